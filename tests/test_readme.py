import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_in_the_readme_runs_as_printed(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
        assert len(names["step"].executables) == len(names["plan"]) <= 8
    assert "buckets for" in capsys.readouterr().out
