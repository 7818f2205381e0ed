import os
import signal

import numpy as np
import pytest
import torch
from by_hand import schedule
from conftest import contents, tiny_model

import data
import evaluate
import finetune
import model as models
import rewards

STORIES = [
    "The brave bear jumped over the cake. It was happy.",
    "A dog came to the brown castle in the rain. The dog barked.",
    "Rain fell. A clever bird flew to its nest and ate cake.",
    "Nothing here.",
    "A quiet boat floated on the blue lake.",
    "The bear danced with a brave bird.",
]
KINDS = [set(data.read_words(kind)) for kind in ("nouns", "verbs", "adjectives")]


def stream(stories=STORIES, seed=1):
    tokens = [token for story in stories for token in [*data.encode(story), data.END]]
    return finetune.Instructions(np.array(tokens, dtype=np.uint16), np.random.default_rng(seed))


@pytest.fixture
def tuning(quick, workshop, monkeypatch):
    """What `quick` needs to run `finetune.main`: a pretrained model, stories, and less to measure on."""
    models.save_checkpoint(workshop / "checkpoints/pretrained/model.pt", tiny_model(3))
    monkeypatch.setattr(finetune, "load_tokens", lambda name: stream().tokens)
    monkeypatch.setattr(finetune, "load_instructions", lambda: data.load_instructions()[:2])
    monkeypatch.setattr(finetune, "STORIES", 4)
    return lambda *argv: quick(finetune, *argv)


# ---- the stream of instructions


def test_an_instruction_asks_for_a_noun_a_verb_and_an_adjective_that_its_story_uses():
    told = set()
    for words, story in (next(instructions) for instructions in [stream()] for _ in range(40)):
        text = data.decode(story)
        told.add(text)
        assert story == [*data.encode(text), data.END]
        assert rewards.words_used(text, words) == 1
        assert len(words) == 3 and any(
            words[a] in KINDS[0] and words[b] in KINDS[1] and words[c] in KINDS[2]
            for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
        )
    assert told == set(STORIES) - {"Nothing here."}


def test_the_words_come_in_no_fixed_order():
    orders = {tuple(stream(seed=seed).words("brave bear jumped")) for seed in range(60)}
    assert len(orders) == 6


def test_a_word_inside_another_is_not_asked_for():
    for seed in range(20):
        assert set(stream(seed=seed).words("braver brave bear_jumped cake9 Rain ate")) == {"brave", "rain", "ate"}


def test_a_story_without_one_of_the_kinds_is_passed_over():
    assert stream().words("The bear jumped.") is None and stream().words("") is None


@pytest.mark.parametrize("words", [data.load_instructions()[0], data.DEMO])
def test_a_story_is_never_told_for_an_ask_that_is_held_out(words, monkeypatch):
    kinds = {"nouns": [words[0], "kite"], "verbs": [words[1]], "adjectives": [words[2]]}
    monkeypatch.setattr(finetune, "read_words", kinds.get)
    for seed in range(20):
        told = stream([f"{' '.join(words)}."], seed)
        assert told.words(f"{' '.join(words)}.") is None and not told.asked
        assert set(told.words(f"kite {' '.join(words[1:])}.")) == {"kite", *words[1:]}


def test_every_story_comes_once_before_any_comes_again():
    instructions = stream()
    passes = [sorted(data.decode(next(instructions)[1]) for _ in range(5)) for _ in range(3)]
    assert passes == [sorted(set(STORIES) - {"Nothing here."})] * 3


def test_only_stories_that_fit_are_taken_whole(monkeypatch):
    size = len(data.encode(STORIES[0])) + 1
    monkeypatch.setattr(finetune, "LONGEST", size)
    longer = STORIES[0] + " The end."
    instructions = stream([STORIES[0], longer])
    assert {data.decode(next(instructions)[1]) for _ in range(6)} == {STORIES[0]}


def test_words_asked_for_less_often_are_favoured():
    often = 0
    for seed in range(110):
        instructions = stream(seed=seed)
        instructions.asked.update({"bear": 9})  # weights 1/10 for bear and 1 for cake: bear in one case of eleven
        often += "bear" in instructions.words("The brave bear jumped on the cake.")
    assert 2 <= often <= 22  # 10 expected; 55 if they were alike


def test_a_word_that_was_asked_for_is_counted():
    instructions = stream()
    asked = [word for _ in range(10) for word in next(instructions)[0]]
    assert all(instructions.asked[word] == asked.count(word) for word in set(asked)) and sum(instructions.asked.values()) == 30


@pytest.mark.parametrize("stories", [["Nothing here."], []])
def test_a_file_without_a_story_to_ask_for_says_so(stories):
    with pytest.raises(data.Problem, match="no story"):
        next(stream(stories))


# ---- what is learned from


def test_the_loss_is_on_the_story_and_its_end_and_not_on_the_prompt_or_the_padding():
    examples = [next(instructions) for instructions in [stream()] for _ in range(5)]
    tokens, counts = finetune.batch(examples, 4, "cpu")
    for row, (words, story) in enumerate(examples):
        prompt = data.encode(data.instruction(words))
        assert data.decode(prompt).endswith(".\n") and prompt == tokens[row, : len(prompt)].tolist()
        counted = counts[row] > 0
        assert tokens[row, 1:][counted].tolist() == story and story[-1] == data.END
        assert counted.nonzero().flatten().tolist() == list(range(len(prompt) - 1, len(prompt) + len(story) - 1))
        assert counts[row][counted][-1] == 1


def test_the_first_mention_of_each_asked_word_counts_more():
    text = "So the brave bear jumped, bearing the brave bear's cake, and the brave bear ran."
    tokens, counts = finetune.batch([(["jumped", "brave", "bear"], [*data.encode(text), data.END])], 7, "cpu")
    assert data.decode(tokens[0, 1:][counts[0] == 7].tolist()) == " brave bear jumped" and set(counts[0].tolist()) == {0, 1, 7}


def test_a_first_mention_counts_less_and_less_and_then_stays_above_any_other_token():
    assert [finetune.asked_count(share) for share in (0, 0.35, 0.7, 0.9, 1)] == pytest.approx([10, 7, 4, 4, 4])


def test_following_is_measured_against_the_next_asks_words_too(tiny, monkeypatch):
    asks = [("cake", "ran", "brave"), ("rain", "ate", "blue")]
    monkeypatch.setattr(evaluate, "write_all", lambda *_: (["A brave cake ran.", "Rain."], [[1, data.END], [2]]))
    assert finetune.follows(tiny, None, asks) == (pytest.approx((1 + 1 / 3) / 2), 0, 0.5)


# ---- the run


def test_fine_tuning_that_ctrl_c_stopped_goes_on_to_the_numbers_of_one_left_alone(tuning, workshop, monkeypatch):
    step, calls = finetune.train_step, []

    def pressing(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(finetune, "train_step", pressing)
    tuning("--steps", 4, "--name", "pressed")
    assert len(calls) == 2
    torch.manual_seed(77)
    tuning("--steps", 4, "--name", "pressed", "--resume")
    tuning("--steps", 4, "--name", "alone")
    one, other = (torch.load(workshop / f"checkpoints/finetuned-{name}/state.pt", weights_only=True) for name in ("pressed", "alone"))
    start = tiny_model(3).state_dict()
    for key in start:
        assert torch.equal(one["model"][key], other["model"][key]), key
        assert not torch.equal(one["model"][key], start[key]), key
    assert one["instructions"]["asked"] == other["instructions"]["asked"] and sum(one["instructions"]["asked"].values()) == 4 * 4 * 3
    assert torch.equal(one["instructions"]["order"]["left"], other["instructions"]["order"]["left"])
    assert one["run"]["numpy_random"] == other["run"]["numpy_random"] and one["run"]["steps"] == other["run"]["steps"] == 4
    for optimizer in "muon", "adam":
        pairs = zip(one[optimizer]["state"].values(), other[optimizer]["state"].values(), strict=True)
        assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)


def test_overwrite_throws_nothing_away_where_no_story_can_be_asked_for(tuning, workshop, monkeypatch):
    tuning("--steps", 1, "--name", "x")
    before = contents(workshop)
    monkeypatch.setattr(finetune, "load_tokens", lambda name: stream(["Nothing here."]).tokens)
    with pytest.raises(data.Problem, match="no story"):
        tuning("--steps", 1, "--name", "x", "--overwrite")
    assert contents(workshop) == before


def test_a_run_has_half_of_pretrainings_rates_their_schedule_and_a_count_that_falls(tuning, monkeypatch):
    seen = []

    def listening(model, optimizers, batches, precision):
        ((_, counts),) = batches
        seen.append((*(optimizer.param_groups[0]["lr"] for optimizer in optimizers), counts.max().item()))
        return 1.0

    monkeypatch.setattr(finetune, "train_step", listening)
    tuning("--steps", 100, "--name", "x")
    muon, adam, counts = zip(*seen)
    assert muon == pytest.approx([0.01 * scale for scale in schedule(100)])
    assert adam == pytest.approx([0.0015 * scale for scale in schedule(100)])
    assert (counts[0], counts[35], counts[-1]) == pytest.approx((10, 7, 4))


def test_fine_tuning_starts_from_the_pretrained_model_and_writes_one_in_bfloat16(tuning, workshop, capsys):
    tuning("--steps", 1, "--name", "x")
    content = torch.load(workshop / "checkpoints/finetuned-x/model.pt", weights_only=True)
    assert {weight.dtype for weight in content["model"].values()} == {torch.bfloat16} and content["steps"] == 1
    assert models.load_checkpoint(workshop / "checkpoints/finetuned-x/model.pt").embedding.weight.dtype == torch.float32
    assert models.read(workshop / "checkpoints/finetuned-x/state.pt")["run"]["start"].endswith("pretrained/model.pt")
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 steps; tensorboard --logdir runs")
