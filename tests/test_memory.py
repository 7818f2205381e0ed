import sys

import pytest
import torch

import memory
import model as models

SMALL = models.Config(context=256, layers=1, heads=2, channels=16, hidden=32)
COUNT = 4096 * 16 + (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16  # embedding, one block with its two norms, the last norm


@pytest.mark.parametrize(
    ("name", "trained"),
    [("DPO", COUNT), ("GRPO", COUNT), ("PPO, linear critic", COUNT + 17), ("PPO, critic a model", 2 * COUNT + 17)],
)
def test_each_part_is_counted_weight_by_weight(name, trained):
    row = memory.measure(name, SMALL)
    assert row["trained_parameters"] == trained
    assert row["weights"] == row["gradients"] == 4 * trained and row["reference"] == 4 * COUNT
    # AdamW keeps two numbers a weight, and a count of its steps for each tensor
    assert 0 < row["optimizer"] - 8 * trained < 400


def test_the_peak_is_at_least_what_was_held_at_once():
    before = memory.peak()
    held = torch.ones(before // 4 + 25 * 2**20)  # more than the process has ever held
    assert memory.peak() - before >= 50 * 2**20 and held[0]


def test_the_table_has_a_row_for_each_method(monkeypatch, capsys, tmp_path):
    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, work, name):
            row = {"name": name, "trained_parameters": 2e6, **dict.fromkeys(("weights", "gradients", "optimizer", "reference"), 2**20)}
            return type("Done", (), {"result": lambda self: {**row, "peak": 3 * 2**20}})()

    monkeypatch.setattr(memory.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--json", str(tmp_path / "memory.json")])
    memory.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in lines[1:]] == list(memory.METHODS)
    assert lines[1].split()[-6:] == ["2.0M", "1", "1", "1", "1", "3"] and (tmp_path / "memory.json").exists()
