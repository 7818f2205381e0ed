"""PPO: reinforcement learning with a critic. Schulman et al. 2017, https://arxiv.org/abs/1707.06347.

The rollout, and two passes of clipped updates over it.
"""

import dataclasses
import math

import numpy as np
import torch
from torch import nn

import evaluate
from data import STORY_TOKENS, Problem, decode, encode, instruction
from evaluate import kl_terms
from model import for_writing, log_probs, pack, story_channels, token_log_probs
from rewards import words_used
from sample import generate

STORIES = 128  # a rollout
CLIP = 0.2
EPOCHS = 2
MINIBATCH = 16
PIECE = 8  # stories whose gradients are computed at once: less memory, the same sum
LEARNING_RATE = 5e-5


# ---- the rollout: write, score, and what the update needs to remember


@dataclasses.dataclass
class Rollout:
    texts: list  # of the stories
    rewards: torch.Tensor  # (stories,)
    tokens: torch.Tensor  # (stories, longest)
    mask: torch.Tensor  # (stories, longest - 1), as all below
    log_probs: torch.Tensor  # of the policy that wrote the stories: the ratio's denominator for the whole update
    reference: torch.Tensor  # log-probabilities of the frozen reference
    channels: torch.Tensor  # (stories, longest - 1, channels): what the critic reads before each token
    ended: float  # share of stories that end with an end of text


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
        for rows in torch.arange(len(asks), device=precision.device).split(MINIBATCH):
            part = mask[rows].bool()
            read = story_channels(model, tokens[rows], part)
            channels[rows] = channels[rows].masked_scatter(part[..., None], read.float())
            old[rows] = old[rows].masked_scatter(part, log_probs(model, read, tokens[rows, 1:][part]))
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
    """The clipped objective, per token: Schulman et al. 2017, equation 7. The smaller of the two, whatever the sign."""
    return torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def clipped(ratio, advantages):
    """Where the minimum really took the clipped side, so that the token's gradient is zero."""
    return ((ratio > 1 + CLIP) & (advantages > 0)) | ((ratio < 1 - CLIP) & (advantages < 0))


def update(model, optimizer, batch, advantages, method, kl, precision):
    """Two passes over a rollout in shuffled minibatches. advantages: (stories, longest - 1). Returns means to log."""
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
    """One optimizer step on a minibatch, its gradient summed over pieces. Returns what to log, means over its tokens."""
    tokens = batch.mask[rows].sum()
    sums = {"update/loss": 0.0, "update/clip_fraction": 0.0, "update/ratio": 0.0}
    for part, counts in zip(rows.split(PIECE), weights.split(PIECE)):
        mask, advantage = batch.mask[part], advantages[part]
        with precision():
            new = token_log_probs(model, batch.tokens[part], mask)  # (piece, longest - 1)
        ratio = (new - batch.log_probs[part]).exp()
        terms = kl * kl_terms(new, batch.reference[part]) - surrogate(ratio, advantage)
        loss = (counts * terms).sum()
        loss.backward()
        sums["update/loss"] += loss.item()
        sums["update/clip_fraction"] += (clipped(ratio, advantage) * mask / tokens).sum().item()
        sums["update/ratio"] += (ratio.detach() * mask / tokens).sum().item()
    sums["update/grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums
