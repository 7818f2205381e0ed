import functools
import signal
import sys

import numpy as np
import pytest
import torch
from by_hand import FLOAT32, schedule
from conftest import tiny_model

import data
import model as models
import pretrain
import run
from data import END

SHAPES = [(8, 8), (24, 8), (8, 24)]


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# ---- Muon


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-2), (torch.bfloat16, 1e-5)], ids=["float32", "bfloat16"])
def test_muon_takes_torch_s_steps(shape, dtype, tolerance):
    """torch's own multiplies in bfloat16 always, so ours in float32 differs by its rounding."""
    ours, theirs = (torch.nn.Parameter(matrix(*shape)) for _ in range(2))
    steps = [pretrain.Muon([ours], lr=0.02, dtype=dtype), torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1)]
    for seed in range(4):
        for weight, optimizer in zip((ours, theirs), steps):
            weight.grad = matrix(*shape, seed=seed)
            optimizer.step()
    moved = theirs.detach() - matrix(*shape)
    assert moved.norm() > 0.1
    assert (ours - theirs).norm() < tolerance * moved.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalise_keeps_singular_vectors_and_pushes_values_to_one(shape):
    u, _, v = torch.linalg.svd(matrix(*shape).double(), full_matrices=False)
    values = torch.linspace(0.1, 3, 8).double()
    found = u.T @ pretrain.orthogonalise(u @ values.diag() @ v) @ v.T
    assert (found.diag() > 0.5).all() and (found.diag() < 1.5).all()
    assert (found - found.diag().diag()).abs().max() < 1e-9


def test_orthogonalise_of_zeros_is_zeros():
    assert torch.equal(pretrain.orthogonalise(torch.zeros(4, 3)), torch.zeros(4, 3))


def test_every_weight_has_exactly_one_optimizer(tiny):
    muon, adam = pretrain.optimizers(tiny, 0.02, 0.003, torch.float32)
    names = {id(weight): name for name, weight in tiny.named_parameters()}
    held = [[names[id(weight)] for group in optimizer.param_groups for weight in group["params"]] for optimizer in (muon, adam)]
    assert sorted(held[0] + held[1]) == sorted(names.values())
    assert len(held[0]) == 2 * 7 and not any("norm" in name or "embedding" in name for name in held[0])


@pytest.mark.parametrize("share, scale", [(0, 0.1), (0.004, 0.5), (0.01, 1), (0.4, 1), (0.7, 0.5), (0.94, 0.1), (1, 0)])
def test_the_rate_warms_up_stays_and_falls_to_zero(share, scale):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    both = [torch.optim.SGD([{"params": [weight], "peak": peak}], lr=9.0) for peak in (0.02, 0.003)]
    assert pretrain.set_rate(both, share) == pytest.approx(scale)
    assert [optimizer.param_groups[0]["lr"] for optimizer in both] == pytest.approx([0.02 * scale, 0.003 * scale])


# ---- growing


@pytest.mark.parametrize("layers", [4, 8])
def test_a_grown_model_computes_exactly_the_same(layers):
    model, tokens = tiny_model().double(), torch.arange(60).view(2, 30)
    deeper = pretrain.grow(model, layers).double()
    assert deeper.config.layers == len(deeper.blocks) == layers
    assert torch.equal(deeper(tokens), model(tokens))


def test_the_new_layers_of_a_grown_model_learn():
    deeper = pretrain.grow(tiny_model(), 4)
    models.token_log_probs(deeper, torch.arange(60).view(2, 30)).sum().backward()
    for block in deeper.blocks:
        assert block.attention.o.weight.grad.norm() > 0 and block.feed_forward.down.weight.grad.norm() > 0


# ---- rows


def stories(*lengths):
    """Stories of these lengths, END included: 100, 101, ... END, then 200, 201, ... END, and so on."""
    return [[*range(100 * number, 100 * number + length - 1), END] for number, length in enumerate(lengths, 1)]


def drawn(monkeypatch, context, lengths, rows):
    """Rows of stories of these lengths, each a list of tokens."""
    monkeypatch.setattr(pretrain, "CONTEXT", context)
    tokens = np.array(sum(stories(*lengths), []), dtype=np.uint16)
    return pretrain.Rows(tokens, np.random.default_rng(0)).batch(rows).tolist()


LENGTHS = [3, 5, 2, 9, 4, 7, 6, 8, 15, 10]


def split(row):
    """A row's stories, without the END that it begins with."""
    found = [[]]
    for token in row[1:]:
        found[-1].append(token)
        if token == END:
            found.append([])
    return [story for story in found if story]


def test_each_row_begins_with_end_and_a_story_s_start(monkeypatch):
    whole = stories(*LENGTHS)
    for row in drawn(monkeypatch, 10, LENGTHS, 60):
        assert len(row) == 11 and row[0] == END
        for story in split(row):
            assert any(story == known[: len(story)] for known in whole)
        *complete, _ = split(row)
        assert all(story in whole for story in complete)


def test_a_story_that_was_cut_begins_the_next_row_whole_if_it_fits(monkeypatch):
    rows = drawn(monkeypatch, 10, LENGTHS, 60)
    whole = {story[0]: story for story in stories(*LENGTHS)}
    again = skipped = 0
    for row, following in zip(rows, rows[1:]):
        *_, last = split(row)
        if last[-1] != END:
            if len(whole[last[0]]) <= 10:
                again += 1
                assert split(following)[0] == whole[last[0]]
            else:
                skipped += 1
                assert split(following)[0] != last
    assert again > 10 and skipped > 2


def test_a_story_that_ends_with_its_row_is_not_repeated(monkeypatch):
    rows = drawn(monkeypatch, 6, [3] * 8, 4)  # two stories fill a row, so four rows are an epoch
    assert sorted(row[at] for row in rows for at in (1, 4)) == [100, 200, 300, 400, 500, 600, 700, 800]


def test_every_story_is_whole_once_in_an_epoch_and_epochs_differ(monkeypatch):
    rows = drawn(monkeypatch, 20, LENGTHS, 100)
    order = [story[0] for row in rows for story in split(row) if story in stories(*LENGTHS)]
    first, second = order[:10], order[10:20]
    assert sorted(first) == sorted(second) == sorted(story[0] for story in stories(*LENGTHS))
    assert first != second


def test_rows_go_on_where_their_state_was_taken(monkeypatch):
    monkeypatch.setattr(pretrain, "CONTEXT", 10)
    tokens = np.array(sum(stories(*LENGTHS), []), dtype=np.uint16)
    for taken in range(1, 6):
        one, other = (pretrain.Rows(tokens, np.random.default_rng(0)) for _ in range(2))
        one.batch(taken)
        other.load_state_dict(one.state_dict())
        other.order.random.bit_generator.state = one.order.random.bit_generator.state
        assert torch.equal(one.batch(20), other.batch(20))


def test_a_run_that_began_with_other_stories_is_not_resumed():
    tokens = [np.array(sum(stories(*lengths), []), dtype=np.uint16) for lengths in (LENGTHS, LENGTHS[:3])]
    one, other = (pretrain.Rows(each, np.random.default_rng(0)) for each in tokens)
    with pytest.raises(data.Problem, match="no longer holds the stories"):
        other.load_state_dict(one.state_dict())


# ---- training


def test_micro_batches_add_up_to_the_gradient_and_loss_of_one_batch():
    tokens, mask = models.pack([[1, 2], [3], [4]], [[5, END], [6, 7, 8, END], [9, 10]])
    results = []
    for batches in [(tokens, mask)], [(tokens[:2], mask[:2]), (tokens[2:], mask[2:])]:
        model = tiny_model()
        loss = pretrain.train_step(model, [torch.optim.SGD(model.parameters(), lr=1.0)], batches, FLOAT32)
        results.append((loss, torch.cat([weight.flatten() for weight in model.parameters()])))
    with torch.no_grad():
        mean = -models.token_log_probs(tiny_model(), tokens)[mask.bool()].mean()
    assert results[0][0] == pytest.approx(mean.item()) == pytest.approx(results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    before = torch.cat([weight.flatten() for weight in tiny_model().parameters()])
    assert (results[0][1] - before).norm().item() == pytest.approx(1, rel=1e-3)  # the clipped gradient


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_step_takes_the_gradient_of_the_mean_over_all_that_counts(monkeypatch, rows):
    monkeypatch.setattr(pretrain, "clip_gradients", lambda model: None)
    tokens, counts = models.pack([[1, 2], [3], [4]], [[5, END], [6, 7, 8, END], [9, 10]])
    counts[0] *= 4
    model = tiny_model()
    loss = -(models.token_log_probs(model, tokens) * counts).sum() / counts.sum()
    wanted = [
        weight.detach() - gradient for weight, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())))
    ]
    pretrain.train_step(model, [torch.optim.SGD(model.parameters(), lr=1.0)], list(zip(tokens.split(rows), counts.split(rows))), FLOAT32)
    for found, expected in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


TEXTS = [
    f"One day {name} went to the {place} and was happy." for name in ("Tom", "Lily", "Ben") for place in ("park", "lake", "old shop", "zoo")
]


@pytest.fixture
def small(workshop, monkeypatch):
    """Pretraining of a tiny model that grows from one layer to two, on a dozen stories."""
    monkeypatch.setattr(pretrain, "Config", functools.partial(models.Config, context=32, heads=2, channels=8, hidden=16))
    monkeypatch.setattr(pretrain, "GROWTH", {0.0: 1, 0.5: 2})
    for name, value in {"CONTEXT": 32, "ROWS": 4, "MICRO": 2}.items():
        monkeypatch.setattr(pretrain, name, value)
    monkeypatch.setattr(data, "FOLDER", workshop)
    for name in "train", "valid":
        data.write_tokens(TEXTS, workshop / f"{name}.bin")
    return workshop


def pretrained(monkeypatch, *args, stop=None):
    """Run the script; stop it after so many steps, as Ctrl-C would. Returns the steps' losses."""
    losses = []

    def step(*args):
        losses.append(step.real(*args))
        if len(losses) == stop:
            signal.raise_signal(signal.SIGINT)
        return losses[-1]

    with monkeypatch.context() as patch:
        step.real = pretrain.train_step
        patch.setattr(pretrain, "train_step", step)
        patch.setattr(sys, "argv", ["pretrain.py", "--device", "cpu", *args])
        pretrain.main()
    return losses


@pytest.mark.parametrize("stop", [2, 4])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(small, monkeypatch, stop):
    """Eight steps against two and six, and against four and four: before the network grows, and just when it would."""
    whole = pretrained(monkeypatch, "--steps", "8", "--name", "whole")
    first = pretrained(monkeypatch, "--steps", "8", "--name", "halves", stop=stop)
    assert len(first) == stop
    second = pretrained(monkeypatch, "--steps", "8", "--name", "halves", "--resume")
    assert first + second == whole and len(set(whole)) == 8
    one, other = (models.read(small / "checkpoints" / f"pretrained-{name}" / "model.pt") for name in ("whole", "halves"))
    assert one["config"] == other["config"] and one["config"]["layers"] == 2
    assert one["steps"] == other["steps"] == 8
    assert all(torch.equal(weight, other["model"][name]) for name, weight in one["model"].items())


def test_a_run_s_rates_are_those_of_the_schedule(small, monkeypatch):
    seen = []

    def listening(model, both, *_):
        seen.append([optimizer.param_groups[0]["lr"] for optimizer in both])
        return 1.0

    monkeypatch.setattr(pretrain, "train_step", listening)
    pretrained(monkeypatch, "--steps", "100")
    assert seen == [pytest.approx([0.02 * scale, 0.003 * scale]) for scale in schedule(100)]


def test_the_shipped_model_grew_from_2_layers_over_4_to_8_at_15_and_50_percent_of_the_time():
    assert pretrain.GROWTH == {0.0: 2, 0.15: 4, 0.5: 8} and models.Config().layers == 8


def test_pretraining_lowers_the_loss_and_writes_a_checkpoint_in_bfloat16(small, monkeypatch, capsys):
    losses = pretrained(monkeypatch, "--steps", "30")
    assert losses[0] == pytest.approx(np.log(4096), rel=0.01)  # a new model knows nothing
    assert losses[-1] < losses[0] - 0.5
    path = small / "checkpoints" / "pretrained" / "model.pt"
    assert {weight.dtype for weight in models.read(path)["model"].values()} == {torch.bfloat16}
    assert models.load_checkpoint(path).config.layers == 2
    assert "grows to 2 layers" in capsys.readouterr().out


# ---- compiling


def loss_and_gradient(model):
    tokens = torch.arange(60).view(2, 30)
    loss = -models.token_log_probs(model, tokens).mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_compiled_model_has_the_same_loss_and_gradient(capsys):
    model = tiny_model()
    wanted = loss_and_gradient(model)
    run.compile_blocks(model)
    if "goes on without" in capsys.readouterr().out:
        pytest.skip("no compiler here")
    torch._dynamo.utils.counters.clear()
    for found, expected in zip(loss_and_gradient(model), wanted, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    deeper = pretrain.grow(model, 4)
    assert torch.allclose(deeper(torch.arange(10)[None]), tiny_model()(torch.arange(10)[None]))


def test_without_a_compiler_pretraining_goes_on_and_says_so(monkeypatch, capsys):
    def compile(*_, **__):
        raise RuntimeError("No working C++ compiler found\nand a long trace")

    monkeypatch.setattr(torch, "compile", compile)
    model = tiny_model()
    wanted = loss_and_gradient(model)
    run.compile_blocks(model)
    assert capsys.readouterr().out == "goes on without torch.compile, which does not work here (No working C++ compiler found)\n"
    assert all(torch.equal(found, expected) for found, expected in zip(loss_and_gradient(model), wanted, strict=True))


@pytest.mark.parametrize(("budget", "compiles"), [(["--minutes", "5"], True), (["--minutes", "4.9"], False), (["--steps", "2"], False)])
def test_only_a_run_that_earns_the_time_back_is_compiled(small, monkeypatch, budget, compiles):
    found = []
    monkeypatch.setattr(pretrain, "compile_blocks", lambda model: found.append(model.config.layers))
    pretrained(monkeypatch, *budget, stop=2)
    assert found == [1] * compiles
