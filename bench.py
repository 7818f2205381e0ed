"""How fast is it here, and how near to what the machine can do?

    python bench.py                             every figure three times, in turn with the others and the ceiling
    python bench.py --repeats 5 --json bench.json
    python bench.py --only writing update       figures whose names hold one of these

The ceiling is the rate of plain matrix products of the model's shapes, in FLOP/s, measured right before and right after
each figure, since the machine's speed may drift within minutes: a share of the mean of the two drifts less than seconds
do. The arithmetic counted is that of the stories' tokens alone: 2 x parameters for a token read or written, 6 x parameters
for one learned from.
"""

import shlex
import statistics
import time

import numpy as np
import torch

import data
import grpo
import model as models
import ppo
from cli import Parser, Problem, main_guard, output, positive, progress, say
from data import STORY_TOKENS, VOCABULARY
from evaluate import SCORED, write_json
from memory import peak, random_stories
from model import Config, StoryModel, for_writing, pack, token_log_probs
from pretrain import ADAM, CONTEXT, MICRO, MUON, ROWS, optimizers, train_step
from run import compile_blocks
from sample import generate


def wait():
    """Until an accelerator has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def clock(work):
    """Seconds that a call takes."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def ceiling(device, dtype, config, part=1):
    """FLOP/s of the matrix products of one pass through the model in one precision. part 32: of a 32nd of the tokens."""
    rows = (2048 if device.type == "cpu" else 65536) // part  # an accelerator is done with 2048 before it is told of more
    block = [(config.channels, config.channels)] * 4 + [(config.channels, config.hidden)] * 2 + [(config.hidden, config.channels)]
    shapes = block * config.layers + [(config.channels, config.vocabulary)]
    pairs = {shape: [torch.randn(rows, shape[0]), torch.randn(*shape)] for shape in set(shapes)}
    pairs = {shape: [x.to(device, dtype) for x in pair] for shape, pair in pairs.items()}
    seconds = clock(lambda: [torch.mm(*pairs[shape]) for shape in shapes])
    return sum(2 * rows * into * out for into, out in shapes) / seconds


class Endless(StoryModel):
    """A model that never writes an end of text: every story runs to all its tokens."""

    def logits(self, channels):
        return super().logits(channels).index_fill(-1, torch.tensor([data.END], device=channels.device), -1e9)


class Bench:
    """The things that are timed. Each method returns (work, how many tokens it makes, multiples of the parameters: FLOP a token)."""

    def __init__(self, device, dtype):
        self.device, self.precision = device, models.Precision(device, dtype)
        self.prompt = data.encode(data.instruction(data.DEMO))
        self.model = StoryModel(Config()).to(device)
        for weight in self.model.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.02)
        compile_blocks(self.model, dynamic=True)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())

    def pretraining(self):
        model = StoryModel(Config()).to(self.device)
        compile_blocks(model)
        both = optimizers(model, MUON, ADAM, self.precision.dtype)
        micro = torch.randint(0, VOCABULARY, (ROWS, CONTEXT + 1), device=self.device).split(MICRO)
        return lambda: train_step(model, both, [(part, None) for part in micro], self.precision), ROWS * CONTEXT, 6

    def writing(self, stories):
        writer = for_writing(Endless(Config()).to(self.device), self.precision.dtype)
        return lambda: generate(writer, [self.prompt] * stories, STORY_TOKENS), stories * STORY_TOKENS, 2

    def scoring(self):
        tokens, mask = pack([self.prompt] * SCORED, random_stories(SCORED, STORY_TOKENS), self.device)

        def work():
            with torch.no_grad(), self.precision():
                token_log_probs(self.model, tokens, mask)

        return work, SCORED * STORY_TOKENS, 2

    def update(self):
        tokens, mask = pack([self.prompt] * ppo.STORIES, random_stories(ppo.STORIES, STORY_TOKENS), self.device)
        zero = torch.zeros_like(mask)
        rewards = torch.rand(ppo.STORIES, device=self.device)
        batch = ppo.Rollout([], rewards, tokens, mask, zero, zero, zero, 0.0)
        method = grpo.GRPO()
        optimizer = ppo.optimizer_of(self.model, 0.0)
        advantages = method.advantages(batch)[0]
        work = lambda: ppo.update(self.model, optimizer, batch, advantages, method, 0.05, self.precision)
        return work, ppo.EPOCHS * ppo.STORIES * STORY_TOKENS, 6

    def rollout(self, model, method):
        optimizer, asks = ppo.optimizer_of(model, 0.0), method.ask(np.random.default_rng(1))
        compile_blocks(model, dynamic=True)

        def work():
            batch = ppo.rollout(model, model, asks, self.precision)
            ppo.update(model, optimizer, batch, method.advantages(batch)[0], method, 0.05, self.precision)

        return work, ppo.STORIES, 0

    def copying(self):
        """All weights copied once: what each token of a single story has to read at least."""
        weights = torch.cat([weight.flatten() for weight in self.model.parameters()]).to(self.precision.dtype)
        into = torch.empty_like(weights)
        return lambda: into.copy_(weights), 1, 0


def main():
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=3, help="times each figure is taken, after one to warm up (default 3)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="only figures whose names hold one of these (default: all)")
    parser.add_argument("--json", metavar="FILE", type=output, help="write the figures there too")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    args = parser.parse_args()
    device, dtype = models.pick_device(args.device)
    models.keep_freed_memory()
    torch.manual_seed(1)
    bench, shipped = Bench(device, dtype), models.load_checkpoint(models.FINETUNED, device)
    figures = {
        "copying the weights": (bench.copying, "times/s"),
        "pretraining": (bench.pretraining, "tokens/s"),
        "writing, 1 story": (lambda: bench.writing(1), "tokens/s"),
        "writing, 8 stories": (lambda: bench.writing(8), "tokens/s"),
        "writing, 128 stories": (lambda: bench.writing(128), "tokens/s"),
        "scoring": (bench.scoring, "tokens/s"),
        "update": (bench.update, "tokens/s"),
        "rollout, random model": (lambda: bench.rollout(Endless(Config()).to(device), grpo.GRPO()), "stories/s"),
        "rollout, GRPO": (lambda: bench.rollout(shipped, grpo.GRPO()), "stories/s"),
        "rollout, PPO": (lambda: bench.rollout(shipped, ppo.PPO(shipped)), "stories/s"),
    }
    chosen = [name for name in figures if any(part in name for part in args.only)]
    if not chosen:
        raise Problem(f"no figure's name holds {' or '.join(args.only)}: {', '.join(figures)}")
    print(f"{device}, {dtype}, {torch.get_num_threads()} threads, {bench.parameters / 1e6:.1f}M parameters")
    for precision in torch.float32, torch.bfloat16:
        part = 1 if precision == dtype else 32  # the other one may be emulated, and take minutes
        rates = [ceiling(device, precision, Config(), part) for _ in range(args.repeats + 1)][1:]
        print(f"matrix products in {str(precision)[6:]:10} {statistics.median(rates) / 1e12:.3f} TFLOP/s")
    works = {name: figures[name][0]() for name in chosen}
    rates, shares = {name: [] for name in chosen}, {name: [] for name in chosen}
    after = ceiling(device, dtype, Config())
    for repeat in range(args.repeats + 1):  # all figures in turn, so that a machine that drifts does not favour one
        for number, (name, (work, amount, multiple)) in enumerate(works.items()):
            progress(repeat * len(works) + number, (args.repeats + 1) * len(works), name)
            before, rate, after = after, amount / clock(work), ceiling(device, dtype, Config())
            if repeat:  # the first time warms up
                rates[name].append(rate)
                shares[name].append(rate * multiple * bench.parameters / ((before + after) / 2))
    results = []
    for name, (_, amount, multiple) in works.items():
        row = {"name": name, "unit": figures[name][1], "median": statistics.median(rates[name]), "least": min(rates[name])}
        row |= {"most": max(rates[name]), "seconds": amount / row["median"]}
        row["share_of_ceiling"] = statistics.median(shares[name]) if multiple else None
        results.append(row)
        share = f"  {row['share_of_ceiling']:4.0%} of the ceiling" if multiple else ""
        spread = f"({row['least']:,.1f} to {row['most']:,.1f})"
        say(f"{name:24} {row['median']:10,.1f} {row['unit']:10} {spread:26} {row['seconds']:8.2f} s{share}")
    gib = (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak()) / 2**30
    print(f"peak memory {gib:.2f} GiB")
    if args.json:
        chosen = [*["--only", *args.only] * any(args.only), *["--device", args.device] * bool(args.device)]
        command = shlex.join(["python", "bench.py", "--repeats", str(args.repeats), *chosen])
        content = {"command": command, "device": str(device), "dtype": str(dtype), "peak_memory_gib": gib, "figures": results}
        write_json(args.json, content)


if __name__ == "__main__":
    main_guard(main)
