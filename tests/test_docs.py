"""README and the pages of docs/, run as printed."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shapebucket as sb
from shapebucket.cli import main

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
RUN_BY_OTHERS = {"sources", "migrating_from_tf_data"}  # below, and by test_tf_data.py
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITHOUT_TENSORFLOW = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda _, name, *rest: None if name.partition(".")[0] == "tensorflow" else find(name, *rest)
)
"""
COMMAND = "from shapebucket.cli import main\nassert main({}) == 0\n"


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The blocks of code of a page, each with its language."""
    return FENCE.findall(page)


def commands_of(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def program_of(page: str) -> str:
    """One program of a page's code: its commands by the command's own entry point."""
    parts = []
    for language, block in blocks_of(page):
        if language == "python":
            parts.append(block)
        for command in commands_of(block) if language == "sh" else []:
            assert command[0] == "shapebucket"
            parts.append(COMMAND.format(command[1:]))
    return "\n".join(parts)


@pytest.fixture(scope="module")
def my_corpus(tmp_path_factory):
    """A folder of TFDS with the data set that pages call the reader's."""
    import tensorflow_datasets as tfds

    class MyCorpus(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number, length in enumerate(np.random.default_rng(0).integers(1, 200, 300)):
                yield number, {"tokens": np.zeros(length, np.int32)}

    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    MyCorpus(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def write_corpus(folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    rng = np.random.default_rng(0)
    for shard in range(2):
        writer = ArrayRecordWriter(str(folder / f"corpus-{shard}.array_record"), "group_size:1")
        for length in rng.geometric(0.02, 10_000):
            writer.write(bytes(int(length)))
        writer.close()


def run_command(command: list[str]) -> None:
    """Runs a command of a page; of those for other machines, what can be checked here."""
    if command[0] == "shapebucket":
        assert main(command[1:]) == 0
    elif command[:3] == ["python", "-m", "shapebucket.watch"]:
        done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "train_step compiled 14 times" in done.stderr + done.stdout
    elif command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        from apache_beam.options.pipeline_options import PipelineOptions

        assert command[:2] == ["python", "measure_corpus.py"]
        known = PipelineOptions(command[2:]).get_all_options(
            drop_default=True
        )  # an unknown flag is left out, with a warning
        assert known.keys() >= {flag.partition("=")[0].lstrip("-") for flag in command[2:]} - {"extra_package"}


def check_readme(names, folder):
    assert len(names["step"].executables) == len(names["plan"]) <= 8


def check_checkpoints(names, folder):
    last = max(int(each.name) for each in (folder / "checkpoints").iterdir())
    count = 2 * len(names["batches"])
    assert names["loader"].get_state() == {"next_index": count, "fingerprint": names["batches"].fingerprint}
    assert names["number"] == count > last  # it went on where it stood


def check_scale(names, folder):
    expected = sb.measure(names["source"], length_fn=len, progress=False)
    np.testing.assert_array_equal(sb.LengthTable.load(folder / "all-lengths.npz").values, expected.values)
    assert sum(len(batch.indices) for batch in names["schedule"]) == len(expected)


CHECKS = {"README": check_readme, "checkpoints": check_checkpoints, "scale": check_scale}


@pytest.mark.parametrize("page", sorted(PAGES.keys() - RUN_BY_OTHERS))
def test_the_page_runs_as_printed(page, my_corpus, tmp_path, monkeypatch):
    """One block after the other, as one program."""
    if page == "migrating_from_lhotse":
        pytest.importorskip("lhotse")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    if page in ("README", "choosing"):
        shutil.copytree(my_corpus, tmp_path / "tensorflow_datasets")
    if page == "scale":
        write_corpus(tmp_path)
    names = {"__name__": "__main__"}
    for language, block in blocks_of(PAGES[page]):
        if language == "python":
            exec(compile(block, f"{page}.md", "exec"), names)
        for command in commands_of(block) if language == "sh" else []:
            run_command(command)
    CHECKS.get(page, lambda *_: None)(names, tmp_path)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_block_is_code_that_runs_or_text(page):
    assert {language for language, _ in blocks_of(PAGES[page])} <= {"python", "sh", "text"}
    assert PAGES[page].count("\n```") + PAGES[page].startswith("```") == 2 * len(blocks_of(PAGES[page]))


def sections() -> str:
    """The page of sources, without the sections whose package is not installed."""
    found = re.split(r"^(?=## )", PAGES["sources"], flags=re.MULTILINE)
    if importlib.util.find_spec("datasets") is None:
        found = [section for section in found if not section.startswith("## Hugging Face")]
    return "".join(found)


@pytest.mark.parametrize("tensorflow", ["absent", "as installed"])
def test_the_page_of_sources_runs_as_printed(tensorflow, tmp_path):
    """A data set of TFDS through measure, plan, schedule and stream, and the other sources; with and without TensorFlow."""
    program = program_of(sections())
    if tensorflow == "absent":
        program = f"{WITHOUT_TENSORFLOW}\n{program}\nimport sys\nassert 'tensorflow' not in sys.modules"
    (tmp_path / "page.py").write_text(program)
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "language: 'int64[]', source: 'uint8[source]', target: 'uint8[target]'" in done.stdout
    summaries = re.findall(r"^([\d,]+) of ([\d,]+) samples in", done.stdout, re.MULTILINE)
    assert len(summaries) == 2
    assert all(emitted == seen for emitted, seen in summaries)
    assert len(set(summaries)) == 1


def test_the_links_of_the_readme_lead_somewhere():
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", PAGES["README"]):
        assert (ROOT / target).exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (ROOT / target).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_site_builds_without_a_warning_and_names_all_that_is_public(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ids = set(re.findall(r'id="shapebucket\.([\w.]+)"', (tmp_path / "api.html").read_text()))
    assert {name for name in sb.__all__ if name not in ids and f"errors.{name}" not in ids} == set()
