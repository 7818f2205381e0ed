"""What the tests share: a tiny random model, and folders of their own for all that is written."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
import evaluate
import finetune
import model as models
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
    """Runs and checkpoints go to a temporary folder, with a tiny fine-tuned model in it."""
    checkpoints = tmp_path / "checkpoints"
    for module in (evaluate, finetune, models, sample):
        for name, path in ("CHECKPOINTS", checkpoints), ("FINETUNED", checkpoints / "finetuned" / "model.pt"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, path)
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    models.save_checkpoint(checkpoints / "finetuned" / "model.pt", tiny_model())
    return tmp_path
