import argparse
import json
import signal
import sys
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_model

import compare
import data
import dpo
import draw
import grpo
import model as models
import ppo
import preferences
import run as runs

FIGURES = {
    "words_used": 0.5,
    "words_used_low": 0.4,
    "words_used_high": 0.6,
    "plain_bits_per_byte": 1.4,
    "ended": 0.8,
    "repeats": 2.0,
    "distinct_pairs": 0.9,
    "kl": 3.0,
}
pytest.importorskip("scipy")


@pytest.fixture
def commands(workshop, monkeypatch):
    """`compare.main` by a function of its flags; the scripts do nothing but leave the state of a run. Collects commands.

    `left` holds, for scripts that end early, (steps, minutes) of the state they leave.
    """
    seen, left = [], {}
    asks = data.load_asks()
    for module in data, ppo:
        monkeypatch.setattr(module, "load_asks", lambda: asks)
    monkeypatch.setattr(data, "FOLDER", workshop)
    monkeypatch.setattr(compare, "measure", lambda path, args: seen.append(f"measure {path.parent.name}") or dict(FIGURES))

    def execute(command):
        words = [str(word) for word in command]
        seen.append(" ".join(words))
        value = lambda flag: words[words.index(flag) + 1]
        if words[0] == "preferences.py":
            return models.save({}, value("--out"))
        method = next(name for name, start in compare.METHODS.items() if words[: len(start)] == start)
        budget, seed = value("--name").removeprefix("compare-"), int(value("--seed"))
        folder = models.CHECKPOINTS / compare.folder_of(method, budget, seed)
        steps = next((int(value(flag)) for flag in ("--rollouts", "--steps") if flag in words), 3)
        spent = float(value("--minutes")) if "--minutes" in words else 1.0
        steps, spent = left.pop(method, (steps, spent))
        start = runs.file_hash(models.FINETUNED)
        models.save({"run": {"steps": steps, "minutes": spent, "start_hash": start}}, folder / "state.pt")
        models.save_checkpoint(folder / "model.pt", tiny_model(seed), steps=steps, minutes=spent, start=start)

    monkeypatch.setattr(compare, "execute", execute)

    def start(*argv):
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, argv)])
        compare.main()

    start.seen, start.left = seen, left
    return start


def test_a_script_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")  # scripts run in the folder above
    (tmp_path / "broken.py").write_text("raise SystemExit(1)")
    with pytest.raises(data.Problem, match=r"python broken.py --kl 0 failed"):
        compare.execute(["broken.py", "--kl", 0])


PATIENT = """
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(0.6)  # longer than Popen waits by itself after Ctrl-C
    pathlib.Path("saved").touch()
    sys.exit()

signal.signal(signal.{name}, save)
os.kill(os.getppid(), signal.{name})
if signal.{name} == signal.SIGINT:  # a terminal sends Ctrl-C to both
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(30)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_script_that_is_stopped_is_waited_for_until_it_has_saved(monkeypatch, tmp_path, name):
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    (tmp_path / "patient.py").write_text(PATIENT.format(name=name))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        compare.execute(["patient.py"])
    assert (tmp_path / "saved").exists() and signal.getsignal(signal.SIGTERM) == before


def test_a_comparison_that_is_stopped_says_how_it_goes_on(commands, workshop, monkeypatch):
    monkeypatch.setattr(compare, "execute", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(data.Problem, match="stopped: the same command goes on from here"):
        commands("--rollouts", 4, "--seeds", 1, "--json", workshop / "results.json")
    assert [row["method"] for row in json.loads((workshop / "results.json").read_text())["runs"]] == ["finetuned"]


@pytest.mark.parametrize("budget", [("--rollouts", 4), ("--minutes", 2)])
def test_the_scripts_take_the_commands_that_they_are_given(commands, workshop, monkeypatch, budget):
    class Taken(Exception):
        pass

    def taken(args, kind):
        raise Taken(f"{kind}-{args.name}" + f"-seed-{args.seed}" * (args.seed != 1))

    for script in ppo, grpo, dpo:
        monkeypatch.setattr(script, "Run", taken)
    monkeypatch.setattr(dpo, "load_pairs", lambda path: ([], runs.file_hash(models.FINETUNED)))
    monkeypatch.setattr(preferences, "load_checkpoint", lambda path, device: taken(argparse.Namespace(name="", seed=1), "preferences"))
    told, leave = [], compare.execute

    def parse(command):
        script, *rest = map(str, command)
        with monkeypatch.context() as shell:
            shell.setattr(sys, "argv", [script, *rest])
            with pytest.raises(Taken) as found:  # a flag that is not known would be a SystemExit
                {"ppo.py": ppo, "grpo.py": grpo, "dpo.py": dpo, "preferences.py": preferences}[script].main()
        told.append(str(found.value))
        leave(command)

    monkeypatch.setattr(compare, "execute", parse)
    commands(*budget, "--seeds", 2)
    names = [compare.folder_of(method, f"{budget[0][2:]}-{budget[1]}", seed) for method in compare.METHODS for seed in (1, 2)]
    assert sorted(told) == sorted([*names, "preferences-", "preferences-"])


def trained(commands):
    return [line for line in commands.seen if not line.startswith("measure")]


def test_the_methods_take_turns_and_each_seed_begins_with_another(commands, workshop):
    commands("--rollouts", 4, "--seeds", 2)
    file = workshop / f"preferences-{runs.file_hash(models.FINETUNED)}-4-seed-1.jsonl"
    assert trained(commands)[:5] == [
        "ppo.py --kl 0.05 --seed 1 --name compare-rollouts-4 --rollouts 4 --overwrite",
        "grpo.py --kl 0.05 --seed 1 --name compare-rollouts-4 --rollouts 4 --overwrite",
        "grpo.py --kl 0 --seed 1 --name compare-rollouts-4 --rollouts 4 --overwrite",
        f"preferences.py --asks 64 --stories 8 --seed 1 --out {file}",  # as many stories as four rollouts: 512
        f"dpo.py --beta 0.1 --seed 1 --name compare-rollouts-4 --steps 32 --pairs {file} --overwrite",  # 1024 gradients of stories
    ]
    assert [line.split()[0] for line in trained(commands)[5:]] == ["grpo.py", "grpo.py", "preferences.py", "dpo.py", "ppo.py"]


def test_what_is_there_is_skipped_and_what_was_stopped_goes_on(commands):
    commands.left["grpo-kl-0"] = (2, 1.0)
    with pytest.raises(data.Problem, match="stopped: the same command goes on from here"):
        commands("--rollouts", 4, "--seeds", 1)
    before = len(commands.seen)
    commands("--rollouts", 4, "--seeds", 1)
    later = [line for line in commands.seen[before:]]
    assert [line.split()[:3] for line in later if not line.startswith("measure")] == [
        ["grpo.py", "--kl", "0"],
        ["preferences.py", "--asks", "64"],
        ["dpo.py", "--beta", "0.1"],
    ]
    assert "--resume" in later[0] and "--overwrite" not in later[0]
    assert sum(line.startswith("measure") for line in commands.seen) == 5  # each model once, in both passes together


def test_equal_minutes_end_by_the_clock(commands):
    commands.left["ppo-kl-0.05"] = (9, 7.5)
    with pytest.raises(data.Problem, match="stopped"):
        commands("--minutes", 10, "--seeds", 1)
    commands("--minutes", 10, "--seeds", 1)
    assert trained(commands)[0].endswith("--name compare-minutes-10 --minutes 10.0 --overwrite")
    assert trained(commands)[1].endswith("--name compare-minutes-10 --minutes 10.0 --resume")


def test_a_model_older_than_its_state_is_not_taken_for_the_finished_run(commands):
    commands("--rollouts", 4, "--seeds", 1)
    folder = models.CHECKPOINTS / compare.folder_of("ppo-kl-0.05", "rollouts-4", 1)
    content = models.read(folder / "model.pt")
    models.save({**content, "steps": 3}, folder / "model.pt")  # as if the run was killed between saving state and model
    before = len(commands.seen)
    commands("--rollouts", 4, "--seeds", 1)
    again = commands.seen[before:]
    assert len(again) == 1 and again[0].startswith("ppo.py") and again[0].endswith("--resume")


def test_a_finished_run_needs_no_state(commands):
    commands("--rollouts", 4, "--seeds", 1)
    (models.CHECKPOINTS / compare.folder_of("ppo-kl-0.05", "rollouts-4", 1) / "state.pt").unlink()
    before = len(commands.seen)
    commands("--rollouts", 4, "--seeds", 1)
    assert len(commands.seen) == before


@pytest.mark.parametrize("flags", [("--rollouts", 5), ("--rollouts", 4, "--stories", 3)])
def test_results_of_another_budget_or_measured_otherwise_are_not_mixed_in(commands, workshop, flags):
    commands("--rollouts", 4, "--seeds", 1, "--json", workshop / "results.json")
    before = (workshop / "results.json").read_text()
    with pytest.raises(data.Problem, match="move it away first"):
        commands(*flags, "--seeds", 1, "--json", workshop / "results.json")
    assert (workshop / "results.json").read_text() == before


def test_fewer_seeds_summarise_fewer_and_lose_none(commands, workshop, capsys):
    commands("--rollouts", 4, "--seeds", 3, "--json", workshop / "results.json")
    capsys.readouterr()
    commands("--rollouts", 4, "--seeds", 2, "--json", workshop / "results.json")
    content = json.loads((workshop / "results.json").read_text())
    assert len(content["runs"]) == 1 + 3 * 4 and content["difference"]["words_used"]["seeds"] == 2
    assert "| grpo-kl-0 | 2 |" in capsys.readouterr().out


def test_runs_of_another_start_are_not_mixed_in(commands):
    commands("--rollouts", 4, "--seeds", 1)
    models.save_checkpoint(models.FINETUNED, tiny_model(5))
    with pytest.raises(data.Problem, match="started from another model"):
        commands("--rollouts", 4, "--seeds", 1, "--json", models.CHECKPOINTS / "other.json")


def test_the_results_hold_every_run_its_command_and_the_summary(commands, workshop, capsys):
    commands("--rollouts", 4, "--seeds", 2, "--json", workshop / "results.json")
    content = json.loads((workshop / "results.json").read_text())
    assert content["command"] == "python compare.py --rollouts 4 --seeds 2 --stories 2"
    assert {(row["method"], row["seed"]) for row in content["runs"]} == {("finetuned", 1)} | {
        (method, seed) for seed in (1, 2) for method in compare.METHODS
    }
    assert content["summary"]["grpo-kl-0"]["words_used"] == {"mean": 0.5, "sd": 0.0}
    assert content["summary"]["finetuned"]["words_used"] == {"mean": 0.5, "sd": None}
    assert content["difference"]["words_used"] == {"mean": 0, "low": 0, "high": 0, "seeds": 2}
    assert "| grpo-kl-0 | 2 | 50.0% ± 0.0% |" in capsys.readouterr().out


def test_the_paired_difference_has_students_interval():
    found = compare.paired_difference([0.5, 0.7, 0.6], [0.4, 0.5, 0.3])  # 0.1, 0.2, 0.3: sd 0.1, and t is 4.3027 for two degrees
    assert found["mean"] == pytest.approx(0.2) and found["seeds"] == 3
    assert (found["low"], found["high"]) == pytest.approx((0.2 - 4.3027 * 0.1 / 3**0.5, 0.2 + 4.3027 * 0.1 / 3**0.5), abs=1e-5)


def test_a_figure_that_one_run_lacks_leaves_its_column_without_a_difference():
    rows = [{"method": method, "seed": seed, **FIGURES, "steps": 1, "minutes": 1.0} for method in compare.PAIRED for seed in (1, 2)]
    rows[0]["repeats"] = None  # it used no word
    content = {"runs": rows, **compare.summarise(rows)}
    last = compare.table(content).splitlines()[-1].split(" | ")
    assert last[0] == "| GRPO - PPO, paired" and last[5] == "-" and last[6] == "+0.00 (+0.00 to +0.00)"


def test_more_rollouts_than_dpo_has_asks_for_are_refused_before_any_run(commands):
    with pytest.raises(data.Problem, match="at most 250"):
        commands("--rollouts", 251)
    assert not commands.seen


def test_pairs_that_were_begun_go_on_and_complete_ones_are_not_written_again(commands, workshop):
    file = workshop / f"preferences-{runs.file_hash(models.FINETUNED)}-4-seed-1.jsonl"
    data.part_of(file).write_text("")
    commands.left["dpo-beta-0.1"] = (2, 1.0)
    with pytest.raises(data.Problem, match="stopped"):
        commands("--rollouts", 4, "--seeds", 1)
    assert trained(commands)[3] == f"preferences.py --asks 64 --stories 8 --seed 1 --out {file} --resume"
    before = len(commands.seen)
    commands("--rollouts", 4, "--seeds", 1)
    assert [line.split()[0] for line in commands.seen[before:]] == ["dpo.py", "measure"]


def test_a_mean_has_the_deviation_over_n_minus_1_and_a_single_seed_has_none():
    rows = [{"words_used": share, "kl": None} for share in (0.1, 0.2, 0.3)]
    assert compare.spread(rows) == {"words_used": pytest.approx({"mean": 0.2, "sd": 0.1})}
    assert compare.spread(rows[:1]) == {"words_used": {"mean": 0.1, "sd": None}}


def test_the_difference_pairs_seeds_and_not_rows():
    rows = [{"method": "ppo-kl-0.05", "seed": seed, "words_used": 0.1 * seed} for seed in (1, 2, 3)]
    rows += [{"method": "grpo-kl-0.05", "seed": seed, "words_used": 0.1 * seed + 0.2} for seed in (3, 2, 1)]
    rows = [{**dict.fromkeys(compare.COLUMNS, 0.0), **row} for row in rows]
    found = compare.summarise(rows)["difference"]["words_used"]
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((0.2, 0.2, 0.2))


def test_a_file_of_something_else_is_not_overwritten(commands, workshop):
    (workshop / "notes.json").write_text("mine")
    with pytest.raises(data.Problem, match="not what compare.py writes"):
        commands("--rollouts", 4, "--seeds", 1, "--json", workshop / "notes.json")
    assert (workshop / "notes.json").read_text() == "mine"


# ---- the picture


def test_the_picture_is_drawn_from_the_logs(commands, workshop, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    commands("--rollouts", 4, "--seeds", 2, "--json", workshop / "results.json")
    drawn = []
    monkeypatch.setattr(draw, "mean_over_seeds", lambda curves, real=draw.mean_over_seeds: drawn.append(curves) or real(curves))
    for method in compare.METHODS:
        for seed in 1, 2:
            with torch.utils.tensorboard.SummaryWriter(runs.RUNS / compare.folder_of(method, "rollouts-4", seed)) as writer:
                for step in range(1, 5):
                    for name in "rollout/reward", "rollout/kl":
                        writer.add_scalar(name, step * seed / 10, step)
                for name in "eval/words_used", "eval/kl":
                    writer.add_scalar(name, 0.5, 16)
    monkeypatch.setattr(sys, "argv", ["draw.py", str(workshop / "results.json")])
    draw.main()
    assert (workshop / "results.png").read_bytes()[:4] == b"\x89PNG"
    steps, values = drawn[0][1]
    assert steps.tolist() == [0, 1, 2, 3] and values.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])  # PPO's second seed
    assert drawn[-1][0][0].tolist() == [2]  # DPO's 16th step of 32 is where the others have done two rollouts of four


def test_the_mean_over_seeds_is_taken_step_by_step_and_ends_with_the_shortest():
    steps, values = draw.mean_over_seeds([([1, 2, 3], [1.0, 2.0, 3.0]), ([1, 1.5, 2], [3.0, 9.0, 6.0])])
    assert steps.tolist() == [1, 2] and values.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("lacks", ["method", "seed", "steps"])
def test_results_with_a_row_that_lacks_something_are_refused(workshop, monkeypatch, lacks):
    pytest.importorskip("matplotlib")
    row = {"method": "ppo-kl-0.05", "seed": 1, "steps": 4}
    other = {key: value for key, value in row.items() if key != lacks}
    (workshop / "results.json").write_text(json.dumps({"budget": "rollouts-4", "runs": [row, other]}))
    monkeypatch.setattr(sys, "argv", ["draw.py", str(workshop / "results.json")])
    with pytest.raises(data.Problem, match="not what compare.py writes"):
        draw.main()


def test_a_picture_of_runs_that_are_not_here_is_refused(commands, workshop, monkeypatch):
    pytest.importorskip("matplotlib")
    commands("--rollouts", 4, "--seeds", 1, "--json", workshop / "results.json")
    monkeypatch.setattr(sys, "argv", ["draw.py", str(workshop / "results.json")])
    with pytest.raises(data.Problem, match="draw where the comparison ran"):
        draw.main()
