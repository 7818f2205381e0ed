import itertools
import json
from unittest.mock import Mock

import pytest

import data
import preferences
import run as runs

ASK = ("kite", "river", "brave")
STORIES = [data.encode(text) for text in ("A kite.", "Nothing.", "A brave kite by the river.", "The brave kite.", "No one.")]


def test_the_pair_is_the_story_with_most_of_the_words_and_the_first_with_fewest():
    made = preferences.pair(ASK, STORIES)
    assert (made["chosen"]["text"], made["chosen"]["score"]) == ("A brave kite by the river.", 1)
    assert (made["rejected"]["text"], made["rejected"]["score"]) == ("Nothing.", 0)
    assert (made["chosen"]["tokens"], made["rejected"]["tokens"], made["ask"]) == (STORIES[2], STORIES[1], list(ASK))


def test_stories_that_all_score_alike_give_no_pair():
    assert preferences.pair(ASK, [STORIES[1], STORIES[4]]) is None
    assert preferences.pair(ASK, [STORIES[0]]) is None


@pytest.fixture
def told(monkeypatch):
    """Every second ask gets one story that uses its first word; the others get none that does. Counts the batches."""
    batches = []

    def generate(model, prompts, max_tokens, generator):
        batches.append(len(prompts))
        asks = [data.decode(prompt).split("words ")[1].split(",")[0] for prompt in prompts]
        order = [words[0] for words in data.load_asks()]
        return [data.encode(f"A {word}.") if row % 2 and order.index(word) % 2 else [data.END] for row, word in enumerate(asks)]

    monkeypatch.setattr(preferences, "generate", generate)
    return batches


def test_pairs_and_ties_are_counted_and_written_with_scores_tokens_and_text(quick, workshop, told, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    asks = preferences.asks_of(1)[:20]
    quick(preferences, "--asks", 20, "--stories", 2, "--out", path)
    pairs, writer = preferences.load_pairs(path)
    assert writer == runs.file_hash(workshop / "checkpoints" / "finetuned" / "model.pt")
    order = [words[0] for words in data.load_asks()]
    expected = [list(words) for words in asks if order.index(words[0]) % 2]
    assert [pair["ask"] for pair in pairs] == expected
    assert f"{len(expected)} pairs from 20 asks, {20 - len(expected)} tied" in capsys.readouterr().out
    for pair in pairs:
        assert pair["chosen"]["score"] == pytest.approx(1 / 3) and pair["rejected"]["score"] == 0
        assert data.decode(pair["chosen"]["tokens"]) == pair["chosen"]["text"] == f"A {pair['ask'][0]}."
        assert pair["rejected"]["tokens"] == [data.END]


def test_each_batch_of_asks_has_random_numbers_of_its_own(quick, workshop, tmp_path, monkeypatch):
    drawn = []
    write = lambda model, prompts, longest, generator: drawn.append(generator.initial_seed()) or prompts
    monkeypatch.setattr(preferences, "generate", write)
    monkeypatch.setattr(preferences, "ROWS", 32)
    for seed in 1, 2:
        quick(preferences, "--asks", 40, "--stories", 2, "--seed", seed, "--out", tmp_path / f"{seed}.jsonl")
    assert len(set(drawn)) == 6


def test_a_file_that_broke_off_is_completed_to_the_one_made_at_once(quick, workshop, tmp_path, monkeypatch):
    once, broken, part = (tmp_path / name for name in ("once.jsonl", "broken.jsonl", "broken.jsonl.part"))
    monkeypatch.setattr(preferences, "ROWS", 32)  # so in three batches
    monkeypatch.setattr(preferences, "words_used", lambda text, words: len(text) % 4 / 3)
    quick(preferences, "--asks", 40, "--stories", 2, "--out", once)
    lines = once.read_text().splitlines(keepends=True)
    assert len(lines) > 25
    for left in ["", *("".join(lines[:kept]) + lines[kept][:40] for kept in (1, 5, 20, len(lines) - 1))]:
        part.write_text(left)
        with pytest.raises(data.Problem, match="broken.jsonl.part already"):
            quick(preferences, "--asks", 40, "--stories", 2, "--out", broken)
        with pytest.raises(data.Problem, match="preferences.py, with --resume"):
            preferences.load_pairs(broken)
        quick(preferences, "--asks", 40, "--stories", 2, "--out", broken, "--resume")
        assert broken.read_text() == once.read_text() and not part.exists()
        broken.unlink()


@pytest.mark.parametrize("flags", [["--overwrite"], ["--asks", 40, "--resume"]], ids=str)
def test_a_file_is_replaced_only_by_one_that_is_complete(quick, workshop, tmp_path, monkeypatch, flags):
    path = tmp_path / "pairs.jsonl"
    monkeypatch.setattr(preferences, "words_used", lambda text, words: len(text) % 4 / 3)
    monkeypatch.setattr(preferences, "ROWS", 32)
    quick(preferences, "--asks", 20, "--stories", 2, "--out", path)
    before = path.read_text()
    with monkeypatch.context() as stopped:
        stopped.setattr(preferences, "progress", Mock(side_effect=[None, KeyboardInterrupt]))  # the second is after a batch
        with pytest.raises(KeyboardInterrupt):
            quick(preferences, "--asks", 20, "--stories", 2, "--out", path, *flags)
    assert path.read_text() == before and data.part_of(path).exists()
    quick(preferences, "--asks", 40, "--stories", 2, "--out", path, "--resume")
    assert path.read_text().startswith(before) and not data.part_of(path).exists()


def test_no_more_stories_are_written_at_once_than_elsewhere(quick, workshop, told, tmp_path):
    quick(preferences, "--asks", 5, "--stories", 60, "--out", tmp_path / "pairs.jsonl")
    assert told == [120, 120, 60]


def test_a_file_that_is_there_is_neither_overwritten_nor_mixed_with_other_settings(quick, workshop, told, tmp_path):
    path = tmp_path / "pairs.jsonl"
    quick(preferences, "--asks", 20, "--stories", 2, "--out", path)
    before = path.read_text()
    for more, named in ([], "--overwrite"), (["--resume", "--seed", 2], "--overwrite"):
        with pytest.raises(data.Problem, match=named):
            quick(preferences, "--asks", 20, "--stories", 2, "--out", path, *more)
        assert path.read_text() == before
    quick(preferences, "--asks", 10, "--stories", 2, "--out", path, "--overwrite")
    assert path.read_text() != before


HEADER = '{"from": "x"}\n'


def one_pair(tokens):
    told = {"ask": ["kite", "river", "brave"], "chosen": {"tokens": [5, data.END]}, "rejected": {"tokens": tokens}}
    return HEADER + json.dumps(told) + "\n"


@pytest.mark.parametrize("tokens", [[], [5, -1], [data.VOCABULARY], [1.5], ["a"], [True], 7, None], ids=repr)
def test_a_story_that_is_no_list_of_known_tokens_is_a_problem(tmp_path, tokens):
    path = tmp_path / "pairs.jsonl"
    path.write_text(one_pair([0, data.END]))
    assert len(preferences.load_pairs(path)[0]) == 1
    path.write_text(one_pair(tokens))
    with pytest.raises(data.Problem, match="no file of pairs"):
        preferences.load_pairs(path)


@pytest.mark.parametrize("content", ["", "{}\n", HEADER, f"{HEADER}not json\n", f'{HEADER}{{"ask": 3}}\n', f"{HEADER}[]\n"], ids=repr)
def test_a_file_of_something_else_is_a_problem(tmp_path, content):
    path = tmp_path / "pairs.jsonl"
    with pytest.raises(data.Problem, match="there is no"):
        preferences.load_pairs(path)
    path.write_text(content)
    with pytest.raises(data.Problem, match="preferences.py"):
        preferences.load_pairs(path)


def test_the_stories_of_an_ask_stay_with_it(quick, workshop, told, tmp_path):
    path = tmp_path / "pairs.jsonl"
    quick(preferences, "--asks", 100, "--stories", 3, "--out", path)
    assert told == [126, 126, 48]
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()[1:]]
    assert all(one < other for one, other in itertools.pairwise(numbers))
    assert all(tuple(pair["ask"]) == preferences.asks_of(1)[number] for number, pair in zip(numbers, preferences.load_pairs(path)[0]))


def test_each_seed_asks_for_other_things_and_more_than_there_are_is_refused(quick, tmp_path):
    assert sorted(preferences.asks_of(1)) == sorted(preferences.asks_of(2)) == sorted(data.load_asks())
    assert len(set(preferences.asks_of(1)[:100]) & set(preferences.asks_of(2)[:100])) < 20
    with pytest.raises(data.Problem, match="--asks 4001: there are 4000 training asks"):
        quick(preferences, "--asks", 4001, "--out", tmp_path / "pairs.jsonl")


def test_resuming_with_fewer_asks_loses_no_pair(quick, workshop, tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    monkeypatch.setattr(preferences, "words_used", lambda text, words: len(text) % 4 / 3)
    quick(preferences, "--asks", 40, "--stories", 2, "--out", path)
    before = path.read_text()
    last = json.loads(before.splitlines()[-1])["number"]
    for fewer in 16, 33, last:
        with pytest.raises(data.Problem, match="more asks"):
            quick(preferences, "--asks", fewer, "--stories", 2, "--out", path, "--resume")
    with pytest.raises(data.Problem, match="exclude"):
        quick(preferences, "--asks", 40, "--stories", 2, "--out", path, "--resume", "--overwrite")
    assert path.read_text() == before


def test_resuming_a_file_that_is_not_there_says_so(quick, workshop, tmp_path):
    with pytest.raises(data.Problem, match="nothing to resume"):
        quick(preferences, "--asks", 2, "--out", tmp_path / "pairs.jsonl", "--resume")
