"""Stories in, tokens out; and what the model will be asked for.

    python data.py                                      fetch TinyStories (1.9 GB) and encode it
    python data.py stories.jsonl.gz                     encode local stories instead
    python data.py mine.txt more.txt.gz --valid held-out.txt
    python data.py mine.txt --valid held-out.txt --train-tokenizer
                                                        learn a new tokenizer first: the shipped checkpoints stop fitting

In a .txt, a line <|endoftext|> stands between two stories; a line of a .jsonl is an object with a "text".

Writes data/train.bin and data/valid.bin: the stories' tokens one after the other, two bytes each, every story closed
by <|endoftext|>.
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import tiktoken

from cli import Parser, Problem, main_guard, reason

FOLDER = Path(__file__).resolve().parent / "data"
TOKENIZER = FOLDER / "tokenizer.tiktoken"
ENCODED_WITH = "encoded-with.txt"  # in FOLDER: which tokenizer train.bin and valid.bin are of
VOCABULARY = 4096
END_TEXT = "<|endoftext|>"
END = VOCABULARY - 1
STORY_TOKENS = 200
DEMO = ("rain", "cake", "jump")

# GPT-2's split into words, numbers and punctuation, but punctuation keeps the line breaks after it.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+\n*|\s+(?!\S)|\s+"

# So that typographer's quotes do not cost three bytes and rare tokens each.
PLAIN_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})


# ---- the tokenizer


@functools.cache
def encoding():
    """The tokenizer of the shipped checkpoints: byte-level BPE, `VOCABULARY` tokens, `END` among them."""
    try:
        lines = TOKENIZER.read_bytes().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        if sorted(ranks.values()) != list(range(END)):
            raise ValueError("it is not whole")
        return tiktoken.Encoding(
            "stories", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_TEXT: END}, explicit_n_vocab=VOCABULARY
        )
    except (OSError, ValueError) as error:
        raise Problem(f"cannot read the tokenizer {TOKENIZER}: {reason(error)}; `git checkout data` brings it back") from None


def tokenizer_hash():
    """What tells one tokenizer from another, in a checkpoint."""
    encoding()  # complains where the file is missing or broken
    return hashlib.sha256(TOKENIZER.read_bytes()).hexdigest()[:16]


def encode(text):
    """The tokens of a text. Text that spells <|endoftext|> gets ordinary tokens, never `END`."""
    return encoding().encode_ordinary(text)


def decode(tokens):
    """The text of some tokens, without their end of text."""
    return encoding().decode([token for token in tokens if token != END])


def train_tokenizer(stories):
    """Learn the merges from an iterable of texts; write them in tiktoken's format, a base64 token and its rank a line."""
    try:
        import rustbpe
    except ImportError:
        raise Problem("--train-tokenizer needs rustbpe: pip install -r requirements-extra.txt") from None
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(stories, vocab_size=END, pattern=PATTERN)
    ranks = sorted(tokenizer.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) < END:
        raise Problem(f"these stories give only {len(ranks)} tokens, {END} are needed: pass more of them")
    write_whole(TOKENIZER, b"".join(base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks))
    encoding.cache_clear()


def part_of(path):
    """Where a file is until it is complete."""
    return path.with_name(path.name + ".part")


@contextlib.contextmanager
def replacing(path, errors=OSError):
    """A path to write to instead, whose file takes this one's place once it is whole. An error in `errors` is a `Problem`."""
    if not path.name:
        raise Problem(f"cannot write {path}: it is a folder")
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except errors as error:
        kept = "; the file before it is as it was" * path.exists()
        raise Problem(f"cannot write {path}: {reason(error)}{kept}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path, content):
    """Write bytes to a file that is either the old one or the new one, never a part."""
    with replacing(path) as part:
        part.write_bytes(content)


# ---- reading stories


def tidy(text):
    """One newline between paragraphs and plain quotes, as in the stories that the tokenizer was trained on."""
    return "\n".join(line for line in map(str.strip, text.translate(PLAIN_QUOTES).split("\n")) if line)


def read_stories(path):
    """Yield (text, split) for each story of a .txt or .jsonl file, or either gzipped, one at a time.

    split is what a .jsonl line says under "split", else None. Raises `Problem` for a file that holds no stories.
    """
    path = Path(path)
    name = path.name.removesuffix(".gz")
    read = {".txt": _read_text, ".jsonl": _read_jsonl}.get(Path(name).suffix)
    if read is None:
        raise Problem(f"cannot read {path}: stories come as .txt, .jsonl, .txt.gz or .jsonl.gz")
    found = 0
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            for text, split in read(file, path):
                if text := tidy(text):
                    found += 1
                    yield text, split
    except UnicodeDecodeError:
        raise Problem(f"cannot read {path}: it is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise Problem(f"cannot read {path}: {reason(error)}") from None
    if not found:
        raise Problem(f"no stories in {path}: it is empty")


def _read_text(file, path):
    story = []
    for line in file:
        if "\0" in line:
            raise Problem(f"cannot read {path}: it is not text")
        *ended, rest = line.split(END_TEXT)
        for part in ended:
            yield "".join([*story, part]), None
            story = []
        story.append(rest)
    yield "".join(story), None


def _read_jsonl(file, path):
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                story = json.loads(line)
                text, split = story["text"], story.get("split")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise Problem(f'line {number} of {path} is not a JSON object with a "text"')
            yield text, split


def write_tokens(stories, path):
    """Encode an iterable of texts into a file of uint16, each closed by `END`. Returns (stories, tokens, bytes)."""
    stories, counts, name = iter(stories), [0, 0, 0], path.name.replace(".new", "")
    try:
        with replacing(path) as part, open(part, "wb") as file:
            while batch := list(itertools.islice(stories, 1000)):
                for tokens in encoding().encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1):
                    file.write(np.array([*tokens, END], dtype=np.uint16).tobytes())
                    counts[1] += len(tokens) + 1
                counts[0] += len(batch)
                counts[2] += sum(len(text.encode(errors="replace")) for text in batch)  # half a surrogate pair has no bytes
                if sys.stderr.isatty():
                    print(f"\r{name}: {counts[0]:,} stories, {counts[1]:,} tokens", end="", file=sys.stderr)
            if not counts[0]:
                raise Problem(f"no stories for {name}")
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    return counts


def load_tokens(name):
    """The tokens of data/NAME.bin, memory-mapped: never copied into memory whole."""
    path, known = FOLDER / f"{name}.bin", FOLDER / ENCODED_WITH
    if not path.exists() or path.stat().st_size < 2:
        raise Problem(f"there is no {path}: run python data.py, or python data.py FILE for stories of your own")
    if known.exists() and known.read_text() != tokenizer_hash():
        raise Problem(f"{path} was encoded with another tokenizer than {TOKENIZER}: make it again with python data.py")
    tokens = np.memmap(path, dtype=np.uint16, mode="r", shape=(path.stat().st_size // 2,))
    if tokens[-1] != END:
        raise Problem(f"{path} does not end with a story's end: make it again with python data.py")
    return tokens


def bounds(tokens):
    """Where the stories of a token file begin and end, their END included: (stories, 2)."""
    ends = np.flatnonzero(np.asarray(tokens) == END) + 1
    return np.stack([np.append(0, ends)[:-1], ends], 1)


def split_stories(tokens):
    """The stories of a token file: a list of lists, each with its END."""
    return [tokens[start:end].tolist() for start, end in bounds(tokens)]


# ---- what is asked for


def instruction(words):
    """The prompt that asks for a story with these three words."""
    return f"Write a story with the words {words[0]}, {words[1]} and {words[2]}.\n"


def read_words(kind):
    """The words of one kind: "nouns", "verbs" or "adjectives"."""
    return _read_list(f"{kind}.txt").split()


def draw_asks(training, held_out, seed=1):
    """Draw asks from the word lists: one word of each kind in random order, no triple twice in any order."""
    draw = random.Random(seed)
    kinds = [read_words(kind) for kind in ("nouns", "verbs", "adjectives")]
    wanted, asks = training + held_out, {}
    for _ in range(100 * wanted):
        words = [draw.choice(kind) for kind in kinds]
        if len(set(words)) == 3 and set(words) != set(DEMO):
            asks.setdefault(frozenset(words), tuple(draw.sample(words, 3)))
        if len(asks) == wanted:
            break
    else:
        raise Problem(f"the word lists in {FOLDER} are too short for {wanted} asks")
    asks = list(asks.values())
    return asks[:training], asks[training:]


def load_asks():
    """The triples to train on: a list of (word, word, word)."""
    return _read_triples("asks-training.txt")


def load_instructions():
    """The triples held out for measuring; none of them, in any order, is among `load_asks()`."""
    return _read_triples("asks-held-out.txt")


def _read_list(name):
    try:
        return (FOLDER / name).read_text()
    except (OSError, ValueError) as error:
        raise Problem(f"cannot read {FOLDER / name}: {reason(error)}; `git checkout data` brings it back") from None


def _read_triples(name):
    triples = [tuple(line.split()) for line in _read_list(name).splitlines()]
    for number, words in enumerate(triples, 1):
        if len(words) != 3:
            raise Problem(f"line {number} of {FOLDER / name} is not three words; `git checkout data` brings the file back")
    return triples


# ---- the script


def fetch(name):
    """Download one file of TinyStories into data/, with a progress bar; goes on where an earlier try broke off."""
    try:
        from huggingface_hub import hf_hub_download, logging
    except ImportError:
        raise Problem("fetching stories needs huggingface_hub: pip install -r requirements-extra.txt") from None
    logging.set_verbosity_error()  # its retries would bury the one line that helps
    try:
        return hf_hub_download("roneneldan/TinyStories", name, repo_type="dataset", local_dir=FOLDER / "tinystories")
    except Exception as error:  # every kind of network failure has a class of its own there
        raise Problem(
            f"cannot fetch {name} of roneneldan/TinyStories ({type(error).__name__}): is there a network? "
            "With stories on disk: python data.py FILE... --valid FILE"
        ) from None


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="stories to train on (default: fetch TinyStories)")
    parser.add_argument("--valid", metavar="FILE", help='stories to measure on (default: those of FILE with "split": "valid")')
    parser.add_argument("--train-tokenizer", action="store_true", help="learn data/tokenizer.tiktoken from these stories first")
    parser.add_argument("--draw-asks", action="store_true", help="draw the asks again from the word lists, and do nothing else")
    args = parser.parse_args()
    if args.draw_asks:
        training, held_out = draw_asks(4000, 200)
        for name, asks in ("asks-training.txt", training), ("asks-held-out.txt", held_out):
            write_whole(FOLDER / name, "".join(" ".join(words) + "\n" for words in asks).encode())
        return
    if args.valid and not args.files:
        raise Problem("--valid goes with files to train on: python data.py FILE... --valid FILE")
    if not args.files:
        args.files, args.valid = [fetch("TinyStories-train.txt")], fetch("TinyStories-valid.txt")

    def stories(split):
        if split == "valid" and args.valid:
            yield from (text for text, _ in read_stories(args.valid))
            return
        for path in args.files:
            yield from (text for text, found in read_stories(path) if (found == "valid") == (split == "valid"))

    if not any(True for _ in stories("valid")):
        raise Problem('no stories to measure on: pass --valid FILE, or JSON lines with "split": "valid" among them')
    if args.train_tokenizer:
        train_tokenizer(stories("train"))
    for split in "valid", "train":
        number, tokens, size = write_tokens(stories(split), FOLDER / f"{split}.new.bin")
        print(f"{split}: {number:,} stories, {tokens:,} tokens, {size / max(tokens, 1):.2f} bytes a token")
    for split in "valid", "train":  # at once: an old one beside a new one may hold the same stories
        os.replace(FOLDER / f"{split}.new.bin", FOLDER / f"{split}.bin")
    write_whole(FOLDER / ENCODED_WITH, tokenizer_hash().encode())


if __name__ == "__main__":
    main_guard(main)
