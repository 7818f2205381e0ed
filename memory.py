"""What does each method's update need in memory, and what does PPO's critic cost?

    python memory.py                            a table; --json FILE writes it too

Each method does two minibatches of its update, twice (DPO four), in a process of its own, on random stories of 200 tokens
and in float32, on the CPU. The peak is what the process held at most, less what it held before there was a model.
"""

import concurrent.futures
import math
import multiprocessing
import sys

import torch

import data
import dpo
import grpo
import ppo
from cli import Parser, Problem, main_guard, output
from data import STORY_TOKENS, VOCABULARY
from evaluate import write_json
from model import Config, Precision, StoryModel, pack

MIB = 2**20
PRECISION = Precision(torch.device("cpu"), torch.float32)


def peak():
    """The most bytes that this process has held so far; NaN under Windows, which does not tell."""
    try:
        import resource
    except ImportError:
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def random_stories(number, length=STORY_TOKENS):
    return torch.randint(0, VOCABULARY - 1, (number, length)).tolist()  # no end of text among them


def reinforce(model, reference, optimizer, method):
    """An update by PPO or GRPO on two minibatches of made-up stories."""
    stories = random_stories(2 * ppo.MINIBATCH)
    tokens, mask = pack([data.encode(data.instruction(data.DEMO))] * len(stories), stories)
    pieces = list(zip(tokens.split(ppo.MINIBATCH), mask.split(ppo.MINIBATCH)))
    with torch.no_grad():
        old, frozen = (torch.cat([ppo.token_log_probs(each, *piece) for piece in pieces]) for each in (model, reference))
    channels = torch.randn(*mask.shape, model.config.channels)
    batch = ppo.Rollout([], torch.rand(len(stories)), tokens, mask, old, frozen, channels, 0.0)
    ppo.update(model, optimizer, batch, method.advantages(batch)[0], method, 0.05, PRECISION)


def prefer(model, reference, optimizer, _):
    """Two steps of DPO, twice, on made-up pairs."""
    for _ in range(4):
        stories = [{"tokens": story} for story in random_stories(2 * dpo.MINIBATCH)]
        pairs = [{"ask": data.DEMO, "chosen": one, "rejected": other} for one, other in zip(stories[::2], stories[1::2])]
        dpo.step(model, dpo.reference_log_probs(reference, pairs, PRECISION), optimizer, pairs, 0.1, PRECISION)


METHODS = {
    "DPO": (prefer, lambda model: None),
    "PPO, linear critic": (reinforce, lambda model: ppo.PPO(model)),
    "PPO, critic a model": (reinforce, lambda model: ppo.PPO(model, critic=ppo.CriticModel(model, PRECISION))),
    "GRPO": (reinforce, lambda model: grpo.GRPO()),
}


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(name, config=None):
    """The bytes of one method's parts, and the peak of its update. Meant for a fresh process: a peak never falls."""
    torch.manual_seed(1)
    warm = torch.nn.Linear(1, 1)
    warm(torch.ones(1)).backward()
    torch.optim.AdamW(warm.parameters()).step()  # what torch itself loads at the first step is no method's need
    before = peak()
    work, make = METHODS[name]
    model, reference = StoryModel(config or Config()), StoryModel(config or Config())
    optimizer = ppo.optimizer_of(model, ppo.LEARNING_RATE)
    method = make(model)
    work(model, reference, optimizer, method)
    trained, optimizers = [*model.parameters()], [optimizer]
    if isinstance(method, ppo.PPO):
        trained += method.critic.parameters()
        optimizers.append(method.optimizer)
    states = [tensor for each in optimizers for state in each.state.values() for tensor in state.values()]
    return {
        "name": name,
        "trained_parameters": sum(weight.numel() for weight in trained),
        "weights": size(trained),
        "gradients": size(trained),  # one number a weight, of the weight's type
        "optimizer": size(states),
        "reference": size(reference.parameters()),
        "peak": peak() - before,
    }


def alone(work, *args):
    """What a function returns that is called in a process of its own. Raises `Problem` if that is killed."""
    try:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *args).result()
    except concurrent.futures.BrokenExecutor:
        raise Problem(f"the process for {args[0]} was killed: is there too little memory?") from None


def main():
    parser = Parser(__doc__)
    parser.add_argument("--json", metavar="FILE", type=output, help="write the figures there too, in bytes")
    args = parser.parse_args()
    columns = ["weights", "gradients", "optimizer", "reference", "peak"]
    print(f"{'MiB':20} {'parameters':>10} " + " ".join(f"{column:>10}" for column in columns), flush=True)
    rows = []
    for name in METHODS:
        rows.append(row := alone(measure, name))
        print(
            f"{name:20} {row['trained_parameters'] / 1e6:9.1f}M " + " ".join(f"{row[column] / MIB:10,.0f}" for column in columns),
            flush=True,
        )
    if args.json:
        write_json(args.json, {"command": "python memory.py", "methods": rows})


if __name__ == "__main__":
    main_guard(main)
