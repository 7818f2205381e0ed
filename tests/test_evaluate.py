import argparse
import json
import math
import sys

import numpy as np
import pytest
import torch
from conftest import tiny_model

import compare
import data
import evaluate
import model as models
from data import END

CPU = models.Precision(torch.device("cpu"), torch.float32)
ASKS = [("cat", "ran", "red"), ("dog", "sat", "big")]


@torch.no_grad()
def hand_log_probs(model, prompt, story):
    """log p of each token of a story, one at a time and in float64."""
    model = models.copy.deepcopy(model).double()
    scores = []
    for at, token in enumerate(story):
        scores.append(model(torch.tensor([prompt + story[:at]]))[0, -1].log_softmax(-1)[token].item())
    return np.array(scores)


# ---- what the stories are like


def test_words_rate_is_the_mean_share_of_words_used():
    assert evaluate.words_rate(["The red cat.", "A big dog sat."], ASKS) == pytest.approx((2 / 3 + 1) / 2)


def test_ended_rate_is_the_share_of_stories_that_end_with_end():
    assert evaluate.ended_rate([[1, END], [1, 2], [END], [END, 3], []]) == pytest.approx(2 / 5)


def test_repeats_is_the_mean_count_of_the_words_that_are_used():
    assert evaluate.repeats(["Cat, cat, cat! Red.", "big"], ASKS) == pytest.approx((3 + 1 + 1) / 3)
    assert math.isnan(evaluate.repeats(["", "none of these"], ASKS))


def test_distinct_pairs_is_the_mean_share_of_new_pairs():
    # "the cat" twice and "cat the" once; two pairs, both new; one word, no pair
    assert evaluate.distinct_pairs(["The cat, the cat", "a b c", "word", ""]) == pytest.approx((2 / 3 + 1) / 2)
    assert math.isnan(evaluate.distinct_pairs(["word", ""]))


def test_the_interval_is_the_normal_one_around_the_mean_and_shrinks_with_more_asks():
    shares = np.random.default_rng(0).integers(0, 4, size=(800, 1)) / 3
    widths = []
    for asks in 50, 200, 800:
        part = shares[:asks]
        low, high = evaluate.interval(part)
        assert low < part.mean() < high
        assert high - low == pytest.approx(2 * 1.96 * part.std() / math.sqrt(asks), rel=0.1)
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]


def test_more_stories_of_the_same_asks_are_no_more_asks():
    shares = np.random.default_rng(0).random((50, 1))
    assert evaluate.interval(np.repeat(shares, 4, axis=1)) == pytest.approx(evaluate.interval(shares))


# ---- KL and loss


def test_kl_terms_are_schulman_s_k3():
    new, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-2.0, -1.0, -0.5])
    assert evaluate.kl_terms(new, reference).tolist() == pytest.approx([math.exp(-1), math.e - 2, 0])


def test_kl_terms_are_never_negative_and_zero_when_equal():
    new = torch.linspace(-30, 0, 301).repeat(301)
    reference = torch.linspace(-30, 0, 301).repeat_interleave(301)
    terms = evaluate.kl_terms(new, reference)
    assert (terms >= 0).all() and (terms[new == reference] == 0).all()
    assert (terms[(new - reference).abs() > 0.05] > 0).all()


def test_huge_differences_give_finite_kl_and_gradients():
    new = torch.tensor([-1e4, 0.0, -200.0, -89.0], requires_grad=True)
    terms = evaluate.kl_terms(new, torch.tensor([0.0, -1e4, -0.1, 0.0]))
    terms.sum().backward()
    assert terms.isfinite().all() and new.grad.isfinite().all()


def test_kl_terms_average_to_the_kl_of_the_distributions():
    new, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    exact = (new.exp() * (new - reference)).sum()
    assert (new.exp() * evaluate.kl_terms(new, reference)).sum().item() == pytest.approx(exact.item(), rel=1e-9)


def test_bits_per_byte_equal_a_hand_loop(tiny):
    texts = ["Once.", "A caf\u00e9 \U0001f600 in the rain.", ""] + ["One day there was a dog."] * 15  # 18: more than are read at once
    stories = [[*data.encode(text), END] for text in texts]
    bits = -sum(hand_log_probs(tiny, [END], story).sum() for story in stories) / math.log(2)
    assert evaluate.bits_per_byte(tiny, stories) == pytest.approx(bits / (5 + 25 + 15 * 24), rel=1e-5)


def test_what_exceeds_the_context_is_left_out_of_bits_and_bytes_alike():
    model, story = tiny_model(context=8), data.encode("One day there was a big brown dog in the park.")
    assert len(story) > 8
    bits = -hand_log_probs(model, [END], story[:8]).sum() / math.log(2)
    assert evaluate.bits_per_byte(model, [[*story, END]]) == pytest.approx(bits / len(data.decode(story[:8])), rel=1e-5)


def test_drift_is_the_kl_summed_over_a_story_and_averaged_over_stories(tiny):
    reference = tiny_model(seed=1)
    prompts, stories = [[1, 2], [3], [4, 5, 6]], [[7, 8, 9, END], [10], [11, 12]]
    total = 0.0
    for prompt, story in zip(prompts, stories):
        r = hand_log_probs(reference, prompt, story) - hand_log_probs(tiny, prompt, story)
        total += (np.exp(r) - r - 1).sum()
    assert evaluate.drift(tiny, reference, prompts, stories) == pytest.approx(total / 3, rel=1e-4)
    assert evaluate.drift(tiny, tiny, prompts, stories) == 0


# ---- all together


@pytest.mark.parametrize(
    "path, name",
    [
        ("pretrained/model.pt", "pretrained"),
        ("finetuned/model.pt", "finetuned"),
        ("ppo/kl-0.05/model.pt", "ppo-kl-0.05"),
        ("grpo/kl-0.05/model.pt", "grpo-kl-0.05"),
        ("grpo/kl-0.05-seed-2/model.pt", "grpo-kl-0.05-seed-2"),
        ("dpo/beta-0.1/model.pt", "dpo-beta-0.1"),
        ("grpo/kl-0.05/rollout-10.pt", "grpo-kl-0.05/rollout-10"),
    ],
)
def test_a_model_is_named_by_its_folder(path, name, monkeypatch):
    assert evaluate.model_name(evaluate.CHECKPOINTS / path) == name
    monkeypatch.chdir(evaluate.CHECKPOINTS.parent)
    assert evaluate.model_name(f"checkpoints/{path}") == name


def test_a_model_from_elsewhere_is_named_by_its_own_folder(tmp_path):
    assert evaluate.model_name(tmp_path / "mine" / "model.pt") == "mine"


def test_every_final_checkpoint_is_found_the_first_two_first(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "CHECKPOINTS", tmp_path)
    names = ["pretrained/model.pt", "finetuned/model.pt", "dpo/beta-0.1/model.pt", "grpo/kl-0/model.pt"]
    for name in [*names, "grpo/kl-0/rollout-10.pt", "grpo/kl-0/state.pt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert evaluate.final_checkpoints() == [tmp_path / name for name in names]


def test_measuring_leaves_training_s_random_numbers_alone(tiny, monkeypatch):
    monkeypatch.setattr(evaluate, "STORY_TOKENS", 5)
    before = torch.get_rng_state()
    first = evaluate.measure(tiny, CPU, ASKS, each=2, plain=[[1, 2, END]])
    assert torch.equal(torch.get_rng_state(), before)
    assert first == pytest.approx(evaluate.measure(tiny, CPU, ASKS, each=2, plain=[[1, 2, END]]), nan_ok=True)


def test_the_figures_are_those_of_the_stories_written(tiny, monkeypatch):
    texts, stories = ["Red cat.", "cat cat", "big dog", "Sat, sat"], [[1, 2, END], [3], [END], [4, 5]]
    monkeypatch.setattr(evaluate, "write_all", lambda *_: (texts, stories))
    figures = evaluate.measure(tiny, CPU, ASKS, each=2, reference=tiny)
    assert figures["words_used"] == pytest.approx((2 + 1 + 2 + 1) / 12)
    assert figures["words_used_low"] == figures["words_used_high"] == pytest.approx(1 / 2)  # both asks have a mean of a half
    assert figures["ended"] == 1 / 2
    assert figures["repeats"] == pytest.approx((1 + 1 + 2 + 1 + 1 + 2) / 6)
    assert (figures["distinct_pairs"], figures["plain_bits_per_byte"], figures["kl"]) == (1, None, 0)
    other, prompts = tiny_model(1), [data.encode(data.instruction(words)) for words in ASKS for _ in range(2)]
    kl = [evaluate.drift(*pair, prompts, stories) for pair in ((tiny, other), (other, tiny))]
    assert evaluate.measure(tiny, CPU, ASKS, each=2, reference=other)["kl"] == pytest.approx(kl[0]) and kl[0] != pytest.approx(kl[1])


def test_the_script_writes_the_figures_of_each_model_as_json(workshop, monkeypatch, capsys):
    for name in "STORY_TOKENS", "ROWS":
        monkeypatch.setattr(evaluate, name, 6)
    monkeypatch.setattr(evaluate, "CHECKPOINTS", workshop / "checkpoints")
    monkeypatch.setattr(evaluate, "load_instructions", lambda: data.load_instructions()[:4])
    models.save_checkpoint(workshop / "checkpoints" / "pretrained" / "model.pt", tiny_model(seed=1))
    models.save_checkpoint(workshop / "checkpoints" / "grpo" / "kl-0" / "model.pt", tiny_model(seed=2))
    (workshop / "plain.txt").write_text("One day.\n<|endoftext|>\nThe end.\n")
    plain, result = workshop / "plain.txt", workshop / "results.json"
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--plain", str(plain), "--json", str(result), "--stories", "2", "--device", "cpu"])
    evaluate.main()
    rows = json.loads(result.read_text(), parse_constant=pytest.fail)["models"]
    assert [row["name"] for row in rows] == ["pretrained", "finetuned", "grpo-kl-0"]
    keys = "name words_used words_used_low words_used_high plain_bits_per_byte ended repeats distinct_pairs kl"
    assert all(" ".join(row) == keys for row in rows)
    assert rows[0]["kl"] is None and rows[1]["kl"] == 0 and rows[2]["kl"] > 0
    assert {row["repeats"] for row in rows if row["words_used"] == 0} == {None}  # JSON has no NaN
    stories = [[*data.encode(text), END] for text in ("One day.", "The end.")]
    bits = -sum(hand_log_probs(tiny_model(), [END], story).sum() for story in stories) / math.log(2)
    assert rows[1]["plain_bits_per_byte"] == pytest.approx(bits / 16, rel=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["pretrained", "finetuned", "grpo-kl-0"]


def test_the_script_and_the_comparison_measure_on_all_200_held_out_asks(workshop, monkeypatch):
    seen = []

    class Seen(Exception):
        pass

    def asks_of(model, precision, asks, *_, **__):
        seen.append(asks)
        raise Seen

    monkeypatch.setattr(evaluate, "measure", asks_of)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--device", "cpu"])
    with pytest.raises(Seen):
        evaluate.main()
    with pytest.raises(Seen):
        compare.measure(models.FINETUNED, argparse.Namespace(stories=2))
    assert seen == [data.load_instructions()] * 2 and len(seen[0]) == 200


def test_the_script_wants_a_checkpoint_and_a_story(workshop, monkeypatch):
    monkeypatch.setattr(evaluate, "CHECKPOINTS", workshop / "nothing")
    for args, complaint in ([], data.Problem), (["--stories", "0"], SystemExit):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--device", "cpu", *args])
        with pytest.raises(complaint):
            evaluate.main()


def test_a_model_keeps_its_name_where_the_checkpoints_are_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "disk" / "grpo" / "kl-0").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(evaluate, "CHECKPOINTS", tmp_path / "checkpoints")
    assert evaluate.model_name(tmp_path / "checkpoints" / "grpo" / "kl-0" / "model.pt") == "grpo-kl-0"
