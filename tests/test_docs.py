"""The pages say what the code says."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
PAGES = [TOP / "README.md", TOP / "checkpoints" / "README.md", *sorted((TOP / "docs").glob("*.md"))]
CODE = {path.name: path.read_text() for path in TOP.glob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_quoted_line_stands_in_the_code(page):
    for quoted in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert any(quoted in code for code in CODE.values()), quoted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_the_pages_names_a_script_and_flags_that_exist(page):
    for script, rest in re.findall(r"python (\w+\.py)([^\n`#|]*)", page.read_text()):
        assert script in CODE, script
        shared = "run.py", "ppo.py" if script == "grpo.py" else script
        known = CODE[script] + "".join(CODE[name] for name in shared if re.search(r"\b(flags|arguments)\(", CODE[script]))
        for flag in re.findall(r"(?<!\S)--([\w-]+)", rest):
            assert f'"--{flag}"' in known or flag in ("rollouts", "steps", "help"), f"{script} --{flag}"


def test_no_page_is_left_with_a_figure_to_fill_in():
    for page in PAGES:
        assert not re.search(r"\[\[[A-Z]", page.read_text()), page.name
