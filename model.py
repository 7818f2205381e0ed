"""The story model: a Llama of 15.7M parameters, and its checkpoints.

RMSNorm before each block, rotary positions, SwiGLU, no biases, one matrix for reading tokens in and out. The layout is
Llama's, so the weights can be carried over to other engines one for one.

    python model.py                     print the parameters of a model, part by part
"""

import copy
import ctypes
import dataclasses
import os
import pickle
import platform
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from cli import Parser, Problem, main_guard, reason
from data import TOKENIZER, VOCABULARY, replacing, tokenizer_hash

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
FINETUNED = CHECKPOINTS / "finetuned" / "model.pt"
ROUND = 64  # how many tokens are computed is rounded up to a multiple: in bfloat16, each new number compiles products of its own


def missing(number):
    """How many are missing to the next multiple of `ROUND`."""
    return -number % ROUND


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = VOCABULARY
    context: int = 512
    layers: int = 8
    heads: int = 6
    channels: int = 384
    hidden: int = 1024


def rotary(context, channels):
    """Cosines and sines of the rotary positions, (context, channels) each: Su et al. 2021, equation 34, theta 10,000.

    Channel i turns together with channel i + channels / 2 (the half-rotation layout, that of Llama at Hugging Face).
    """
    frequencies = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Turn queries or keys, (stories, heads, tokens, channels), to their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Real:
    """Where the real tokens of a padded batch are. real: a mask (stories, tokens).

    So much of the padding counts as real that their number is a multiple of `ROUND`, where there is so much.
    """

    def __init__(self, real):
        places, padding = (each.flatten().nonzero().squeeze(1) for each in (real, ~real))
        self.shape, self.places = real.shape, torch.cat((places, padding[: missing(len(places))]))

    def spread(self, x):
        """(real tokens, channels) -> (stories, tokens, channels), zeros on the padding."""
        padded = x.new_zeros(self.shape.numel(), x.shape[-1])
        return padded.index_put_((self.places,), x).view(*self.shape, -1)

    def gather(self, x):
        """The reverse: (stories, tokens, channels) -> (real tokens, channels)."""
        return x.flatten(0, 1).index_select(0, self.places)  # faster backwards than x[places]


class Cache:
    """The keys and values of the tokens that one block has read, (rows, heads, longest, channels / heads) each."""

    def __init__(self, config, rows, longest, device, dtype):
        shape = (rows, config.heads, longest, config.channels // config.heads)
        self.keys, self.values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self.length = 0

    def extend(self, keys, values):
        """Append new keys and values; return all of them up to now."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows):
        """Drop all rows but these, numbers (rows,)."""
        for name in "keys", "values":
            old = getattr(self, name)
            new = old.new_empty(len(rows), *old.shape[1:])
            new[:, :, : self.length] = old[rows, :, : self.length]
            setattr(self, name, new)


def attend(q, k, v):
    """softmax(q k^T / sqrt(channels)) v, (stories, heads, tokens, channels) each: Vaswani et al. 2017, equation 1.

    No query sees a later key; a single one is the last, and sees all.
    """
    if q.shape[2] == 1 or q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    # On a CPU in bfloat16, the backward of PyTorch's own takes twice as long as these products.
    later = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    scores = torch.baddbmm(later, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.channels, config.channels, bias=False)
        self.k = nn.Linear(config.channels, config.channels, bias=False)
        self.v = nn.Linear(config.channels, config.channels, bias=False)
        self.o = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x, cos, sin, cache, real):
        """(stories, tokens, channels), or (real tokens, channels) where `real` is a `Real`; the same comes out."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if real is not None:  # attention alone needs the rows side by side
            q, k, v = real.spread(q), real.spread(k), real.spread(v)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # (stories, heads, tokens, channels / heads)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v).transpose(1, 2).flatten(2)
        return self.o(y if real is None else real.gather(y))


class FeedForward(nn.Module):
    """SwiGLU: Shazeer 2020, equation 6."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.channels, config.hidden, bias=False)
        self.up = nn.Linear(config.channels, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.channels, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.channels, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.channels, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x, cos, sin, cache=None, real=None):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache, real)
        return x + self.feed_forward(self.feed_forward_norm(x))


class StoryModel(nn.Module):
    """Tokens (stories, tokens) to logits (stories, tokens, vocabulary)."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config = config or Config()
        self.embedding = nn.Embedding(config.vocabulary, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.channels, eps=1e-5)
        cos, sin = rotary(config.context, config.channels // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what a block adds is zero at first: it starts as the identity
                nn.init.normal_(weight, std=0.0 if name.endswith(("o.weight", "down.weight")) else 0.02)

    def caches(self, rows, longest):
        """An empty cache a block, for `rows` texts of at most `longest` tokens."""
        return [Cache(self.config, rows, longest, self.cos.device, self.embedding.weight.dtype) for _ in self.blocks]

    def channels(self, tokens, caches=None, real=None):
        """What the output layer and the critic read: (stories, tokens) -> (stories, tokens, channels).

        real: a mask (stories, tokens) that is true on each row's beginning and false on the padding after it; then only
        its tokens are computed, and returned one after the other: (real tokens, channels).
        """
        start = caches[0].length if caches else 0
        end = start + tokens.shape[1]
        if start and tokens.shape[1] > 1:
            raise Problem("once a cache holds tokens, the model reads one at a time")
        if end > self.config.context:
            raise Problem(f"{end} tokens do not fit a context of {self.config.context}")
        layout = None if real is None else Real(real)
        x = self.embedding(tokens if real is None else tokens.flatten()[layout.places])
        cos, sin = self.cos[start:end], self.sin[start:end]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, cos, sin, cache, layout)
        return self.norm(x if real is None else x[: int(real.sum())])

    def logits(self, channels):
        """The output layer: the embedding once more, the other way round."""
        return F.linear(channels, self.embedding.weight)

    def forward(self, tokens):
        return self.logits(self.channels(tokens))


# ---- where it runs


def pick_device(name=None):
    """The device and the precision to compute in: CUDA, then Apple's MPS, then the CPU, or the one named.

    bfloat16 where the hardware multiplies it natively, float32 elsewhere: emulated, it is eight times slower.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type not in ("cuda", "mps", "cpu"):
            raise ValueError
    except (RuntimeError, AssertionError, ValueError, ImportError):
        raise Problem(f"there is no device {name!r} here: try --device cpu") from None
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        can = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        native = bool(can.get("amx_bf16") or can.get("avx512_bf16"))
    forbidden = os.environ.get("STORY_FLOAT32", "0") not in ("", "0")
    return device, torch.bfloat16 if native and not forbidden else torch.float32


class Precision:
    """How a device computes: calling it gives the context in which matrix products take `dtype`."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype

    def __call__(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def keep_freed_memory():
    """Have glibc keep freed memory for the next step, not return it to the system and fault it in again, page by page."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
        size, page = ctypes.c_size_t(2**31), 2**21
        libc.malloc.restype = ctypes.c_void_p
        if start := libc.malloc(size):  # the heap's next 2 GiB, in pages of 2 MiB: only what is used takes memory
            libc.madvise(ctypes.c_void_p(-(-start // page) * page), ctypes.c_size_t(size.value - page), 14)  # MADV_HUGEPAGE
            libc.free(ctypes.c_void_p(start))


def for_writing(model, dtype):
    """A copy, not compiled, all in `dtype`: so its cache is in bfloat16 too, and no weight is cast again."""
    return copy.deepcopy(model).to(dtype)


# ---- stories in a batch


def pack(prompts, stories, device="cpu"):
    """Put prompts and stories, lists of token lists, into one padded batch.

    Returns tokens (stories, longest) and mask (stories, longest - 1): mask[i, t] is 1 where tokens[i, t + 1] is a token
    of story i. The mask comes from the lengths, so an end of text that a model wrote counts, and padding never does.

        pack([[1, 2]], [[3, 4]])   ->   [[1, 2, 3, 4]], [[0, 1, 1]]
    """
    longest = max(len(prompt) + len(story) for prompt, story in zip(prompts, stories, strict=True))
    tokens = torch.zeros(len(stories), longest, dtype=torch.long)
    mask = torch.zeros(len(stories), longest - 1)
    for row, (prompt, story) in enumerate(zip(prompts, stories)):
        tokens[row, : len(prompt) + len(story)] = torch.tensor(prompt + story)
        mask[row, len(prompt) - 1 : len(prompt) + len(story) - 1] = 1
    return tokens.to(device), mask.to(device)


def story_channels(model, tokens, mask):
    """The channels from which each story token is predicted: (story tokens of the whole batch, channels).

    Only real tokens are computed: what follows a story's last token, and its padding, costs nothing but in attention.
    """
    chosen = mask.bool()
    real = chosen.flip(1).cumsum(1).flip(1) > 0  # (stories, longest - 1): up to the last story token's predecessor
    return model.channels(tokens[:, :-1], real=real).index_select(0, chosen[real].nonzero().squeeze(1))


def log_probs(model, channels, targets):
    """log p of the target tokens, (tokens,), from the channels before them, (tokens, channels). float32 at least."""
    logits = model.logits(F.pad(channels, (0, 0, 0, missing(len(channels)))))[: len(channels)]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)  # a third of cross_entropy's time


def token_log_probs(model, tokens, mask=None):
    """log p of each token given those before it: (stories, longest) -> float32 (stories, longest - 1).

    Entry [i, t] is of tokens[i, t + 1]. Where a mask is given, entries outside it are zero, and are not computed.
    """
    targets = tokens[:, 1:]
    if mask is None:
        return log_probs(model, model.channels(tokens[:, :-1]).flatten(0, 1), targets.flatten()).view_as(targets)
    chosen = mask.bool()
    found = log_probs(model, story_channels(model, tokens, chosen), targets[chosen])
    return found.new_zeros(chosen.shape).masked_scatter(chosen, found)


# ---- checkpoints


def save_checkpoint(path, model, **extra):
    """Write a model, in its own precision, and plain values beside it. The old file stays whole until the new one is."""
    save({"config": dataclasses.asdict(model.config), "tokenizer": tokenizer_hash(), "model": model.state_dict(), **extra}, path)


def save(content, path):
    """`torch.save` to a temporary file that then takes the path's place. Raises `Problem` where it cannot."""
    with replacing(Path(path), (OSError, RuntimeError)) as part:
        torch.save(content, part)


def read(path):
    """What `save` wrote: tensors and plain values. Code in a file is refused, never run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of foreign pickles: one line says enough
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        folder = Path(path).resolve().parent
        ships = folder in (CHECKPOINTS / "pretrained", CHECKPOINTS / "finetuned")
        raise Problem(f"there is no checkpoint {path}" + f": `git checkout checkpoints/{folder.name}` brings it back" * ships) from None
    except OSError as error:
        raise Problem(f"cannot read {path}: {reason(error)}") from None
    except pickle.UnpicklingError:
        raise Problem(f"cannot read {path}: it holds something other than tensors and plain values, and was not run") from None
    except Exception as error:  # what a foreign or damaged file makes the reader stumble over has no class of its own
        said = str(error).partition("\n")[0][:80]
        raise Problem(f"cannot read {path}: it is no checkpoint, or only a part of one ({said})") from None


def load_checkpoint(path, device="cpu"):
    """The model of a checkpoint, in float32, in evaluation mode. Raises `Problem` if the file or its shape do not fit."""
    content, tokenizer = read(path), tokenizer_hash()
    try:
        config = Config(**content["config"])
        fits = content["tokenizer"] == tokenizer and config.vocabulary == VOCABULARY
        model = StoryModel(config)
        model.load_state_dict(content["model"])
    except (LookupError, ArithmeticError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        said = str(error).partition("\n")[0][:80]
        raise Problem(f"{path} is not a story model, or of another shape than it says ({said})") from None
    if not fits:
        raise Problem(f"{path} was trained with another tokenizer than {TOKENIZER}: train it again")
    return model.to(device).eval()


def main():
    parser = Parser(__doc__)
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", default=FINETUNED, help="(default checkpoints/finetuned/model.pt)")
    args = parser.parse_args()
    model = load_checkpoint(args.start)
    for name, weight in model.named_parameters():
        print(f"{name:40} {str(tuple(weight.shape)):>14} {weight.numel():>10,}")
    print(f"{'all':40} {'':14} {sum(weight.numel() for weight in model.parameters()):>10,}")


if __name__ == "__main__":
    main_guard(main)
