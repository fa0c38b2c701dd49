"""Quantize candidates and the original model with tools of others, and give candidates adapters of peft.

    make clients && make run
    PYTHONPATH=. .venv-clients/bin/python -m benchmarks.other_tools anchored-0.33   # Markdown tables for this study

Each tool gets a model as `from_pretrained` returns it, or quantizes it there, with the settings that its documentation
begins with. The size is that of the state dict in a file. Models are scored on the test examples.

Adapters are trained for `--steps` steps of 32 training examples by transformers' Trainer, saved, loaded onto the
candidate and merged into its factors. The table has the scores at each of these points.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, Trainer, TrainingArguments

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import ORIGINAL, megabytes, metric_cell, metric_title, parser_of_candidates
from tasks.artifacts.paths import FINETUNED
from tasks.config.params_file import section
from tasks.config.schema import Threads
from tasks.data.loading import encoded
from tasks.models.model_io import TEACHER
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import quiet
from tasks.scoring.splits import Scorer, load_scorer

HEAD = "classifier"
"""Name of the head, which stays as it is: peft trains it, and its few weights hardly count."""
Load = Callable[..., PreTrainedModel]
"""Loads the model, with the given options of `from_pretrained`."""


def linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != HEAD


def torchao(bits: int) -> Callable[[Load], PreTrainedModel]:
    """Return the quantization of weights by torchao; in int4 with a step for each output, which suits any rank."""

    def quantized(load: Load) -> PreTrainedModel:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, quantize_

        model = load()
        int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0))
        quantize_(model, Int8WeightOnlyConfig() if bits == 8 else int4, filter_fn=linear)
        return model

    return quantized


def torchao_packed(load: Load) -> PreTrainedModel:
    """Pack two weights into a byte by torchao's prototype for CPUs, where a layer has the sizes that it asks for.

    The rest is in bfloat16. In float32, a packed product takes sixty times as long as a dense one.
    """
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    def packable(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and linear(module, name) and module.out_features % 16 == 0

    model = load(dtype=torch.bfloat16)
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32), filter_fn=packable)  # if 32 divides the inputs
    return model


def quanto(bits: int) -> Callable[[Load], PreTrainedModel]:
    def quantized(load: Load) -> PreTrainedModel:
        from optimum.quanto import freeze, qint4, qint8, quantize

        model = load()
        quantize(model, weights=qint8 if bits == 8 else qint4, exclude=HEAD)
        freeze(model)
        return model

    return quantized


def dynamic(load: Load) -> PreTrainedModel:
    return torch.ao.quantization.quantize_dynamic(load(), {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]


def bitsandbytes(load: Load) -> PreTrainedModel:
    return load(quantization_config=BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[HEAD]))


def hqq(bits: int) -> Callable[[Load], PreTrainedModel]:
    def quantized(load: Load) -> PreTrainedModel:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        model, config = load(), BaseQuantizeConfig(nbits=bits, group_size=64)
        for name, module in list(model.named_modules()):
            if linear(module, name):
                model.set_submodule(name, HQQLinear(module, config, compute_dtype=torch.float32, device="cpu"))
        return model

    return quantized


QUANTIZERS: Mapping[str, Callable[[Load], PreTrainedModel]] = {
    "none: float32": lambda load: load(),
    "torchao, int8 weights": torchao(8),
    "torchao, int4 weights": torchao(4),
    "torchao, packed int4, bfloat16": torchao_packed,
    "optimum-quanto, int8 weights": quanto(8),
    "optimum-quanto, int4 weights": quanto(4),
    "torch `quantize_dynamic`, int8": dynamic,
    "bitsandbytes, 8 bits at load": bitsandbytes,
    "HQQ, 8 bits": hqq(8),
    "HQQ, 4 bits": hqq(4),
}


def adapters() -> dict[str, Any]:
    """Return configs of peft by their titles; a fresh config each time, because peft writes into it."""
    from peft import IA3Config, LoraConfig

    common: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": [HEAD]}
    names = ["query", "value"]
    scaled = {"target_modules": ["key", "value", "intermediate.dense"], "feedforward_modules": ["intermediate.dense"]}
    return {
        'LoRA, `["query", "value"]`': LoraConfig(target_modules=names, r=8, lora_alpha=16, **common),
        'LoRA, `"all-linear"`': LoraConfig(target_modules="all-linear", r=8, lora_alpha=16, **common),
        'DoRA, `["query", "value"]`': LoraConfig(target_modules=names, r=8, lora_alpha=16, use_dora=True, **common),
        "(IA)³, key, value, intermediate": IA3Config(**scaled, **common),
    }


def size(model: PreTrainedModel) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


class Study:
    """The study in this folder: its models and its test examples."""

    def __init__(self) -> None:
        self.scorer: Scorer = load_scorer("test")
        self.kind = kind_of(self.scorer.task)

    def load(self, name: str, **options: Any) -> PreTrainedModel:
        folder = TEACHER if name == ORIGINAL else FINETUNED / name
        model: PreTrainedModel = self.kind.auto.from_pretrained(folder, **options)
        return model.eval()

    def score(self, model: PreTrainedModel, title: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(TEACHER)
        with redirect_stdout(sys.stderr):
            return metric_cell(self.scorer.score_on("test", model.eval(), tokenizer, title).score.metric)


def print_quantizers(study: Study, names: list[str]) -> None:
    print(f"| tool | {' | '.join(f'{name}, MB | {metric_title()}' for name in names)} |")
    print("|---" * (1 + 2 * len(names)) + "|")
    for title, quantize in QUANTIZERS.items():
        cells = []
        for name in names:
            model = quantize(lambda name=name, **options: study.load(name, **options))  # type: ignore[misc]
            cells += [megabytes(size(model)), study.score(model, f"{title}, {name}")]
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


def print_adapters(study: Study, name: str, steps: int) -> None:
    from peft import PeftModel, get_peft_model

    columns = ("before", "trained", "loaded again", "merged", "merged, loaded again")
    print(f"\n| adapter of {name} | trained parameters | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    data = encoded("train", tokenizer)
    for title, config in adapters().items():
        torch.manual_seed(0)
        base = study.load(name)
        before = study.score(base, f"{name}, before")
        model = get_peft_model(copy.deepcopy(base), config)
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=32,
                learning_rate=1e-3,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            with redirect_stdout(sys.stderr):
                Trainer(model, settings, train_dataset=data, data_collator=study.kind.collate(tokenizer, base)).train()
            model.save_pretrained(Path(folder) / "adapter")
            again = PeftModel.from_pretrained(base, Path(folder) / "adapter")
            cells = [study.score(model, f"{title}, trained"), study.score(again, f"{title}, loaded")]
            merged = model.merge_and_unload()
            merged.save_pretrained(Path(folder) / "merged")
            last = study.kind.auto.from_pretrained(Path(folder) / "merged")
            cells += [study.score(merged, f"{title}, merged"), study.score(last, f"{title}, merged and loaded")]
        print(f"| {title} | {count:,} | {before} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = parser_of_candidates(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of the training of each adapter; default: %(default)s")
    asked = parser.parse_args()
    quiet()
    warnings.simplefilter("ignore")
    torch.set_num_threads(section("threads", Threads).candidate)
    study = Study()
    print_quantizers(study, [ORIGINAL, *asked.candidates])
    for name in asked.candidates:
        print_adapters(study, name, asked.steps)


if __name__ == "__main__":
    main()
