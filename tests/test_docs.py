"""The pages of docs/, run as printed."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = (Path(__file__).parent.parent / "docs" / "sources.md").read_text()
WITHOUT_TENSORFLOW = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda _, name, *rest: None if name.partition(".")[0] == "tensorflow" else find(name, *rest)
)
"""
COMMAND = "from shapebucket.cli import main\nassert main({}) == 0\n"


def program_of(page: str) -> str:
    """One program of a page's code: its commands by the command's own entry point."""
    parts = []
    for language, block in re.findall(r"```(python|sh)\n(.*?)```", page, re.DOTALL):
        if language == "python":
            parts.append(block)
        for command in block.splitlines() if language == "sh" else []:
            name, *arguments = shlex.split(command)
            assert name == "shapebucket"
            parts.append(COMMAND.format(arguments))
    return "\n".join(parts)


def sections() -> str:
    """The page, without the sections whose package is not installed."""
    found = re.split(r"^(?=## )", SOURCES, flags=re.MULTILINE)
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
