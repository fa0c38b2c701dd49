"""vLLM's plug-in: its layers against eckart's and, where vLLM is installed, its answers against those of transformers.

vLLM's environment is another than ours. There, run `pip install pytest accelerate greenlet` and then
`python -m pytest --noconftest tests/eckart/model/test_vllm.py`. Without vLLM, a stand-in for its base classes lets the
layers be tested.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from eckart.factorization.pivoted_storage import pivot
from eckart.model import hf_format
from eckart.model.layers import LowRankLinear, PivotedLinear, narrowed_shapes
from eckart.model.targets import find_targets
from tests import tiny

IN, OUTS = 8, (8, 4, 6)
TEXT = [3, 4, 5, 6, 7]


class Unquantized:
    """Stand-in for the method of vLLM's dense layers."""

    def create_weights(
        self, layer: nn.Module, inputs: int, outputs: list[int], input_size: int, output_size: int, dtype: torch.dtype
    ) -> None:
        layer.register_parameter("weight", nn.Parameter(torch.empty(sum(outputs), inputs, dtype=dtype)))


def stand_in() -> Iterator[ModuleType]:
    """Stand in for the modules of vLLM that the plug-in imports."""
    layers = "vllm.model_executor.layers"
    names = ["vllm", "vllm.model_executor", layers, f"{layers}.linear", f"{layers}.quantization"]
    for name in [*names, f"{layers}.quantization.base_config"]:
        module: Any = ModuleType(name)
        module.LinearBase = type("LinearBase", (nn.Module,), {})
        module.LinearMethodBase, module.UnquantizedLinearMethod = type("Method", (), {}), Unquantized
        module.QuantizationConfig = type("Config", (), {"__init__": lambda self: None})
        module.register_quantization_config = lambda method: lambda config: config
        yield module


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not find_spec("vllm"):
        for module in stand_in():
            monkeypatch.setitem(sys.modules, module.__name__, module)
    import eckart_vllm

    yield eckart_vllm
    sys.modules.pop("eckart_vllm")


def drawn(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    return layer


def fused_parts() -> dict[str, list[nn.Module]]:
    """Return the parts of fused layers of three, by how they are stored."""
    low = [drawn(LowRankLinear(IN, out, rank, bias=False)) for out, rank in zip(OUTS, (1, 3, 2), strict=True)]
    rows = [drawn(LowRankLinear(IN, out, 2, bias=False, rows=2)) for out in OUTS]
    pivots = [drawn(PivotedLinear(IN, out, rank, bias=False)) for out, rank in zip(OUTS, (2, 1, 3), strict=True)]
    for layer in rows:
        layer.rows.copy_(torch.tensor([3, 1]))
    for layer in pivots:
        layer.places.copy_(torch.randperm(len(layer.places)))
    dense = [drawn(nn.Linear(IN, out, bias=False)) for out in OUTS]
    return {"factors": low, "rows": rows, "pivoted": pivots, "mixed": [pivots[0], dense[1], rows[2]]}


def as_part(plugin: Any, layer: nn.Module) -> Any:
    if isinstance(layer, nn.Linear):
        return plugin.Part(None)
    rows = 0 if isinstance(layer, PivotedLinear) or layer.rows is None else len(layer.rows)
    return plugin.Part(layer.rank, rows, isinstance(layer, PivotedLinear))


@pytest.mark.parametrize("shards", [("q", "k", "v"), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["factors", "rows", "pivoted", "mixed"])
def test_a_fused_layer_computes_the_same_as_its_parts(plugin: Any, kind: str, shards: tuple[str | int, ...]) -> None:
    torch.manual_seed(0)
    parts, layer, x, bias = fused_parts()[kind], nn.Module(), torch.randn(3, IN), torch.randn(sum(OUTS))
    method = plugin.LowRankMethod([as_part(plugin, part) for part in parts])
    method.create_weights(layer, IN, list(OUTS), IN, sum(OUTS), torch.float32)
    for shard, part in reversed(list(zip(shards, parts, strict=True))):  # a file has them in any order
        for name, values in part.state_dict().items():
            parameter = layer.get_parameter(name)
            parameter.weight_loader(parameter, values, shard)
    method.process_weights_after_loading(layer)
    wanted = torch.cat([part(x) for part in parts], -1)
    torch.testing.assert_close(method.apply(layer, x), wanted)
    torch.testing.assert_close(method.apply(layer, x, bias), wanted + bias)


def on_device(plugin: Any, parts: list[nn.Module], inputs: int, outs: list[int], **sharing: int) -> Any:
    """Return a function that computes what one device does: of each part these numbers of outputs, from its inputs.

    Args:
        inputs: number of inputs of the device.
        sharing: attributes of vLLM's layers.
    """
    layer = nn.Module()
    vars(layer).update(sharing)
    method = plugin.LowRankMethod([as_part(plugin, part) for part in parts])
    # vLLM counts the outputs of heads that several devices have as often as there are devices.
    output_size = sum(outs) * (sharing["tp_size"] if inputs == IN else 1)
    method.create_weights(layer, inputs, outs, IN, output_size, torch.float32)
    for shard, part in enumerate(parts):
        for name, values in part.state_dict().items():
            parameter = layer.get_parameter(name)
            parameter.weight_loader(parameter, values, shard)
    method.process_weights_after_loading(layer)
    return lambda x: method.apply(layer, x)


@pytest.mark.parametrize("kind", ["factors", "rows", "pivoted", "mixed"])
def test_devices_with_some_outputs_compute_the_same_together(plugin: Any, kind: str) -> None:
    torch.manual_seed(0)
    parts, x = fused_parts()[kind], torch.randn(3, IN)
    for devices, same in ((2, 1), (4, 2)):
        outs = [OUTS[0] // devices, *(out * same // devices for out in OUTS[1:])]
        sharing = {"tp_size": devices, "num_kv_head_replicas": same}
        found = [on_device(plugin, parts, IN, outs, tp_rank=rank, **sharing)(x) for rank in range(devices)]
        query, key, value = zip(*(y.split(outs, -1) for y in found), strict=True)
        for part, pieces in zip(parts, (query, key[::same], value[::same]), strict=True):
            torch.testing.assert_close(torch.cat(pieces, -1), part(x))
        for pieces in (key, value):
            assert all(torch.equal(pieces[rank], pieces[rank // same * same]) for rank in range(devices))


@pytest.mark.parametrize("kind", ["factors", "rows", "pivoted"])
def test_outputs_of_devices_with_some_inputs_add_up(plugin: Any, kind: str) -> None:
    torch.manual_seed(0)
    part, x = fused_parts()[kind][2], torch.randn(3, IN)
    found = [
        on_device(plugin, [part], IN // 4, [OUTS[2]], tp_rank=rank, tp_size=4)(piece)
        for rank, piece in enumerate(x.chunk(4, -1))
    ]
    torch.testing.assert_close(sum(found), part(x))


def test_a_fused_layer_that_is_one_layer_in_the_file(plugin: Any) -> None:
    """So are GPT-2's query, key and value."""
    torch.manual_seed(0)
    whole, layer, x = drawn(LowRankLinear(IN, sum(OUTS), 3, bias=False)), nn.Module(), torch.randn(2, IN)
    method = plugin.LowRankMethod([plugin.Part(3)])
    method.create_weights(layer, IN, list(OUTS), IN, sum(OUTS), torch.float32)
    for name, values in whole.state_dict().items():
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, values)
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x), whole(x))


def narrowed(plugin: Any, name: str, layer: Any, devices: int = 1, fused: bool = False, **config: Any) -> Any:
    """Return the layer `name` of a LLaMA, whose MLP of 96 neurons has 40, after vLLM has made it on one of `devices`.

    Args:
        layer: has the attributes that vLLM's layers have before they ask for their weights.
        fused: whether gate and up are one layer in the file, too, as in Phi-3.
    """
    up = {"mlp.gate_up_proj": [80, 64]} if fused else {"mlp.gate_proj": [40, 64], "mlp.up_proj": [40, 64]}
    read = plugin.EckartConfig.from_config({"ranks": {}, "narrowed": {**up, "mlp.down_proj": [64, 40]}, **config})
    read.packed_modules_mapping = {"gate_up_proj": ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]}
    method = read.get_quant_method(layer, f"mlp.{name}")
    if name == "gate_up_proj":
        layer.output_sizes = [96, 96]
        method.create_weights(layer, 64, [96 // devices] * 2, 64, 192, torch.float32)
    else:
        method.create_weights(layer, 96 // devices, [64], 96, 64, torch.float32)
    layer.quant_method = method
    return layer


@pytest.mark.skipif(bool(find_spec("vllm")), reason="vLLM's own layers need its distributed groups")
@pytest.mark.parametrize("fused", [False, True])
def test_narrowed_layers_get_their_sizes(plugin: Any, fused: bool) -> None:
    layer = sys.modules["vllm.model_executor.layers.linear"].LinearBase
    for devices in (1, 4):
        joined = narrowed(plugin, "gate_up_proj", layer(), devices, fused)
        assert (joined.input_size_per_partition, joined.input_size, joined.output_size) == (64, 64, 80)
        assert (joined.output_sizes, joined.output_size_per_partition) == ([40, 40], 80 // devices)
        assert joined.weight.shape == (80 // devices, 64)
        down = narrowed(plugin, "down_proj", layer(), devices, fused)
        assert (down.input_size, down.output_size, down.output_partition_sizes) == (40, 64, [64])
        assert down.weight.shape == (64, 40 // devices)
    with pytest.raises(ValueError, match=r"gate_up_proj has 40 .*divisor of 40"):
        narrowed(plugin, "gate_up_proj", layer(), 3, fused)


@pytest.mark.skipif(bool(find_spec("vllm")), reason="vLLM's own layers need its distributed groups")
def test_narrowed_layers_may_have_ranks(plugin: Any) -> None:
    torch.manual_seed(0)
    layer, x = sys.modules["vllm.model_executor.layers.linear"].LinearBase(), torch.randn(3, 64)
    layer.tp_rank, layer.tp_size = 0, 1
    gate, up = drawn(PivotedLinear(64, 40, 5, bias=False)), nn.Linear(64, 40, bias=False)
    made = narrowed(plugin, "gate_up_proj", layer, ranks={"mlp.gate_proj": 5}, pivoted=["mlp.gate_proj"], format=2)
    for shard, part in enumerate((gate, up)):
        for name, values in part.state_dict().items():
            made.get_parameter(name).weight_loader(made.get_parameter(name), values, shard)
    made.quant_method.process_weights_after_loading(made)
    torch.testing.assert_close(made.quant_method.apply(made, x), torch.cat([gate(x), up(x)], -1))


@pytest.mark.parametrize("old", [False, True])
def test_biases_of_parts_are_added_to_the_layers_own(plugin: Any, old: bool) -> None:
    """vLLM gives a layer its bias after the weights have been allocated. A part in pivots has none of its own."""
    torch.manual_seed(0)
    kinds = (LowRankLinear, PivotedLinear, LowRankLinear)
    parts = [drawn(kind(IN, out, 2, bias=True)) for kind, out in zip(kinds, OUTS, strict=True)]
    stored = [plugin.Part(2, pivoted=kind is PivotedLinear, biased=not old) for kind in kinds]
    layer, x = nn.Module(), torch.randn(3, IN)
    method = plugin.LowRankMethod(stored, {}) if old else plugin.LowRankMethod(stored)
    method.create_weights(layer, IN, list(OUTS), IN, sum(OUTS), torch.float32)
    layer.bias = nn.Parameter(torch.zeros(sum(OUTS)))
    start = 0
    for shard, part in enumerate(parts):
        names = {new: before for before, new in part.renamed().items()} if old else {}
        for name, values in part.state_dict().items():
            name, end = names.get(name, name), start + part.out_features
            if name == "bias":  # vLLM's own
                layer.bias.data[start:end] = values
            else:
                layer.get_parameter(name).weight_loader(layer.get_parameter(name), values, shard)
        start += part.out_features
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x, layer.bias), torch.cat([part(x) for part in parts], -1))


def test_a_weight_that_vllm_has_transposed_is_turned_back(plugin: Any) -> None:
    """So it does with all weights of a GPT-2. This one is square, so that its shape does not tell."""
    part, layer, x = drawn(PivotedLinear(IN, 6, 3, bias=False)), nn.Module(), torch.randn(2, IN)
    method = plugin.LowRankMethod([plugin.Part(3, pivoted=True)])
    method.create_weights(layer, IN, [6], IN, 6, torch.float32)
    for name, values in part.state_dict().items():
        layer.get_parameter(name).weight_loader(layer.get_parameter(name), values.t() if values.ndim == 2 else values)
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x), part(x))


def test_unsupported_storage_is_an_error(plugin: Any) -> None:
    method, layer = plugin.LowRankMethod([plugin.Part(2)]), nn.Module()
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        method.create_weights(layer, IN, [2, 2, 2], IN, 12, torch.float32)
    with pytest.raises(ValueError, match="export --dense"):
        plugin.EckartConfig.from_config({"ranks": {}, "heads": {"query": 2}})
    with pytest.raises(ValueError, match=r"experts.*--dense"):
        plugin.EckartConfig.from_config({"ranks": {}, "experts": ["mlp.experts"]})
    config = plugin.EckartConfig.from_config({"ranks": {"embed": 2}})
    with pytest.raises(ValueError, match="embed"):
        config.get_quant_method(nn.Embedding(3, 3), "embed")
    method.create_weights(layer, IN, [6], IN, 6, torch.float32)
    with pytest.raises(ValueError, match=r"left .*\b12\b"):
        layer.left.weight.weight_loader(layer.left.weight, torch.zeros(6, 3))


def causal(family: str) -> PreTrainedModel:
    """Its heads have a width that vLLM's attention supports."""
    if family == "gpt2":
        config = GPT2Config(vocab_size=tiny.VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2, pad_token_id=0)
        return tiny.drawn(GPT2LMHeadModel, config)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    name = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM"}[family]
    everywhere = {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2}
    return tiny.build(name, num_key_value_heads=1, **everywhere, **sizes)


def compress(model: PreTrainedModel, stored: str) -> PreTrainedModel:
    """Factorize two layers of three at different ranks, as factors, pivots, or factors and two rows of the rest.

    If narrowed, the MLPs have other widths, and the layers of attention stay dense.
    """
    if stored.startswith("narrowed"):
        model = tiny.narrow(model, (40, 70))
        for name in list(narrowed_shapes(model))[1:] if stored == "narrowed in pivots" else ():
            tiny.factorize_layer(model, name, 3)
        pivot(model)
        return model.eval()
    for number, target in enumerate(find_targets(model, {"input_ids": torch.tensor([TEXT])}).targets):
        if number % 3 != 1:
            tiny.factorize_layer(model, target.name, 3 + number % 4, slice(1, 3) if stored == "rows" else None)
    if stored == "pivoted":
        pivot(model)
    return model.eval()


def losses(model: PreTrainedModel) -> Tensor:
    """Return the log-probability of each token of TEXT but the first."""
    with torch.no_grad():
        chances = model(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return -chances[range(len(TEXT) - 1), TEXT[1:]]


@pytest.mark.skipif(
    not find_spec("vllm"), reason="vLLM is not installed; it needs an environment of its own: pip install vllm pytest"
)
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *(("llama", stored) for stored in ("factors", "pivoted", "rows", "narrowed", "narrowed in pivots")),
        *(("gpt2", stored) for stored in ("factors", "narrowed")),
        *(("phi3", stored) for stored in ("narrowed", "narrowed in pivots")),
    ],
)
def test_vllm_generates_as_transformers(family: str, stored: str, tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams

    model = compress(causal(family), stored)
    hf_format.save(model, tmp_path)
    tiny.words().save_pretrained(tmp_path)
    engine = LLM(str(tmp_path), dtype="float32", max_model_len=64, enforce_eager=stored != "factors")
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    (found,) = engine.generate([{"prompt_token_ids": TEXT}], asked)
    given = torch.tensor([-one[token].logprob for token, one in zip(TEXT[1:], found.prompt_logprobs[1:], strict=True)])
    torch.testing.assert_close(given, losses(model), rtol=1e-3, atol=1e-3)
    wanted = model.generate(torch.tensor([TEXT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert list(found.outputs[0].token_ids) == wanted[0, len(TEXT) :].tolist()
