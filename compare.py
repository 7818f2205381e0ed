"""PPO, GRPO and DPO from the same start over several seeds, then all of them measured.

    python compare.py --rollouts 32 --seeds 5       equal rollouts: this is what compares the methods
    python compare.py --minutes 10 --seeds 2        equal minutes: this is what a reader sees

The methods run in turn, each seed starting with the next of them, so that a machine that drifts favours none. Ctrl-C
ends it; the same command goes on where it stopped, and skips what is there. A run keeps about half a gigabyte in
checkpoints/.

DPO's pairs are the best and the worst of as many stories as the others write, written before its run by the model it starts
from, and it computes gradients for as many. With --minutes it has the pairs of 32 rollouts' stories, and writing them is not counted.
"""

import importlib.util
import json
import math
import platform
import signal
import subprocess
import sys

import numpy as np
import torch

import data
import dpo
import evaluate
import model as models
import ppo
import run as runs
from cli import Parser, Problem, main_guard, minutes, output, positive, say

METHODS = {
    "ppo-kl-0.05": ["ppo.py", "--kl", "0.05"],
    "grpo-kl-0.05": ["grpo.py", "--kl", "0.05"],
    "grpo-kl-0": ["grpo.py", "--kl", "0"],
    "dpo-beta-0.1": ["dpo.py", "--beta", "0.1"],
}
COLUMNS = ["words_used", "plain_bits_per_byte", "ended", "repeats", "distinct_pairs", "kl", "steps", "minutes"]
PAIRED = ("grpo-kl-0.05", "ppo-kl-0.05")
STORIES_AN_ASK = 8
TIMED_ROLLOUTS = 32  # whose stories DPO gets where the budget is minutes: about as many as ten minutes hold in bfloat16


def folder_of(method, budget, seed):
    """Where a run of this comparison keeps its checkpoints, below checkpoints/."""
    family, _, settings = method.partition("-")
    return f"{family}/{settings}-compare-{budget}" + f"-seed-{seed}" * (seed != 1)


def done_by(file):
    """(steps, minutes) of a run, from its model or its state; (0, 0) where there is none yet."""
    if not file.exists():
        return 0, 0.0
    content = models.read(file)
    try:
        told = content.get("run", content)
        start = told["start_hash"] if "run" in content else told["start"]
        steps, spent = told["steps"], told["minutes"]
    except (LookupError, TypeError, AttributeError):
        raise Problem(f"{file} is not of a run that compare.py has started: move it away first") from None
    if start != runs.file_hash(models.FINETUNED):
        raise Problem(f"{file} started from another model than {models.FINETUNED} is now: move it away first")
    return steps, spent


def execute(command):
    """Run one of our scripts. Ctrl-C reaches it too, and is waited for: it saves and measures before it ends."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=runs.RUNS.parent)

    def stop(*_):  # `kill` reaches this process alone, so it is passed on
        process.terminate()
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, earlier)
    if status:
        raise Problem(f"python {' '.join(map(str, command))} failed: see above; the same command goes on after it")


def write_pairs(rollouts, seed):
    """The pairs of a seed, from as many stories as that many rollouts have. Returns their file."""
    file = data.FOLDER / f"preferences-{runs.file_hash(models.FINETUNED)}-{rollouts}-seed-{seed}.jsonl"
    if not file.exists():
        asks = rollouts * ppo.STORIES // STORIES_AN_ASK
        command = ["preferences.py", "--asks", asks, "--stories", STORIES_AN_ASK, "--seed", seed, "--out", file]
        execute(command + ["--resume"] * data.part_of(file).exists())
    return file


def train(method, args, seed):
    """One run, from its start or from where it stopped; nothing where it is complete. Returns whether it is now."""
    folder = models.CHECKPOINTS / folder_of(method, args.budget, seed)
    steps, off_line = args.rollouts, method.startswith("dpo")
    if off_line and steps:  # as many gradients of stories, two a pair
        steps = steps * ppo.EPOCHS * ppo.STORIES // (2 * dpo.MINIBATCH)
    complete = lambda done, spent: done >= steps if steps else spent >= args.minutes
    if complete(*done_by(folder / "model.pt")):
        return True
    say(f"--- {method}, seed {seed}")
    command = [*METHODS[method], "--seed", seed, "--name", f"compare-{args.budget}"]
    command += ["--steps" if off_line else "--rollouts", steps] if steps else ["--minutes", args.minutes]
    if off_line:
        command += ["--pairs", write_pairs(args.rollouts or TIMED_ROLLOUTS, seed)]
    execute(command + (["--resume"] if done_by(folder / "state.pt")[0] else ["--overwrite"]))
    return complete(*done_by(folder / "model.pt"))


def measure(path, args):
    """All figures of a model on the held-out asks."""
    device, dtype = models.pick_device()
    model, reference = (models.load_checkpoint(each, device) for each in (path, models.FINETUNED))
    precision, plain = models.Precision(device, dtype), evaluate.load_plain()
    figures = evaluate.measure(model, precision, data.load_instructions(), args.stories, plain, reference, show=evaluate.model_name(path))
    return evaluate.for_json(figures)


def spread(rows):
    """{column: {"mean", "sd"}} over seeds; no sd of a single one."""
    found = {}
    for column in COLUMNS:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            found[column] = {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None}
    return found


def paired_difference(one, other):
    """Mean of one - other, paired by seed, with the 95% interval of Student's t. Equally long lists, two numbers or more."""
    from scipy import stats

    differences = np.subtract(one, other)
    middle, margin = differences.mean(), stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / math.sqrt(len(differences))
    return {"mean": float(middle), "low": float(middle - margin), "high": float(middle + margin), "seeds": len(differences)}


def summarise(rows):
    """Mean and spread of each method, and the paired difference where both methods have two seeds in common or more."""
    by_method = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["seed"]] = row
    summary = {method: spread(list(seeds.values())) for method, seeds in by_method.items()}
    one, other = (by_method.get(method, {}) for method in PAIRED)
    seeds = sorted(set(one) & set(other))
    difference = {}
    if len(seeds) > 1:
        for column in COLUMNS:
            values = [[each[seed][column] for seed in seeds] for each in (one, other)]
            if None not in values[0] + values[1]:
                difference[column] = paired_difference(*values)
    return {"summary": summary, "difference": {"of": f"{PAIRED[0]} - {PAIRED[1]}", **difference}}


STYLES = {"words_used": ".1%", "plain_bits_per_byte": ".3f", "ended": ".1%", "repeats": ".2f", "distinct_pairs": ".2f", "kl": ".2f"}
HEADINGS = {"words_used": "words used", "plain_bits_per_byte": "bits/byte", "distinct_pairs": "pairs", "kl": "KL"}


def table(content):
    """The summary as a Markdown table, mean and standard deviation over seeds, and the paired difference below it."""
    styles = {column: STYLES.get(column, ".1f") for column in COLUMNS}
    lines = ["| | seeds | " + " | ".join(HEADINGS.get(column, column) for column in COLUMNS) + " |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for method, figures in content["summary"].items():
        seeds = sum(row["method"] == method for row in content["runs"])
        cells = []
        for column, style in styles.items():
            each = figures.get(column)
            deviation = "" if not each or each["sd"] is None else f" ± {format(each['sd'], style)}"
            cells.append("-" if not each else format(each["mean"], style) + deviation)
        lines.append(f"| {method} | {seeds} | " + " | ".join(cells) + " |")
    difference = content["difference"]
    if len(difference) > 1:
        cells = []
        for column, style in styles.items():
            each = difference.get(column)  # there is none where a run has no figure, as repeats of words that no story uses
            cells.append(f"{each['mean']:+{style}} ({each['low']:+{style}} to {each['high']:+{style}})" if each else "-")
        lines.append(f"| GRPO - PPO, paired | {difference['words_used']['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_results(file, same):
    """The rows that an earlier pass has written, under (method, seed). `same`: what the file must say of itself."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        found = {key: content[key] for key in same}
        rows = {(row["method"], row["seed"]): row for row in content["runs"] if row["hash"] and row["steps"] >= 0}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Problem(f"cannot read {file}: it is not what compare.py writes ({error}); move it away first") from None
    if found != same:
        raise Problem(f"{file} holds results of {found}, not of {same}: move it away first, or name another with --json")
    return rows


def main():
    parser = Parser(__doc__)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--rollouts", type=positive, help="rollouts of each run (default 32)")
    budget.add_argument("--minutes", type=minutes, help="minutes of each run, in place of rollouts")
    parser.add_argument("--seeds", type=positive, default=5, help="seeds 1 to this (default 5)")
    parser.add_argument("--stories", type=positive, default=2, help="stories written for each of the 200 asks (default 2)")
    parser.add_argument("--json", type=output, metavar="FILE", help="the results (default runs/compare-BUDGET.json)")
    args = parser.parse_args()
    if not args.minutes and not args.rollouts:
        args.rollouts = 32
    if args.rollouts and args.rollouts * ppo.STORIES // STORIES_AN_ASK > (most := len(data.load_asks())):
        raise Problem(f"--rollouts {args.rollouts}: at most {most * STORIES_AN_ASK // ppo.STORIES}, or DPO lacks asks for its pairs")
    if args.seeds > 1 and importlib.util.find_spec("scipy") is None:
        raise Problem("comparing seeds needs scipy: pip install -r requirements-extra.txt")
    flag = "rollouts" if args.rollouts else "minutes"
    args.budget = f"{flag}-{getattr(args, flag):g}"
    file = args.json or runs.RUNS / f"compare-{args.budget}.json"
    content = {"budget": args.budget, "stories": args.stories, "start": runs.file_hash(models.FINETUNED)}
    known, rows = read_results(file, content), {}
    content["command"] = f"python compare.py --{flag} {getattr(args, flag):g} --seeds {args.seeds} --stories {args.stories}"
    content["machine"] = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, {models.pick_device()[1]}"

    def add(method, seed, path, steps, spent):
        """Measure a model, unless it has been, and write all results so far."""
        told = {"method": method, "seed": seed, "hash": runs.file_hash(path)}
        same = told.items() <= known.get((method, seed), {}).items()
        rows[method, seed] = known[method, seed] if same else {**told, **measure(path, args), "steps": steps, "minutes": spent}
        content.update(runs=list(({**known, **rows}).values()), **summarise(rows.values()))
        evaluate.write_json(file, content)

    try:
        add("finetuned", 1, models.FINETUNED, 0, 0.0)
        for seed in range(1, args.seeds + 1):
            methods, first = list(METHODS), (seed - 1) % len(METHODS)
            for method in methods[first:] + methods[:first]:
                if not train(method, args, seed):
                    raise Problem("stopped: the same command goes on from here")
                model = models.CHECKPOINTS / folder_of(method, args.budget, seed) / "model.pt"
                add(method, seed, model, *done_by(model))
    except KeyboardInterrupt:
        raise Problem("stopped: the same command goes on from here") from None
    order = ["finetuned", *METHODS]  # of the tables; the file keeps runs as they came, and those of more seeds
    content["runs"] = sorted(rows.values(), key=lambda row: (order.index(row["method"]), row["seed"]))
    names = [row["method"] + f"-seed-{row['seed']}" * (row["seed"] > 1) for row in content["runs"]]
    width = max(map(len, names))
    say(f"{'':{width}}  {evaluate.HEADING}")
    for name, row in zip(names, content["runs"]):
        say(f"{name:{width}}  {evaluate.table_row(row)}")
    if args.seeds > 1:
        say(table(content))
    say(f"wrote {file}; python draw.py {file} draws it")


if __name__ == "__main__":
    main_guard(main)
