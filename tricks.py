"""What does each trick that makes it fast give by itself?

    python tricks.py                            a table; --json FILE writes it too

One trick at a time is replaced by the plain way. The tasks are a rollout's writing (128 stories of the fine-tuned model),
its learning (GRPO's update on 32 plain stories) and pretraining (a step), without the trick and with all of them, in turn,
each time in a process of its own. The unit is what plain matrix products, timed before and after, could have computed in
the time of a token: a machine that drifts changes it less than seconds.
"""

import contextlib
import statistics
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import bench
import data
import grpo
import model as models
import ppo
import sample
from bench import Bench, ceiling, clock
from cli import Parser, main_guard, output, positive, progress, say
from data import STORY_TOKENS
from evaluate import load_plain, write_json
from memory import alone

LEARNED = 32  # stories


def multinomial(logits, uniforms, temperature=1.0, top_k=None):
    return torch.multinomial(logits.softmax(-1), 1).squeeze(1)


def all_positions(model, tokens, mask):
    return models.token_log_probs(model, tokens) * mask


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def cross_entropy(model, channels, targets):
    return -F.cross_entropy(model.logits(channels).float(), targets, reduction="none")


TRICKS = {  # name: (task, module, what is replaced there, by what)
    "one uniform number a row": ("writing", sample, "choose", multinomial),
    "ended stories leave the batch": ("writing", sample, "LEAVE", 10**9),
    "padding, and logits of prompts, are left out": ("learning", ppo, "token_log_probs", all_positions),
    "rounded numbers of tokens": ("learning", models, "ROUND", 1),
    "freed memory is kept": ("learning", models, "keep_freed_memory", lambda: None),
    "attention written out": ("learning", models, "attend", fused_attention),
    "log p without cross_entropy": ("learning", models, "log_probs", cross_entropy),
    "compiled blocks": ("pretraining", bench, "compile_blocks", lambda *_, **__: None),
}


def writing(precision):
    """Returns a function that writes stories of at most so many tokens, and returns how many it wrote."""
    model = models.for_writing(models.load_checkpoint(models.FINETUNED, precision.device), precision.dtype)
    prompts = [data.encode(data.instruction(words)) for words in data.load_instructions()[: ppo.STORIES]]

    def work(longest):
        torch.manual_seed(1)
        return sum(map(len, sample.generate(model, prompts, longest)))

    return work


def learning(precision):
    """Returns a function that learns from stories cut to so many tokens, and returns from how many it learned."""
    model = models.load_checkpoint(models.FINETUNED, precision.device)
    optimizer, method = ppo.optimizer_of(model, 0.0), grpo.GRPO()
    prompts, stories = [data.encode(data.instruction(words)) for words in data.load_asks()[:LEARNED]], load_plain()[:LEARNED]
    rewards = torch.from_numpy(np.random.default_rng(1).random(LEARNED, dtype=np.float32)).to(precision.device)

    def work(longest):
        tokens, mask = models.pack(prompts, [story[:longest] for story in stories], precision.device)
        zero = torch.zeros_like(mask)
        batch = ppo.Rollout([], rewards, tokens, mask, zero, zero, zero, 0.0)
        ppo.update(model, optimizer, batch, method.advantages(batch)[0], method, 0.05, precision)
        return ppo.EPOCHS * int(mask.sum())

    return work


def pretraining(precision):
    """Returns a function that takes a step of pretraining, whatever it is told, and returns from how many tokens."""
    step, tokens, _ = Bench(precision.device, precision.dtype).pretraining()

    def work(longest):
        step()
        return tokens

    return work


def trial(task, left_out, device):
    """What a token of a task costs, in MFLOP at the ceiling's rate, without the trick `left_out` or, if None, with all."""
    device, dtype = models.pick_device(device)
    precision = models.Precision(device, dtype)
    with contextlib.nullcontext() if left_out is None else mock.patch.object(*TRICKS[left_out][1:]):
        models.keep_freed_memory()
        work, done = {"writing": writing, "learning": learning, "pretraining": pretraining}[task](precision), []
        work(8)  # warms up
        rate = lambda: ceiling(device, dtype, models.Config())
        before, seconds, after = rate(), clock(lambda: done.append(work(STORY_TOKENS))), rate()
        return seconds / done[0] * (before + after) / 2 / 1e6


def main():
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=3, help="times each is taken (default 3)")
    parser.add_argument("--json", metavar="FILE", type=output, help="write the figures there too")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    args = parser.parse_args()
    trials = [("writing", None), ("learning", None), ("pretraining", None), *((task, name) for name, (task, *_) in TRICKS.items())]
    found = {each: [] for each in trials}
    for repeat in range(args.repeats):
        for number, each in enumerate(trials):
            progress(repeat * len(trials) + number, args.repeats * len(trials), each[1] or each[0])
            found[each].append(alone(trial, *each, args.device))
    width = max(map(len, TRICKS))
    say(f"{'MFLOP a token':{width}} {'task':9} {'without':>9} {'with':>9} {'times as fast':>14}")
    rows = []
    for name, (task, *_) in TRICKS.items():
        ratios = [without / all_on for without, all_on in zip(found[task, name], found[task, None])]
        row = {"name": name, "task": task, "without": statistics.median(found[task, name]), "with": statistics.median(found[task, None])}
        rows.append(row | {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)})
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        say(f"{name:{width}} {task:9} {row['without']:9,.0f} {row['with']:9,.0f} {rows[-1]['ratio']:14.2f} {spread}")
    if args.json:
        command = f"python tricks.py --repeats {args.repeats}" + f" --device {args.device}" * bool(args.device)
        write_json(args.json, {"command": command, "tricks": rows})


if __name__ == "__main__":
    main_guard(main)
