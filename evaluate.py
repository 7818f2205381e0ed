"""Measuring: how many bits does the model need for a byte of stories?"""

import math

import torch

from data import END, decode
from model import pack, token_log_probs

SCORED = 16  # stories read at once


@torch.no_grad()
def bits_per_byte(model, stories):
    """Bits that the model needs for a byte of plain stories, each read from its beginning.

    stories: token lists, each with its END. What exceeds the model's context is left out of bits and bytes alike.
    """
    stories = sorted((story[: model.config.context] for story in stories), key=len)
    nats = 0.0
    for start in range(0, len(stories), SCORED):
        group = stories[start : start + SCORED]
        tokens, mask = pack([[END]] * len(group), group, model.cos.device)
        nats -= token_log_probs(model, tokens, mask).sum().item()
    return nats / math.log(2) / sum(len(decode(story).encode()) for story in stories)
