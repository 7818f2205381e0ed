import gc
import math
import weakref

import numpy as np
import pytest
import torch
from by_hand import FLOAT32, Recorder, nudged, plain_loss
from conftest import tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import evaluate
import grpo
import model as models
import ppo
import rewards
import run as runs
import sample

THIRDS = [0.0, 1 / 3, 2 / 3, 1.0]
MIXED = [THIRDS[number * 7 % 4] for number in range(16)]


@pytest.fixture
def exact(monkeypatch):
    """All that is float32 is float64 here, so that two ways to one number agree in all digits that matter."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def ratios(monkeypatch):
    """What the update hands to `surrogate`, piece by piece: a growing list of the ratios of whole pieces."""
    seen, surrogate = [], ppo.surrogate
    monkeypatch.setattr(ppo, "surrogate", lambda ratio, advantages: (seen.append(ratio.detach()), surrogate(ratio, advantages))[1])
    return seen


def made_up(rewards, channels, lengths):
    """A rollout of nothing but what the critic reads."""
    mask = (torch.arange(channels.shape[1]) < torch.tensor(lengths)[:, None]).float()
    return ppo.Rollout([], rewards, torch.zeros(len(mask), channels.shape[1] + 1), mask, mask * 0, mask * 0, channels, 0.0)


def weights_of(module):
    return [weight.detach().clone() for weight in module.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the rollout


def test_ppo_asks_128_different_things_of_the_training_asks():
    for seed in range(5):  # of 128 draws from 4000, one in eight has no number twice by luck
        asks = ppo.PPO(tiny_model()).ask(np.random.default_rng(seed))
        assert len(asks) == len(set(asks)) == 128 and set(asks) <= set(data.load_asks())


@pytest.mark.parametrize("method, needed", [(ppo.PPO(tiny_model()), 128), (grpo.GRPO(), 16)], ids=["ppo", "grpo"])
def test_too_few_asks_for_a_rollout_are_a_problem(monkeypatch, method, needed):
    asks = data.load_asks()[: needed - 1]
    monkeypatch.setattr(ppo, "load_asks", lambda: asks)
    with pytest.raises(data.Problem, match=f"{needed} different asks.* has {needed - 1}"):
        method.ask(np.random.default_rng(1))


def test_log_probs_of_a_rollout_are_those_of_a_full_forward_for_each_story_alone(tiny, staged):
    stories = [[5, 6, 7, data.END], [9], [data.END], [8, data.END, 4, 3]]
    other = tiny_model(1)
    batch = staged(tiny, other, [0.0, 0.0, 0.0, 1.0], stories)
    for row, (words, story) in enumerate(zip(data.load_asks(), stories)):
        prompt = data.encode(data.instruction(words))
        for model, found in (tiny, batch.log_probs), (other, batch.reference):
            scores = model(torch.tensor([prompt + story]))[0].log_softmax(-1)
            for place, token in enumerate(story, len(prompt)):  # the token at `place` is predicted at `place - 1`
                assert found[row, place - 1].item() == pytest.approx(scores[place - 1, token].item(), abs=1e-5)
            assert found[row].count_nonzero() == len(story) == batch.mask[row].sum()


def test_log_probs_written_down_while_sampling_are_those_of_the_rollout(tiny, monkeypatch):
    written, choose = [], sample.choose

    def listening(logits, uniforms, *rest):
        chosen = choose(logits, uniforms, *rest)
        assert torch.equal(chosen, choose(logits, uniforms))  # at temperature 1, with no top-k
        written.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0])
        return chosen

    monkeypatch.setattr(sample, "choose", listening)
    monkeypatch.setattr(ppo, "STORY_TOKENS", 12)
    reference = tiny_model(1)
    torch.manual_seed(1)
    batch = ppo.rollout(tiny, reference, [data.load_asks()[0]] * 6, FLOAT32)
    assert batch.mask.sum(1).tolist() == [12] * 6  # none ended, so no row was dropped: step by step, row by row
    torch.testing.assert_close(batch.log_probs[batch.mask.bool()].view(6, 12), torch.stack(written, 1), atol=1e-5, rtol=0)


def test_in_bfloat16_too_a_model_and_its_copy_give_the_very_same_log_probs(tiny, monkeypatch):
    monkeypatch.setattr(ppo, "STORY_TOKENS", 12)
    batch = ppo.rollout(tiny, tiny_model(), data.load_asks()[:6], models.Precision(torch.device("cpu"), torch.bfloat16))
    assert torch.equal(batch.log_probs, batch.reference) and batch.log_probs.any()


def test_each_story_is_scored_with_the_words_of_its_own_ask(tiny, monkeypatch):
    asks = data.load_asks()[:4]
    texts = [" ".join(["Once", *words[:used]]) + "." for used, words in enumerate(asks)]
    stories = [data.encode(text) for text in texts]
    monkeypatch.setattr(ppo, "generate", lambda *_: stories)
    batch = ppo.rollout(tiny, tiny, asks, FLOAT32)
    assert batch.rewards.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1]) and batch.texts == texts


def test_a_story_keeps_the_end_it_wrote_and_gets_none_that_it_did_not(tiny, staged):
    batch = staged(tiny, tiny, [0.0, 0.0], [[5, data.END], [5, 6, 7]])
    written = [batch.tokens[row, 1:][batch.mask[row].bool()].tolist() for row in range(2)]
    assert written == [[5, data.END], [5, 6, 7]] and batch.ended == 0.5


def test_what_the_critic_reads_before_a_token_has_not_seen_it(tiny, staged):
    one, other = (staged(tiny, tiny, [0.0], [[5, 6, token, 8]]).channels[0] for token in (7, 70))
    before = len(data.encode(data.instruction(data.load_asks()[0]))) - 1
    assert torch.equal(one[: before + 3], other[: before + 3]) and one[before + 2].any()  # before the first three tokens
    assert not torch.isclose(one[before + 3], other[before + 3]).all()  # before the fourth, the third has been read


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_named(tiny, staged, reward):
    with pytest.raises(data.Problem, match=f"{', '.join(data.load_asks()[1])} is {reward}, not a finite number"):
        staged(tiny, tiny, [0.0, reward])


def test_a_bad_reward_ends_a_run_before_any_weight_moves(quick, workshop, monkeypatch):
    monkeypatch.setattr(ppo, "words_used", lambda *_: math.nan)
    with pytest.raises(data.Problem, match="not a finite number"):
        quick(ppo, "--rollouts", 1)
    start = models.load_checkpoint(workshop / "checkpoints/finetuned/model.pt").state_dict()
    left = models.read(workshop / "checkpoints/ppo/kl-0.05/state.pt")["model"]
    assert all(torch.equal(start[key], left[key]) for key in start)
    assert not (workshop / "checkpoints/ppo/kl-0.05/model.pt").exists()


def test_a_word_said_again_and_again_earns_no_more_and_is_measured():
    once, often = "A cake.", "Cake cake cake cake."
    ask = ("cake", "rain", "jump")
    assert rewards.words_used(once, ask) == rewards.words_used(often, ask) == 1 / 3
    assert evaluate.repeats([once], [ask]) == 1 and evaluate.repeats([often], [ask]) == 4


# ---- ratio, clip, KL


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "is_clipped"),
    [
        (0.5, 2.0, 1.0, 2.0, False),  # likely less than it was, though good: pull back up
        (1.1, 2.0, 2.2, 2.0, False),
        (1.5, 2.0, 2.4, 0.0, True),  # good, and up by enough
        (0.5, -2.0, -1.6, 0.0, True),  # bad, and down by enough
        (0.9, -2.0, -1.8, -2.0, False),
        (1.5, -2.0, -3.0, -2.0, False),  # likelier than it was, though bad: push back down
        (1.0, 2.0, 2.0, 2.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_surrogate_is_the_smaller_of_the_two_and_clipped_where_that_cuts_the_gradient(ratio, advantage, value, gradient, is_clipped):
    ratio = torch.tensor([ratio], requires_grad=True)
    found = ppo.surrogate(ratio, torch.tensor([advantage]))
    found.sum().backward()
    assert (found.item(), ratio.grad.item()) == pytest.approx((value, gradient))
    assert ppo.clipped(ratio, torch.tensor([advantage])).item() == is_clipped


def test_the_clip_fraction_leaves_out_what_the_minimum_did_not_take(tiny, staged):
    batch = staged(tiny, tiny, [0.0] * 2, [[5, 6, 7], [8]])
    batch.log_probs = batch.log_probs - batch.mask * math.log(1.5)  # every ratio is 1.5
    advantages = batch.mask * torch.tensor([[1.0], [-1.0]])  # the first story's three tokens are clipped, the second's is not
    figures = ppo.update(tiny, Recorder(tiny), batch, advantages, grpo.GRPO(), 0.05, FLOAT32)
    assert figures["update/clip_fraction"] == pytest.approx(3 / 4)
    assert figures["update/ratio"] == pytest.approx(1.5, abs=1e-4)


@pytest.mark.parametrize("method", [ppo.PPO, lambda _: grpo.GRPO()])
def test_a_zero_learning_rate_leaves_every_ratio_at_one(tiny, staged, ratios, method):
    batch = staged(tiny, tiny_model(1), MIXED * 2)
    method = method(tiny)
    advantages, _ = method.advantages(batch)
    figures = ppo.update(tiny, torch.optim.AdamW(tiny.parameters(), lr=0.0), batch, advantages, method, 0.05, FLOAT32)
    assert sum(len(piece) for piece in ratios) == 2 * 32  # two passes
    assert all(torch.allclose(piece, torch.ones(()), atol=1e-4) for piece in ratios)
    assert figures["update/ratio"] == pytest.approx(1, abs=1e-5) and figures["update/clip_fraction"] == 0


def test_the_ratio_is_taken_against_the_policy_that_wrote_the_rollout_in_both_passes(tiny, staged, ratios, monkeypatch):
    batch = staged(tiny, tiny, MIXED)
    old, new, scores = batch.log_probs.clone(), [], ppo.token_log_probs
    monkeypatch.setattr(ppo, "token_log_probs", lambda *args: new.append((args[1], scores(*args))) or new[-1][1])
    advantages = grpo.GRPO().advantages(batch)[0]
    ppo.update(tiny, torch.optim.AdamW(tiny.parameters(), lr=1e-2), batch, advantages, grpo.GRPO(), 0.05, FLOAT32)
    assert torch.equal(batch.log_probs, old)
    first, second = ratios  # one minibatch a pass
    assert torch.allclose(first, torch.ones(()), atol=1e-4) and (second - 1).abs().max() > 0.05
    for (tokens, found), ratio in zip(new, ratios):
        rows = [(batch.tokens == row).all(1).nonzero().item() for row in tokens]
        torch.testing.assert_close(ratio, (found - old[rows]).exp().detach())


def test_the_kl_is_never_negative_at_any_token_and_zero_where_nothing_moved(tiny, staged):
    batch = staged(tiny, tiny, MIXED)
    assert not evaluate.kl_terms(batch.log_probs, batch.reference).any()
    for size in 1e-6, 1e-4, 1e-2, 1.0:
        noise = size * torch.randn(100_000, generator=torch.Generator().manual_seed(1))
        assert evaluate.kl_terms(torch.zeros(100_000), noise).min() >= 0, f"at log ratios around {size}"


def test_an_update_reads_every_story_once_a_pass_in_shuffled_minibatches_of_16(tiny, staged, monkeypatch):
    batch, seen = staged(tiny, tiny, MIXED * 4), []
    monkeypatch.setattr(ppo, "policy_step", lambda model, optimizer, batch, rows, *_: seen.append(rows.tolist()) or {"x": 0.0})
    ppo.update(tiny, None, batch, batch.mask, grpo.GRPO(), 0.05, FLOAT32)
    assert [len(rows) for rows in seen] == [16] * 8
    one, other = sum(seen[:4], []), sum(seen[4:], [])
    assert sorted(one) == sorted(other) == list(range(64)) and one != other and list(range(64)) not in (one, other)


@pytest.mark.parametrize("stories", [[[], [5, data.END]], [[], []]])
def test_a_story_without_a_token_makes_no_figure_of_an_update_nan(tiny, staged, stories):
    batch = staged(tiny, tiny, [0.0, 1.0], stories)
    judged = ppo.PPO(tiny)
    judged.advantages(batch)
    for method in judged, grpo.GRPO():
        figures = ppo.update(tiny, Recorder(tiny), batch, batch.mask, method, 0.05, FLOAT32)
        assert figures and all(math.isfinite(value) for value in figures.values())


@pytest.mark.parametrize("method", [ppo.PPO, lambda _: grpo.GRPO()])
def test_in_bfloat16_all_that_is_compared_is_float32_and_ratios_start_near_one(tiny, ratios, monkeypatch, method):
    rough, method = models.Precision(torch.device("cpu"), torch.bfloat16), method(tiny)
    monkeypatch.setattr(ppo, "STORY_TOKENS", 12)
    monkeypatch.setattr(ppo, "words_used", lambda text, _: len(text) % 4 / 3)
    batch = ppo.rollout(tiny, tiny_model(1), data.load_asks()[:16], rough)
    advantages, _ = method.advantages(batch)
    ppo.update(tiny, torch.optim.AdamW(tiny.parameters(), lr=0.0), batch, advantages, method, 0.05, rough)
    assert {each.dtype for each in (batch.log_probs, batch.reference, batch.channels, advantages, *tiny.parameters())} == {torch.float32}
    assert len(ratios) == 2 and all((ratio - 1).abs().mean() < 0.01 for ratio in ratios)


def test_a_reference_that_is_far_away_gives_no_overflow(tiny, staged):
    batch = staged(tiny, tiny, [0.0] * 16)
    batch.reference = batch.reference + 200 * batch.mask  # e^200 is infinite in float32
    optimizer = Recorder(tiny)
    figures = ppo.update(tiny, optimizer, batch, batch.mask * 0.5, grpo.GRPO(), 0.05, FLOAT32)
    assert math.isfinite(figures["update/loss"]) and all(each.isfinite().all() for step in optimizer.gradients for each in step)


def test_a_gradient_that_is_not_finite_is_a_problem_before_any_weight_moves(tiny, staged):
    batch, optimizer = staged(tiny, tiny, [0.0] * 16), Recorder(tiny)
    batch.log_probs = batch.log_probs - 200 * batch.mask  # a ratio of e^200, and no clip where the advantage is negative
    with pytest.raises(data.Problem, match="the gradient is not finite"):
        ppo.update(tiny, optimizer, batch, -batch.mask, grpo.GRPO(), 0.05, FLOAT32)
    assert not optimizer.gradients


def check_gradient(staged, method, tolerance):
    """An update's loss and gradients against the plain implementation's."""
    writer, reference = tiny_model(), tiny_model(1)
    batch = staged(writer, reference, [1 / 3] * 8 + MIXED[:8])  # GRPO's first group is tied
    model, optimizer = nudged(writer), Recorder(writer)
    optimizer.model = model
    method = ppo.PPO(model) if method == "ppo" else grpo.GRPO()
    if isinstance(method, ppo.PPO):
        torch.nn.init.normal_(method.critic.linear.weight, std=0.1)  # so that advantages differ from token to token
    advantages, _ = method.advantages(batch)
    figures = ppo.update(model, optimizer, batch, advantages, method, 0.3, FLOAT32)
    loss, norm, gradients = plain_loss(model, batch, range(16), advantages, 0.3, isinstance(method, grpo.GRPO))
    assert norm > 1  # so the gradient is clipped, once, as a whole
    assert (figures["update/loss"], figures["update/grad_norm"]) == pytest.approx((loss, norm), rel=tolerance, abs=tolerance)
    assert len(optimizer.gradients) == 2
    for step in optimizer.gradients:
        for found, wanted in zip(step, gradients, strict=True):
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_loss_and_gradient_are_those_of_the_plain_implementation(exact, staged, method):
    check_gradient(staged, method, 1e-9)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_in_float32_too_the_gradient_is_the_plain_one(staged, method):
    check_gradient(staged, method, 1e-5)


# ---- PPO's own


def test_ppo_takes_the_mean_over_all_story_tokens_and_none_of_the_padding():
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    assert torch.equal(ppo.PPO(tiny_model()).weights(mask), mask / 4)
    assert torch.equal(ppo.PPO(tiny_model()).weights(mask * 0), mask * 0)  # no token at all: zeros, not NaN


@pytest.mark.parametrize(("rate", "bias_rate", "explains"), [(1e-3, 1e-2, 0.95), (ppo.CRITIC_RATE, ppo.CRITIC_BIAS_RATE, 0.2)])
def test_the_critic_starts_at_zero_learns_and_explains_more_and_more(monkeypatch, rate, bias_rate, explains):
    monkeypatch.setattr(ppo, "CRITIC_RATE", rate)
    monkeypatch.setattr(ppo, "CRITIC_BIAS_RATE", bias_rate)
    torch.manual_seed(0)
    story = torch.randn(64, 1, 16)
    channels = story.expand(64, 5, 16).clone()
    channels[..., 1:] += torch.randn(64, 5, 15)  # only channel 0 tells what a story is worth
    batch = made_up(0.5 + 0.3 * story[:, 0, 0], channels, [1 + number % 5 for number in range(64)])
    method = ppo.PPO(tiny_model())
    explained = []
    for _ in range(4):
        explained.append(method.advantages(batch)[1]["critic/explained_variance"])
        for rows in torch.arange(64).repeat(50).split(16):
            method.learn(batch, rows)
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained == sorted(explained) and explained[-1] > explains
    weight, bias = method.critic.linear.weight[0], method.critic.linear.bias.item()
    assert bias == pytest.approx(0.5, abs=0.1)
    if explains > 0.9:  # it is done
        assert weight[0].item() == pytest.approx(0.3, abs=0.05) and weight[1:].abs().max() < 0.05


def test_the_critics_gradient_does_not_reach_the_policy(tiny, staged):
    batch, method = staged(tiny, tiny, MIXED), ppo.PPO(tiny)
    batch.channels.requires_grad_()
    torch.nn.init.normal_(method.critic.linear.weight)
    before = weights_of(method.critic)
    method.advantages(batch)
    method.learn(batch, torch.arange(16))
    assert batch.channels.grad is None and all(weight.grad is None for weight in tiny.parameters())
    assert not same(before, weights_of(method.critic))


@pytest.mark.parametrize("kind", ["linear", "model"])
def test_the_critics_gradient_is_that_of_the_mean_square_over_the_minibatch(tiny, staged, monkeypatch, kind):
    monkeypatch.setattr(ppo, "clip_gradients", lambda model: None)
    batch = staged(tiny, tiny, MIXED)
    method = ppo.PPO(tiny, critic=ppo.CriticModel(tiny, FLOAT32) if kind == "model" else None)
    torch.nn.init.normal_(method.critic.linear.weight)
    batch.returns, weights = batch.mask * torch.rand(batch.mask.shape), list(method.critic.parameters())
    chosen = batch.mask.bool()
    read = method.critic.body.channels(batch.tokens[:, :-1]) if kind == "model" else batch.channels
    values = read @ method.critic.linear.weight[0] + method.critic.linear.bias
    wanted = torch.autograd.grad(((values - batch.returns)[chosen] ** 2).mean(), weights)
    found = []
    monkeypatch.setattr(method.optimizer, "step", lambda: found.extend(weight.grad.clone() for weight in weights))
    method.learn(batch, torch.arange(16))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_explained_variance_worked_out_by_hand():
    values, returns = torch.tensor([[0.0, 0.5, 0.5, 1.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    mask = torch.ones(1, 4)
    assert ppo.explained_variance(values, returns, mask) == pytest.approx(0.5)  # what is left varies by 1/6, all by 1/3
    assert ppo.explained_variance(returns, returns, mask) == 1
    assert ppo.explained_variance(values * 0 + 7, returns, mask) == pytest.approx(0)


@pytest.mark.parametrize("reward", THIRDS)
def test_where_all_rewards_are_equal_no_variance_is_explained(reward):
    returns, values = torch.full((128, 200), reward), torch.linspace(0, 1, 200).expand(128, 200)
    assert math.isnan(ppo.explained_variance(values, returns, torch.ones(128, 200)))


@pytest.mark.parametrize("lam", [0.95, 1.0])
def test_padding_changes_nothing_for_the_critic(lam):
    torch.manual_seed(0)
    rewards, channels = torch.tensor([0.0, 1.0, 1 / 3]), torch.randn(3, 6, 16)
    clean, dirty = (made_up(rewards, channels.clone(), [2, 6, 1]) for _ in range(2))
    dirty.channels[dirty.mask == 0] = 1e3
    results = []
    for batch in clean, dirty:
        method = ppo.PPO(tiny_model(), lam)
        method.advantages(batch)
        method.learn(batch, torch.arange(3))
        results.append((weights_of(method.critic), *method.advantages(batch)))
    (one, advantages, log), (other, dirty_advantages, dirty_log) = results
    assert same(one, other) and torch.equal(advantages, dirty_advantages) and log == dirty_log
    hand = sum(
        (rewards[row] - clean.channels[row, place] @ one[0][0] - one[1]) ** 2 for row, n in enumerate([2, 6, 1]) for place in range(n)
    )
    assert log["critic/loss"] == pytest.approx(hand.item() / 9, rel=1e-5)


# ---- the run


@pytest.fixture
def logged(monkeypatch):
    """All scalars of a run, under (name, rollouts done)."""
    found = {}
    monkeypatch.setattr(ppo.Run, "log", lambda run, scalars: found.update({(key, run.steps): value for key, value in scalars.items()}))
    return found


def test_entropy_length_endings_and_reward_are_over_the_stories_alone(quick, workshop, logged, monkeypatch):
    stories = [[5] * (1 + number % 5) + [data.END] * (number % 4 == 0) for number in range(16)]
    monkeypatch.setattr(ppo, "generate", lambda *_: stories)
    monkeypatch.setattr(ppo, "words_used", lambda text, words: 1.0 if words == asks[3] else 0.0)
    asks = data.load_asks()[:16]
    monkeypatch.setattr(ppo.PPO, "ask", lambda *_: asks)
    quick(ppo, "--rollouts", 1)
    model, nats = models.load_checkpoint(workshop / "checkpoints/finetuned/model.pt"), 0.0
    for words, story in zip(asks, stories):
        prompt = data.encode(data.instruction(words))
        scores = model(torch.tensor([prompt + story]))[0].log_softmax(-1)
        nats -= sum(scores[place - 1, token].item() for place, token in enumerate(story, len(prompt)))
    tokens = sum(map(len, stories))
    assert logged["rollout/entropy", 1] == pytest.approx(nats / tokens, rel=1e-5)
    assert logged["rollout/length", 1] == tokens / 16
    assert logged["rollout/ended", 1] == 4 / 16 and logged["rollout/reward", 1] == 1 / 16


def test_drift_is_zero_before_the_first_step_and_positive_after_it_even_without_a_kl_term(quick, logged, monkeypatch):
    monkeypatch.setattr(ppo, "words_used", lambda text, _: len(text) % 4 / 3)
    monkeypatch.setattr(ppo, "LEARNING_RATE", 1e-2)
    quick(ppo, "--rollouts", 2, "--kl", 0)
    assert logged["rollout/kl", 1] == 0 and logged["rollout/kl", 2] > 0.01


def test_drift_is_summed_over_a_storys_tokens_and_averaged_over_stories(quick, logged, monkeypatch):
    def shifted(*args, made=ppo.rollout):
        batch = made(*args)
        batch.reference = batch.log_probs + math.log(2) * batch.mask  # each token adds 2 - log 2 - 1
        return batch

    monkeypatch.setattr(ppo, "rollout", shifted)
    monkeypatch.setattr(ppo, "generate", lambda *_: [[5] * (1 + number % 2) for number in range(16)])  # 1.5 tokens on average
    quick(ppo, "--rollouts", 1)
    assert logged["rollout/kl", 1] == pytest.approx(1.5 * (1 - math.log(2)), rel=1e-4)


def test_the_critic_is_judged_by_a_rollout_before_it_learns_from_it(quick, logged, monkeypatch):
    """At zero it explains nothing of the first one's rewards: the variance that is left is all of it."""
    left = iter([0.0, 1.0] * 16)
    monkeypatch.setattr(ppo, "words_used", lambda *_: next(left))
    monkeypatch.setattr(ppo, "generate", lambda *_: [[5, 6, 7]] * 16)
    quick(ppo, "--rollouts", 2)
    assert logged["critic/loss", 1] == 0.5 and logged["critic/explained_variance", 1] == 0
    assert logged["critic/loss", 2] != 0.5


def test_the_speed_counts_writing_and_update(quick, logged, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ppo.time, "perf_counter", lambda: now[0])

    def taking(seconds, made):
        def work(*args):
            now[0] += seconds
            return made(*args)

        return work

    monkeypatch.setattr(ppo, "rollout", taking(2, ppo.rollout))
    monkeypatch.setattr(ppo, "update", taking(3, ppo.update))
    quick(ppo, "--rollouts", 1)
    assert logged["speed/stories_per_second", 1] == 16 / 5


def test_an_evaluation_is_of_the_policy_on_held_out_asks_with_each_figure_under_its_name(quick, logged, monkeypatch):
    seen, trained, made = [], [], ppo.rollout
    told = {"words_used": 0.1, "ended": 0.2, "plain_bits_per_byte": 0.3, "kl": None}
    monkeypatch.setattr(evaluate, "measure", lambda model, precision, asks, each, *rest: seen.append((model, asks, each)) or told)
    monkeypatch.setattr(ppo, "rollout", lambda model, *rest: trained.append(model) or made(model, *rest))
    quick(grpo, "--rollouts", 1)
    assert len(seen) == 2 and all(seen[row] == (trained[0], data.load_instructions()[:2], 2) for row in range(2))
    assert [logged[f"eval/{name}", 0] for name in ("words_used", "ended", "plain_loss")] == [0.1, 0.2, 0.3]


def test_the_demo_story_is_120_tokens_on_the_demo_words_and_leaves_the_random_numbers_of_training_alone(quick, monkeypatch):
    seen = []

    def listening(model, words, longest, **rest):
        before = torch.get_rng_state()
        text = sample.write(model, words, longest, **rest)
        seen.append((words, longest, torch.equal(before, torch.get_rng_state())))
        return text

    monkeypatch.setattr(runs, "write", listening)
    quick(grpo, "--rollouts", 1)
    assert seen == [(("rain", "cake", "jump"), 120, True)] * 2


def test_each_rollout_asks_for_other_things():
    for method in ppo.PPO(tiny_model()), grpo.GRPO():
        random = np.random.default_rng(1)
        assert method.ask(random) != method.ask(random)


def test_the_numbers_are_those_of_the_design():
    assert (ppo.STORIES, grpo.PROMPTS, grpo.GROUP, data.STORY_TOKENS) == (128, 16, 8, 200) and data.DEMO == ("rain", "cake", "jump")
    assert (ppo.CLIP, ppo.EPOCHS, ppo.MINIBATCH, ppo.MEASURE_EVERY, runs.MEASURE_ASKS) == (0.2, 2, 16, 10, 50)


def test_the_optimizers_of_a_run_decay_no_weight_and_have_the_rates_of_the_docs(quick, workshop):
    quick(ppo, "--rollouts", 1)
    state = models.read(workshop / "checkpoints/ppo/kl-0.05/state.pt")
    groups = state["optimizer"]["param_groups"] + state["method"]["optimizer"]["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(5e-5, 0), (1e-4, 0), (0.1, 0)]


def test_the_rate_is_level_for_eight_rollouts_and_then_falls_as_one_over_their_number():
    rates = {1: 5e-5, 8: 5e-5, 10: 4e-5, 16: 2.5e-5, 40: 1e-5}
    assert {number: ppo.learning_rate(number) for number in rates} == pytest.approx(rates)


def test_a_run_follows_the_rate_when_it_goes_on_too_and_the_critic_keeps_its_own(quick, workshop, monkeypatch):
    monkeypatch.setattr(ppo, "LEVEL", 1)
    quick(ppo, "--rollouts", 2)
    quick(ppo, "--rollouts", 4, "--resume")
    state = models.read(workshop / "checkpoints/ppo/kl-0.05/state.pt")
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [5e-5 / 4]
    assert [group["lr"] for group in state["method"]["optimizer"]["param_groups"]] == [1e-4, 0.1]
    log = EventAccumulator(str(workshop / "runs/ppo/kl-0.05")).Reload()
    assert [event.value for event in log.Scalars("update/rate")] == pytest.approx([5e-5, 5e-5 / 2, 5e-5 / 3, 5e-5 / 4])


def test_no_rollout_outlives_the_next_one(quick, monkeypatch):
    born, alive = [], []

    def counting(*args, made=ppo.rollout):
        gc.collect()
        alive.append(sum(each() is not None for each in born))
        batch = made(*args)
        born.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(ppo, "rollout", counting)
    quick(ppo, "--rollouts", 6)
    assert len(alive) == 6 and max(alive) <= 1


def test_memory_stays_flat_over_two_hundred_rollouts(quick, monkeypatch):
    held = []  # how many tensors are still there, and their bytes

    def counting(*args, made=ppo.rollout):
        sizes = []
        if len(held) in (60, 199):
            gc.collect()
            sizes = [each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor]
        held.append((len(sizes), sum(sizes)))
        return made(*args)

    monkeypatch.setattr(ppo, "rollout", counting)
    monkeypatch.setattr(ppo, "STORY_TOKENS", 6)
    monkeypatch.setattr(ppo, "MEASURE_EVERY", 50)
    quick(grpo, "--rollouts", 200)
    assert len(held) == 200
    assert abs(held[199][0] - held[60][0]) < 50  # keeping a loss of every rollout, and its graph, would add 139
    assert abs(held[199][1] - held[60][1]) < 2**18  # keeping every rollout would add some MiB


def test_the_rollouts_page_shows_eight_stories_with_what_they_earned(tiny, staged):
    batch = staged(tiny, tiny, MIXED)
    text = ppo.group_text(data.load_asks(), batch, batch.mask * 0.25)
    assert text.count("advantage +0.25") == 8 and f"{', '.join(data.load_asks()[1])}: reward {MIXED[1]:.2f}" in text
