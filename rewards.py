"""What a story is worth.

python rewards.py "The kite flew over the river." kite river brave      0.667
"""

import re

from cli import Parser, Problem, main_guard


def count(story, word):
    """How often a text uses a word: as a whole word, whatever the case."""
    return len(re.findall(rf"\b{re.escape(word)}\b", story, re.IGNORECASE))


def words_used(story, words):
    """The share of `words` that the text `story` uses: 0, 1/3, 2/3 or 1 for three words."""
    return sum(count(story, word) > 0 for word in words) / len(words)


def check_words(words):
    """Raise `Problem` for a word that no story could use."""
    for word in words:
        if not word.isalpha():
            raise Problem(f"{word!r} is no word that a story could use: letters only")


def main():
    parser = Parser(__doc__)
    parser.add_argument("story", help="its text")
    parser.add_argument("words", nargs="+", metavar="WORD", help="the words it was asked to use")
    args = parser.parse_args()
    check_words(args.words)
    print(f"{words_used(args.story, args.words):.3f}")


if __name__ == "__main__":
    main_guard(main)
