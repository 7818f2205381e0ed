"""Writing stories.

python sample.py kite river brave                 one story, printed as it is written
python sample.py --count 8 --seed 3               eight about rain, cake and jump, with their scores
python sample.py --temperature 0.5 --top-k 40     more of what is likely
python sample.py --greedy --from checkpoints/grpo/kl-0.05/model.pt
"""

import codecs
import math
import secrets

import torch

from cli import Parser, Problem, kind, main_guard, positive, whole
from data import DEMO, END, STORY_TOKENS, decode, encode, encoding, instruction
from model import FINETUNED, for_writing, load_checkpoint, pick_device
from rewards import check_words, words_used

ROWS = 128  # stories written at once
LEAVE = 8  # stories that have ended leave the batch so many at a time: that copies the cache, and each new size costs too
warmth = kind(float, lambda value: value == 0 or 0.01 <= value <= 100, "0 or a number from 0.01 to 100")


def choose(logits, uniforms, temperature=1.0, top_k=None):
    """The token at each row's uniform number, (rows,), in the cumulative distribution of its logits (rows, vocabulary).

    Temperature 0 takes the likeliest. Half the time of `torch.multinomial`, and the same numbers choose the same tokens
    in any batch, but for the rounding of the logits.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        likeliest = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    cumulative = logits.softmax(-1).cumsum(-1)  # (rows, vocabulary)
    # Against the last sum and not 1, which rounding may miss; `right` steps over tokens of probability zero.
    picked = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return picked.squeeze(1).clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def tokens_written(model, prompts, max_tokens, temperature=1.0, top_k=None, generator=None):
    """Yield (rows, tokens) at each step: which stories got a token, and which token.

    No padding: all rows start at the shortest prompt's length, and the longer prompts' own tokens are fed to their rows
    until they run out. So all rows are always at one position of the key-value cache.
    """
    if not prompts or not all(prompts):
        raise Problem("every prompt needs a token")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest + max_tokens > model.config.context + 1:
        raise Problem(f"{longest} tokens of prompt and {max_tokens} of story do not fit a context of {model.config.context}")
    device = model.cos.device
    given = torch.tensor([prompt + [END] * (longest - len(prompt)) for prompt in prompts])  # (stories, longest)
    uniforms = torch.rand(len(prompts), max_tokens, generator=generator)
    rows = torch.arange(len(prompts))  # the stories that the cache still holds
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    caches = model.caches(len(prompts), longest + max_tokens)
    new = given[:, :shortest]
    for position in range(shortest, longest + max_tokens):
        logits = model.logits(model.channels(new.to(device), caches)[:, -1]).float()  # (rows, vocabulary)
        step = position - lengths[rows]  # the story token that each row is at; below 0 it still reads its prompt
        chosen = choose(logits, uniforms[rows, step.clamp(0, max_tokens - 1)].to(device), temperature, top_k).cpu()
        reading = step < 0
        chosen = torch.where(reading, given[rows, min(position, longest - 1)], chosen)
        writing = ~reading & ~ended
        yield rows[writing], chosen[writing]
        ended |= writing & ((chosen == END) | (step == max_tokens - 1))
        if ended.all():
            return
        if (size := math.ceil(int((~ended).sum()) / LEAVE) * LEAVE) < len(rows):
            kept = ended.argsort(stable=True)[:size].sort().values
            for cache in caches:
                cache.keep(kept.to(device))
            rows, chosen, ended = rows[kept], chosen[kept], ended[kept]
        new = chosen[:, None]


def generate(model, prompts, max_tokens, temperature=1.0, top_k=None, generator=None):
    """Write a story for each prompt, all at once.

    prompts: token lists, of any lengths. Returns token lists without the prompts; each stops after its first END, which
    it keeps, or at `max_tokens`. Temperature 0 is greedy. `generator` is a CPU generator whatever the device.
    """
    stories = [[] for _ in prompts]
    for rows, tokens in tokens_written(model, prompts, max_tokens, temperature, top_k, generator):
        for row, token in zip(rows.tolist(), tokens.tolist()):
            stories[row].append(token)
    return stories


def write(model, words, max_tokens=STORY_TOKENS, temperature=1.0, top_k=None, generator=None, show=lambda piece: None):
    """Write one story with these words, as text. `show` is called with each piece of text as soon as it is written."""
    text, pieces = "", codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
    for _, tokens in tokens_written(model, [encode(instruction(words))], max_tokens, temperature, top_k, generator):
        if (token := tokens.item()) != END:
            text += (piece := pieces.decode(encoding().decode_single_token_bytes(token)))
            show(piece)
    if piece := pieces.decode(b"", final=True):  # what a story cut off in the middle of a character leaves
        show(piece)
    return text + piece


def check_ask(words):
    """The three words of an ask, lower case; raises `Problem` if no story could use them."""
    if len(words) != 3:
        raise Problem(f"a story is asked for with three words, not {len(words)}: python sample.py kite river brave")
    check_words(words)
    return tuple(word.lower() for word in words)


def main():
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="three words for the story to use (default: rain cake jump)")
    parser.add_argument("--count", type=positive, default=1, help="how many stories to write (default 1)")
    parser.add_argument("--temperature", type=warmth, default=1.0, help="below 1 likely tokens become likelier (default 1)")
    parser.add_argument("--greedy", dest="temperature", action="store_const", const=0.0, help="always take the likeliest token")
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens (default: from all)")
    parser.add_argument("--seed", type=whole, help="write the same again (default: another story each time)")
    parser.add_argument("--from", dest="start", metavar="FILE", default=FINETUNED, help="who writes (default: the fine-tuned model)")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    args = parser.parse_args()
    words = check_ask(args.words or DEMO)
    device, dtype = pick_device(args.device)
    model = for_writing(load_checkpoint(args.start, device), dtype)
    generator = torch.Generator().manual_seed(secrets.randbits(32) if args.seed is None else args.seed)
    how = {"temperature": args.temperature, "top_k": args.top_k, "generator": generator}
    if args.count == 1:
        write(model, words, **how, show=lambda piece: print(piece, end="", flush=True))
        print()
        return
    prompts = [encode(instruction(words))] * args.count
    for start in range(0, args.count, ROWS):
        for story in generate(model, prompts[start : start + ROWS], STORY_TOKENS, **how):
            text = decode(story)
            print(f"--- words used {words_used(text, words):.2f}, {len(story)} tokens{', cut off' * (story[-1] != END)}\n{text}\n")


if __name__ == "__main__":
    main_guard(main)
