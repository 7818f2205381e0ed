import itertools

import numpy as np
import pytest
import torch
from by_hand import FLOAT32, Recorder, nudged, plain_loss
from conftest import tiny_model

import data
import grpo
import ppo

ALL_BUT_TIED = [1 / 3] * 8 + [0.0, 1.0, 1 / 3, 0.0, 2 / 3, 1.0, 0.0, 0.0]  # a tied group and one that is not


@pytest.fixture
def moved(tiny, staged):
    """A rollout with a tied group and another, and a policy that has moved since it wrote it."""
    batch = staged(tiny, tiny_model(1), ALL_BUT_TIED)
    return nudged(tiny), batch, grpo.GRPO().advantages(batch)[0]


def moved_by(model, batch, advantages, kl, optimizer=None):
    """Run an update; return how much each weight moved at most, over all of them."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = [weight.detach().clone() for weight in model.parameters()]
    ppo.update(model, optimizer, batch, advantages, grpo.GRPO(), kl, FLOAT32)
    return max((weight - old).abs().max().item() for weight, old in zip(model.parameters(), before))


# ---- groups and their advantages


def test_a_groups_advantages_are_worked_out_with_the_deviation_over_n_minus_1():
    advantages, tied = grpo.group_advantages(torch.tensor([0.0, 1, 1, 1]), group=4)
    # mean 3/4; squares 9/16 + 3 * 1/16 = 3/4, over n - 1 = 3, so the deviation is 1/2 (over n it would be 0.433)
    assert advantages.tolist() == pytest.approx([-0.75 / 0.5001, 0.25 / 0.5001, 0.25 / 0.5001, 0.25 / 0.5001], rel=1e-5)
    assert tied.tolist() == [False]


def test_a_groups_rewards_never_move_anothers_advantages():
    torch.manual_seed(0)
    mine, others = torch.rand(8), [torch.rand(8), torch.full((8,), 1 / 3), torch.arange(8.0) * 100]
    alone, _ = grpo.group_advantages(mine)
    for other in others:
        both, _ = grpo.group_advantages(torch.cat([other, mine, other]))
        assert torch.equal(both[8:16], alone) and torch.equal(both[:8], grpo.group_advantages(other)[0])


@pytest.mark.parametrize("reward", [0.0, 1 / 3, 2 / 3, 1.0, 0.1, 1e6 / 7])
def test_equal_rewards_are_a_tie_and_give_exactly_zero(reward):
    for group in 2, 3, 7, 8:
        advantages, tied = grpo.group_advantages(torch.full((group,), reward), group)
        assert tied.tolist() == [True] and not advantages.any()


def test_almost_equal_rewards_are_no_tie():
    rewards = torch.full((8,), 1 / 3)
    rewards[5] = torch.nextafter(rewards[5], torch.tensor(1.0))
    advantages, tied = grpo.group_advantages(rewards)
    assert tied.tolist() == [False] and advantages[5] > 0 and advantages.abs().max() < 0.01  # the 1e-4 keeps it small


def test_ties_are_found_group_by_group():
    rewards = torch.tensor([1.0] * 8 + [0.0] * 7 + [1.0] + [0.0] * 8 + [1.0] + [0.0] * 7)
    assert grpo.group_advantages(rewards)[1].tolist() == [True, False, True, False]


def test_grpo_asks_16_different_things_eight_times_each_side_by_side():
    asks = grpo.GRPO().ask(np.random.default_rng(1))
    groups = [(words, len(list(same))) for words, same in itertools.groupby(asks)]
    assert [size for _, size in groups] == [8] * 16 and len({words for words, _ in groups}) == 16
    assert set(asks) <= set(data.load_asks()) and not set(asks) & set(data.load_instructions())


def test_stories_of_a_group_differ_from_their_first_token_on(tiny, monkeypatch):
    monkeypatch.setattr(ppo, "STORY_TOKENS", 2)
    torch.manual_seed(1)
    batch = ppo.rollout(tiny, tiny, [data.load_asks()[0]] * 8, FLOAT32)
    first = batch.mask[0].nonzero()[0].item() + 1
    assert len(set(batch.tokens[:, first].tolist())) > 4  # a random model is very unsure


def test_every_token_of_a_story_shares_its_advantage_and_padding_has_none(tiny, staged):
    batch = staged(tiny, tiny, ALL_BUT_TIED)
    advantages, log = grpo.GRPO().advantages(batch)
    shares, _ = grpo.group_advantages(batch.rewards)
    for row in range(16):
        chosen = batch.mask[row].bool()
        assert torch.equal(advantages[row, chosen], shares[row].expand(int(chosen.sum()))) and not advantages[row, ~chosen].any()
    assert log == {"rollout/tied_groups": 1}


def test_a_group_that_fails_alike_is_tied_however_long_its_stories_and_whether_they_end(tiny, monkeypatch):
    monkeypatch.setattr(ppo, "generate", lambda *_: [[5] * length + [data.END] * (length % 2) for length in range(1, 9)])
    batch = ppo.rollout(tiny, tiny, [data.load_asks()[0]] * 8, FLOAT32)
    advantages, log = grpo.GRPO().advantages(batch)
    assert log["rollout/tied_groups"] == 1 and not advantages.any()


# ---- the loss


def test_grpo_takes_the_mean_over_each_storys_tokens_then_over_the_stories():
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])  # the last row has no token
    wanted = [[0, 1 / 12, 1 / 12, 1 / 12], [0, 0, 1 / 4, 0], [1 / 8, 1 / 8, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(grpo.GRPO().weights(mask), torch.tensor(wanted))


def test_a_tied_groups_stories_feel_the_kl_alone(moved):
    model, batch, advantages = moved
    batch = ppo.Rollout(**{**vars(batch), **{key: vars(batch)[key][:8] for key in ("tokens", "mask", "log_probs", "reference")}})
    assert not advantages[:8].any()
    optimizer = Recorder(model)
    ppo.update(model, optimizer, batch, advantages[:8], grpo.GRPO(), 0.3, FLOAT32)
    _, norm, wanted = plain_loss(model, batch, range(8), batch.mask * 0, 0.3, mean_of_means=True)
    assert norm > 0.01
    for found, gradient in zip(optimizer.gradients[0], wanted, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_tied_stories_count_in_the_mean(moved, kl):
    model, batch, advantages = moved
    kl, advantages, optimizer = kl / 50, advantages / 50, Recorder(model)
    ppo.update(model, optimizer, batch, advantages, grpo.GRPO(), kl, FLOAT32)
    _, norm, wanted = plain_loss(model, batch, range(16), advantages, kl, mean_of_means=True)  # over all 16, dropped or not
    assert 0.01 < norm < 1  # or clipping would hide by how many the sum was divided
    for step in optimizer.gradients:
        for found, gradient in zip(step, wanted, strict=True):
            torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-3)


def test_tied_stories_alone_make_no_step_without_a_kl_term(moved):
    model, batch, advantages = moved
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    assert moved_by(model, batch, advantages, 0.0, optimizer) > 0  # and now the optimizer has momentum
    assert moved_by(model, batch, advantages * 0, 0.0, optimizer) == 0
    assert moved_by(model, batch, advantages * 0, 0.3, optimizer) > 0


def test_a_minibatch_of_tied_stories_is_skipped_beside_one_that_is_not(tiny, staged, monkeypatch):
    batch, optimizer = staged(tiny, tiny, [1 / 3] * 16 + [0.0, 1.0] * 8), Recorder(tiny)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    ppo.update(tiny, optimizer, batch, grpo.GRPO().advantages(batch)[0], grpo.GRPO(), 0.0, FLOAT32)
    assert len(optimizer.gradients) == 2  # one a pass, not two


def test_an_update_of_tied_groups_alone_logs_nothing_of_a_policy_step(moved):
    model, batch, advantages = moved
    assert ppo.update(model, Recorder(model), batch, advantages * 0, grpo.GRPO(), 0.0, FLOAT32) == {}


def test_a_loss_near_zero_is_normal(tiny, staged):
    batch = staged(tiny, tiny, ALL_BUT_TIED)
    advantages, _ = grpo.GRPO().advantages(batch)
    figures = ppo.update(tiny, Recorder(tiny), batch, advantages, grpo.GRPO(), 0.05, FLOAT32)
    assert figures["update/loss"] == pytest.approx(0, abs=1e-5) and figures["update/grad_norm"] > 0.01


def test_a_run_of_ties_without_a_kl_term_leaves_the_weights_as_they_were(quick, workshop):
    quick(grpo, "--rollouts", 1, "--kl", 0)  # a random model uses none of the words
    start, end = (
        torch.load(workshop / "checkpoints" / name / "model.pt", weights_only=True)["model"] for name in ("finetuned", "grpo/kl-0")
    )
    assert all(torch.equal(start[key], end[key]) for key in start)
