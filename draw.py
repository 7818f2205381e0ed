"""Reward and KL over the rollouts of a comparison, from the TensorBoard logs of its runs.

    python draw.py runs/compare-rollouts-32.json                     runs/compare-rollouts-32.png
    python draw.py runs/compare-minutes-10.json --out minutes.png

A thin line is a seed, a thick one the mean over seeds. DPO writes no stories while it learns: for it, the marks are what
the evaluations on held-out asks found, at the same share of its way.
"""

import json
from pathlib import Path

import numpy as np

import run as runs
from cli import Parser, Problem, main_guard, output, reason, say
from compare import folder_of

PANELS = [("rollout/reward", "eval/words_used", "reward"), ("rollout/kl", "eval/kl", "KL from the reference, nats a story")]


def scalars(folder, name):
    """(steps, values) of one scalar of a run, empty where it was not logged."""
    if not folder.is_dir():
        return np.empty(0), np.empty(0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder))
    log.Reload()
    events = log.Scalars(name) if name in log.Tags()["scalars"] else []
    return np.array([event.step for event in events]), np.array([event.value for event in events])


def mean_over_seeds(curves):
    """The mean of several curves, (steps, values) each, on the steps of the first, as far as all of them reach."""
    end = min(steps[-1] for steps, _ in curves)
    common = np.array([step for step in curves[0][0] if step <= end])
    return common, np.mean([np.interp(common, *curve) for curve in curves], axis=0)


def main():
    parser = Parser(__doc__)
    parser.add_argument("results", type=Path, help="what compare.py wrote")
    parser.add_argument("--out", type=output, metavar="FILE", help="the picture (default: beside the results)")
    args = parser.parse_args()
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise Problem("drawing needs matplotlib: pip install -r requirements-extra.txt") from None
    try:
        content = json.loads(args.results.read_text())
        rows = [row for row in content["runs"] if row["method"] != "finetuned"]
        logs = [runs.RUNS / folder_of(row["method"], content["budget"], row["seed"]) for row in rows]
        rollouts = max(row["steps"] for row in rows if not row["method"].startswith("dpo"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise Problem(f"cannot read {args.results}: it is not what compare.py writes, or holds no run yet") from None
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for color, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        same = [(row, log) for row, log in zip(rows, logs) if row["method"] == method]
        for axis, (name, measured, label) in zip(axes, PANELS):
            off_line = method.startswith("dpo")
            scalar = measured if off_line else name
            curves = [scalars(log, scalar) for _, log in same]
            if not all(len(steps) for steps, _ in curves):
                raise Problem(f"a seed of {method} has no {scalar} below {runs.RUNS}: draw where the comparison ran")
            if off_line:  # its steps on the others' axis
                curves = [(steps * rollouts / row["steps"], values) for (steps, values), (row, _) in zip(curves, same)]
            else:  # a rollout shows what the steps before it have made of the model
                curves = [(steps - 1, values) for steps, values in curves]
            for curve in curves:
                axis.plot(*curve, color=f"C{color}", alpha=0.3, linewidth=0.8)
            axis.plot(*mean_over_seeds(curves), color=f"C{color}", linewidth=2, marker="o" if off_line else None, label=method)
            axis.set_xlabel("rollouts")
            axis.set_ylabel(label)
    axes[0].legend()
    figure.tight_layout()
    out = args.out or args.results.with_suffix(".png")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise Problem(f"cannot write {out}: {reason(error)}") from None
    say(f"wrote {out}")


if __name__ == "__main__":
    main_guard(main)
