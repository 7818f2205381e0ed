"""Every measured figure on the pages is in docs/results, where its command stands beside it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import compare
import evaluate

TOP = Path(__file__).resolve().parent.parent
RESULTS = sorted((TOP / "docs" / "results").glob("*.json"))
FILES = [TOP / "README.md", TOP / "checkpoints" / "README.md", *sorted((TOP / "docs").glob("*.md"))]
PAGES = {str(file.relative_to(TOP)).removeprefix("docs/"): file.read_text() for file in FILES}
MEASURED = re.compile(r"^## (What to expect|The commands|Figures)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.,-])-?\d[\d,]*(?:\.\d+)?%?(?![\w-])")
SOURCES = {  # page, or page and subsection: the results of its figures, or, after a colon, those whose key begins so
    "README.md": "training make-grpo compare-minutes-10 compare-rollouts-32:summary compare-rollouts-32:difference memory speed",
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


def results(name):
    return json.loads((TOP / "docs" / "results" / f"{name}.json").read_text())


def pool_of(sources):
    """All numbers in these results."""
    found = []
    for name, _, prefix in (each.partition(":") for each in sources.split()):
        content = results(name)
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


# ---- tables, cell by cell: a right figure in a wrong row is wrong


def cells(text):
    """(row, column, cell) of all Markdown tables in a text."""
    found, columns = set(), None
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        name, *row = (cell.strip() for cell in line[1:-1].split("|"))
        if columns:
            found |= {(name, *pair) for pair in zip(columns, row, strict=True)}
        columns = columns or row
    return {cell for cell in found if set(cell[2]) - set("-")}


def compared(budget):
    """What compare.py makes of the runs that are in the results."""
    content = results(f"compare-{budget}")
    return {**content, **compare.summarise(content["runs"])}


@pytest.mark.parametrize(("budget", "heading"), [("minutes-10", "What to expect"), ("rollouts-32", "32 rollouts")])
def test_the_table_of_a_comparison_is_what_its_runs_come_to(budget, heading):
    pytest.importorskip("scipy")
    table = compare.table(compared(budget))
    section = re.split(rf"^##+ {heading}\n", PAGES["09-comparison.md"], flags=re.MULTILINE)[1].split("\n##")[0]
    assert cells(table) <= cells(section) and compare.table(results(f"compare-{budget}")) == table


def test_the_rows_of_the_runs_of_ten_minutes_are_what_was_measured():
    start, *rows = results("compare-minutes-10")["runs"]
    for row in rows:
        won = (row["words_used"] - start["words_used"]) / (1 - start["words_used"])
        shown = [row["method"], row["seed"], f"{row['steps']} steps" if row["method"].startswith("dpo") else row["steps"]]
        shown += [f"{row['words_used']:.1%} ({row['words_used_low']:.1%} to {row['words_used_high']:.1%})", f"{won:.0%}"]
        shown += [f"{row['plain_bits_per_byte']:.3f}", f"{row['ended']:.1%}", f"{row['repeats']:.2f}"]
        shown += [f"{row['distinct_pairs']:.2f}", f"{row['kl']:.2f}"]
        assert f"| {' | '.join(map(str, shown))} |" in PAGES["09-comparison.md"].splitlines()


def test_what_is_derived_from_the_runs_of_32_rollouts_follows_from_them():
    content, logs = results("compare-rollouts-32"), results("compare-rollouts-32-logs")
    start, made, up = content["runs"][0], content["derived"], content["plain_bits_per_byte_up"]
    for method in compare.METHODS:
        rows = [row for row in content["runs"] if row["method"] == method]
        mine = [logs[method + f"-seed-{row['seed']}" * (row["seed"] > 1)] for row in rows]
        mean = lambda key, where, mine=mine: float(np.mean([log[key][where] for log in mine]))
        found = made[method]
        won = [(row["words_used"] - start["words_used"]) / (1 - start["words_used"]) for row in rows]
        assert found["share_of_unused_words_won"]["each"] == pytest.approx(won)
        for key, values in found.get("on_the_way", {}).items():
            assert values == pytest.approx([mean(f"eval/{key}", place) for place in range(5)])
        for key, value in found.get("rollout", {}).items():
            name, _, rest = key.partition("_")
            eights = [mean(f"rollout/{name}", slice(first, first + 8)) for first in range(0, 32, 8)]
            assert value == pytest.approx(eights if rest == "by_eights" else mean("rollout/kl", int(rest) - 1))
        if method in up:
            assert up[method]["each"] == pytest.approx([row["plain_bits_per_byte"] / start["plain_bits_per_byte"] - 1 for row in rows])
        if method.startswith("ppo"):
            explained = [np.mean(log["critic/explained_variance"][24:]) for log in mine]
            assert found["explained_variance_of_the_last_eight"]["each"] == pytest.approx(explained)


def test_the_tables_of_the_readme_are_what_the_runs_come_to():
    pytest.importorskip("scipy")
    content = compared("rollouts-32")
    names = {name for name, *_ in cells(compare.table(content))}
    shown = {cell for cell in cells(PAGES["README.md"]) if cell[0] in names}
    assert {name for name, *_ in shown} == names and shown <= cells(compare.table(content))
    for row in compared("minutes-10")["runs"]:
        name = row["method"] + f"-seed-{row['seed']}" * (row["seed"] > 1)
        assert re.search(rf"^{name} +{re.escape(evaluate.table_row(row))}$", PAGES["README.md"], re.MULTILINE)


def test_the_rollout_that_the_readme_shows_is_one_that_was_printed():
    [shown] = re.findall(r"^    (rollout .*)$", PAGES["README.md"], re.MULTILINE)
    assert shown in results("make-grpo")["another_run"]["printed"]


def test_the_table_of_memory_is_what_was_measured():
    columns = ["weights", "gradients", "optimizer", "reference", "peak"]
    wanted = {(row["name"], column, f"{row[column] / 2**20:,.0f}") for row in results("memory")["methods"] for column in columns}
    assert wanted <= cells(PAGES["10-memory.md"])


def test_the_tables_of_speed_are_what_was_measured():
    wanted = set()
    for row in results("speed")["parts"][0]["figures"]:
        unit = row["unit"].replace("/s", " a second")
        wanted.add((row["name"], "median", f"{row['median']:,.0f} {unit}"))
        wanted.add((row["name"], "least to most", f"{row['least']:,.0f} to {row['most']:,.0f}"))
        if row["share_of_ceiling"]:
            wanted.add((row["name"], "share of the ceiling", f"{row['share_of_ceiling']:.0%}"))
    for row in results("tricks")["tricks"]:
        wanted.add((row["name"], "times as fast with it, median of five", f"{row['ratio']:.2f}"))
        wanted.add((row["name"], "least to most", f"{row['least']:.2f} to {row['most']:.2f}"))
    assert wanted <= cells(PAGES["11-speed.md"])


def test_a_right_figure_in_a_wrong_row_is_found():
    page = "| | a | b |\n| --- | --- | --- |\n| ppo | 1 | 2 |\n| grpo | 3 |  |\n\n| | c |\n| --- | --- |\n| ppo | 4 |\n"
    assert cells(page) == {("ppo", "a", "1"), ("ppo", "b", "2"), ("grpo", "a", "3"), ("ppo", "c", "4")}
