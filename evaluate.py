"""Measuring: do the stories use the words asked for, do they end, and is the model still good at plain stories?

    python evaluate.py                                          every final checkpoint there is
    python evaluate.py checkpoints/grpo/kl-0.05/model.pt        those named
    python evaluate.py --json results.json --plain held-out.txt

words used    share of the words asked for that a story uses, on the held-out asks, with a 95% interval (bootstrap over asks)
bits/byte     loss on plain stories: what the training for instructions and rewards has cost elsewhere
ended         share of stories that reach their end of text within 200 tokens
repeats       how many times a used word is used: a model that hacks the reward says it again and again
pairs         distinct pairs of neighbouring words in a story, over all pairs: low where it goes in circles
KL            from the fine-tuned model, in nats, summed over a story
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import torch

import data
import model as models
from cli import Parser, Problem, main_guard, output, positive, progress, say
from data import END, STORY_TOKENS, decode, encode, instruction, load_instructions
from model import CHECKPOINTS, FINETUNED, for_writing, load_checkpoint, pack, token_log_probs
from rewards import count, words_used
from sample import ROWS, generate

PLAIN = data.FOLDER / "plain.txt"
SCORED = 16  # stories read at once


def words_rate(stories, asks):
    """The share of the asked words used, averaged over stories. stories: texts; asks: as many word triples."""
    return float(np.mean([words_used(story, words) for story, words in zip(stories, asks, strict=True)]))


def ended_rate(stories):
    """The share of stories, token lists, that end with an end of text."""
    return float(np.mean([story[-1:] == [END] for story in stories]))


def repeats(stories, asks):
    """How many times a used word is used, averaged over all words asked for and used; NaN if none was."""
    counts = [count(story, word) for story, words in zip(stories, asks, strict=True) for word in words]
    return float(np.mean([number for number in counts if number])) if any(counts) else math.nan


def distinct_pairs(stories):
    """Distinct pairs of neighbouring words over all pairs of a story, averaged over the texts that have a pair."""
    shares = []
    for story in stories:
        words = re.findall(r"\w+", story.lower())
        if pairs := list(zip(words, words[1:])):
            shares.append(len(set(pairs)) / len(pairs))
    return float(np.mean(shares)) if shares else math.nan


def interval(shares):
    """95% bootstrap interval of the mean of `shares` (asks, stories an ask), resampling the asks."""
    means = np.asarray(shares).mean(1)
    draws = np.random.default_rng(0).integers(len(means), size=(2000, len(means)))
    low, high = np.percentile(means[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def kl_terms(log_probs, reference):
    """e^r - r - 1 with r = log p_ref - log p, per token: a KL estimate that is never negative (Schulman 2020, "k3").

    r is clamped before the exponential: clamped after it, an overflow still makes NaN gradients.
    """
    r = (reference - log_probs).clamp(-20, 20)
    return r.expm1() - r  # accurate near zero, where e^r - 1 would be rounding alone


@torch.no_grad()
def bits_per_byte(model, stories):
    """Bits that the model needs for a byte of plain stories, each read from its beginning.

    stories: token lists, each with its END. What exceeds the model's context is left out of bits and bytes alike.
    """
    stories = sorted((story[: model.config.context] for story in stories), key=len)
    nats = 0.0
    for start in range(0, len(stories), SCORED):
        group = stories[start : start + SCORED]
        tokens, mask = pack([[END]] * len(group), group, model.cos.device)
        nats -= token_log_probs(model, tokens, mask).sum().item()
    return nats / math.log(2) / sum(len(decode(story).encode()) for story in stories)


@torch.no_grad()
def drift(model, reference, prompts, stories):
    """KL from the reference, in nats: summed over a story's tokens, averaged over stories."""
    total = 0.0
    order = sorted(range(len(stories)), key=lambda row: len(stories[row]))
    for start in range(0, len(order), SCORED):
        rows = order[start : start + SCORED]
        tokens, mask = pack([prompts[row] for row in rows], [stories[row] for row in rows], model.cos.device)
        scores = [token_log_probs(each, tokens, mask) for each in (model, reference)]
        total += (kl_terms(*scores) * mask).sum().item()
    return total / len(stories)


def write_all(model, precision, asks, show=""):
    """A story for each ask, `ROWS` at once. Returns texts and token lists. Training's random numbers are left alone."""
    generator = torch.Generator().manual_seed(0)
    prompts = [encode(instruction(words)) for words in asks]
    writer = for_writing(model, precision.dtype)
    stories = []
    for start in range(0, len(prompts), ROWS):
        stories += generate(writer, prompts[start : start + ROWS], STORY_TOKENS, generator=generator)
        if show:
            progress(len(stories), len(prompts), show)
    return [decode(story) for story in stories], stories


def measure(model, precision, asks, each=1, plain=(), reference=None, show=""):
    """All figures of one model, as in the JSON file.

    precision: a `model.Precision`; asks: word triples; each: stories written for an ask; plain: token lists, without
    which there is no loss; without a reference there is no "kl".
    """
    asked = [words for words in asks for _ in range(each)]
    texts, stories = write_all(model, precision, asked, show)
    shares = np.reshape([words_used(text, words) for text, words in zip(texts, asked)], (len(asks), each))
    low, high = interval(shares)
    with precision():
        return {
            "words_used": float(shares.mean()),
            "words_used_low": low,
            "words_used_high": high,
            "plain_bits_per_byte": bits_per_byte(model, plain) if plain else None,
            "ended": ended_rate(stories),
            "repeats": repeats(texts, asked),
            "distinct_pairs": distinct_pairs(texts),
            "kl": drift(model, reference, [encode(instruction(words)) for words in asked], stories) if reference is not None else None,
        }


def load_plain(path=PLAIN):
    """The plain stories of a file as token lists."""
    return [[*encode(text), END] for text, _ in data.read_stories(path)]


def model_name(path):
    """checkpoints/grpo/kl-0.05/model.pt -> grpo-kl-0.05; a checkpoint along the way keeps its own name too."""
    path = Path(path).resolve()
    folder, top = path.parent, CHECKPOINTS.resolve()
    label = "-".join(folder.relative_to(top).parts) if folder.is_relative_to(top) else folder.name
    return label if path.name == "model.pt" else f"{label}/{path.stem}"


def final_checkpoints():
    """The final model of every run, the pretrained and the fine-tuned first."""
    first = [CHECKPOINTS / name / "model.pt" for name in ("pretrained", "finetuned")]
    return [path for path in first if path.exists()] + sorted(set(CHECKPOINTS.rglob("model.pt")) - set(first))


HEADING = "words used (95%)        bits/byte   ended  repeats  pairs      KL"


def table_row(row):
    """A row of the JSON file as a line of text, without its name."""
    show = lambda key, style: f"{'-':>{style.partition('.')[0]}}" if row[key] is None or math.isnan(row[key]) else format(row[key], style)
    used = f"{row['words_used']:.1%} ({row['words_used_low']:.1%} to {row['words_used_high']:.1%})"
    return f"{used:23} {show('plain_bits_per_byte', '9.3f')}  {row['ended']:6.1%}  " + "  ".join(
        [show("repeats", "7.2f"), show("distinct_pairs", "5.2f"), show("kl", "6.2f")]
    )


def for_json(content):
    """Figures, in dicts and lists, as JSON can hold them, which knows no NaN."""
    if isinstance(content, dict):
        return {key: for_json(value) for key, value in content.items()}
    if isinstance(content, list):
        return [for_json(value) for value in content]
    return None if content != content else content


def write_json(path, content):
    """Write figures to a file, indented; the old file stays whole until the new one is."""
    data.write_whole(path, (json.dumps(for_json(content), indent=2) + "\n").encode())


def main():
    parser = Parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", metavar="PATH", help="checkpoints to compare (default: every final one)")
    parser.add_argument("--plain", metavar="FILE", default=PLAIN, help="plain stories for the loss (default data/plain.txt)")
    parser.add_argument("--stories", type=positive, default=4, help="stories written for each of the 200 asks (default 4)")
    parser.add_argument("--json", metavar="FILE", type=output, help="write the figures there too")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    args = parser.parse_args()
    device, dtype = models.pick_device(args.device)
    models.keep_freed_memory()
    paths = args.checkpoints or final_checkpoints()
    if not paths:
        raise Problem(f"there is no checkpoint below {CHECKPOINTS}")
    for path in paths:  # what cannot be read is refused before the first is measured
        load_checkpoint(path)
    plain = load_plain(args.plain)
    reference = load_checkpoint(FINETUNED, device) if FINETUNED.exists() else None
    rows, width = [], max(len(model_name(path)) for path in paths)
    say(f"{'':{width}}  {HEADING}")
    for path in paths:
        name, model = model_name(path), load_checkpoint(path, device)
        against = None if name.startswith("pretrained") else reference
        figures = measure(model, models.Precision(device, dtype), load_instructions(), args.stories, plain, against, show=name)
        rows.append({"name": name, **figures})
        say(f"{name:{width}}  {table_row(rows[-1])}")
        if args.json:
            write_json(args.json, {"models": rows})


if __name__ == "__main__":
    main_guard(main)
