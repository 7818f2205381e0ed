"""The usual forms of PPO: --lam, --kl-in reward."""

import pytest
import torch
from conftest import tiny_model

import data
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
    found, values = method.advantages(batch)[0], values_of(method, batch)
    for row in range(16):
        places = batch.mask[row].nonzero().flatten().tolist()
        rewards = [-kl * (batch.log_probs[row, place] - batch.reference[row, place]).item() for place in places]
        rewards[-1] += batch.rewards[row].item()
        wanted = brute_force(rewards, values[row, places].tolist(), lam)
        assert found[row, places].tolist() == pytest.approx(wanted, abs=1e-4)
    assert not found[batch.mask == 0].any()


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
