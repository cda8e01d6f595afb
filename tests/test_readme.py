import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_in_the_readme_runs_as_printed(capsys, tmp_path, monkeypatch):
    """One block after the other, as one program."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["step"].executables) == len(names["plan"]) <= 8
    assert "buckets for" in capsys.readouterr().out
    last = max(int(each.name) for each in (tmp_path / "checkpoints").iterdir())
    count = 2 * len(names["batches"])
    assert names["loader"].get_state() == {"next_index": count, "fingerprint": names["batches"].fingerprint}
    assert names["number"] == count > last  # it went on where it stood
