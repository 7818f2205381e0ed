import sys

import pytest

import rewards

TABLE = [
    ("The cat sat.", "cat", 1),
    ("Cat, CAT! cAt?", "cat", 3),
    ("cat", "CAT", 1),
    ('The cat\'s toy, a cat-like toy, "cat"\ncat', "cat", 4),
    ("Cats concatenate. A wildcat; cat9, cat_.", "cat", 0),
    ("She jumped, then jumps.", "jump", 0),
    ("", "cat", 0),
    ("caf\u00e9 caf", "caf", 1),
    ("A dot. Adot", "a.ot", 0),
]


@pytest.mark.parametrize("story, word, times", TABLE)
def test_a_word_counts_as_a_whole_word_whatever_the_case(story, word, times):
    assert rewards.count(story, word) == times


@pytest.mark.parametrize(
    "story, share",
    [("The KITE flew over the river.", 2 / 3), ("Kites!", 0), ("brave brave brave", 1 / 3), ("A brave kite. River!", 1), ("", 0)],
)
def test_the_reward_is_the_share_of_the_words_used(story, share):
    assert rewards.words_used(story, ("kite", "river", "brave")) == share


def test_the_script_prints_the_reward(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rewards.py", "The kite flew over the river.", "kite", "river", "brave"])
    rewards.main()
    assert capsys.readouterr().out == "0.667\n"


def test_the_script_wants_a_story_and_words(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rewards.py", "The kite flew."])
    with pytest.raises(SystemExit):
        rewards.main()
    assert capsys.readouterr().err.splitlines() == ["rewards.py: the following arguments are required: WORD (see rewards.py --help)"]
