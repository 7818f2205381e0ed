"""PPO: reinforcement learning with a critic. Schulman et al. 2017, https://arxiv.org/abs/1707.06347.

First the rollout: stories, their rewards, and what the update needs to remember of them.
"""

import dataclasses
import math

import torch

import evaluate
from data import STORY_TOKENS, Problem, decode, encode, instruction
from model import for_writing, log_probs, pack, story_channels, token_log_probs
from rewards import words_used
from sample import generate

STORIES = 128  # a rollout
MINIBATCH = 16


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
