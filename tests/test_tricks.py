import json
import sys

import pytest
import torch

import bench
import model as models
import tricks


@pytest.mark.parametrize("name", tricks.TRICKS)
def test_a_trick_is_left_out_while_its_task_is_timed_and_is_back_afterwards(quick, monkeypatch, name):
    task, module, replaced, plain = tricks.TRICKS[name]
    seen = []
    monkeypatch.setattr(tricks, "STORY_TOKENS", 12)
    monkeypatch.setattr(tricks, "clock", lambda work: seen.append(getattr(module, replaced)) or work() or 2.0)
    monkeypatch.setattr(tricks, "ceiling", lambda *_: 3e6)
    monkeypatch.setattr(bench, "compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(bench.Bench, "pretraining", lambda self: (lambda: None, 6, 6))
    before = getattr(module, replaced)
    assert tricks.trial(task, name, "cpu") > 0
    assert seen == [plain] and getattr(module, replaced) == before


def test_nothing_is_left_out_where_no_trick_is_named(quick, monkeypatch):
    seen = []
    monkeypatch.setattr(tricks, "STORY_TOKENS", 12)
    now = lambda: [getattr(module, replaced) for _, module, replaced, _ in tricks.TRICKS.values()]
    monkeypatch.setattr(tricks, "clock", lambda work: seen.append(now()) or work() or 2.0)
    before = now()
    monkeypatch.setattr(tricks, "ceiling", lambda *_: 3e6)
    monkeypatch.setattr(tricks, "learning", lambda precision: lambda longest: 4)
    assert tricks.trial("learning", None, "cpu") == 2.0 / 4 * 3  # seconds a token, times MFLOP a second
    assert seen == [before]


def test_the_plain_ways_compute_the_same(tiny):
    tokens = torch.randint(0, 4096, (3, 20))
    matrix, targets = torch.randn(20, 16), tokens[0]
    mask = (torch.arange(19) >= 4).float() * (torch.arange(19) < torch.tensor([[9], [14], [19]]))
    torch.testing.assert_close(tricks.all_positions(tiny, tokens, mask), models.token_log_probs(tiny, tokens, mask))
    torch.testing.assert_close(tricks.cross_entropy(tiny, matrix, targets), models.log_probs(tiny, matrix, targets))
    q, k, v = torch.randn(3, 2, 4, 10, 8).bfloat16()
    torch.testing.assert_close(tricks.fused_attention(q, k, v), models.attend(q, k, v), atol=0.02, rtol=0.02)
    logits = torch.full((400, 3), -30.0)
    logits[:, 1] = 0
    assert tricks.multinomial(logits, None).tolist() == [1] * 400


def test_a_ratio_is_the_median_of_those_taken_in_one_turn(monkeypatch, tmp_path, capsys):
    first = [1.0, 10.0, 5.0, 2.0, 3.0, 20.0, 10.0, 15.0, 20.0, 10.0, 10.0]  # of the three tasks, then without each trick
    third = [2.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    times = iter(first + [10.0] * 11 + third)
    asked = []
    monkeypatch.setattr(tricks, "alone", lambda work, task, name, device: asked.append((task, name)) or next(times))
    monkeypatch.setattr(sys, "argv", ["tricks.py", "--json", str(tmp_path / "tricks.json")])
    tricks.main()
    assert len(asked) == 33 and asked[:3] == [("writing", None), ("learning", None), ("pretraining", None)] and asked[:11] == asked[11:22]
    rows = json.loads((tmp_path / "tricks.json").read_text())["tricks"]
    # of [2, 1, .5], [3, 1, .5], [2, 1, 4], [1, 1, 1], [1.5, 1, 1], [2, 1, 1], [1, 1, 1], [2, 1, 3]
    assert [row["ratio"] for row in rows] == [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    assert (rows[1]["least"], rows[1]["most"]) == (0.5, 3.0) and "freed memory is kept" in capsys.readouterr().out
