"""From plain stories to instructions.

    python finetune.py --minutes 14 --overwrite     checkpoints/finetuned/model.pt, as it ships

The stories teach themselves: a training story that uses a noun, a verb and an adjective of our lists is preceded by the
instruction that asks for these three. The loss is on the story's tokens alone, its end of text included, and the first
mention of each asked word counts more. Only stories of at most `LONGEST` tokens are taken, so the model learns to end in
good time: reinforcement learning makes its stories longer, and those too should end within `STORY_TOKENS`.
"""

import re
from collections import Counter

import numpy as np

import evaluate
from cli import Problem, main_guard, progress, say
from data import DEMO, STORY_TOKENS, bounds, decode, encode, instruction, load_instructions, load_tokens, read_words
from model import CHECKPOINTS, pack
from pretrain import Shuffle, optimizers, set_rate, train_step
from run import MEASURE_ASKS, Run, flags

STORIES = 16  # a step
LONGEST = STORY_TOKENS - 30  # tokens of the stories that it learns from
ASKED_COUNTS = 10, 4  # what an asked word's first mention counts in the loss: copying has to be learned from few tokens
FALL = 0.7  # the share of the time in which the first of these becomes the second
MUON, ADAM = 0.01, 0.0015  # learning rates: half of pretraining's


class Instructions:
    """An endless stream of (words, story tokens), made from the stories in a token file."""

    def __init__(self, tokens, random):
        self.tokens, self.random = tokens, random
        every = bounds(tokens)
        self.bounds = every[every[:, 1] - every[:, 0] <= LONGEST]
        self.kinds = [set(read_words(kind)) for kind in ("nouns", "verbs", "adjectives")]
        self.held_out = {frozenset(words) for words in [*load_instructions(), DEMO]}
        self.asked = Counter()
        self.order = Shuffle(len(self.bounds), random)

    def words(self, text):
        """Three listed words that a text uses, one of each kind, in random order; None where it lacks a kind, or where
        it is the very ask that is held out.

        Words that were asked for less often so far are likelier, so that the rare ones are learned too.
        """
        found = set(re.findall(r"\w+", text.lower()))  # whole words, as `rewards.count` takes them
        words = []
        for kind in self.kinds:
            usable = sorted(kind & found)
            if not usable:
                return None
            weights = np.array([1 / (1 + self.asked[word]) for word in usable])
            words.append(usable[self.random.choice(len(usable), p=weights / weights.sum())])
        if frozenset(words) in self.held_out:
            return None
        self.asked.update(words)
        self.random.shuffle(words)
        return words

    def __iter__(self):
        return self

    def __next__(self):
        for _ in range(2 * len(self.bounds)):  # one whole pass at least
            start, end = self.bounds[next(self.order)]
            story = self.tokens[start:end].tolist()
            if words := self.words(decode(story)):
                return words, story
        raise Problem(f"no story of data/train.bin has a listed noun, verb and adjective within {LONGEST} tokens: run python data.py")

    def state_dict(self):
        return {"order": self.order.state_dict(), "asked": dict(self.asked)}

    def load_state_dict(self, state):
        self.order.load_state_dict(state["order"])
        self.asked = Counter(state["asked"])


def asked_count(share):
    """What an asked word's first mention counts after a share of the time: a straight line down, then level."""
    first, last = ASKED_COUNTS
    return first + (last - first) * min(1.0, share / FALL)


def batch(examples, count, device):
    """Pack (words, story) pairs. Returns tokens and what each counts in the loss, 1 or `count`: (stories, longest - 1)."""
    words, stories = zip(*examples)
    prompts = [encode(instruction(each)) for each in words]
    tokens, counts = pack(prompts, stories)
    for row, (prompt, story) in enumerate(zip(prompts, stories)):
        for piece in [encode(f" {word}") for word in words[row]]:
            for start in range(len(story) - len(piece) + 1):
                end = start + len(piece)
                if story[start:end] == piece and not decode(story[end : end + 1])[:1].isalpha():  # not the "bear" of "bearing"
                    counts[row, len(prompt) - 1 + start :][: len(piece)] = count
                    break
    return tokens.to(device), counts.to(device)


def follows(model, precision, asks):
    """Share of words used with the asked words, the same against the next ask's words, and the share that ends."""
    texts, stories = evaluate.write_all(model, precision, asks)
    return evaluate.words_rate(texts, asks), evaluate.words_rate(texts, asks[1:] + asks[:1]), evaluate.ended_rate(stories)


def main():
    args = flags(__doc__, CHECKPOINTS / "pretrained" / "model.pt", unit="steps", budget=24.0).parse_args()
    tokens = load_tokens("train")
    next(Instructions(tokens, np.random.default_rng(0)))  # a story that will do, or a Problem, before anything is thrown away
    run = Run(args, "finetuned")
    model, instructions = run.base, Instructions(tokens, run.random)
    muon, adam = optimizers(model, MUON, ADAM, run.precision.dtype)
    parts = {"model": model, "muon": muon, "adam": adam, "instructions": instructions}
    if args.resume:
        run.load_state(**parts)

    def measure(asks):
        used, other, ended = follows(model, run.precision, asks)
        with run.precision():
            bits = evaluate.bits_per_byte(model, run.plain)
        run.log({"eval/words_used": used, "eval/other_words_used": other, "eval/ended": ended, "eval/plain_loss": bits})
        say(f"words used {used:.1%}, another ask's {other:.1%}, ended {ended:.1%}, plain stories {bits:.4f} bits per byte")

    measured = run.share()
    while not run.over():
        set_rate([muon, adam], run.share())
        examples = batch([next(instructions) for _ in range(STORIES)], asked_count(run.share()), run.device)
        loss = train_step(model, [muon, adam], [examples], run.precision)
        run.steps += 1
        run.log({"train/loss": loss})
        progress(run.share(), 1, f"loss {loss:.3f}")
        if run.steps % 20 == 0:
            say(f"step {run.steps}  {run.minutes:.1f} min  loss {loss:.3f}")
        if run.due():
            run.save_state(**parts)
        if run.share() - measured > 0.1:
            measured = run.share()
            measure(run.asks[:MEASURE_ASKS])
    if run.steps:
        run.save_state(**parts)
        measure(run.asks)
    run.finish(model.bfloat16(), "step")


if __name__ == "__main__":
    main_guard(main)
