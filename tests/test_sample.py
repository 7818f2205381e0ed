import sys

import pytest
import torch
from by_hand import FLOAT32
from conftest import tiny_model

import data
import evaluate
import ppo
import sample
from data import END
from model import pack, token_log_probs

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6, 7], [300, 301], [302], [77, 78, 79, 80], [1, 2]]


@pytest.fixture
def ending():
    """A tiny model that often ends a story early, and often does not."""
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight[END] *= 3
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- choosing a token


def chosen(logits, uniforms, **kwargs):
    return sample.choose(torch.tensor([logits] * len(uniforms)), torch.tensor(uniforms), **kwargs).tolist()


def test_a_uniform_number_finds_its_token_in_the_cumulative_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()
    assert chosen(logits, [0.0, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 0.99]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert chosen(logits, [0.0, 0.66, 0.67, 0.99], top_k=2) == [0, 0, 1, 1]  # 2/3 and 1/3
    assert len(set(chosen([1.0] * 8, [row / 100 for row in range(100)], top_k=3))) == 3  # where all are equally likely too
    assert chosen(logits, [0.72, 0.73, 0.90, 0.91], temperature=0.5) == [0, 1, 1, 2]  # squares: 16, 4, 1, 1 of 22
    assert chosen(logits, [0.0, 0.99], temperature=0) == [0, 0]


@pytest.mark.parametrize("temperature, top_k, bound", [(1.0, None, 24.322), (0.7, None, 24.322), (1.5, 4, 16.266), (1.0, 8, 24.322)])
def test_tokens_are_chosen_by_the_exact_distribution(temperature, top_k, bound):
    """Pearson's chi-square against its 99.9% quantile with 7 or 3 degrees of freedom."""
    logits, draws = torch.tensor([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, 1.5]), 40_000
    powers = (logits.double() / temperature).exp()
    if top_k == 4:
        powers[[0, 1, 3, 5]] = 0
    expected = draws * powers / powers.sum()
    tokens = sample.choose(logits.expand(draws, 8), torch.rand(draws, generator=seeded()), temperature, top_k)
    counts = torch.bincount(tokens, minlength=8)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected) ** 2 / expected)[possible].sum() < bound


def test_the_ends_of_the_unit_interval_never_choose_a_masked_token():
    below_one = 1 - 2**-24  # the largest that torch.rand gives
    for seed in range(20):
        logits = torch.randn(1, 50, generator=seeded(seed))
        allowed = logits[0].topk(3).indices.tolist()
        for uniform in 0.0, below_one:
            assert sample.choose(logits, torch.tensor([uniform]), top_k=3).item() in allowed
    assert chosen([-torch.inf, 0.0, 0.0, -torch.inf], [0.0, below_one]) == [1, 2]
    long = torch.randn(100, data.VOCABULARY, generator=seeded())  # many of their sums end below `below_one`
    long[:, -1] = -torch.inf
    assert (sample.choose(long, torch.full((100,), below_one)) < data.VOCABULARY - 1).all()


def test_the_same_number_chooses_the_same_token_in_any_batch():
    logits, uniforms = torch.randn(64, 100, generator=seeded()), torch.rand(64, generator=seeded(1))
    alone = [sample.choose(logits[row : row + 1], uniforms[row : row + 1]).item() for row in range(64)]
    assert sample.choose(logits, uniforms).tolist() == alone


# ---- writing in a batch


@torch.no_grad()
def test_greedy_equals_a_hand_loop_without_a_cache(ending):
    stories = sample.generate(ending, PROMPTS, 20, temperature=0)
    for prompt, story in zip(PROMPTS, stories):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 20 and (len(tokens) == len(prompt) or tokens[-1] != END):
            tokens.append(ending(torch.tensor([tokens]))[0, -1].argmax().item())
        assert story == tokens[len(prompt) :]
    assert sample.generate(ending, PROMPTS, 20, temperature=0, generator=seeded(5)) == stories


def test_a_seed_writes_the_same_again_and_another_seed_does_not(tiny):
    write = lambda seed: sample.generate(tiny, PROMPTS, 10, generator=seeded(seed))
    assert write(3) == write(3) != write(4)


def test_a_story_is_cut_after_its_first_end_and_none_is_added(ending):
    stories = sample.generate(ending, PROMPTS * 4, 30, generator=seeded())
    ended = [story for story in stories if END in story]
    assert 8 <= len(ended) <= 24  # of 32: both kinds are there, as are early and late ends
    assert len({len(story) for story in ended}) > 4
    assert all(story.index(END) == len(story) - 1 for story in ended)
    assert all(len(story) == 30 for story in stories if END not in story)


def test_a_batch_writes_what_each_prompt_would_alone(ending, monkeypatch):
    prompts = PROMPTS * 4
    uniforms = torch.rand(len(prompts), 30, generator=seeded())
    stories = sample.generate(ending, prompts, 30, generator=seeded())
    for row, (prompt, story) in enumerate(zip(prompts, stories)):
        monkeypatch.setattr(torch, "rand", lambda *_, row=row, **__: uniforms[row : row + 1])
        assert sample.generate(ending, [prompt], 30) == [story]


def test_ended_stories_leave_the_batch_eight_at_a_time(ending, monkeypatch):
    rows, channels = [], type(ending).channels
    monkeypatch.setattr(type(ending), "channels", lambda self, tokens, caches: rows.append(len(tokens)) or channels(self, tokens, caches))
    stories = sample.generate(ending, [[5, 6, 7]] * 64, 30, generator=seeded())
    for token, (computed, following) in enumerate(zip(rows, rows[1:]), 1):
        going = sum(len(story) > token for story in stories)  # after this many tokens
        assert following == min(computed, -(-going // 8) * 8)  # so the batches of all rollouts have few sizes
    assert rows[0] == 64 and len(set(rows)) > 2


@torch.no_grad()
def test_a_story_read_token_by_token_from_a_cache_scores_as_in_one_forward(ending):
    stories = sample.generate(ending, PROMPTS, 30, generator=seeded())
    tokens, mask = pack(PROMPTS, stories)
    recomputed = token_log_probs(ending, tokens, mask)
    for row, (prompt, story) in enumerate(zip(PROMPTS, stories)):
        caches, new = ending.caches(1, 40), prompt
        for at, token in enumerate(story):
            logits = ending.logits(ending.channels(torch.tensor([new]), caches))[0, -1]
            assert logits.log_softmax(-1)[token].item() == pytest.approx(recomputed[row, len(prompt) + at - 1].item(), abs=1e-4)
            new = [token]


def test_stories_of_one_prompt_differ_at_the_first_token_where_the_model_is_unsure(tiny):
    with torch.no_grad():
        assert tiny(torch.tensor([[5, 6, 7]]))[0, -1].softmax(-1).max() < 0.5
    stories = sample.generate(tiny, [[5, 6, 7]] * 8, 1, generator=seeded())
    assert len({story[0] for story in stories}) > 4


@torch.no_grad()
def test_top_k_writes_only_the_likeliest_tokens(tiny):
    (story,) = sample.generate(tiny, [[5, 6, 7]], 30, top_k=2, generator=seeded())
    ranks = []
    for at, token in enumerate(story):
        logits = tiny(torch.tensor([[5, 6, 7, *story[:at]]]))[0, -1]
        ranks.append((logits > logits[token]).sum().item())
    assert set(ranks) == {0, 1}


@pytest.mark.parametrize("training", [True, False])
def test_a_rollout_and_an_evaluation_leave_the_mode_as_it_was(tiny, monkeypatch, training):
    monkeypatch.setattr(ppo, "STORY_TOKENS", 6)
    monkeypatch.setattr(evaluate, "STORY_TOKENS", 6)
    tiny.train(training)
    ppo.rollout(tiny, tiny_model(), data.load_asks()[:2], FLOAT32)
    assert tiny.training == training
    evaluate.measure(tiny, FLOAT32, data.load_asks()[:2], 1, [[5, END]], tiny_model())
    assert tiny.training == training
    sample.write(tiny, data.DEMO, 6)
    assert tiny.training == training


@pytest.mark.parametrize("training", [True, False])
def test_writing_leaves_the_model_in_the_mode_it_was_in_and_without_gradients(tiny, training):
    tiny.train(training)
    sample.generate(tiny, PROMPTS, 3)
    assert tiny.training == training
    assert all(weight.grad is None for weight in tiny.parameters())


def test_a_story_may_fill_the_context_and_not_exceed_it():
    model = tiny_model(context=16)
    (story,) = sample.generate(model, [[1, 2, 3, 4, 5, 6, 7]], 10, temperature=0)  # the last token is written and never read
    assert len(story) == 10
    with pytest.raises(ValueError, match="do not fit"):
        sample.generate(model, [[1, 2, 3, 4, 5, 6, 7]], 11)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]], ids=repr)
def test_a_prompt_without_a_token_is_refused(tiny, prompts):
    with pytest.raises(ValueError, match="every prompt"):
        sample.generate(tiny, prompts, 3)


# ---- one story as text


def written(monkeypatch, tokens):
    """What `write` returns and the pieces that it shows, when the model writes these tokens."""
    monkeypatch.setattr(sample, "tokens_written", lambda *_: ((None, torch.tensor([token])) for token in tokens))
    pieces = []
    return sample.write(None, data.DEMO, show=pieces.append), pieces


def test_a_story_is_shown_as_it_is_written(monkeypatch):
    tokens = data.encode("Once upon a time there was a cake.")
    text, pieces = written(monkeypatch, [*tokens, END])
    assert text == "".join(pieces) == "Once upon a time there was a cake."
    assert len(pieces) == len(tokens)


def test_a_character_of_several_tokens_is_shown_once_it_is_whole(monkeypatch):
    tokens = [data.encoding().encode_single_token(bytes([byte])) for byte in "\u00e9\U0001f600!".encode()]
    text, pieces = written(monkeypatch, [*tokens, END])
    assert text == "\u00e9\U0001f600!"
    assert pieces == ["", "\u00e9", "", "", "", "\U0001f600", "!"]


def test_write_asks_with_the_instruction_and_writes_what_generate_does(ending):
    prompt = data.encode("Write a story with the words rain, cake and jump.\n")
    for seed in range(5):
        (story,) = sample.generate(ending, [prompt], 20, generator=seeded(seed))
        whole = b"".join(data.encoding().decode_single_token_bytes(token) for token in story if token != END)
        text = sample.write(ending, data.DEMO, 20, generator=seeded(seed))
        assert whole.decode(errors="replace").startswith(text) and len(text) > 5


@pytest.mark.parametrize(
    "words", [[], ["rain"], ["rain", "cake"], ["a", "b", "c", "d"], ["rain", "cake", "c4ke"], ["rain", "cake", "two words"]]
)
def test_bad_words_are_a_problem(words):
    with pytest.raises(data.Problem):
        sample.check_ask(words)


def test_words_are_asked_for_in_lower_case():
    assert sample.check_ask(["Rain", "CAKE", "jump"]) == ("rain", "cake", "jump")


def script(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["sample.py", *args])
    sample.main()
    return capsys.readouterr().out


def test_the_script_prints_one_story_or_several_with_their_scores(workshop, monkeypatch, capsys):
    monkeypatch.setattr(sample, "STORY_TOKENS", 12)
    start = ["--from", str(workshop / "checkpoints" / "finetuned" / "model.pt"), "--device", "cpu"]
    greedy = script(monkeypatch, capsys, *start, "--greedy")
    assert greedy == script(monkeypatch, capsys, *start, "--greedy", "rain", "Cake", "jump") != ""
    for same in ["--temperature", "0"], ["--top-k", "1"]:  # one token to draw from is the likeliest
        assert script(monkeypatch, capsys, *start, *same) == greedy
    drawn = [script(monkeypatch, capsys, *start, "--seed", "1", "--temperature", warmth) for warmth in ("1", "3")]
    assert drawn[0] == script(monkeypatch, capsys, *start, "--seed", "1") != drawn[1]
    several = script(monkeypatch, capsys, *start, "--count", "3", "--seed", "1")
    assert several.count("--- words used 0.00, 12 tokens, cut off\n") == 3
    with monkeypatch.context() as smaller:
        smaller.setattr(sample, "ROWS", 2)  # at once
        assert script(monkeypatch, capsys, *start, "--count", "3", "--seed", "1").count("--- words used 0.00, 12 tokens") == 3
    assert several == script(monkeypatch, capsys, *start, "--count", "3", "--seed", "1")
    assert several != script(monkeypatch, capsys, *start, "--count", "3", "--seed", "1", "--temperature", "3")
    first = script(monkeypatch, capsys, *start, "--count", "2", "--top-k", "1").split("\n---")[0].split("\n", 1)[1]
    assert first.strip() and greedy.strip().startswith(first.strip())  # the one story above has no 12 tokens' limit
    for flag, value, wanted in [
        ("--count", "0", "a whole number of 1 or more"),
        ("--top-k", "0", "a whole number of 1 or more"),
        *[("--temperature", value, "0 or a number from 0.01 to 100") for value in ("-1", "nan", "inf", "1e-9")],
    ]:
        with pytest.raises(SystemExit):
            script(monkeypatch, capsys, *start, flag, value)
        assert f"{flag}: '{value}' is not {wanted}" in capsys.readouterr().err
