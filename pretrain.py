"""Next-token training on plain stories, from random weights.

    python pretrain.py --minutes 68 --overwrite     checkpoints/pretrained/model.pt, as it ships
    python pretrain.py --minutes 128 --resume       an hour more

The network grows while it trains: 2 layers for the first 15% of the time, 4 up to half, 8 to the end. A new layer is a
copy of the one before it whose two output matrices are zero, so the step to the deeper network changes nothing that it
says. Shallow layers cost little, and most of what is learned early (words, which word follows which) needs no depth.
"""

import dataclasses
import math
import time

import numpy as np
import torch

import evaluate
from cli import Problem, main_guard, progress, say
from data import END, bounds, load_tokens, split_stories
from model import Config, StoryModel, token_log_probs
from run import Run, clip_gradients, compile_blocks, flags

GROWTH = {0.0: 2, 0.15: 4, 0.5: 8}  # share of the time: layers
CONTEXT = 512
ROWS = 12  # of CONTEXT tokens, a step
MICRO = 6  # rows at a time, as many as the processor's cache likes
MEASURED = 500  # held-out stories at the end, a fifth of them along the way
WARMUP, DECAY_FROM = 0.01, 0.4  # shares of the time
MUON, ADAM = 0.02, 0.003  # learning rates


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    `torch.optim.Muon` does the same sums, but always in bfloat16, which a CPU without it multiplies eight times slower
    than float32.
    """

    def __init__(self, weights, lr, momentum=0.95, weight_decay=0.1, dtype=torch.float32):
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                momentum = state["momentum"] if state else state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                step = orthogonalise(weight.grad.lerp(momentum, group["momentum"]).to(self.dtype))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(step, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalise(matrix):
    """Push all singular values of a matrix, of any shape, towards 1: five Newton-Schulz steps with Jordan's coefficients."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


def optimizers(model, muon, adam, dtype):
    """Muon for the blocks' matrices, AdamW for the embedding and the norms. Each group keeps its rate as "peak"."""
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    others = [model.embedding.weight, *(weight for weight in model.parameters() if weight.dim() == 1)]
    return [
        Muon([{"params": matrices, "peak": muon}], lr=muon, dtype=dtype),
        torch.optim.AdamW([{"params": others, "peak": adam}], lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def set_rate(optimizers, share):
    """Warm-up, then constant, then a straight line down to zero at the end of the time."""
    scale = min(1.0, (share + 1e-3) / WARMUP, (1 - share) / (1 - DECAY_FROM))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
    return scale


def grow(model, layers):
    """The same function with more layers, each new one a copy of its predecessor that adds nothing yet."""
    old = model.state_dict()
    times = layers // model.config.layers
    deeper = StoryModel(dataclasses.replace(model.config, layers=layers))
    new = deeper.state_dict()
    for key in new:
        if not key.startswith("blocks."):
            new[key] = old[key]
            continue
        _, block, rest = key.split(".", 2)
        new[key] = old[f"blocks.{int(block) // times}.{rest}"].clone()
        if int(block) % times and rest.endswith(("o.weight", "down.weight")):
            new[key].zero_()
    deeper.load_state_dict(new)
    return deeper


class Shuffle:
    """An endless stream of the numbers below `count`, in a new order each time round."""

    def __init__(self, count, random):
        self.count, self.random = count, random
        self.left = np.empty(0, dtype=np.int64)

    def __next__(self):
        if not len(self.left):
            self.left = self.random.permutation(self.count)
        number, self.left = self.left[-1], self.left[:-1]
        return number

    def state_dict(self):
        return {"count": self.count, "left": torch.from_numpy(self.left)}

    def load_state_dict(self, state):
        if state["count"] != self.count:
            raise Problem("data/train.bin no longer holds the stories that this run began with: --overwrite starts afresh")
        self.left = state["left"].numpy()


class Rows:
    """An endless stream of rows, (rows, CONTEXT + 1) tokens: shuffled stories, each row beginning with a story.

    A story that a row's end cuts off begins the next row once more, whole, if it fits one.
    """

    def __init__(self, tokens, random):
        self.tokens, self.bounds = tokens, bounds(tokens)
        self.order, self.left = Shuffle(len(self.bounds), random), None

    def row(self):
        """The next CONTEXT + 1 tokens."""
        parts, size = [np.array([END], dtype=np.uint16)], 1
        if self.left is not None:
            parts.append(self.left)
            size += len(self.left)
        while size <= CONTEXT:
            start, end = self.bounds[next(self.order)]
            parts.append(self.tokens[start:end])
            size += end - start
        self.left = parts[-1] if size > CONTEXT + 1 and len(parts[-1]) <= CONTEXT else None
        return np.concatenate(parts)[: CONTEXT + 1]

    def state_dict(self):
        left = None if self.left is None else torch.from_numpy(self.left.astype(np.int64))
        return {"order": self.order.state_dict(), "left": left}

    def load_state_dict(self, state):
        self.order.load_state_dict(state["order"])
        self.left = None if state["left"] is None else state["left"].numpy().astype(np.uint16)

    def batch(self, rows):
        """(rows, CONTEXT + 1)"""
        return torch.from_numpy(np.stack([self.row() for _ in range(rows)]).astype(np.int64))


def train_step(model, both, batches, precision):
    """One optimizer step on the mean loss over several micro-batches of (tokens, what each counts in the loss or None).

    tokens: (rows, longest); counts: (rows, longest - 1), None for 1 each. Returns the loss.
    """
    size = sum(tokens[:, 1:].numel() if counts is None else counts.sum().item() for tokens, counts in batches)
    total = 0.0
    for tokens, counts in batches:
        with precision():
            found = token_log_probs(model, tokens, counts)
        loss = -(found if counts is None else found * counts).sum() / size
        loss.backward()
        total += loss.item()
    clip_gradients(model)
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def build(run, layers, model=None):
    model = (grow(model, layers) if model else StoryModel(Config(layers=layers))).to(run.device)
    if run.compiles:
        compile_blocks(model)
    return model, optimizers(model, MUON, ADAM, run.precision.dtype)


def main():
    args = flags(__doc__, None, unit="steps", budget=68.0).parse_args()
    tokens, valid = load_tokens("train"), split_stories(load_tokens("valid"))[:MEASURED]
    run = Run(args, "pretrained")
    rows = Rows(tokens, run.random)
    model, both = build(run, GROWTH[0.0])
    if args.resume:
        content = run.load_state()
        rows.load_state_dict(content["rows"])
        model, both = build(run, content["layers"])
        for part, state in zip([model, *both], content["parts"]):
            part.load_state_dict(state)

    def save():
        parts = [model.state_dict(), *(optimizer.state_dict() for optimizer in both)]
        run.save_state(parts=parts, layers=model.config.layers, rows=rows.state_dict())

    def measure(stories, name="eval/bits_per_byte"):
        with run.precision(), torch.compiler.set_stance("force_eager"):  # not compiled for each of their lengths
            bits = evaluate.bits_per_byte(model, stories)
        run.log({name: bits})
        return f"held-out {bits:.4f} bits per byte"

    seen, clock, measured = 0, time.monotonic(), run.minutes
    while not run.over():
        layers = max(number for share, number in GROWTH.items() if share <= run.share())
        if layers > model.config.layers:
            model, both = build(run, layers, model)
            say(f"the network grows to {layers} layers")
        scale = set_rate(both, run.share())
        micro = rows.batch(ROWS).to(run.device).split(MICRO)
        loss = train_step(model, both, [(part, None) for part in micro], run.precision)
        run.steps += 1
        seen += ROWS * CONTEXT
        run.log({"train/loss": loss, "train/rate": scale})
        progress(run.share(), 1, f"loss {loss:.3f}")
        if run.due():
            save()
        if run.steps % 20 == 0:
            rate = seen / (time.monotonic() - clock)
            line = f"step {run.steps}  {run.minutes:.1f} min  loss {loss:.3f}  {rate:,.0f} tokens/s"
            if run.minutes - measured > args.minutes / 12:
                line += "  " + measure(valid[: MEASURED // 5])
                measured = run.minutes
            say(line)
            seen, clock = 0, time.monotonic()
    if run.steps:
        save()
        say(measure(valid, "eval/final_bits_per_byte") + f" after {run.minutes:.1f} minutes and {run.steps} steps")
    run.finish(model.bfloat16(), "step")


if __name__ == "__main__":
    main_guard(main)
