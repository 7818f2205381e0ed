"""DPO: learning from pairs of stories, without writing any. Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

The loss, and a step on it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from data import encode, instruction
from model import pack, token_log_probs

MINIBATCH = 16  # pairs a step
PIECE = 4  # pairs whose gradients are computed at once
LEARNING_RATE = 2e-5


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    """Rafailov et al. 2023, equation 7, per pair. Log-probabilities of whole stories, (pairs,) each.

    Returns the loss and the margin, the implied reward of the chosen story less that of the rejected one, (pairs,) both.
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def story_log_probs(model, pairs, side, device):
    """log p of one side's stories given their instructions: (pairs,)."""
    prompts = [encode(instruction(pair["ask"])) for pair in pairs]
    tokens, mask = pack(prompts, [pair[side]["tokens"] for pair in pairs], device)
    return token_log_probs(model, tokens, mask).sum(1)


def step(model, reference, optimizer, pairs, beta, precision):
    """One optimizer step on a minibatch, its gradient summed over pieces. Returns means over the pairs to log."""
    names = ["update/loss", "dpo/accuracy", "dpo/margin", "dpo/chosen_log_prob", "dpo/rejected_log_prob"]
    sums = torch.zeros(len(names))
    for start in range(0, len(pairs), PIECE):
        part = pairs[start : start + PIECE]
        with precision():
            chosen, rejected = (story_log_probs(model, part, side, precision.device) for side in ("chosen", "rejected"))
            with torch.no_grad():
                frozen = [story_log_probs(reference, part, side, precision.device) for side in ("chosen", "rejected")]
        losses, margin = dpo_loss(chosen, rejected, *frozen, beta)
        (losses.sum() / len(pairs)).backward()
        with torch.no_grad():
            sums += torch.stack([each.sum() for each in (losses, (margin > 0).float(), margin, chosen, rejected)]).cpu()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**dict(zip(names, (sums / len(pairs)).tolist())), "update/grad_norm": norm}
