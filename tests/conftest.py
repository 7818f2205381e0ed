"""What the tests share: a tiny random model, and folders of their own for all that is written."""

import contextlib
import math
import random
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
import dpo
import evaluate
import finetune
import grpo
import model as models
import ppo
import preferences
import run as runs
import sample

torch.set_num_threads(1)  # the models here are so small that a second thread only waits


@pytest.fixture
def tiny():
    """A model of two layers over the real vocabulary whose weights are large enough to have opinions."""
    return tiny_model()


def tiny_model(seed=0, vocabulary=data.VOCABULARY, context=256):
    torch.manual_seed(seed)
    model = models.StoryModel(models.Config(vocabulary=vocabulary, context=context, layers=2, heads=2, channels=16, hidden=32))
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """Runs and checkpoints go to a temporary folder, with a tiny fine-tuned model in it; the CPU computes in float32."""
    checkpoints = tmp_path / "checkpoints"
    for module in (dpo, evaluate, finetune, models, ppo, preferences, sample):
        for name, path in ("CHECKPOINTS", checkpoints), ("FINETUNED", checkpoints / "finetuned" / "model.pt"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, path)
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("STORY_FLOAT32", "1")  # so that figures are the same on every machine
    for device in torch.cuda, torch.backends.mps:
        monkeypatch.setattr(device, "is_available", lambda: False)
    models.save_checkpoint(checkpoints / "finetuned" / "model.pt", tiny_model())
    return tmp_path


class Payload:
    """What opens a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@contextlib.contextmanager
def disk_of(size):
    """No file grows beyond `size` bytes: what a full disk does, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def quick(workshop, monkeypatch):
    """A function that runs a script's `main` with some flags: short stories, small rollouts, two asks to measure on."""
    for module in ppo, evaluate, preferences:
        monkeypatch.setattr(module, "STORY_TOKENS", 12)
    monkeypatch.setattr(ppo, "STORIES", 16)
    monkeypatch.setattr(grpo, "PROMPTS", 2)
    monkeypatch.setattr(runs, "MEASURE_ASKS", 2)
    monkeypatch.setattr(runs, "COMPILE_FROM", math.inf)
    monkeypatch.setattr(evaluate, "load_plain", lambda: [[*data.encode("Once upon a time."), data.END]])
    monkeypatch.setattr(runs, "write", lambda *_, **__: "Once.")
    monkeypatch.setattr(models, "keep_freed_memory", lambda: None)
    handlers = {sort: signal.getsignal(sort) for sort in (signal.SIGINT, signal.SIGTERM)}

    def start(script, *argv):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, argv)])
        script.main()

    yield start
    for sort, handler in handlers.items():
        signal.signal(sort, handler)


@pytest.fixture
def staged(monkeypatch):
    """A function that makes a rollout whose rewards, and stories if need be, a test has chosen. Two models score it."""

    def make(model, reference, rewards, stories=None):
        draw, left = random.Random(0), iter(rewards)
        if not stories:  # of 1 to 7 tokens, every other one with its end
            stories = [[draw.randrange(data.END) for _ in range(number % 7)] + [data.END - number % 2] for number in range(len(rewards))]
        monkeypatch.setattr(ppo, "generate", lambda *_: stories)
        monkeypatch.setattr(ppo, "words_used", lambda *_: next(left))
        return ppo.rollout(model, reference, data.load_asks()[: len(rewards)], models.Precision(torch.device("cpu"), torch.float32))

    return make
