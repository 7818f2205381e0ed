"""Pairs of stories: of several for one ask, the one that uses most of the words and the one that uses fewest.

    python preferences.py                            data/preferences.jsonl, written by the fine-tuned model
    python preferences.py --asks 1000 --stories 8 --out more.jsonl
    python preferences.py --resume                   go on where it stopped

The first line holds the settings, each of the others a pair: the ask, and the chosen and the rejected story, each with
its score, token ids and text. Asks whose stories all score alike give no pair. Nobody is asked for an opinion: the
preferences are the reward's. Until it is complete, the file's name ends in .part.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch

import model as models
from cli import Parser, Problem, main_guard, output, positive, progress, reason, say, several, whole
from data import FOLDER, STORY_TOKENS, VOCABULARY, decode, encode, instruction, load_asks, part_of, write_whole
from model import FINETUNED, for_writing, load_checkpoint
from rewards import words_used
from run import file_hash
from sample import ROWS, generate

PAIRS = FOLDER / "preferences.jsonl"


def pair(words, stories):
    """The best and the worst of several stories, token lists, for one ask; None where all score alike.

    Of equally good ones the first is taken.
    """
    texts = [decode(story) for story in stories]
    scores = [words_used(text, words) for text in texts]
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        return None
    told = lambda row: {"score": scores[row], "tokens": stories[row], "text": texts[row]}
    return {"ask": list(words), "chosen": told(best), "rejected": told(worst)}


def load_pairs(path=PAIRS):
    """The pairs of a file, as `pair` made them, and the hash of the model that wrote them.

    Raises `Problem` where there is none, or the file is something else.
    """
    known = lambda story: bool(story["tokens"]) and all(type(token) is int and 0 <= token < VOCABULARY for token in story["tokens"])
    try:
        settings, *pairs = [json.loads(line) for line in Path(path).read_text().splitlines()]
        writer = settings["from"]
        if not all(len(each["ask"]) == 3 and known(each["chosen"]) and known(each["rejected"]) for each in pairs):
            raise ValueError
    except FileNotFoundError:
        begun = ", with --resume: it was stopped before its end" * part_of(Path(path)).exists()
        raise Problem(f"there is no {path}: run python preferences.py{begun}") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise Problem(f"cannot read {path}: it is no file of pairs, or only a part of one: run preferences.py --overwrite") from None
    if not pairs:
        raise Problem(f"no pairs in {path}: run python preferences.py with more --asks")
    return pairs, writer


def asks_of(seed):
    """All training asks, in an order of the seed's own."""
    every = load_asks()
    return [every[number] for number in np.random.default_rng(seed).permutation(len(every))]


def main():
    parser = Parser(__doc__)
    parser.add_argument("--asks", type=positive, default=500, help="how many of the training asks (default 500)")
    parser.add_argument("--stories", type=several, default=8, help="stories written for each (default 8)")
    parser.add_argument("--out", type=output, default=PAIRS, metavar="FILE", help="(default data/preferences.jsonl)")
    parser.add_argument("--seed", type=whole, default=1, help="of the asks and the stories (default 1)")
    parser.add_argument("--from", dest="start", metavar="FILE", default=FINETUNED, help="who writes (default: the fine-tuned model)")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    parser.add_argument("--resume", action="store_true", help="go on with a file that is not complete")
    parser.add_argument("--overwrite", action="store_true", help="replace the file, once the new one is complete")
    args = parser.parse_args()
    if args.resume and args.overwrite:
        raise Problem("--resume and --overwrite exclude each other")
    part = part_of(args.out)
    begun = next((file for file in (part, args.out) if file.exists()), None)
    if args.resume and not begun:
        raise Problem(f"nothing to resume: there is no {args.out}")
    if begun and not (args.resume or args.overwrite):
        raise Problem(f"there is {begun} already: --resume goes on with it, --overwrite replaces it")
    device, dtype = models.pick_device(args.device)
    model = for_writing(load_checkpoint(args.start, device), dtype)
    models.keep_freed_memory()
    every = asks_of(args.seed)
    if args.asks > len(every):
        raise Problem(f"--asks {args.asks}: there are {len(every)} training asks")
    asks = every[: args.asks]
    settings = {"from": file_hash(args.start), "seed": args.seed, "stories": args.stories}
    done, lines, at_once = 0, [json.dumps(settings)], max(1, ROWS // args.stories)
    if args.resume and begun.stat().st_size:
        done, lines = written(begun, settings, len(asks), at_once)
    try:
        write_whole(part, "".join(line + "\n" for line in lines).encode())
        with open(part, "a") as file:
            for start in range(done, len(asks), at_once):
                progress(start, len(asks), f"{len(lines) - 1} pairs")
                group = asks[start : start + at_once]
                generator = torch.Generator().manual_seed(args.seed * len(every) + start)  # so that resuming changes nothing
                prompts = [encode(instruction(words)) for words in group for _ in range(args.stories)]
                stories = generate(model, prompts, STORY_TOKENS, generator=generator)
                for row, words in enumerate(group):
                    if made := pair(words, stories[row * args.stories : (row + 1) * args.stories]):
                        lines.append(json.dumps({"number": start + row, **made}))
                        file.write(lines[-1] + "\n")
                file.flush()
        os.replace(part, args.out)
    except OSError as error:
        raise Problem(f"cannot write {args.out}: {reason(error)}") from None
    say(f"{len(lines) - 1} pairs from {len(asks)} asks, {len(asks) - len(lines) + 1} tied: {args.out}")


def written(path, settings, wanted, at_once):
    """How many asks of a broken-off file need not be asked again, and its lines up to there, the settings first.

    at_once: the asks of a batch, the last of which is asked again. Raises `Problem` where the file goes on beyond the `wanted`
    asks, or is not of these settings.
    """
    try:
        first, *lines = path.read_text().splitlines()
        if json.loads(first) != settings:
            raise Problem(f"{path} was made with {first}: resume it with the same, or --overwrite it")
        whole_lines = [line for line in lines if line.endswith("}}")]  # the last may be cut off
        last = json.loads(whole_lines[-1])["number"] if whole_lines else 0
        if last >= wanted:
            raise Problem(f"{path} holds the pairs of more asks already than --asks {wanted}")
        done = last // at_once * at_once
        return done, [first, *(line for line in whole_lines if json.loads(line)["number"] < done)]
    except Problem:
        raise
    except (OSError, ValueError, LookupError, TypeError):
        raise Problem(f"cannot go on with {path}: it is not what preferences.py writes; --overwrite makes it anew") from None


if __name__ == "__main__":
    main_guard(main)
