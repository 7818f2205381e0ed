import json
import math

import pytest
import torch
from by_hand import FLOAT32, Recorder
from conftest import tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import dpo
import model as models
import run as runs


def pairs(number=6):
    """Made-up pairs: the chosen stories are short and end, the rejected ones are long and do not."""
    told = lambda tokens, score: {"score": score, "tokens": tokens, "text": data.decode(tokens)}
    return [
        {
            "ask": list(words),
            "chosen": told([40 + row, 50, *[60] * (row % 3), data.END], 1.0),
            "rejected": told([70 + row, 80, 90, 91, 92][: 3 + row % 3], 0.0),
        }
        for row, words in enumerate(data.load_asks()[:number])
    ]


@pytest.fixture
def exact(monkeypatch):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_loss_is_that_of_equation_7_worked_out_by_hand():
    loss, margin = dpo.dpo_loss(*(torch.tensor([each]) for each in (-10.0, -12.0, -11.0, -11.5)), beta=0.5)
    assert margin.item() == pytest.approx(0.5 * ((-10 + 11) - (-12 + 11.5)))  # 0.75
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.75)))


def test_before_the_first_step_the_loss_is_log_two_and_no_margin_is_there():
    model, made = tiny_model(), pairs()
    frozen = dpo.reference_log_probs(tiny_model(), made, FLOAT32)
    figures = dpo.step(model, frozen, Recorder(model), made, 0.1, FLOAT32)
    assert figures["update/loss"] == pytest.approx(math.log(2)) and figures["dpo/margin"] == 0 and figures["dpo/accuracy"] == 0
    assert figures["update/grad_norm"] > 0
    rows = torch.arange(len(made)).flip(0)  # in a run they come in another order than the reference has read them in
    figures = dpo.step(model, frozen[:, rows], Recorder(model), [made[row] for row in rows], 0.1, FLOAT32)
    assert figures["update/loss"] == pytest.approx(math.log(2)) and figures["dpo/margin"] == pytest.approx(0, abs=1e-5)


def test_a_margin_that_is_far_off_gives_no_overflow():
    chosen = torch.tensor([-1e4], requires_grad=True)
    loss, _ = dpo.dpo_loss(chosen, torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0]), beta=1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1e4) and chosen.grad.item() == pytest.approx(-1)


@pytest.mark.parametrize("piece", [1, 4, 16])
def test_loss_and_gradient_equal_those_of_a_loop_over_stories_in_float64(exact, monkeypatch, piece):
    model, reference, made = tiny_model(), tiny_model(1), pairs()
    monkeypatch.setattr(dpo, "PIECE", piece)
    recorder = Recorder(model)
    figures = dpo.step(model, dpo.reference_log_probs(reference, made, FLOAT32), recorder, made, 0.3, FLOAT32)

    def told(who, pair, side):  # log p of a story, token by token, from a forward of its own
        prompt = data.encode(data.instruction(pair["ask"]))
        scores = who(torch.tensor([prompt + pair[side]["tokens"]]))[0].log_softmax(-1)
        return sum(scores[place - 1, token] for place, token in enumerate(pair[side]["tokens"], len(prompt)))

    losses, chosen, rejected = [], [], []
    for pair in made:
        chosen.append(told(model, pair, "chosen"))
        rejected.append(told(model, pair, "rejected"))
        margin = (chosen[-1] - told(reference, pair, "chosen")) - (rejected[-1] - told(reference, pair, "rejected"))
        losses.append(-torch.log(1 / (1 + torch.exp(-0.3 * margin))))
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    assert figures["update/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert figures["update/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    assert figures["dpo/chosen_log_prob"] == pytest.approx(torch.stack(chosen).mean().item(), rel=1e-6)
    assert figures["dpo/rejected_log_prob"] == pytest.approx(torch.stack(rejected).mean().item(), rel=1e-6)
    for found, wanted in zip(recorder.gradients[0], gradients, strict=True):
        torch.testing.assert_close(found, wanted / max(1.0, norm.item() + 1e-6), atol=1e-9, rtol=0)


def test_the_frozen_reference_gets_no_gradient_and_the_policy_learns_the_preference():
    model, reference, made = tiny_model(), tiny_model(), pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    frozen = dpo.reference_log_probs(reference, made, FLOAT32)
    figures = [dpo.step(model, frozen, optimizer, made, 0.1, FLOAT32) for _ in range(12)]
    assert all(weight.grad is None for weight in reference.parameters())
    assert figures[-1]["update/loss"] < figures[0]["update/loss"] and figures[-1]["dpo/accuracy"] == 1
    assert figures[-1]["dpo/margin"] > 0


@pytest.fixture
def written(workshop):
    """Pairs that the fine-tuned model is said to have written."""
    settings = {"from": runs.file_hash(workshop / "checkpoints" / "finetuned" / "model.pt")}
    path = workshop / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [settings, *pairs(20)]))
    return path


def test_a_run_that_stopped_goes_on_to_the_weights_of_one_that_did_not(quick, workshop, written):
    quick(dpo, "--pairs", written, "--steps", 4, "--name", "once")
    quick(dpo, "--pairs", written, "--steps", 2)
    quick(dpo, "--pairs", written, "--steps", 4, "--resume")
    one, other = (models.read(workshop / f"checkpoints/dpo/beta-0.1{name}/state.pt") for name in ("-once", ""))
    assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
    start = models.load_checkpoint(workshop / "checkpoints/finetuned/model.pt").state_dict()
    assert any(not torch.equal(start[key], one["model"][key]) for key in start)
    assert (workshop / "checkpoints/dpo/beta-0.1/model.pt").exists()


def test_a_run_logs_what_its_page_lists_and_is_measured_along_the_way(quick, workshop, written, monkeypatch):
    monkeypatch.setattr(dpo, "MEASURE_STEPS", 2)
    quick(dpo, "--pairs", written, "--steps", 3)
    events = EventAccumulator(str(workshop / "runs/dpo/beta-0.1")).Reload()
    names = """update/loss update/grad_norm dpo/accuracy dpo/margin dpo/chosen_log_prob dpo/rejected_log_prob speed/pairs_per_second
        eval/words_used eval/ended eval/plain_loss eval/kl"""
    assert sorted(events.Tags()["scalars"]) == sorted(names.split())
    drift = events.Scalars("eval/kl")
    assert [event.step for event in drift] == [0, 2, 3] and drift[0].value == 0


def test_each_step_has_16_other_pairs_at_the_rate_of_the_docs_and_no_weight_decays(quick, workshop, written, monkeypatch):
    seen, made = [], dpo.step

    def listening(model, reference, optimizer, pairs, *rest):
        seen.append([tuple(pair["ask"]) for pair in pairs])
        return made(model, reference, optimizer, pairs, *rest)

    monkeypatch.setattr(dpo, "step", listening)
    quick(dpo, "--pairs", written, "--steps", 6)
    assert all(len(set(asks)) == 16 for asks in seen)
    assert len({frozenset(asks) for asks in seen}) > 1 and len(set().union(*seen)) == 20  # of 20
    (group,) = models.read(workshop / "checkpoints/dpo/beta-0.1/state.pt")["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (2e-5, 0)


def test_pairs_that_another_model_wrote_are_refused_before_anything_is_made(quick, workshop, written):
    models.save_checkpoint(workshop / "checkpoints" / "finetuned" / "model.pt", tiny_model(1))
    with pytest.raises(data.Problem, match="another model"):
        quick(dpo, "--pairs", written, "--steps", 1)
    assert not (workshop / "checkpoints" / "dpo").exists()


def test_a_run_goes_on_with_its_own_pairs_only(quick, written):
    quick(dpo, "--pairs", written, "--steps", 1)
    written.write_text("".join(written.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(data.Problem, match="started with"):
        quick(dpo, "--pairs", written, "--steps", 2, "--resume")


@pytest.mark.parametrize("beta", ["0", "-1", "nan", "inf"])
def test_a_beta_that_is_no_number_above_zero_is_refused(quick, written, capsys, beta):
    with pytest.raises(SystemExit):
        quick(dpo, "--pairs", written, "--beta", beta, "--steps", 1)
    assert len(capsys.readouterr().err.splitlines()) == 1
