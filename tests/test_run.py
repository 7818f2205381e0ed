import ast
import errno
import math
import os
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import Payload, contents, tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import dpo
import evaluate
import finetune
import grpo
import model as models
import ppo
import pretrain
import run as runs

BOTH = pytest.mark.parametrize("script", [ppo, grpo])
ORDER = "cli data rewards model sample evaluate run pretrain finetune ppo grpo preferences dpo compare draw memory bench tricks".split()
SHARED = """rollout/reward rollout/kl rollout/ended rollout/length rollout/entropy update/loss update/clip_fraction update/ratio
    update/grad_norm update/rate speed/stories_per_second eval/words_used eval/plain_loss eval/ended""".split()
OWN = {ppo: ["critic/loss", "critic/explained_variance"], grpo: ["rollout/tied_groups"]}


@pytest.fixture(autouse=True)
def rewarded(monkeypatch):
    """Rewards that differ from story to story, so that there is something to learn."""
    monkeypatch.setattr(ppo, "words_used", lambda text, _: len(text) % 4 / 3)


@pytest.fixture
def labels(monkeypatch):
    """The labels of runs that are set up but do not train."""
    seen = []
    for script in ppo, grpo:
        monkeypatch.setattr(script, "train", lambda run, *_: (seen.append(run.label), run.writer.close()))
    return seen


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C in the middle of rollout 2; fail if there is a third. Gives the rollout that does not press it."""
    calls, made = [], ppo.rollout

    def pressing(*args):
        calls.append(1)
        assert len(calls) < 3, "the run did not stop"
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return made(*args)

    monkeypatch.setattr(ppo, "rollout", pressing)
    return made


def differences(one, other, path=""):
    """Where two nested states differ: paths into them."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [each for key in one for each in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        return [each for number, (a, b) in enumerate(zip(one, other, strict=True)) for each in differences(a, b, f"{path}/{number}")]
    return [] if one == other else [path]


def state(workshop, label):
    return models.read(workshop / "checkpoints" / label / "state.pt")


# ---- the same again, and going on


@BOTH
def test_two_rollouts_a_stop_and_two_more_equal_four(quick, workshop, script):
    quick(script, "--rollouts", 4, "--name", "whole")
    quick(script, "--rollouts", 2, "--name", "half")
    torch.manual_seed(77)  # whatever happened in between
    quick(script, "--rollouts", 4, "--name", "half", "--resume")
    method = script.__name__
    whole, half = state(workshop, f"{method}/kl-0.05-whole"), state(workshop, f"{method}/kl-0.05-half")
    assert half["run"].pop("minutes") > 0 and whole["run"].pop("minutes") > 0
    assert whole["run"]["steps"] == 4 and whole.keys() == {"model", "optimizer", "method", "run"}
    assert differences(whole, half) == []
    start = models.load_checkpoint(workshop / "checkpoints/finetuned/model.pt").state_dict()
    assert differences(start, whole["model"])  # it has learned something at all
    assert whole["optimizer"]["state"][0]["step"] == 8  # two passes over one minibatch, four times
    if script is ppo:
        assert whole["method"]["critic"]["linear.weight"].any() and whole["method"]["optimizer"]["state"][0]["step"] == 8


def test_a_bar_says_what_a_run_is_at_and_how_much_of_it_is_done(quick, workshop, monkeypatch):
    bars = []
    monkeypatch.setattr(runs, "progress", lambda done, total, note: bars.append((done / total, note)))
    quick(grpo, "--rollouts", 2)
    assert bars == [(0, "measuring"), (0, "rollout 1"), (0.5, "rollout 2"), (1, "measuring")]


def test_a_seed_gives_the_same_asks_and_weights_again_and_another_seed_others(quick, workshop, monkeypatch):
    asks, made = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args: asks.append(args[2]) or made(*args))
    for flags in ("--name", "a"), ("--name", "b"), ("--seed", 2):
        quick(grpo, "--rollouts", 3, *flags)
    a, b, c = (models.read(workshop / f"checkpoints/grpo/kl-0.05-{name}/model.pt")["model"] for name in ("a", "b", "seed-2"))
    assert differences(a, b) == [] and differences(a, c)
    assert asks[:3] == asks[3:6] and not any(one == other for one, other in zip(asks, asks[6:]))


def test_a_resumed_run_keeps_the_reference_and_the_start_that_it_had(quick, workshop, monkeypatch):
    other = workshop / "other.pt"
    models.save_checkpoint(other, tiny_model(5))
    quick(grpo, "--rollouts", 1, "--from", other)
    seen, made = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args: (seen.append(args[1]), made(*args))[1])
    quick(grpo, "--rollouts", 2, "--resume")
    assert differences(dict(seen[0].state_dict()), dict(tiny_model(5).state_dict())) == []


def test_a_resumed_run_refuses_another_start_than_it_had(quick, workshop):
    models.save_checkpoint(workshop / "other.pt", tiny_model(5))
    quick(grpo, "--rollouts", 1)
    with pytest.raises(data.Problem, match="started from .*finetuned.model.pt: leave --from out"):
        quick(grpo, "--rollouts", 2, "--resume", "--from", workshop / "other.pt")
    quick(grpo, "--rollouts", 2, "--resume", "--from", workshop / "checkpoints/finetuned/model.pt")
    assert state(workshop, "grpo/kl-0.05")["run"]["steps"] == 2


def test_a_run_that_was_killed_in_its_first_rollout_starts_again_from_its_evaluation(quick, workshop, monkeypatch):
    with monkeypatch.context() as dying:
        dying.setattr(ppo, "rollout", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quick(grpo, "--rollouts", 1)
    quick(grpo, "--rollouts", 1, "--resume")
    events = EventAccumulator(str(workshop / "runs/grpo/kl-0.05")).Reload()
    assert [event.step for event in events.Scalars("eval/words_used")] == [0, 1]


@pytest.mark.parametrize("call", ["add_scalar", "close"])
def test_a_full_disk_for_the_logs_is_one_line(quick, workshop, monkeypatch, capsys, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs.SummaryWriter, call, full)
    with pytest.raises(data.Problem, match="cannot write below .*runs: No space left on device"):
        quick(grpo, "--rollouts", 1)
    assert ("model.pt after" in capsys.readouterr().out) == (call == "close")  # the model is there by then, and it is said


@pytest.mark.parametrize("place", [(runs.Path, "mkdir"), (runs, "SummaryWriter")], ids=["checkpoints", "runs"])
def test_a_folder_that_may_not_be_written_is_a_problem(quick, workshop, monkeypatch, place):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/the/folder")

    monkeypatch.setattr(*place, refuse)
    with pytest.raises(data.Problem, match="^cannot write to /the/folder: Permission denied$"):
        quick(ppo, "--rollouts", 1)
    assert [path.name for path in workshop.rglob("*.pt")] == ["model.pt"]  # the fine-tuned one


def test_a_text_is_logged_as_it_stands(quick, workshop, monkeypatch):
    monkeypatch.setattr(runs, "write", lambda *_, **__: "One.\n# Two.")
    quick(grpo, "--rollouts", 1)
    events = EventAccumulator(str(workshop / "runs/grpo/kl-0.05")).Reload()
    assert events.Tensors("demo/story/text_summary")[0].tensor_proto.string_val[0] == b"    One.\n    # Two."


def test_resuming_what_never_ran_says_so(quick):
    with pytest.raises(data.Problem, match="nothing to resume"):
        quick(ppo, "--resume")


def test_resuming_and_overwriting_at_once_is_refused(quick):
    with pytest.raises(data.Problem, match="exclude each other"):
        quick(ppo, "--resume", "--overwrite")


# ---- Ctrl-C


def test_ctrl_c_ends_a_run_after_its_rollout_with_an_evaluation_and_a_model(quick, workshop, interrupt, capsys):
    quick(ppo, "--minutes", 5)
    lines = capsys.readouterr().out.splitlines()
    folder = workshop / "checkpoints/ppo/kl-0.05"
    assert sum(line.startswith("stopping after this step") for line in lines) == 1
    assert [line for line in lines if line.startswith("held-out asks after 2 rollouts")]
    assert lines[-1].startswith(f"wrote {folder / 'model.pt'} after") and "2 rollouts" in lines[-1]
    assert models.read(folder / "model.pt")["steps"] == state(workshop, "ppo/kl-0.05")["run"]["steps"] == 2


def test_a_run_that_ctrl_c_ended_goes_on_to_the_numbers_of_one_that_it_did_not(quick, workshop, interrupt, monkeypatch):
    quick(ppo, "--rollouts", 3, "--name", "pressed")
    assert state(workshop, "ppo/kl-0.05-pressed")["run"]["steps"] == 2
    monkeypatch.setattr(ppo, "rollout", interrupt)
    quick(ppo, "--rollouts", 3, "--name", "pressed", "--resume")
    quick(ppo, "--rollouts", 3, "--name", "left-alone")
    one, other = state(workshop, "ppo/kl-0.05-pressed"), state(workshop, "ppo/kl-0.05-left-alone")
    assert one["run"]["steps"] == 3 and differences({**one, "run": 0}, {**other, "run": 0}) == []


def test_a_terminated_run_stops_after_its_rollout_too(quick, workshop, monkeypatch):
    def ending(*args, made=ppo.rollout):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        return made(*args)

    monkeypatch.setattr(ppo, "rollout", ending)
    quick(grpo, "--rollouts", 5)
    assert state(workshop, "grpo/kl-0.05")["run"]["steps"] == 1


def test_a_run_stopped_before_its_first_rollout_leaves_the_old_model_and_says_so(quick, workshop, monkeypatch):
    quick(ppo, "--rollouts", 1)
    model = workshop / "checkpoints/ppo/kl-0.05/model.pt"
    before = model.read_bytes()
    monkeypatch.setattr(runs.Run, "report", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(data.Problem, match="stopped before the first rollout"):
        quick(ppo, "--rollouts", 1, "--overwrite")
    assert model.read_bytes() == before


def test_a_run_stopped_while_it_starts_measures_nothing_and_can_go_on(quick, workshop, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "optimizer_of", lambda *args, made=ppo.optimizer_of: [signal.raise_signal(signal.SIGINT), made(*args)][1])
        patch.setattr(evaluate, "measure", Mock(side_effect=AssertionError("measured")))
        with pytest.raises(data.Problem, match="stopped before the first rollout"):
            quick(ppo, "--rollouts", 1)
    quick(ppo, "--rollouts", 1, "--resume")
    events = EventAccumulator(str(workshop / "runs/ppo/kl-0.05")).Reload()
    assert [event.step for event in events.Scalars("eval/words_used")] == [0, 1]


def test_a_run_whose_evaluation_takes_all_its_time_still_makes_one_rollout(quick, workshop):
    quick(ppo, "--minutes", 1e-9)
    assert state(workshop, "ppo/kl-0.05")["run"]["steps"] == 1


def test_an_evaluation_that_was_broken_off_is_made_up_for_when_the_run_goes_on(quick, workshop, monkeypatch):
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 2)
    calls = []

    def breaking(*args, made=evaluate.measure):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(*args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "measure", breaking)
        with pytest.raises(KeyboardInterrupt):
            quick(grpo, "--rollouts", 3)
    quick(grpo, "--rollouts", 3, "--resume")
    events = EventAccumulator(str(workshop / "runs/grpo/kl-0.05")).Reload()
    assert [event.step for event in events.Scalars("eval/words_used")] == [0, 2, 3]


@pytest.mark.parametrize("at", ["rollout", "measure"])
def test_what_was_learned_is_saved_before_an_evaluation_and_every_few_minutes(quick, workshop, monkeypatch, at):
    monkeypatch.setattr(runs, "SAVE_AFTER", -1 if at == "rollout" else 100)
    module, calls, made = {"rollout": (ppo, [], ppo.rollout), "measure": (evaluate, [], evaluate.measure)}[at]

    def broken_off(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(*args)

    monkeypatch.setattr(module, at, broken_off)
    with pytest.raises(KeyboardInterrupt):
        quick(grpo, "--rollouts", 3)
    assert state(workshop, "grpo/kl-0.05")["run"]["steps"] == {"rollout": 1, "measure": 3}[at]


def test_a_second_ctrl_c_stops_at_once(quick, labels, monkeypatch):
    monkeypatch.setattr(ppo, "train", lambda run, *_: [run.writer.close(), *(os.kill(os.getpid(), signal.SIGINT) for _ in range(2))])
    with pytest.raises(KeyboardInterrupt):
        quick(ppo)


# ---- gradients


def test_a_gradient_is_scaled_down_to_a_norm_of_1_and_never_up():
    model = torch.nn.Linear(2, 1)
    for gradient, bias, norm in ([2.0, 3.0], 6.0, 7.0), ([0.2, 0.3], 0.6, 0.7):
        model.weight.grad, model.bias.grad = torch.tensor([gradient]), torch.tensor([bias])
        assert runs.clip_gradients(model) == pytest.approx(norm)
        wanted = [each / max(norm, 1) for each in (*gradient, bias)]
        assert [*model.weight.grad[0].tolist(), model.bias.grad.item()] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_a_problem(worst):
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0, worst]]), torch.zeros(1)
    with pytest.raises(data.Problem, match="the gradient is not finite"):
        runs.clip_gradients(model)


# ---- names and folders


@pytest.mark.parametrize(
    ("argv", "label"),
    [
        ([], "kl-0.05"),
        (["--kl", "0"], "kl-0"),
        (["--kl", "0.0"], "kl-0"),
        (["--kl", "-0"], "kl-0"),
        (["--kl", "5e-2"], "kl-0.05"),
        (["--name", "fast"], "kl-0.05-fast"),
        (["--seed", "2"], "kl-0.05-seed-2"),
        (["--seed", "1"], "kl-0.05"),
        (["--kl", "0.10", "--name", "fast", "--seed", "3"], "kl-0.1-fast-seed-3"),
    ],
)
def test_a_run_is_named_by_what_sets_it_apart(quick, workshop, labels, argv, label):
    quick(ppo, *argv)
    quick(grpo, *argv)
    assert labels == [f"ppo/{label}", f"grpo/{label}"]
    for kind in "runs", "checkpoints":
        assert all((workshop / kind / each).is_dir() for each in labels)


def test_an_existing_run_is_refused_with_the_ways_out(quick, labels):
    quick(ppo)
    with pytest.raises(data.Problem, match="run ppo/kl-0.05 already: --overwrite.*--name"):  # nothing was saved to go on with
        quick(ppo)
    quick(ppo, "--name", "other")
    quick(grpo)
    assert labels == ["ppo/kl-0.05", "ppo/kl-0.05-other", "grpo/kl-0.05"]


def test_a_run_that_can_be_resumed_says_so_when_it_is_refused(quick, workshop):
    quick(ppo, "--rollouts", 1)
    with pytest.raises(data.Problem, match="already.*--resume.*--overwrite.*--name"):
        quick(ppo, "--rollouts", 1)


def test_overwrite_keeps_the_old_model_until_there_is_a_new_one(quick, workshop, monkeypatch):
    quick(ppo, "--rollouts", 1)
    model = workshop / "checkpoints/ppo/kl-0.05/model.pt"
    before = model.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "words_used", lambda *_: math.nan)
        with pytest.raises(data.Problem, match="not a finite number"):
            quick(ppo, "--rollouts", 1, "--overwrite")
    assert model.read_bytes() == before


@pytest.mark.parametrize("script", [ppo, grpo])
@pytest.mark.parametrize("module, name", [(evaluate, "load_plain"), (runs, "load_instructions"), (ppo, "load_asks")])
def test_overwrite_throws_nothing_away_where_there_is_nothing_to_ask_for_or_measure_on(quick, workshop, monkeypatch, script, module, name):
    quick(script, "--rollouts", 1)
    before = contents(workshop)
    monkeypatch.setattr(module, name, Mock(side_effect=data.Problem("cannot read it")))
    with pytest.raises(data.Problem, match="cannot read it"):
        quick(script, "--rollouts", 1, "--overwrite")
    assert contents(workshop) == before


def test_a_run_is_not_resumed_with_another_seed_whose_folder_has_the_same_name(quick, workshop):
    quick(ppo, "--rollouts", 1, "--name", "seed-2")
    with pytest.raises(data.Problem, match="is of a run with --seed 1, not 2"):
        quick(ppo, "--rollouts", 2, "--seed", 2, "--resume")


def test_a_run_is_not_resumed_when_the_model_it_started_from_is_another_one_now(quick, workshop):
    quick(ppo, "--rollouts", 1)
    models.save_checkpoint(workshop / "checkpoints/finetuned/model.pt", tiny_model(5))
    with pytest.raises(data.Problem, match="no longer the model"):
        quick(ppo, "--rollouts", 2, "--resume")


def test_a_run_is_resumed_from_any_folder(quick, workshop, monkeypatch):
    monkeypatch.chdir(workshop / "checkpoints")
    quick(ppo, "--rollouts", 1, "--from", "finetuned/model.pt")
    monkeypatch.chdir(workshop)
    quick(ppo, "--rollouts", 2, "--resume")
    assert models.read(workshop / "checkpoints/ppo/kl-0.05/model.pt")["steps"] == 2


def test_a_state_of_something_else_is_a_problem(quick, workshop):
    quick(ppo, "--rollouts", 1)
    torch.save({"model": torch.zeros(1)}, workshop / "checkpoints/ppo/kl-0.05/state.pt")
    with pytest.raises(data.Problem, match="not the state of a run"):
        quick(ppo, "--rollouts", 2, "--resume")


def test_a_damaged_state_is_a_problem_and_code_in_it_never_runs(quick, workshop, tmp_path):
    quick(ppo, "--rollouts", 1)
    file, proof = workshop / "checkpoints/ppo/kl-0.05/state.pt", tmp_path / "it-ran"
    whole, good = file.read_bytes(), models.read(file)
    for content in (
        lambda: file.write_bytes(whole[: len(whole) // 2]),
        lambda: torch.save({**good, "model": Payload(proof)}, file),
        lambda: torch.save({"run": good["run"]}, file),
        lambda: torch.save({**good, "model": tiny_model(context=8, vocabulary=5).state_dict()}, file),
        lambda: torch.save({**good, "run": {**good["run"], "torch_random": 3}}, file),
    ):
        content()
        before = contents(workshop / "checkpoints")
        with pytest.raises(data.Problem) as caught:
            quick(ppo, "--rollouts", 2, "--resume")
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
        assert not proof.exists() and contents(workshop / "checkpoints") == before


def test_overwrite_starts_afresh_and_leaves_other_runs_alone(quick, workshop):
    quick(ppo, "--rollouts", 1, "--name", "other")
    quick(ppo, "--rollouts", 3)
    folder = workshop / "checkpoints/ppo/kl-0.05"
    first = models.read(folder / "rollout-3.pt")["model"]
    quick(ppo, "--rollouts", 2, "--overwrite")
    assert sorted(path.name for path in folder.glob("*.pt")) == ["model.pt", "rollout-2.pt", "state.pt"]
    assert state(workshop, "ppo/kl-0.05")["run"]["steps"] == 2
    assert len(list((workshop / "runs/ppo/kl-0.05").iterdir())) == 1
    assert (workshop / "checkpoints/ppo/kl-0.05-other/model.pt").exists()
    assert differences(first, models.read(folder / "model.pt")["model"])  # two rollouts, not two more


def test_a_run_is_measured_every_ten_rollouts_and_not_twice_after_the_last(quick, workshop):
    quick(grpo, "--rollouts", 10)
    events = EventAccumulator(str(workshop / "runs/grpo/kl-0.05")).Reload()
    for found in events.Scalars("eval/words_used"), events.Tensors("demo/story/text_summary"):
        assert [event.step for event in found] == [0, 10]
    assert [path.name for path in (workshop / "checkpoints/grpo/kl-0.05").glob("rollout-*.pt")] == ["rollout-10.pt"]


def test_a_checkpoint_is_kept_at_every_evaluation_and_after_the_last_rollout(quick, workshop, monkeypatch):
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 2)
    quick(grpo, "--rollouts", 5)
    folder = workshop / "checkpoints/grpo/kl-0.05"
    assert sorted(path.name for path in folder.iterdir()) == ["model.pt", "rollout-2.pt", "rollout-4.pt", "rollout-5.pt", "state.pt"]
    last, final = models.read(folder / "rollout-5.pt"), models.read(folder / "model.pt")
    assert differences(last["model"], final["model"]) == [] and last["steps"] == final["steps"] == 5
    assert final["minutes"] > 0 and differences(last["model"], models.read(folder / "rollout-4.pt")["model"])


@BOTH
def test_tensorboard_gets_the_names_that_the_docs_list(quick, workshop, monkeypatch, script):
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 2)
    quick(script, "--rollouts", 3)
    events = EventAccumulator(str(workshop / "runs" / script.__name__ / "kl-0.05")).Reload()
    tags = events.Tags()
    assert sorted(tags["scalars"]) == sorted(SHARED + OWN[script])
    assert sorted(tags["tensors"]) == ["demo/story/text_summary", "rollout/group/text_summary"]
    for name in tags["scalars"]:
        steps = [event.step for event in events.Scalars(name)]
        assert steps == ([0, 2, 3] if name.startswith("eval/") else [1, 2, 3]), name
    assert [event.step for event in events.Tensors("rollout/group/text_summary")] == [1, 2, 3]
    assert events.Scalars("rollout/kl")[0].value == 0 < events.Scalars("rollout/kl")[1].value


def test_a_complete_run_that_is_resumed_says_that_its_steps_count(quick, workshop, capsys):
    quick(grpo, "--rollouts", 1)
    before = models.read(workshop / "checkpoints/grpo/kl-0.05/model.pt")["model"]
    assert "it is complete" not in capsys.readouterr().out
    quick(grpo, "--rollouts", 1, "--resume")
    assert re.search(r"it is complete, after \d+\.\d minutes and 1 steps", capsys.readouterr().out)
    assert differences(before, models.read(workshop / "checkpoints/grpo/kl-0.05/model.pt")["model"]) == []


def test_a_resumed_runs_scalars_go_on_where_they_stopped(quick, workshop):
    quick(grpo, "--rollouts", 2)
    quick(grpo, "--rollouts", 4, "--resume")
    events = EventAccumulator(str(workshop / "runs/grpo/kl-0.05")).Reload()
    assert [event.step for event in events.Scalars("rollout/reward")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/words_used")] == [0, 2, 4]


# ---- compiling


@pytest.mark.parametrize(("budget", "compiles"), [(["--minutes", 5], True), (["--minutes", 4.9], False), (["--rollouts", 1], False)])
@pytest.mark.parametrize("script", [ppo, grpo])
def test_a_run_that_earns_the_time_back_compiles_the_policy_and_the_reference(quick, monkeypatch, script, budget, compiles):
    found, made = [], ppo.rollout
    monkeypatch.setattr(runs, "COMPILE_FROM", 5)
    monkeypatch.setattr(ppo, "compile_blocks", lambda *these, dynamic: found.append((these, dynamic)))
    monkeypatch.setattr(ppo, "rollout", lambda *args: found.append(args[:2]) or os.kill(os.getpid(), signal.SIGINT) or made(*args))
    quick(script, *budget)
    *compiled, rolled = found
    assert compiled == [(rolled, True)] * compiles


def test_compiled_blocks_learn_the_same_from_batches_of_any_shape(capsys):
    model, compiled = tiny_model(), tiny_model()
    runs.compile_blocks(compiled, dynamic=True)
    if "goes on without" in capsys.readouterr().out:
        pytest.skip("no compiler here")
    for lengths in [9, 4, 7], [30, 22], [40, 41, 42, 43, 44]:
        tokens, mask = models.pack([[1, 2, 3]] * len(lengths), [torch.randint(0, 4096, (length,)).tolist() for length in lengths])
        scores = [models.token_log_probs(each, tokens, mask) for each in (model, compiled)]
        torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-4)
        wanted, found = (torch.autograd.grad(each.sum(), list(of.parameters())) for each, of in zip(scores, (model, compiled)))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


# ---- the clock, the precision, the imports


def test_minutes_count_the_earlier_parts_of_a_run(quick, labels, monkeypatch):
    made = []
    monkeypatch.setattr(ppo, "train", lambda run, *_: made.append(run))
    quick(ppo, "--minutes", 10)
    run = made[0]
    run.steps = 1
    monkeypatch.setattr(runs.time, "monotonic", lambda: run.started + 240)
    run.earlier = 5.0
    assert run.minutes == pytest.approx(9) and run.share() == pytest.approx(0.9) and not run.over()
    run.earlier = 6.5
    assert run.share() == 1 and run.over()
    run.args.steps, run.steps = 4, 1  # counted, and the minutes no longer matter
    assert run.share() == 0.25 and not run.over()
    run.writer.close()


def test_the_clock_starts_before_the_first_evaluation(quick, workshop, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    def taking(minutes, made):
        def work(*args):
            now[0] += 60 * minutes
            return made(*args)

        return work

    monkeypatch.setattr(runs.Run, "report", taking(4, runs.Run.report))
    monkeypatch.setattr(ppo, "rollout", taking(3, ppo.rollout))
    quick(grpo, "--minutes", 10)  # 4, 7, 10: two rollouts; four if the evaluation did not count
    assert models.read(workshop / "checkpoints/grpo/kl-0.05/model.pt")["steps"] == 2


def test_the_last_evaluation_takes_no_minutes_of_a_run_and_those_on_the_way_do(quick, workshop, monkeypatch):
    now, made = [0.0], ppo.rollout

    def measuring(*args, real=evaluate.measure):
        now[0] += 120
        return real(*args)

    def rolling(*args):
        now[0] += 180
        return made(*args)

    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(evaluate, "measure", measuring)
    monkeypatch.setattr(ppo, "rollout", rolling)
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 2)
    quick(grpo, "--minutes", 12)  # 2 for the evaluation, 5, 8, and another 2, 13: the one after it takes none
    folder = workshop / "checkpoints/grpo/kl-0.05"
    assert models.read(folder / "model.pt")["minutes"] == state(workshop, "grpo/kl-0.05")["run"]["minutes"] == 13
    assert now[0] == 15 * 60 and models.read(folder / "model.pt")["steps"] == 3
    quick(grpo, "--minutes", 16, "--resume")  # three minutes more, as was asked for
    assert models.read(folder / "model.pt")["minutes"] == 16 and models.read(folder / "model.pt")["steps"] == 4


def test_a_run_whose_time_ends_in_an_evaluation_is_complete(quick, workshop, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(evaluate, "measure", lambda *args, real=evaluate.measure: (now.__setitem__(0, now[0] + 240), real(*args))[1])
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 1)
    quick(grpo, "--minutes", 6)  # 4 before the first rollout, 8 after it
    assert state(workshop, "grpo/kl-0.05")["run"]["minutes"] == 8
    assert models.read(workshop / "checkpoints/grpo/kl-0.05/model.pt")["minutes"] == 8
    quick(grpo, "--minutes", 6, "--resume")
    assert "it is complete, after 8.0 minutes and 1 steps" in capsys.readouterr().out


def test_a_run_that_is_stopped_early_is_not_taken_for_complete_because_it_was_measured(quick, workshop, interrupt, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(evaluate, "measure", lambda *args, real=evaluate.measure: (now.__setitem__(0, now[0] + 240), real(*args))[1])
    quick(grpo, "--minutes", 5)
    assert models.read(workshop / "checkpoints/grpo/kl-0.05/model.pt")["minutes"] == 4


def test_a_resumed_run_counts_the_minutes_of_its_earlier_part(quick, workshop, monkeypatch):
    quick(grpo, "--rollouts", 1)
    file, made = workshop / "checkpoints/grpo/kl-0.05/state.pt", []
    content = models.read(file)
    content["run"]["minutes"] = 7.5
    models.save(content, file)
    monkeypatch.setattr(grpo, "train", lambda run, *_: (made.append(run.minutes), run.writer.close()))
    quick(grpo, "--minutes", 10, "--resume")
    assert 7.5 <= made[0] < 10


@pytest.mark.parametrize(
    ("can", "dtype"), [({}, torch.float32), ({"amx_bf16": True}, torch.bfloat16), ({"avx512_bf16": True}, torch.bfloat16)]
)
def test_a_run_computes_in_bfloat16_only_where_the_processor_can(quick, labels, monkeypatch, can, dtype):
    monkeypatch.delenv("STORY_FLOAT32")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    made = []
    monkeypatch.setattr(ppo, "train", lambda run, *_: (made.append(run.precision.dtype), run.writer.close()))
    quick(ppo, "--device", "cpu")
    assert made == [dtype]


def test_every_script_imports_only_those_that_a_reader_has_met():
    folder = Path(data.__file__).parent
    scripts = {path.stem: path for path in folder.glob("*.py")}
    assert scripts.keys() == set(ORDER)
    for name in ORDER:
        for node in ast.walk(ast.parse(scripts[name].read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                ours = set(names) & scripts.keys()
                assert ours <= set(ORDER[: ORDER.index(name)]), f"{name}.py imports {ours}"


def test_the_flags_mean_the_same_in_every_training_script(quick, capsys):
    for script in pretrain, finetune, ppo, grpo, dpo:
        with pytest.raises(SystemExit):
            quick(script, "--help")
        flags = set(re.findall(r"^  (--[a-z]+)", capsys.readouterr().out, re.MULTILINE))
        assert {"--minutes", "--seed", "--name", "--device", "--resume", "--overwrite"} <= flags
        assert ("--from" in flags) == (script is not pretrain) and ("--rollouts" in flags) == ("--kl" in flags) == (script in (ppo, grpo))


def test_overwriting_the_run_that_one_starts_from_is_refused(quick, workshop):
    quick(grpo, "--rollouts", 1)
    start = workshop / "checkpoints/grpo/kl-0.05/model.pt"
    with pytest.raises(data.Problem, match="--name"):
        quick(grpo, "--rollouts", 1, "--overwrite", "--from", str(start))
    assert start.exists()
