"""PPO: reinforcement learning with a critic. Schulman et al. 2017, https://arxiv.org/abs/1707.06347.

    python ppo.py --minutes 10 --kl 0.05        checkpoints/ppo/kl-0.05/model.pt, runs/ppo/kl-0.05

One story for each of 128 instructions, its reward, and how much better that is than the critic expected just before each
token; then two passes of clipped updates. Simpler than the usual PPO on language models: the critic is one linear layer
on the policy's channels, the reward comes at the story's end with no discount, so a token's advantage is the reward
minus the critic's value (generalised advantage estimation with lambda 1), and the KL is in the loss. More usual forms
of these three are a flag away: --critic model, --lam 0.95, --kl-in reward.
"""

import copy
import dataclasses
import math
import time

import numpy as np
import torch
from torch import nn

import evaluate
from cli import Problem, main_guard, say, share, weight
from data import STORY_TOKENS, decode, encode, instruction, load_asks
from evaluate import kl_terms
from model import FINETUNED, for_writing, log_probs, pack, story_channels, token_log_probs
from rewards import words_used
from run import Run, clip_gradients, compile_blocks, flags
from sample import generate

STORIES = 128  # a rollout
CLIP = 0.2
EPOCHS = 2
MINIBATCH = 16
LEARNING_RATE = 5e-5
LEVEL = 8  # rollouts at the full rate
CRITIC_RATE, CRITIC_BIAS_RATE = 1e-4, 0.1
MEASURE_EVERY = 10  # rollouts


# ---- the rollout: write, score, and what the update needs to remember


@dataclasses.dataclass
class Rollout:
    texts: list  # of the stories
    rewards: torch.Tensor  # (stories,)
    tokens: torch.Tensor  # (stories, longest)
    mask: torch.Tensor  # (stories, longest - 1), as log_probs, reference and returns
    log_probs: torch.Tensor  # of the policy that wrote the stories: the ratio's denominator for the whole update
    reference: torch.Tensor  # log-probabilities of the frozen reference
    channels: torch.Tensor  # (stories, longest - 1, channels): what the critic reads before each token
    ended: float  # share of stories that end with an end of text
    returns: torch.Tensor = None  # what the critic learns towards, once PPO has worked it out


def enough_asks(number):
    """The training asks. Raises `Problem` where there are fewer than a rollout needs."""
    asks = load_asks()
    if len(asks) < number:
        raise Problem(f"a rollout needs {number} different asks, and data/asks-training.txt has {len(asks)}")
    return asks


def different_asks(random, number):
    """So many of the training asks, none twice."""
    asks = enough_asks(number)
    return [asks[each] for each in random.choice(len(asks), number, replace=False)]


def rollout(model, reference, asks, precision):
    """Write a story for each ask at temperature 1, reward it, and score it under the policy and the reference."""
    prompts = [encode(instruction(words)) for words in asks]
    stories = generate(for_writing(model, precision.dtype), prompts, STORY_TOKENS)
    texts = [decode(story) for story in stories]
    rewards = score(texts, asks)
    tokens, mask = pack(prompts, stories, precision.device)
    channels = torch.zeros(*mask.shape, model.config.channels, device=precision.device)
    old, frozen = torch.zeros_like(mask), torch.zeros_like(mask)
    with torch.no_grad(), precision():
        for start in range(0, len(asks), MINIBATCH):
            rows = slice(start, start + MINIBATCH)
            part = mask[rows].bool()
            read = story_channels(model, tokens[rows], part)
            channels[rows][part] = read.float()
            old[rows][part] = log_probs(model, read, tokens[rows, 1:][part])
            frozen[rows] = token_log_probs(reference, tokens[rows], part)
    return Rollout(texts, rewards.to(precision.device), tokens, mask, old, frozen, channels, evaluate.ended_rate(stories))


def score(texts, asks):
    """The stories' rewards, (stories,). Raises `Problem` for one that is not a finite number, before any weight moves."""
    rewards = [float(words_used(text, words)) for text, words in zip(texts, asks, strict=True)]
    for text, words, reward in zip(texts, asks, rewards):
        if not math.isfinite(reward):
            raise Problem(
                f"the reward of a story with {', '.join(words)} is {reward}, not a finite number: see rewards.py; it begins {text[:40]!r}"
            )
    return torch.tensor(rewards)


# ---- the update


def surrogate(ratio, advantages):
    """The clipped objective, per token, all (stories, longest - 1): Schulman et al. 2017, equation 7.

    The smaller of the two, whatever the sign.
    """
    return torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def clipped(ratio, advantages):
    """Where the minimum really took the clipped side, so that the surrogate's gradient at the token is zero."""
    return ((ratio > 1 + CLIP) & (advantages > 0)) | ((ratio < 1 - CLIP) & (advantages < 0))


def update(model, optimizer, batch, advantages, method, kl, precision):
    """Two passes over a rollout in shuffled minibatches. advantages: (stories, longest - 1). Returns means to log.

    method: a `PPO` or a `grpo.GRPO`. Here they differ in what a token counts, and in whether a critic learns too.
    """
    logged = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch.tokens)).split(MINIBATCH):
            method.learn(batch, rows)
            weights = method.weights(batch.mask[rows])  # (minibatch, longest - 1): what each token counts in the loss
            if kl == 0:  # stories without advantage then add nothing, and AdamW moves weights even on a zero gradient
                moving = (advantages[rows] != 0).any(1).cpu()
                rows, weights = rows[moving], weights[moving]
            if len(rows):
                logged.append(policy_step(model, optimizer, batch, rows, advantages, weights, kl, precision))
    return {key: float(np.mean([each[key] for each in logged])) for key in logged[0]} if logged else {}


def policy_step(model, optimizer, batch, rows, advantages, weights, kl, precision):
    """One optimizer step on a minibatch. Returns what to log."""
    mask, advantages = batch.mask[rows], advantages[rows]
    with precision():
        new = token_log_probs(model, batch.tokens[rows], mask)  # (minibatch, longest - 1)
    ratio = (new - batch.log_probs[rows]).exp()
    terms = kl * kl_terms(new, batch.reference[rows]) - surrogate(ratio, advantages)
    loss = (weights * terms).sum()
    loss.backward()
    norm = clip_gradients(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    shares = mask / mask.sum().clamp(min=1)
    return {
        "update/loss": loss.item(),
        "update/clip_fraction": (clipped(ratio, advantages) * shares).sum().item(),
        "update/ratio": (ratio.detach() * shares).sum().item(),
        "update/grad_norm": norm,
    }


def learning_rate(rollout):
    """The policy's rate in a rollout, counted from 1: level at first, then falling as one over the rollout's number.

    Most of a step is noise. Steps that shrink so average it out, and yet their sum has no bound: Robbins and Monro 1951.
    """
    return LEARNING_RATE * min(1.0, LEVEL / rollout)


def optimizer_of(model, rate):
    """AdamW without weight decay, whose step is one kernel."""
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)


# ---- what is PPO's own


class Critic(nn.Module):
    """What a story is expected to be worth, seen just before each of its tokens: one linear layer, zero at first."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, channels):
        """(..., channels) -> (...,). The channels get no gradient."""
        return self.linear(channels.detach()).squeeze(-1)

    def values(self, batch, rows):
        """The values before the tokens of some of a rollout's stories: (rows, longest - 1)."""
        return self(batch.channels[rows])


class CriticModel(Critic):
    """The linear layer on a story model of its own, a copy of the policy's start that learns with it."""

    def __init__(self, model, precision):
        super().__init__(model.config.channels)
        self.body, self.precision = copy.deepcopy(model), precision

    def values(self, batch, rows):
        chosen = batch.mask[rows].bool()
        with self.precision():
            read = story_channels(self.body, batch.tokens[rows], chosen)
        return torch.zeros_like(batch.mask[rows]).masked_scatter(chosen, self.linear(read.float()).squeeze(-1))


def token_rewards(batch, kl):
    """The story's reward at its last token, less `kl` times log p - log p_ref at each: (stories, longest - 1).

    The KL in the reward: Ouyang et al. 2022, equation 2, token by token.
    """
    rewards = kl * (batch.reference - batch.log_probs) * batch.mask
    last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)).argmax(1)
    rewards[torch.arange(len(last)), last] += batch.rewards
    return rewards


def lambda_returns(rewards, values, mask, lam):
    """The returns G of generalised advantage estimation, with discount 1: Schulman et al. 2015, equation 16.

    rewards, values, mask, and what is returned: (stories, longest - 1). G_t = r_t + (1 - lambda) V_(t+1) + lambda G_(t+1),
    with V and G zero after a story's last token; the advantage is G_t - V_t. With lambda 1, G_t is exactly the sum of the
    rewards from t on.
    """
    returns, values = torch.zeros_like(rewards), values * mask
    following = value = torch.zeros_like(rewards[:, 0])  # G and V of the token after
    for place in reversed(range(rewards.shape[1])):
        following = (rewards[:, place] + (1 - lam) * value + lam * following) * mask[:, place]
        returns[:, place], value = following, values[:, place]
    return returns


def explained_variance(values, returns, mask):
    """1 - Var[return - value] / Var[return] over story tokens: 1 is a perfect critic, 0 one that knows only the mean."""
    chosen = mask.bool()
    left, all_of_it = (returns - values)[chosen], returns[chosen]
    tied = (all_of_it == all_of_it[:1]).all()  # by comparing: the variance of many a third is not quite zero
    return math.nan if tied else (1 - left.var() / all_of_it.var()).item()


class PPO:
    """What PPO does its own way. `grpo.GRPO` has the same methods.

    kl: the weight of the KL in the reward; 0 where the KL is in the loss.
    """

    def __init__(self, model, lam=1.0, kl=0.0, critic=None):
        self.lam, self.kl = lam, kl
        self.critic = (critic or Critic(model.config.channels)).to(model.cos.device)
        # The bias learns the mean reward at once: at the weights' rate, all of them would first bend to make up for it.
        rates = {"linear.weight": CRITIC_RATE, "linear.bias": CRITIC_BIAS_RATE}
        groups = [{"params": [each], "lr": rates.get(name, LEARNING_RATE)} for name, each in self.critic.named_parameters()]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    def ask(self, random):
        """128 different instructions, a story each."""
        return different_asks(random, STORIES)

    def advantages(self, batch):
        """How much better each token's return is than its value: (stories, longest - 1), and what to log."""
        with torch.no_grad():
            values = torch.cat([self.critic.values(batch, rows) for rows in torch.arange(len(batch.tokens)).split(MINIBATCH)])
        rewards = token_rewards(batch, self.kl)
        batch.returns = lambda_returns(rewards, values, batch.mask, self.lam)
        came = lambda_returns(rewards, values, batch.mask, 1.0)  # the critic is judged by what really came, whatever lambda
        log = {"critic/loss": ((came - values)[batch.mask.bool()] ** 2).mean().item()}
        log["critic/explained_variance"] = explained_variance(values, came, batch.mask)
        return (batch.returns - values) * batch.mask, log

    def weights(self, mask):
        """A mean over all story tokens of the minibatch."""
        return mask / mask.sum().clamp(min=1)

    def learn(self, batch, rows):
        """One step of the critic towards the returns."""
        (self.weights(batch.mask[rows]) * (self.critic.values(batch, rows) - batch.returns[rows]) ** 2).sum().backward()
        clip_gradients(self.critic)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self):
        return {"critic": self.critic.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])


# ---- the run, the same for both methods


def train(run, method, kl):
    """Rollouts until the time is over; every ten, an evaluation, the demo story and a checkpoint."""
    model, reference = run.base, copy.deepcopy(run.base)
    optimizer = optimizer_of(model, LEARNING_RATE)
    parts = {"model": model, "optimizer": optimizer, "method": method}
    if run.args.resume:
        run.load_state(**parts)
    if run.compiles:
        compile_blocks(model, reference, dynamic=True)  # both, so that the KL begins at zero
    for number in run.loop(model, parts, "rollout", MEASURE_EVERY):
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = rate = learning_rate(number)
        asks = method.ask(run.random)
        batch = rollout(model, reference, asks, run.precision)
        advantages, own = method.advantages(batch)
        figures = update(model, optimizer, batch, advantages, method, kl, run.precision)
        tokens = batch.mask.sum().item()
        kl_now = (kl_terms(batch.log_probs, batch.reference) * batch.mask).sum(1).mean().item()
        speed = len(asks) / (time.perf_counter() - start)
        reward, length = batch.rewards.mean().item(), tokens / len(asks)
        run.log({**figures, **own, "rollout/reward": reward, "rollout/kl": kl_now, "rollout/ended": batch.ended, "update/rate": rate})
        entropy = -batch.log_probs.sum().item() / max(1, tokens)  # the mean of -log p over tokens drawn from p estimates it
        run.log({"rollout/length": length, "rollout/entropy": entropy, "speed/stories_per_second": speed})
        run.log({"rollout/group": group_text(asks, batch, advantages)})
        tied = f"  tied {own['rollout/tied_groups']}" if "rollout/tied_groups" in own else ""
        say(
            f"rollout {number}  {run.minutes:.1f} min  reward {reward:.3f}  KL {kl_now:.2f}{tied}  "
            f"ended {batch.ended:.0%}  {speed:.1f} stories/s"
        )


def group_text(asks, batch, advantages):
    """The first eight stories of a rollout, a group in GRPO, with reward and mean advantage."""
    means = advantages.sum(1) / batch.mask.sum(1).clamp(min=1)
    rows = zip(asks[:8], batch.texts, batch.rewards.tolist(), means.tolist())
    return "\n\n".join(f"{', '.join(words)}: reward {reward:.2f}, advantage {mean:+.2f}\n{text}" for words, text, reward, mean in rows)


def arguments(description):
    parser = flags(description, FINETUNED)
    parser.add_argument("--kl", type=weight, default=0.05, help="weight of the KL from the reference (default 0.05)")
    return parser


def main():
    parser = arguments(__doc__)
    parser.add_argument("--lam", type=share, default=1.0, help="lambda of the advantage estimate; 1 is return minus value (default 1)")
    parser.add_argument("--kl-in", choices=["loss", "reward"], default="loss", help="where the KL counts (default loss)")
    parser.add_argument("--critic", choices=["linear", "model"], default="linear", help="a layer on the policy or a model (default linear)")
    args = parser.parse_args()
    reward_kl, loss_kl = (args.kl, 0.0) if args.kl_in == "reward" else (0.0, args.kl)
    if args.kl_in == "reward" and not reward_kl:
        raise Problem("--kl-in reward needs a --kl above 0")
    enough_asks(STORIES)  # before anything is thrown away
    label = f"kl-{args.kl:g}" + f"-lam-{args.lam:g}" * (args.lam != 1) + "-kl-in-reward" * (reward_kl > 0)
    run = Run(args, f"ppo/{label}" + "-critic-model" * (args.critic == "model"))
    critic = CriticModel(run.base, run.precision) if args.critic == "model" else None
    train(run, PPO(run.base, args.lam, reward_kl, critic), loss_kl)


if __name__ == "__main__":
    main_guard(main)
