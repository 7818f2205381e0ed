import json

import pytest
import torch

import bench
import data
import model as models
import ppo

TINY = models.Config(context=256, layers=2, heads=2, channels=16, hidden=32)


@pytest.fixture
def small(quick, monkeypatch):
    monkeypatch.setattr(bench, "Config", lambda: TINY)
    monkeypatch.setattr(bench, "STORY_TOKENS", 12)
    monkeypatch.setattr(bench, "CONTEXT", 32)
    monkeypatch.setattr(bench, "MICRO", 6)
    monkeypatch.setattr(bench, "compile_blocks", lambda *_, **__: None)
    return quick


def test_every_figure_is_printed_and_written_with_its_spread_and_share(small, workshop, tmp_path, capsys):
    small(bench, "--repeats", 2, "--json", tmp_path / "bench.json")
    content = json.loads((tmp_path / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert {"writing, 1 story", "writing, 128 stories", "scoring", "update", "rollout, GRPO", "rollout, PPO"} <= {
        row["name"] for row in content["figures"]
    }
    for row in content["figures"]:
        assert 0 < row["least"] <= row["median"] <= row["most"] and row["name"] in printed
        assert row["share_of_ceiling"] is None or 0 < row["share_of_ceiling"]
    assert content["peak_memory_gib"] > 0 and content["dtype"] == "torch.float32"


def test_the_figures_take_turns_and_the_first_turn_only_warms_up(small, monkeypatch, tmp_path):
    order = []
    for name in "scoring", "update":
        made = getattr(bench.Bench, name)
        monkeypatch.setattr(bench.Bench, name, lambda self, made=made, name=name: (lambda: order.append(name), *made(self)[1:]))
    small(bench, "--repeats", 2, "--only", "scoring", "update", "--json", tmp_path / "bench.json")
    assert order == ["scoring", "update"] * 3


def test_only_the_figures_asked_for_are_taken(small, capsys):
    small(bench, "--repeats", 1, "--only", "scoring")
    printed = capsys.readouterr().out
    assert "scoring" in printed and "writing" not in printed
    with pytest.raises(data.Problem, match="no figure's name holds scorring"):
        small(bench, "--only", "scorring")


def test_the_ceilings_arithmetic_is_that_of_all_matrices_that_a_token_passes(monkeypatch):
    monkeypatch.setattr(bench, "clock", lambda work: 1.0)
    model = models.StoryModel(TINY)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert bench.ceiling(torch.device("cpu"), torch.float32, TINY, part=256) == 2 * 8 * matrices


def test_an_endless_model_writes_to_the_last_token():
    model = models.for_writing(bench.Endless(TINY), torch.bfloat16)
    stories = bench.generate(model, [[1, 2]] * 20, 30, generator=torch.Generator().manual_seed(1))
    assert [len(story) for story in stories] == [30] * 20


def test_the_update_that_is_timed_moves_no_weight_and_reads_every_token(small, monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "token_log_probs", lambda *args, real=ppo.token_log_probs: seen.append(args[2].sum().item()) or real(*args))
    timed = bench.Bench(torch.device("cpu"), torch.float32)
    before = [weight.clone() for weight in timed.model.parameters()]
    work, tokens, _ = timed.update()
    work()
    assert sum(seen) == tokens
    assert all(torch.equal(one, other) for one, other in zip(before, timed.model.parameters()))
