"""The usual forms of PPO: --lam, --kl-in reward, --critic model."""

import pytest
import torch
from by_hand import FLOAT32
from conftest import tiny_model

import data
import model as models
import ppo

MIXED = [number * 7 % 4 / 3 for number in range(16)]


def values_of(method, batch):
    with torch.no_grad():
        return method.critic.values(batch, torch.arange(len(batch.tokens)))


def brute_force(rewards, values, lam):
    """Schulman et al. 2015, equations 11 and 16 as they stand, with discount 1, for one story. Lists, a number a token."""
    after = [*values, 0.0]  # nothing is expected after the last token
    surprises = [reward + after[place + 1] - after[place] for place, reward in enumerate(rewards)]
    return [sum(lam**ahead * surprise for ahead, surprise in enumerate(surprises[place:])) for place in range(len(rewards))]


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_advantages_equal_a_brute_force_sum_over_the_definition(tiny, staged, lam, kl):
    batch, method = staged(tiny, tiny_model(1), MIXED), ppo.PPO(tiny, lam, kl)
    torch.nn.init.normal_(method.critic.linear.weight)
    torch.nn.init.constant_(method.critic.linear.bias, 0.6)  # the value of the padding too, which must count for nothing
    found, values = method.advantages(batch)[0], values_of(method, batch)
    for row in range(16):
        places = batch.mask[row].nonzero().flatten().tolist()
        rewards = [-kl * (batch.log_probs[row, place] - batch.reference[row, place]).item() for place in places]
        rewards[-1] += batch.rewards[row].item()
        wanted = brute_force(rewards, values[row, places].tolist(), lam)
        assert found[row, places].tolist() == pytest.approx(wanted, abs=1e-4)
    assert not found[batch.mask == 0].any() and not batch.returns[batch.mask == 0].any()


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_the_critic_is_judged_by_what_came_whatever_lambda(tiny, staged, lam):
    batch, method = staged(tiny, tiny, MIXED), ppo.PPO(tiny, lam)
    torch.nn.init.normal_(method.critic.linear.weight, std=0.1)
    log, chosen = method.advantages(batch)[1], batch.mask.bool()
    came, value = batch.rewards[:, None].expand(batch.mask.shape)[chosen].numpy(), values_of(method, batch)[chosen].numpy()
    assert log["critic/loss"] == pytest.approx(((came - value) ** 2).mean(), rel=1e-4)
    assert log["critic/explained_variance"] == pytest.approx(1 - (came - value).var() / came.var(), rel=1e-4)


def test_lambda_one_is_exactly_reward_minus_value(tiny, staged):
    batch, method = staged(tiny, tiny, MIXED), ppo.PPO(tiny)
    torch.nn.init.normal_(method.critic.linear.weight)
    assert torch.equal(method.advantages(batch)[0], (batch.rewards[:, None] - values_of(method, batch)) * batch.mask)


def test_the_kl_in_the_reward_sums_to_the_log_ratio_of_the_story(tiny, staged):
    batch = staged(tiny, tiny_model(1), MIXED)
    sums = (batch.log_probs - batch.reference).sum(1)
    torch.testing.assert_close(ppo.token_rewards(batch, 0.3).sum(1), batch.rewards - 0.3 * sums)


def test_the_reward_is_at_the_last_real_token_and_the_kl_of_the_padding_nowhere(tiny, staged):
    batch = staged(tiny, tiny, [1.0, 1.0], [[5, 6, data.END], [7]])
    batch.reference = batch.log_probs + 9 * (1 - batch.mask)
    before = [len(data.encode(data.instruction(words))) - 1 for words in data.load_asks()[:2]]
    wanted = torch.zeros_like(batch.mask)
    wanted[0, before[0] + 2] = wanted[1, before[1]] = 1.0
    assert torch.equal(ppo.token_rewards(batch, 0.3), wanted)


def test_with_the_kl_in_the_reward_it_is_not_in_the_loss(quick, monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "train", lambda run, method, kl: seen.append((run.label, method.kl, method.lam, kl)))
    quick(ppo, "--rollouts", 1, "--kl", 0.1)
    quick(ppo, "--rollouts", 1, "--kl", 0.1, "--kl-in", "reward", "--lam", 0.95)
    assert seen == [("ppo/kl-0.1", 0, 1.0, 0.1), ("ppo/kl-0.1-lam-0.95-kl-in-reward", 0.1, 0.95, 0)]


@pytest.mark.parametrize("lam", [-0.1, 1.5, "nan", "much"])
def test_a_lambda_that_is_no_number_from_0_to_1_is_refused(quick, capsys, lam):
    with pytest.raises(SystemExit):
        quick(ppo, "--lam", lam)
    assert "is not a number from 0 to 1" in capsys.readouterr().err


def test_a_kl_of_zero_in_the_reward_is_refused(quick):
    with pytest.raises(data.Problem, match="needs a --kl above 0"):
        quick(ppo, "--kl", 0, "--kl-in", "reward")


def test_a_run_is_not_resumed_with_other_flags_under_its_name(quick):
    quick(ppo, "--rollouts", 1, "--lam", 0.9)
    with pytest.raises(data.Problem, match="of a run ppo/kl-0.05-lam-0.9, not ppo/kl-0.05"):
        quick(ppo, "--rollouts", 2, "--name", "lam-0.9", "--resume")


# ---- a model as critic


@pytest.fixture
def deep(tiny):
    """PPO with a model of its own as critic, that has an opinion from the start."""
    method = ppo.PPO(tiny, critic=ppo.CriticModel(tiny, FLOAT32))
    torch.nn.init.normal_(method.critic.linear.weight, std=0.3)
    return method


def test_a_model_critic_starts_at_zero_as_the_linear_one_does(tiny, staged):
    method = ppo.PPO(tiny, critic=ppo.CriticModel(tiny, FLOAT32))
    assert not values_of(method, staged(tiny, tiny, MIXED)).any()


def test_before_it_has_learned_a_model_critic_reads_what_the_linear_one_reads(tiny, staged, deep):
    batch, linear = staged(tiny, tiny, MIXED), ppo.PPO(tiny)
    linear.critic.linear.load_state_dict(deep.critic.linear.state_dict())
    torch.testing.assert_close(values_of(deep, batch) * batch.mask, values_of(linear, batch) * batch.mask)


@pytest.mark.parametrize("kind", ["linear", "model"])
def test_the_value_used_for_a_token_has_not_seen_that_token(tiny, staged, deep, kind):
    method = deep if kind == "model" else ppo.PPO(tiny)
    torch.nn.init.normal_(method.critic.linear.weight, std=0.3)
    one, other = (values_of(method, staged(tiny, tiny, [0.0], [[5, 6, token, 8]]))[0] for token in (7, 70))
    before = len(data.encode(data.instruction(data.load_asks()[0]))) - 1
    torch.testing.assert_close(one[before : before + 3], other[before : before + 3], atol=1e-6, rtol=0)
    assert abs(one[before + 3] - other[before + 3]) > 1e-3  # the fourth comes after the third was read


def test_a_model_critic_learns_in_all_its_weights_and_leaves_the_policy_alone(tiny, staged, deep):
    batch, policy = staged(tiny, tiny, MIXED), [weight.clone() for weight in tiny.parameters()]
    before = [weight.clone() for weight in deep.critic.parameters()]
    deep.advantages(batch)
    deep.learn(batch, torch.arange(16))
    moved = [not torch.equal(one, other) for one, other in zip(before, deep.critic.parameters(), strict=True)]
    assert all(moved)
    assert all(torch.equal(one, other) for one, other in zip(policy, tiny.parameters()))
    assert all(weight.grad is None for weight in tiny.parameters())


def test_a_model_critic_explains_more_and_more_of_rewards_that_the_first_token_tells(tiny, staged, monkeypatch):
    monkeypatch.setattr(ppo, "CRITIC_RATE", 1e-2)
    stories = [[5 + number % 2, 9, 9] for number in range(32)]  # a story that begins with token 6 is worth 1
    batch = staged(tiny, tiny, [float(number % 2) for number in range(32)], stories)
    method, explained = ppo.PPO(tiny, critic=ppo.CriticModel(tiny, FLOAT32)), []
    for _ in range(3):
        explained.append(method.advantages(batch)[1]["critic/explained_variance"])
        for rows in torch.arange(32).repeat(20).split(16):
            method.learn(batch, rows)
    # of three tokens the first is written before anything is known, so two thirds are what can be explained
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained == sorted(explained) and explained[-1] > 0.5


def test_a_run_with_every_flag_resumes_to_the_same_numbers(quick, workshop, monkeypatch):
    monkeypatch.setattr(ppo, "words_used", lambda text, _: len(text) % 4 / 3)
    flags = "--kl-in", "reward", "--lam", 0.9, "--critic", "model"
    quick(ppo, "--rollouts", 2, *flags, "--name", "once")
    quick(ppo, "--rollouts", 1, *flags)
    quick(ppo, "--rollouts", 2, *flags, "--resume")
    folder = workshop / "checkpoints" / "ppo"
    once, twice = (models.read(folder / f"kl-0.05-lam-0.9-kl-in-reward-critic-model{name}" / "state.pt") for name in ("-once", ""))
    for key in once["method"]["critic"]:
        torch.testing.assert_close(once["method"]["critic"][key], twice["method"]["critic"][key], atol=1e-6, rtol=1e-5)
    for key in once["model"]:
        torch.testing.assert_close(once["model"][key], twice["model"][key], atol=1e-6, rtol=1e-5)
