"""Every measured figure on the pages is in docs/results, where its command stands beside it."""

import json
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
RESULTS = sorted((TOP / "docs" / "results").glob("*.json"))
FILES = [TOP / "README.md", TOP / "checkpoints" / "README.md", *sorted((TOP / "docs").glob("*.md"))]
PAGES = {str(file.relative_to(TOP)).removeprefix("docs/"): file.read_text() for file in FILES}
MEASURED = re.compile(r"^## (What to expect|The commands|Figures)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.,-])-?\d[\d,]*(?:\.\d+)?%?(?![\w-])")
SOURCES = {  # page, or page and subsection: the results of its figures, or, after a colon, those whose key begins so
    "README.md": "training compare-minutes-10 compare-rollouts-32:summary compare-rollouts-32:difference memory speed",
    "checkpoints/README.md": "training",
    "01-stories-and-tokens.md": "training",
    "02-model-and-pretraining.md": "training",
    "03-finetuning.md": "training compare-minutes-10",
    "04-writing.md": "training speed",
    "05-measuring.md": "training compare-minutes-10",
    "06-ppo.md": "training compare-minutes-10 compare-minutes-10-logs:ppo",
    "07-grpo.md": "training compare-minutes-10 compare-minutes-10-logs:grpo",
    "08-preferences-and-dpo.md": "compare-minutes-10",
    "09-comparison.md": "compare-minutes-10",
    "09-comparison.md, 32 rollouts": "compare-rollouts-32",
    "09-comparison.md, What the falling rate gives": "compare-rollouts-32 level-rate-32",
    "10-memory.md": "memory",
    "11-speed.md": "speed tricks training compare-minutes-10",
}
NAMES = r"`[^`\n]*`|\b(?:ppo|grpo|dpo|kl|beta)-[\w.-]*\w|\]\([^)]*\)|<http[^>]*>|CDLA\S*|[\d.]+ GHz|Python [\d.]+|95%"


def numbers(value):
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def measured(page, name=""):
    """(text, sources) of each measured part of a page: a subsection that has sources of its own, or what is around it."""
    for _, section in MEASURED.findall(page):
        pieces = ["", *re.split(r"^### (.*)\n", section, flags=re.MULTILINE)]
        for heading, text in zip(pieces[::2], pieces[1::2]):
            yield text, SOURCES.get(f"{name}, {heading}", SOURCES.get(name, ""))


def figures(text):
    """Measured figures, as they are written: those with a decimal point, a percent sign or a thousands comma."""
    text = re.sub(r"```(?:text|python)\n.*?```", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(">"))  # stories
    return [figure for figure in FIGURE.findall(re.sub(NAMES, "", text)) if re.search(r"[.%]|\d,\d", figure)]


def stands_in(figure, pool):
    """Is a figure the rounding of one of the numbers? A percentage may be of a share."""
    digits = figure.rstrip("%").replace(",", "")
    value, slack = float(digits), 0.5 * 10.0 ** -len(digits.partition(".")[2]) + 1e-9
    return any(abs(number * scale - value) <= slack for number in pool for scale in ([100] if figure.endswith("%") else [1]))


def pool_of(sources):
    """All numbers in these results."""
    found = []
    for name, _, prefix in (each.partition(":") for each in sources.split()):
        content = json.loads((TOP / "docs" / "results" / f"{name}.json").read_text())
        found += numbers({key: value for key, value in content.items() if key.startswith(prefix)})
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_measured_figure_is_in_the_results(name):
    for text, sources in measured(PAGES[name], name):
        pool = pool_of(sources)
        assert not [figure for figure in figures(text) if not stands_in(figure, pool)]


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_a_wrong_figure_would_pass_by_chance_in_a_quarter_of_all_cases_at_most(sources):
    pool = pool_of(sources)
    assert sum(stands_in(f"{number / 10}%", pool) for number in range(1000)) <= 250


def test_every_source_is_of_a_page_or_of_a_subsection_that_exists():
    for name, _, heading in (key.partition(", ") for key in SOURCES):
        assert name in PAGES and (not heading or f"\n### {heading}\n" in PAGES[name])


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_every_results_file_says_how_it_was_made(file):
    content = json.loads(file.read_text())
    for part in content.get("parts", [content]):
        assert part["command"].startswith(("python ", "make "))


def test_a_figure_that_differs_in_its_last_digit_is_found():
    page = "## What to expect\n\nIt went from 76.8% to 80.4% in 1,056 steps, with `--kl 0.05` (-3.75).\n\n## Other\n\n9.9\n"
    [found] = [figures(text) for text, _ in measured(page)]
    assert found == ["76.8%", "80.4%", "1,056", "-3.75"]
    pool = [0.7676, 0.80416, 1056.4, -3.7481]
    assert all(stands_in(figure, pool) for figure in found)
    assert not any(stands_in(figure, pool) for figure in ["76.7%", "80.5%", "1,057", "-3.74", "3.75", "0.77%"])


def test_a_subsection_is_held_against_its_own_sources():
    page = "## What to expect\n\n1.5%\n\n### 32 rollouts\n\n2.5%\n\n### More\n\n3.5%\n"
    found = [(figures(text), sources) for text, sources in measured(page, "09-comparison.md")]
    assert found == [(["1.5%"], "compare-minutes-10"), (["2.5%"], "compare-rollouts-32"), (["3.5%"], "compare-minutes-10")]
