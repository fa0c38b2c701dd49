"""Laws of calibration statistics. That they equal autograd's in every family is in test_architectures.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from eckart.calibration.passes import passes
from eckart.calibration.second_moments import add_gram, mirror, square_sums
from eckart.calibration.statistics import STATISTIC_KINDS, collect, mean_loss_times_batch
from eckart.calibration.statistics_files import join_statistics, load_statistics, save_statistics
from eckart.model.attention_products import find_products
from eckart.model.targets import Target, find_targets, weight_of
from tests import tiny

SAMPLES = tiny.samples(16)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def double(family: str) -> nn.Module:
    """A tiny model in float64, so that equal means equal."""
    return tiny.FAMILIES[family]().double()


def targets_of(model: nn.Module) -> tuple[Target, ...]:
    return find_targets(model, tiny.collate(SAMPLES[:2])).targets


def assert_same(actual, other, **tolerance) -> None:
    assert {kind: set(tensors) for kind, tensors in actual.items()} == {k: set(tensors) for k, tensors in other.items()}
    for kind, tensors in actual.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, other[kind][key], msg=f"{kind} of {key}", **(tolerance or CLOSE))


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_statistics_do_not_depend_on_padding_to_the_left(family):
    model = double(family)
    targets = targets_of(model)
    alone = collect(model, tiny.batches(SAMPLES[:8], 1), targets)
    assert_same(collect(model, tiny.batches(SAMPLES[:8], 4, 11, "left"), targets), alone)


@pytest.mark.parametrize("kind", STATISTIC_KINDS)
def test_each_kind_alone_is_the_same_as_all_together(kind):
    model = double("llama")
    targets = targets_of(model)
    together = collect(model, tiny.batches(SAMPLES, 4), targets)
    alone = collect(model, tiny.batches(SAMPLES, 4), targets, kinds=[kind])
    wanted = {kind, "tokens"} if kind in ("inputs", "input_magnitudes") else {kind}
    assert_same(alone, {name: together[name] for name in wanted})


# --- the sums of squares ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(5, 2, 9, 8), (2, 3, 300, 2), (5, 40, 9, 8), (1, 1, 3, 4), (3, 4, 16, 16), (3, 5, 16, 16)]
)
def test_square_sums_are_those_of_each_examples_gradient(shape):
    """For few and many tokens, which take different forms, and for more rows than are squared at a time."""
    batch, tokens, rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    x, delta, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((batch, tokens, columns), (batch, tokens, rows), (rows, columns))
    )
    gradients = torch.einsum("nto,nti->noi", delta, x)
    squares = {"fisher": gradients**2, "taylor": (gradients * weight) ** 2}
    for kinds in (["fisher"], ["taylor"], ["fisher", "taylor"]):
        got = square_sums(x, delta, weight, kinds)
        assert list(got) == kinds
        for kind, (by_input, by_output) in got.items():
            torch.testing.assert_close(by_input, squares[kind].sum((0, 1)), **CLOSE)
            torch.testing.assert_close(by_output, squares[kind].sum((0, 2)), **CLOSE)


@pytest.mark.parametrize(("tokens", "features"), [(40, 7), (5, 128), (5, 129), (3, 300)])
def test_a_gram_matrix_in_panels_is_the_product(tokens, features):
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.ones(features, features, dtype=torch.float64)
    add_gram(total, x)
    mirror(total)
    torch.testing.assert_close(total, x.T @ x + 1, **CLOSE)


# --- a case solved by hand -------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """y = x Wᵀ with W = (2, -1); an example's loss is the sum of y over its tokens, so that every Δ is one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 1, bias=False)
        self.map.weight.data.copy_(torch.tensor([[2.0, -1.0]]))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        y = self.map(x)
        kept = y if attention_mask is None else y[attention_mask.bool()]
        return SimpleNamespace(loss=kept.sum() / len(x))


MAP = Target(name="map", out_features=1, in_features=2, input_of="map")
# G = (4, 6) and (1, 1)
TWO = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]])


def test_two_samples_solved_by_hand():
    expected = {
        "inputs": {"map": [[5.5, 7.0], [7.0, 10.5]]},
        "input_magnitudes": {"map": [(4 + 1) / 2, (6 + 1) / 2]},
        "tokens": {"map": 2.0},
        "output_gradients": {"map": [[2.0]]},
        "fisher": {"map.input": [(16 + 1) / 2, (36 + 1) / 2], "map.output": [27.0]},
        "taylor": {"map.input": [(64 + 4) / 2, (36 + 1) / 2], "map.output": [52.5]},
        "gradients": {"map": [[2.5, 3.5]]},
    }
    got = collect(Sum(), [{"x": TWO}], [MAP])
    assert_same(got, {kind: {key: torch.tensor(v) for key, v in some.items()} for kind, some in expected.items()})


@pytest.mark.parametrize("filling", [0.0, 5.0, float("inf"), float("nan")])
def test_padding_does_not_count_whatever_it_holds(filling):
    """A model may compute anything at padding, as long as nothing reads it."""
    padded = torch.full((2, 5, 2), filling)
    padded[:, :2] = TWO
    mask = torch.tensor([[1, 1, 0, 0, 0]] * 2)
    assert_same(collect(Sum(), [{"x": padded, "attention_mask": mask}], [MAP]), collect(Sum(), [{"x": TWO}], [MAP]))


# --- the model afterwards --------------------------------------------------------------------------------------------


def mixed_model() -> nn.Module:
    """Some modules in training and some not, some parameters frozen, one with a gradient already."""
    model = tiny.bert().train()
    model.bert.encoder.layer[0].eval()
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    return model


def state(model: nn.Module):
    return (
        {name: module.training for name, module in model.named_modules()},
        {name: (p.requires_grad, None if p.grad is None else p.grad.tolist()) for name, p in model.named_parameters()},
        {name: len(m._forward_hooks) + len(m._backward_hooks or ()) for name, m in model.named_modules()},
        {name: tensor.tolist() for name, tensor in model.state_dict().items()},
    )


def test_collecting_does_not_change_the_model():
    model = mixed_model()
    before = state(model)
    collect(model, tiny.batches(SAMPLES, 4), targets_of(tiny.bert()))
    assert state(model) == before


def test_a_model_in_training_gives_the_statistics_of_eval_mode():
    """Dropout is off: two passes give the same numbers, and so does the model in eval mode."""
    model = double("bert").train()
    targets = targets_of(model)
    first, second = (collect(model, tiny.batches(SAMPLES, 4), targets) for _ in range(2))
    assert_same(first, second, rtol=0, atol=0)
    assert_same(first, collect(model.eval(), tiny.batches(SAMPLES, 4), targets), rtol=0, atol=0)


def test_inputs_alone_need_no_gradient():
    def forward_only(model, batch):
        assert not torch.is_grad_enabled()
        return mean_loss_times_batch(model, batch)

    model = tiny.bert()
    collect(model, tiny.batches(SAMPLES, 4), targets_of(model), kinds=["inputs"], loss=forward_only)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_no_example_is_an_error():
    with pytest.raises(ValueError, match=r"data\.sizes\.calibration"):
        collect(Sum(), [], [MAP])


def test_statistics_that_are_not_finite_are_an_error_that_names_the_target():
    model = tiny.bert()
    targets = targets_of(model)
    model.bert.encoder.layer[1].intermediate.dense.bias.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"^inputs .*\bbert\.encoder\.layer\.1\.output\.dense\b"):
        collect(model, tiny.batches(SAMPLES, 4), targets)


class Reshaped(Sum):
    """A model whose layer reads something else than `(batch, tokens, features)`."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(loss=self.map(self.change(x)).sum() / len(x))


def test_tokens_that_cannot_be_split_into_examples_are_an_error():
    model = Reshaped(lambda x: x.flatten(0, 1)[1:])
    with pytest.raises(ValueError, match=r"^map: .*\b2\b"):
        collect(model, [{"x": TWO}], [MAP])


def test_padding_that_cannot_be_told_from_data_is_an_error():
    model = Reshaped(lambda x: torch.cat([x, x], 1))
    mask = torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"^map: 4 .*\battention_mask\b.*\b2\b"):
        collect(model, [{"x": TWO, "attention_mask": mask}], [MAP])


@pytest.mark.parametrize("tokens", [3, 4])
@pytest.mark.parametrize("padding", [0, 1])
def test_inputs_with_tokens_before_examples_are_an_error(tokens, padding):
    """`(tokens, batch, features)` is divisible by the batch size too, but not in the order of the examples."""
    x = torch.arange(4.0 * tokens).reshape(2, tokens, 2)
    mask = torch.ones(2, tokens, dtype=torch.int64)
    mask[1, tokens - padding :] = 0
    with pytest.raises(ValueError, match=r"^map: "):
        collect(Reshaped(lambda x: x.transpose(0, 1)), [{"x": x, "attention_mask": mask}], [MAP])


def test_flattened_tokens_are_attributed_to_their_examples():
    """Some models flatten to `(batch × tokens, features)` before their linear layers."""
    flat = collect(Reshaped(lambda x: x.flatten(0, 1)), [{"x": TWO}], [MAP])
    assert_same(flat, collect(Sum(), [{"x": TWO}], [MAP]))


# --- targets that run several times, and whose tokens they see -------------------------------------------------------


class Cell(nn.Module):
    """h ← tanh(W h + x) token by token, in either order; the loss is the sum of h over real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        h, total = torch.zeros_like(x[:, 0]), x.new_zeros(())
        for token, real in zip(x.unbind(1), attention_mask.unbind(1), strict=True):
            h = torch.tanh(self.map(h) + token) * real.unsqueeze(-1)
            total = total + h.sum()
        return SimpleNamespace(loss=total / len(x))


CELL = Target(name="map", out_features=3, in_features=3, input_of="map", repeated=True)


def rows(left: bool) -> list[dict[str, Tensor]]:
    """Return examples of 1 to 5 tokens as batches of one; then all as one batch, padded on one side."""
    generator = torch.Generator().manual_seed(0)
    each, padded = [], []
    for length in (2, 5, 1, 3):
        x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
        mask = torch.ones(length, dtype=torch.int64)
        each.append({"x": x[None], "attention_mask": mask[None]})
        sides = (7 - length, 0) if left else (0, 7 - length)
        padded.append((nn.functional.pad(x, (0, 0, *sides), value=9.0), nn.functional.pad(mask, sides)))
    x, mask = (torch.stack(parts) for parts in zip(*padded, strict=True))
    return [*each, {"x": x, "attention_mask": mask}]


@pytest.mark.parametrize("left", [False, True])
def test_the_tokens_of_a_recurrent_cell_are_its_calls_without_padding(left):
    torch.manual_seed(0)
    model = Cell()
    *each, together = rows(left)
    fisher = torch.zeros(3, 3, dtype=torch.float64)
    for one in each:
        model.zero_grad()
        model(**one).loss.backward()
        fisher += model.map.weight.grad**2 / len(each)
    got = collect(model, [together], [CELL])
    torch.testing.assert_close(got["fisher"]["map.input"], fisher.sum(0), **CLOSE)
    torch.testing.assert_close(got["fisher"]["map.output"], fisher.sum(1), **CLOSE)
    assert float(got["tokens"]["map"]) == (2 + 5 + 1 + 3) / 4
    assert_same(got, collect(model, each, [CELL]))


def test_calls_without_a_gradient_add_nothing():
    class Detached(Cell):
        def forward(self, x: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            self.map(x[:, 0])
            return SimpleNamespace(loss=self.map(x[:, 1]).sum() / len(x))

    model, batch = Detached(), {"x": torch.ones(2, 2, 3, dtype=torch.float64), "attention_mask": torch.ones(2, 2)}
    got = collect(model, [batch], [CELL])
    torch.testing.assert_close(got["fisher"]["map.input"], 3 * torch.ones(3, dtype=torch.float64))
    assert float(got["tokens"]["map"]) == 2.0


def test_a_target_that_runs_again_unexpectedly_is_an_error():
    once = CELL.model_copy(update={"repeated": False})
    with pytest.raises(ValueError, match=r"^map: "):
        collect(Cell(), rows(left=False)[1:2], [once])


def test_each_target_is_masked_by_its_own_mask():
    """The same inputs, with the mask of either side of the batch."""
    mask, other = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 0], [0, 1]])

    class Two(Sum):
        def forward(self, x: Tensor, attention_mask: Tensor, decoder_attention_mask: Tensor) -> SimpleNamespace:
            return super().forward(x)

    batch = {"x": TWO, "attention_mask": mask, "decoder_attention_mask": other}
    for name, chosen in (("attention_mask", mask), ("decoder_attention_mask", other)):
        target = MAP.model_copy(update={"mask": name})
        expected = collect(Sum(), [{"x": TWO, "attention_mask": chosen}], [MAP])
        assert_same(collect(Two(), [batch], [target]), expected)


def test_a_batch_without_the_mask_of_a_target_is_an_error():
    target = MAP.model_copy(update={"mask": "decoder_attention_mask"})
    batch = {"x": TWO, "attention_mask": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"^map: .*\bdecoder_attention_mask\b"):
        collect(Sum(), [batch], [target])


def test_inputs_without_a_mask_all_count():
    """Such as those of a picture beside a padded text; each example has the same number."""
    target = MAP.model_copy(update={"mask": None})
    assert_same(collect(Sum(), [{"x": TWO}], [target]), collect(Sum(), [{"x": TWO}], [MAP]))
    twice = torch.cat([TWO, TWO], 1)
    mask = {"attention_mask": torch.tensor([[1, 1], [1, 0]])}
    model = Reshaped(lambda x: x)
    assert_same(collect(model, [{"x": twice, **mask}], [target]), collect(Sum(), [{"x": twice}], [MAP]))
    with pytest.raises(ValueError, match=r"^map: 4 .*\b2\b"):
        collect(model, [{"x": twice, **mask}, {"x": TWO, **mask}], [target])


# --- a few layers at once ---------------------------------------------------------------------------------------------


def in_parts(model, targets, layers, folder, **options):
    """Gather statistics of `layers` layers at a time, save each part, and load all."""
    for number, part in enumerate(passes(targets, layers), 1):
        gathered = collect(model, tiny.batches(SAMPLES, 4), part.targets, then=part.then, **options)
        save_statistics(gathered, folder, number)
    return load_statistics(folder)


@pytest.mark.parametrize("kinds", [STATISTIC_KINDS, ["inputs"]])
@pytest.mark.parametrize("layers", [1, 9])
def test_layer_by_layer_is_bitwise_the_single_pass(layers, kinds, tmp_path):
    model = tiny.bert()
    targets = targets_of(model)
    whole = collect(model, tiny.batches(SAMPLES, 4), targets, kinds)
    assert_same(in_parts(model, targets, layers, tmp_path, kinds=kinds), whole, rtol=0, atol=0)


def test_passes_are_the_layers_in_order():
    targets = targets_of(tiny.bert())
    one, two, pooler = passes(targets, 1)
    assert {target.name.split(".")[3] for target in one.targets} == {"0"}
    assert {target.name.split(".")[3] for target in two.targets} == {"1"}
    assert [target.name for target in pooler.targets] == ["bert.pooler.dense"]
    assert (one.then, two.then, pooler.then) == (two.targets[0], pooler.targets[0], None)
    assert [part.targets for part in passes(targets, 2)] == [one.targets + two.targets, pooler.targets]
    assert [part.targets for part in passes(targets, None)] == [targets]


def test_targets_without_a_number_are_a_layer_between_their_neighbors():
    names = ["first", "a.0.x", "a.0.y.7.z", "between.x", "also", "b.c.0", "b.c.1", "last"]
    targets = [Target(name=name, out_features=1, in_features=1, input_of=name) for name in names]
    got = [[target.name for target in part.targets] for part in passes(targets, 1)]
    assert got == [["first"], ["a.0.x", "a.0.y.7.z"], ["between.x", "also"], ["b.c.0"], ["b.c.1"], ["last"]]


def count_forwards(module: nn.Module) -> list[None]:
    calls: list[None] = []
    module.register_forward_hook(lambda *_: calls.append(None))
    return calls


def test_a_pass_for_inputs_stops_after_its_layers():
    model = tiny.llama()
    part = passes(targets_of(model), 1)[0]
    first, second = (count_forwards(model.model.layers[layer].mlp.down_proj) for layer in (0, 1))
    collect(model, tiny.batches(SAMPLES, 4), part.targets, ["inputs"], then=part.then)
    assert (len(first), len(second)) == (4, 1)  # the first batch shows that nothing of the part comes later
    collect(model, tiny.batches(SAMPLES, 4), part.targets, then=part.then)
    assert (len(first), len(second)) == (8, 5)  # gradients come from the end


class Late(Sum):
    """A model that runs its first layer before and after the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.map(x).sum() + self.other(self.map(x)).sum() + self.map(x).sum())


def test_a_pass_does_not_stop_before_a_target_runs_again():
    other = Target(name="other", out_features=1, in_features=1, input_of="other")
    batches = [{"x": TWO}] * 3
    again = MAP.model_copy(update={"repeated": True, "mask": None})
    expected = collect(Late(), batches, [again], ["inputs"])
    assert_same(collect(Late(), batches, [again], ["inputs"], then=other), expected, rtol=0, atol=0)


def test_the_graph_begins_at_the_first_target():
    """So activations before it are not kept."""
    model = tiny.llama()
    second, graphs = passes(targets_of(model), 1)[1], []
    model.model.layers[0].register_forward_hook(lambda _, args, output: graphs.append(output.requires_grad))
    model.model.layers[1].register_forward_hook(lambda _, args, output: graphs.append(output.requires_grad))
    collect(model, [tiny.collate(SAMPLES)], second.targets)
    assert graphs == [False, True]


def test_activations_are_offloaded_and_weights_are_not():
    model, moved = tiny.llama(), []
    weights = {parameter.shape for parameter in model.parameters()}
    to_cpu = Tensor.cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor) or to_cpu(tensor))
        collect(model, tiny.batches(SAMPLES[:3], 3, 11), targets_of(model), offload_activations=True)
    assert moved
    resident = {parameter.data_ptr() for parameter in model.parameters()}
    assert not resident & {tensor.data_ptr() for tensor in moved}
    assert not weights & {tensor.shape for tensor in moved if tensor.dim() == 2}


def test_half_precision_is_summed_in_single_and_near_it():
    """Sums of squares in bfloat16 would stop growing after 256 terms."""
    model = tiny.bert().bfloat16()
    targets = targets_of(model)
    half = collect(model, tiny.batches(SAMPLES, 4), targets)
    single = collect(model.float(), tiny.batches(SAMPLES, 4), targets)  # the same weights
    for kind, tensors in single.items():
        for key, tensor in tensors.items():
            assert half[kind][key].dtype == torch.float32
            error = (half[kind][key] - tensor).norm() / tensor.norm().clamp(min=1e-12)
            assert error < 0.1, f"{kind} of {key}: {error:.3f}"


# --- a device map -----------------------------------------------------------------------------------------------------


def test_an_offloaded_model_has_the_same_statistics(tmp_path):
    here, folder = tiny.llama(), tmp_path / "model"
    here.save_pretrained(folder)
    on_cpu = ["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "score"]
    device_map = {**dict.fromkeys(on_cpu, "cpu"), "model.layers.0": "disk"}
    there = type(here).from_pretrained(folder, device_map=device_map, offload_folder=folder / "offload")
    assert there.model.layers[0].mlp.up_proj.weight.is_meta
    targets = targets_of(there)
    assert targets == targets_of(here)
    expected = collect(here, tiny.batches(SAMPLES, 4), targets)
    # Not bits: weights that were loaded lie elsewhere in memory.
    assert_same(in_parts(there, targets, 1, tmp_path / "statistics"), expected)
    assert there.model.layers[0].mlp.up_proj.weight.is_meta
    for target in targets:
        torch.testing.assert_close(
            weight_of(there.get_submodule(target.name)), weight_of(here.get_submodule(target.name))
        )


# --- zeros and rounding ----------------------------------------------------------------------------------------------


def test_a_target_that_no_gradient_reaches_weighs_nothing():
    """The pooler runs, but this loss does not read it."""
    model = tiny.bert()
    batch = tiny.collate(tiny.samples(2))
    targets = find_targets(model, batch).targets
    pooler = next(target for target in targets if target.name == "bert.pooler.dense")

    def loss(model, batch):
        return model.bert(batch["input_ids"]).last_hidden_state.sum()

    statistics = collect(model, [batch], targets, loss=loss)
    assert not statistics["output_gradients"][pooler.name].any()
    assert not statistics["fisher"][f"{pooler.name}.input"].any()
    assert statistics["taylor"][f"{pooler.name}.output"].shape == (pooler.out_features,)


def test_sums_of_squares_are_never_negative():
    """A channel that is constant over tokens whose gradients cancel leaves the Gram form nothing but rounding."""
    torch.manual_seed(0)
    x, delta, weight = torch.randn(1, 16, 64), torch.randn(1, 16, 64), torch.empty(64, 64)
    x[..., 0] = 30.0
    delta -= delta.mean(1, keepdim=True)
    assert all((sums >= 0).all() for sums in square_sums(x, delta, weight, ["fisher"])["fisher"])


# --- parts of the examples -------------------------------------------------------------------------------------------


def test_statistics_of_parts_join_to_those_of_all_examples(tmp_path):
    """All kinds, also those of attention products, for parts of several sizes, gathered in several passes."""
    model = double("bert")
    probe = tiny.collate(SAMPLES[:2])
    targets = find_products(model, probe, find_targets(model, probe)).targets
    groups, parts = passes(targets, 1), {"a": SAMPLES[:7], "b": SAMPLES[7:8], "c": SAMPLES[8:]}
    for name, samples in parts.items():
        for number, group in enumerate(groups):
            save_statistics(collect(model, tiny.batches(samples, 4), group.targets), tmp_path / name, number)
    (tmp_path / "all").mkdir()
    join_statistics({tmp_path / name: len(samples) for name, samples in parts.items()}, tmp_path / "all")
    joined, whole = load_statistics(tmp_path / "all"), collect(model, tiny.batches(SAMPLES, 4), targets)
    assert "input_sums" in whole
    assert_same(joined, whole)


def test_a_tensor_that_a_part_lacks_is_zero_there(tmp_path):
    for name, kind in (("a", "inputs"), ("b", "fisher"), ("all", "taylor")):
        save_statistics({kind: {"x": torch.ones(2)}}, tmp_path / name)
    join_statistics({tmp_path / "a": 3, tmp_path / "b": 1}, tmp_path / "all")
    joined = load_statistics(tmp_path / "all")
    assert joined["inputs"]["x"].tolist() == [0.75, 0.75]
    assert joined["fisher"]["x"].tolist() == [0.25, 0.25]
