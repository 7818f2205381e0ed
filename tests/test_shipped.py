"""What the two models that ship can do: the real weights, in float32, with fixed random numbers."""

import pytest
import torch
from by_hand import FLOAT32

import data
import evaluate
import model as models
import sample

ASKS = data.load_instructions()[:32]


@pytest.fixture(scope="module")
def shipped():
    return {name: models.load_checkpoint(models.CHECKPOINTS / name / "model.pt") for name in ("pretrained", "finetuned")}


@pytest.fixture(scope="module")
def written(shipped):
    return evaluate.write_all(shipped["finetuned"], FLOAT32, ASKS)


def test_both_are_of_the_shape_that_the_course_is_about_and_stored_in_bfloat16(shipped):
    for name, model in shipped.items():
        assert model.config == models.Config() and sum(weight.numel() for weight in model.parameters()) == 15_735_168
        stored = models.read(models.CHECKPOINTS / name / "model.pt")["model"]
        assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


def test_the_fine_tuned_model_uses_the_words_it_is_asked_for_and_not_those_of_another_ask(written):
    texts, _ = written
    assert evaluate.words_rate(texts, ASKS) > 0.35
    assert evaluate.words_rate(texts, ASKS[1:] + ASKS[:1]) < 0.1


def test_most_of_its_stories_end_in_time_and_use_a_word_about_twice(written):
    texts, stories = written
    assert evaluate.ended_rate(stories) > 0.6
    assert 1 <= evaluate.repeats(texts, ASKS) < 4 and evaluate.distinct_pairs(texts) > 0.8


def test_fine_tuning_cost_plain_stories_little(shipped):
    plain = evaluate.load_plain()[:16]
    before, after = (evaluate.bits_per_byte(shipped[name], plain) for name in ("pretrained", "finetuned"))
    assert before < 1.5 and after < 1.2 * before


def test_its_likeliest_story_begins_as_stories_do_and_has_the_words_of_the_demo(shipped):
    story = sample.write(shipped["finetuned"], data.DEMO, temperature=0)
    assert story.startswith(("Once upon a time", "One day")) and any(word in story for word in data.DEMO)
