"""DPO: learning from pairs of stories, without writing any. Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

    python preferences.py                       the pairs, once
    python dpo.py --minutes 10 --beta 0.1       checkpoints/dpo/beta-0.1/model.pt, runs/dpo/beta-0.1

The policy is its own reward model: a story's implied reward is beta times log(p / p_ref), how much likelier it is than
under the frozen reference. Each step pushes that of the chosen stories above that of the rejected ones.
"""

import copy
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from cli import Problem, kind, main_guard, progress, say
from data import encode, instruction
from model import FINETUNED, pack, token_log_probs
from ppo import MEASURE_EVERY, optimizer_of
from preferences import PAIRS, load_pairs
from run import Run, clip_gradients, compile_blocks, file_hash, flags

MINIBATCH = 16  # pairs a step
PIECE = 4  # pairs whose gradients are computed at once
LEARNING_RATE = 2e-5
MEASURE_STEPS = 10 * MEASURE_EVERY
beta = kind(float, lambda value: 0 < value < math.inf, "a finite number above 0")


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    """Rafailov et al. 2023, equation 7, per pair. Log-probabilities of whole stories, (pairs,) each.

    Returns the loss and the margin, the implied reward of the chosen story less that of the rejected one, (pairs,) both.
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def story_log_probs(model, pairs, device):
    """log p of the chosen and of the rejected stories, given their instructions: (2, pairs)."""
    prompts = [encode(instruction(pair["ask"])) for pair in pairs]
    tokens, mask = pack(prompts * 2, [pair[side]["tokens"] for side in ("chosen", "rejected") for pair in pairs], device)
    return token_log_probs(model, tokens, mask).sum(1).view(2, -1)


def reference_log_probs(reference, pairs, precision):
    """`story_log_probs` of all pairs under the frozen model, once and for all: (2, pairs)."""
    found = []
    with torch.no_grad(), precision():
        for start in range(0, len(pairs), PIECE):
            found.append(story_log_probs(reference, pairs[start : start + PIECE], precision.device))
            progress(start + PIECE, len(pairs), "pairs read by the reference")
    return torch.cat(found, 1)


def step(model, frozen, optimizer, pairs, beta, precision):
    """One optimizer step on a minibatch, its gradient summed over pieces. Returns means over the pairs to log.

    frozen: the pairs' `reference_log_probs`, (2, pairs).
    """
    names = ["update/loss", "dpo/accuracy", "dpo/margin", "dpo/chosen_log_prob", "dpo/rejected_log_prob"]
    sums = torch.zeros(len(names))
    for start in range(0, len(pairs), PIECE):
        part = pairs[start : start + PIECE]
        with precision():
            chosen, rejected = story_log_probs(model, part, precision.device)
        losses, margin = dpo_loss(chosen, rejected, *frozen[:, start : start + PIECE], beta)
        (losses.sum() / len(pairs)).backward()
        with torch.no_grad():
            sums += torch.stack([each.sum() for each in (losses, (margin > 0).float(), margin, chosen, rejected)]).cpu()
    norm = clip_gradients(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**dict(zip(names, (sums / len(pairs)).tolist())), "update/grad_norm": norm}


def main():
    parser = flags(__doc__, FINETUNED, unit="steps")
    parser.add_argument("--beta", type=beta, default=0.1, help="how strongly the reference holds (default 0.1)")
    parser.add_argument("--pairs", type=Path, default=PAIRS, metavar="FILE", help="(default data/preferences.jsonl)")
    args = parser.parse_args()
    pairs, writer = load_pairs(args.pairs)
    if not args.resume and writer != file_hash(args.start):
        raise Problem(f"another model than {args.start} wrote {args.pairs}: make pairs with python preferences.py --from {args.start}")
    run = Run(args, f"dpo/beta-{args.beta:g}")
    model, reference = run.base, copy.deepcopy(run.base)
    optimizer = optimizer_of(model, LEARNING_RATE)
    parts = {"model": model, "optimizer": optimizer}
    known = file_hash(args.pairs)
    if args.resume and run.load_state(**parts).get("pairs") != known:
        raise Problem(f"{args.pairs} is not the file of pairs that this run started with")
    parts["pairs"] = known
    say(f"{len(pairs)} pairs from {args.pairs}")
    if run.compiles:
        compile_blocks(model, reference, dynamic=True)
    frozen = reference_log_probs(reference, pairs, run.precision)
    for number in run.loop(model, parts, "step", MEASURE_STEPS, reference):
        start = time.perf_counter()
        rows = run.random.choice(len(pairs), min(MINIBATCH, len(pairs)), replace=False)
        figures = step(model, frozen[:, rows], optimizer, [pairs[row] for row in rows], args.beta, run.precision)
        run.log({**figures, "speed/pairs_per_second": len(rows) / (time.perf_counter() - start)})
        if number % 10 == 0:
            say(
                f"step {number}  {run.minutes:.1f} min  loss {figures['update/loss']:.3f}  "
                f"accuracy {figures['dpo/accuracy']:.0%}  margin {figures['dpo/margin']:.2f}"
            )


if __name__ == "__main__":
    main_guard(main)
