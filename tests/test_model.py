import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Payload, disk_of, tiny_model

import data
import model as models
from data import END

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
STORIES = [[20, 21, END], [22, 23, 24, 25, 26, 27, 28], [29]]


def random_tokens(rows, longest, seed=0):
    return torch.randint(0, data.VOCABULARY, (rows, longest), generator=torch.Generator().manual_seed(seed))


# ---- the network


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_attention_in_bfloat16_is_that_of_float64_up_to_rounding_and_so_are_its_gradients(tokens):
    torch.manual_seed(1)
    rough = [torch.randn(2, 3, tokens, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = exact = [x.detach().double().requires_grad_() for x in rough]
    scores = (q @ k.mT / 4).masked_fill(torch.arange(tokens) > torch.arange(tokens)[:, None], -torch.inf)
    wanted, weights = scores.softmax(-1) @ v, torch.randn(2, 3, tokens, 16).bfloat16()
    (wanted * weights).sum().backward()
    found = models.attend(*rough)
    (found * weights).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)
    for x, y in zip(rough, exact):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.03)


def test_the_model_has_15_735_168_parameters():
    embedding, attention, feed_forward, norms = 4096 * 384, 4 * 384 * 384, 3 * 384 * 1024, 2 * 384
    assert embedding + 8 * (attention + feed_forward + norms) + 384 == 15_735_168
    assert sum(weight.numel() for weight in models.StoryModel().parameters()) == 15_735_168


@torch.no_grad()
def test_a_fresh_network_passes_the_embedding_through_to_its_last_norm():
    fresh, tokens = models.StoryModel(models.Config(layers=2, heads=2, channels=16, hidden=32)), random_tokens(2, 7)
    x = fresh.embedding.weight[tokens]
    torch.testing.assert_close(fresh.channels(tokens), x / (x**2).mean(-1, keepdim=True).add(1e-5).sqrt())


def llama(weights, config, tokens):
    """Llama's logits for one text, in numpy: rotary positions as products of complex numbers, attention head by head."""
    width = config.channels // config.heads
    turns = np.exp(1j * np.outer(np.arange(len(tokens)), 10_000.0 ** (-2 * np.arange(width // 2) / width)))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights[name]

    def turn(x):
        x = (x[:, : width // 2] + 1j * x[:, width // 2 :]) * turns
        return np.concatenate([x.real, x.imag], 1)

    x = weights["embedding.weight"][tokens]
    for layer in range(config.layers):
        part = lambda name, layer=layer: weights[f"blocks.{layer}.{name}.weight"]
        y = norm(x, f"blocks.{layer}.attention_norm.weight")
        heads = []
        for head in range(config.heads):
            rows = slice(head * width, (head + 1) * width)
            q, k, v = (y @ part(f"attention.{name}")[rows].T for name in "qkv")
            scores = turn(q) @ turn(k).T / np.sqrt(width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            scores = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(scores / scores.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(heads, 1) @ part("attention.o").T
        y = norm(x, f"blocks.{layer}.feed_forward_norm.weight")
        gate = y @ part("feed_forward.gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ part("feed_forward.up").T)) @ part("feed_forward.down").T
    return norm(x, "norm.weight") @ weights["embedding.weight"].T


def test_the_forward_pass_is_llama_s():
    model = tiny_model().double()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    angles = torch.outer(torch.arange(256).double(), 10_000.0 ** (-torch.arange(4).double() / 4)).repeat(1, 2)
    model.cos, model.sin = angles.cos(), angles.sin()  # the model's own are rounded to float32
    tokens = random_tokens(2, 40)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        logits = model(tokens).numpy()
    for row in range(2):
        np.testing.assert_allclose(logits[row], llama(weights, model.config, tokens[row].numpy()), rtol=0, atol=1e-9)


def test_rotary_positions_are_llama_s():
    cos, sin = models.rotary(512, 64)
    angles = np.outer(np.arange(512), 10_000.0 ** (-np.arange(0, 64, 2) / 64))
    for found, wanted in (cos, np.cos(angles)), (sin, np.sin(angles)):
        np.testing.assert_allclose(found[:, :32].numpy(), wanted, atol=1e-4)
        assert torch.equal(found[:, :32], found[:, 32:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_later_tokens(tiny, dtype):
    tokens, others = random_tokens(1, 12), random_tokens(1, 12, seed=1)
    others[:, :8] = tokens[:, :8]
    with models.Precision(torch.device("cpu"), dtype)():
        one, other = tiny(tokens), tiny(others)
    torch.testing.assert_close(one[:, :8], other[:, :8])
    assert (one[:, 8] - other[:, 8]).abs().max() > 0.1


@torch.no_grad()
def test_logits_depend_on_the_order_of_earlier_tokens(tiny):
    tokens = random_tokens(1, 6)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert (tiny(tokens)[:, -1] - tiny(swapped)[:, -1]).abs().max() > 0.01


@torch.no_grad()
def test_cached_equals_uncached(tiny):
    tokens = random_tokens(3, 20)
    caches = tiny.caches(3, 20)
    pieces = [tiny.channels(tokens[:, :6], caches)] + [tiny.channels(tokens[:, at : at + 1], caches) for at in range(6, 20)]
    torch.testing.assert_close(torch.cat(pieces, 1), tiny.channels(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_cache_that_dropped_rows_goes_on_with_the_others(tiny):
    tokens = random_tokens(3, 10)
    caches = tiny.caches(3, 10)
    tiny.channels(tokens[:, :9], caches)
    kept = torch.tensor([0, 2])
    for cache in caches:
        cache.keep(kept)
    torch.testing.assert_close(tiny.channels(tokens[kept, 9:], caches), tiny.channels(tokens)[kept, 9:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padded_equals_unpadded(tiny):
    tokens, lengths = random_tokens(3, 9), [4, 9, 1]
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    padded = tiny.channels(tokens, real=real)
    alone = torch.cat([tiny.channels(tokens[row : row + 1, :length])[0] for row, length in enumerate(lengths)])
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("multiple", "computed"), [(1, [10, 10, 8]), (3, [12, 12, 9]), (64, [12, 12, 64])])
def test_no_more_is_computed_than_real_tokens_and_no_logits_of_prompts_but_to_round_up(tiny, monkeypatch, multiple, computed):
    monkeypatch.setattr(models, "ROUND", multiple)
    prompts, stories = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10, 11, 12]]
    rows = []
    for part in tiny.blocks[0].feed_forward.up, tiny.blocks[1].attention.q:
        part.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    logits = models.StoryModel.logits
    monkeypatch.setattr(models.StoryModel, "logits", lambda self, read: rows.append(len(read)) or logits(self, read))
    tokens, mask = models.pack(prompts, stories)
    found = models.token_log_probs(tiny, tokens, mask)
    assert rows == computed  # of 4 + 6 tokens read, as a story's last predicts nothing, and 2 + 6 written; there are 2 x 6 places
    torch.testing.assert_close(found, models.token_log_probs(tiny, tokens) * mask)


def test_minibatches_of_stories_of_any_length_multiply_matrices_of_few_sizes(tiny, monkeypatch):
    draw, rows = random.Random(1), set()
    for part in tiny.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(lambda _, inputs: rows.add(len(inputs[0])))
    logits = models.StoryModel.logits
    monkeypatch.setattr(models.StoryModel, "logits", lambda self, read: rows.add(len(read)) or logits(self, read))
    for _ in range(20):
        stories = [[1] * draw.randint(10, 60) for _ in range(16)]
        models.token_log_probs(tiny, *models.pack([[1] * draw.randint(8, 14) for _ in stories], stories))
    assert len(rows) < 10 and not any(number % models.ROUND for number in rows)


@pytest.mark.parametrize("multiple", [1, 7, 64])
def test_rounding_up_changes_no_gradient(monkeypatch, multiple):
    tokens, mask = models.pack([[1, 2, 3], [4], [5, 6]], [[5, 6], [7, 8, 9, 10, 11, 12], [13]])
    model, weights = tiny_model().double(), torch.rand(mask.shape)
    wanted = torch.autograd.grad((models.token_log_probs(model, tokens) * mask * weights).sum(), list(model.parameters()))
    monkeypatch.setattr(models, "ROUND", multiple)
    found = torch.autograd.grad((models.token_log_probs(model, tokens, mask) * weights).sum(), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_a_text_beyond_the_context_is_refused(tiny):
    tiny(random_tokens(1, 256))
    with pytest.raises(ValueError, match="257 tokens"):
        tiny(random_tokens(1, 257))


# ---- stories in a batch


def test_pack_puts_the_mask_on_the_story_s_tokens():
    tokens, mask = models.pack([[1, 2]], [[3, 4]])
    assert tokens.tolist() == [[1, 2, 3, 4]] and mask.tolist() == [[0, 1, 1]]
    tokens, mask = models.pack([[1], [1, 2, 3]], [[4, 5, 6], [7]])
    assert tokens.tolist() == [[1, 4, 5, 6], [1, 2, 3, 7]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_end_that_the_model_wrote_counts_and_padding_never_does():
    _, mask = models.pack([[1], [1], [END, 1]], [[3, END], [END, 3, END, 4, 5], [0, 0]])
    assert mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]


def test_an_empty_story_has_a_mask_of_zeros_and_no_nan(tiny):
    tokens, mask = models.pack([[1, 2], [1, 2, 3]], [[], [4, END]])
    assert mask.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    scores = models.token_log_probs(tiny, tokens, mask)
    scores.sum().backward()
    assert scores[0].eq(0).all() and scores[1, 2:].lt(0).all()
    assert all(weight.grad.isfinite().all() for weight in tiny.parameters())


def test_as_many_prompts_as_stories_are_packed():
    with pytest.raises(ValueError):
        models.pack([[1], [2]], [[3]])


@torch.no_grad()
def test_token_log_probs_equal_a_hand_loop_and_are_zero_outside_the_mask(tiny):
    tokens, mask = models.pack(PROMPTS, STORIES)
    scores = models.token_log_probs(tiny, tokens, mask)
    wanted = torch.zeros(mask.shape)
    for row, (prompt, story) in enumerate(zip(PROMPTS, STORIES)):
        for at, token in enumerate(story):
            before = torch.tensor([prompt + story[:at]])
            wanted[row, len(prompt) + at - 1] = tiny(before)[0, -1].log_softmax(-1)[token]
    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)
    assert (scores == 0).eq(mask == 0).all()
    torch.testing.assert_close(models.token_log_probs(tiny, tokens) * mask, wanted, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_token_log_probs_is_the_plain_implementation_s():
    model, weights = tiny_model().double(), torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    tokens, mask = models.pack(PROMPTS, STORIES)

    def gradients(scores):
        model.zero_grad()
        (scores * weights * mask).sum().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    plain = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    wanted = gradients(plain)
    for scores in models.token_log_probs(model, tokens, mask), models.token_log_probs(model, tokens):
        for found, expected in zip(gradients(scores), wanted):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


def test_autocast_to_bfloat16_gives_float32_log_probs_close_to_float32_s(tiny):
    tokens, mask = models.pack(PROMPTS, STORIES)
    exact = models.token_log_probs(tiny, tokens, mask)
    with models.Precision(torch.device("cpu"), torch.bfloat16)():
        rough = models.token_log_probs(tiny, tokens, mask)
        assert tiny(tokens).dtype == torch.bfloat16
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.2
    rough.sum().backward()
    assert all(weight.grad.dtype == torch.float32 and weight.grad.isfinite().all() for weight in tiny.parameters())


@torch.no_grad()
def test_a_model_in_bfloat16_gives_log_probs_in_float32(tiny):
    rough, tokens = models.for_writing(tiny, torch.bfloat16), random_tokens(2, 6)
    wanted = rough(tokens[:, :-1]).float().log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(models.token_log_probs(rough, tokens), wanted)


def test_a_copy_for_writing_is_not_compiled(tiny, monkeypatch):
    compiled = []
    for block in tiny.blocks:
        block.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    with torch.no_grad():
        models.for_writing(tiny, torch.float32)(random_tokens(2, 6))
        assert not compiled
        tiny(random_tokens(2, 6))
        assert compiled


def test_a_copy_for_writing_leaves_the_model_in_float32(tiny):
    copy = models.for_writing(tiny, torch.bfloat16)
    assert {weight.dtype for weight in copy.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in tiny.parameters()} == {torch.float32}
    with torch.no_grad():
        tiny.norm.weight += 1
    assert torch.equal(models.for_writing(tiny, torch.bfloat16).norm.weight, tiny.norm.weight.bfloat16())  # a copy of what is now


# ---- where it runs


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "", "hpu"])
def test_an_unknown_device_is_a_problem(name):
    with pytest.raises(data.Problem, match="--device cpu"):
        models.pick_device(name)


@pytest.mark.parametrize("feature", ["amx_bf16", "avx512_bf16"])
def test_a_cpu_that_multiplies_bfloat16_does_unless_told_otherwise(monkeypatch, feature):
    monkeypatch.delenv("STORY_FLOAT32", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    assert models.pick_device("cpu") == (torch.device("cpu"), torch.bfloat16)
    for told, dtype in ("1", torch.float32), ("0", torch.bfloat16), ("", torch.bfloat16):
        monkeypatch.setenv("STORY_FLOAT32", told)
        assert models.pick_device("cpu") == (torch.device("cpu"), dtype)


def test_a_cpu_without_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.delenv("STORY_FLOAT32", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert models.pick_device("cpu") == (torch.device("cpu"), torch.float32)


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.delenv("STORY_FLOAT32", raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert models.pick_device("cuda") == (torch.device("cuda"), torch.float32)


@pytest.mark.parametrize(
    ("cuda", "mps", "wanted"),
    [(True, True, ("cuda", torch.bfloat16)), (False, True, ("mps", torch.float32)), (False, False, ("cpu", torch.float32))],
)
def test_cuda_comes_before_mps_and_mps_before_the_cpu(monkeypatch, cuda, mps, wanted):
    monkeypatch.delenv("STORY_FLOAT32", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    device, dtype = models.pick_device()
    assert (device.type, dtype) == wanted


def test_the_allocator_is_left_alone_where_it_is_not_glibcs(monkeypatch):
    monkeypatch.setattr(models.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(models.ctypes, "CDLL", lambda *_: pytest.fail("touched"))
    models.keep_freed_memory()


@pytest.mark.skipif(models.platform.libc_ver()[0] != "glibc" or not HUGE_PAGES.exists(), reason="neither glibc nor huge pages")
def test_freed_memory_is_kept_and_comes_in_huge_pages():
    code = """if True:
        import model, torch
        model.keep_freed_memory()
        torch.ones(2**26)  # 256 MiB, freed at once
        for part in open("/proc/self/smaps").read().split("[heap]")[1:]:
            kept = int(part.split("Rss:")[1].split()[0]) >= 2**18
            print("kept" * kept, "huge" * ("hg" in part.split("VmFlags:")[1].splitlines()[0].split()))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=models.CHECKPOINTS.parent, capture_output=True, text=True, check=True)
    assert "kept huge" in done.stdout.splitlines()


# ---- checkpoints


def problem(path):
    """The one line that loading a checkpoint ends with."""
    with pytest.raises(data.Problem) as caught:
        models.load_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def saved(tmp_path, tiny):
    path = tmp_path / "some" / "model.pt"
    models.save_checkpoint(path, tiny, steps=3)
    return path


def test_a_checkpoint_comes_back_as_it_was_saved(saved, tiny):
    loaded = models.load_checkpoint(saved)
    assert loaded.config == tiny.config and not loaded.training
    assert loaded.state_dict().keys() == tiny.state_dict().keys()
    assert all(torch.equal(weight, tiny.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert models.read(saved)["steps"] == 3
    assert list(saved.parent.iterdir()) == [saved]


def test_a_checkpoint_in_bfloat16_is_loaded_in_float32(tmp_path, tiny):
    wanted = tiny.embedding.weight.detach().bfloat16().float()
    models.save_checkpoint(tmp_path / "model.pt", tiny.bfloat16())
    assert models.read(tmp_path / "model.pt")["model"]["embedding.weight"].dtype == torch.bfloat16
    assert torch.equal(models.load_checkpoint(tmp_path / "model.pt").embedding.weight, wanted)


def test_a_full_disk_leaves_the_old_checkpoint_whole(saved):
    old = saved.read_bytes()
    with disk_of(len(old) // 2), pytest.raises(data.Problem, match=f"cannot write {re.escape(str(saved))}"):
        models.save_checkpoint(saved, tiny_model(seed=1))
    assert saved.read_bytes() == old and list(saved.parent.iterdir()) == [saved]


def test_a_checkpoint_below_a_file_is_a_problem(saved, tiny):
    with pytest.raises(data.Problem, match="cannot write"):
        models.save_checkpoint(saved / "model.pt", tiny)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_checkpoint_is_a_problem(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    problem(saved)


@pytest.mark.parametrize(
    "content", [b"a text\n", b"abc\n.", b"\x80\x02abc.", b"0abc\n.", b"\x8fabc\n.", b"PK\x03\x04", bytes(1000)], ids=repr
)
def test_a_foreign_file_is_a_problem(saved, content):
    saved.write_bytes(content)
    problem(saved)


@pytest.mark.filterwarnings("ignore:Using a non-tuple")
@pytest.mark.parametrize("content", [torch.zeros(3), [1, 2], None, {}, {"config": 3}], ids=repr)
def test_a_file_with_other_content_is_a_problem(saved, content):
    torch.save(content, saved)
    assert "is not a story model" in problem(saved)


def test_a_folder_in_a_checkpoint_s_place_is_named_for_what_it_is(tmp_path):
    with pytest.raises(data.Problem, match="Is a directory"):
        models.read(tmp_path)


def test_a_missing_checkpoint_is_a_problem_and_git_is_named_where_it_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "CHECKPOINTS", tmp_path)
    assert problem(tmp_path / "grpo" / "model.pt").endswith("there is no checkpoint " + str(tmp_path / "grpo" / "model.pt"))
    assert problem(tmp_path / "finetuned" / "model.pt").endswith("`git checkout checkpoints/finetuned` brings it back")


def test_code_in_a_checkpoint_never_runs(saved, tmp_path):
    proof = tmp_path / "it-ran"
    content = {"config": Payload(proof)}
    for write in (lambda: torch.save(content, saved)), (lambda: saved.write_bytes(pickle.dumps(content, protocol=2))):
        write()
        problem(saved)
        assert not proof.exists()
    pickle.loads(saved.read_bytes())["config"].close()
    assert proof.exists()  # so the payload does work


def test_a_checkpoint_with_another_number_of_tokens_is_a_problem(saved):
    models.save_checkpoint(saved, tiny_model(vocabulary=100))
    assert "another tokenizer" in problem(saved)


def test_a_checkpoint_of_another_tokenizer_is_a_problem(saved, tmp_path, monkeypatch):
    (tmp_path / "other.tiktoken").write_bytes(b"IQ== 0\n")
    with monkeypatch.context() as patch:
        patch.setattr(data, "TOKENIZER", tmp_path / "other.tiktoken")
        assert "another tokenizer" in problem(saved)
    models.load_checkpoint(saved)


@pytest.mark.parametrize(
    "change", [{"channels": 32}, {"layers": 3}, {"layers": 1}, {"vocabulary": 100}, {"heads": 0}, {"depth": 3}], ids=repr
)
def test_a_checkpoint_of_another_shape_than_it_says_is_a_problem(saved, change):
    content = models.read(saved)
    content["config"] |= change
    torch.save(content, saved)
    assert "is not a story model" in problem(saved)
