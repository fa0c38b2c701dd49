"""The training loop of all stages: transformers.Trainer with rules, a training curve and checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import is_bitsandbytes_available

from eckart.calibration.losses import Loss, mean_loss
from eckart.model.batches import Batch, batch_size, examples_of, without_labels
from eckart.model.hf_format import converted
from eckart.model.module_context import kept_config
from eckart.training.learning_rate import share_of_peak
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule
from eckart.training.schedules import steps_in
from tasks.artifacts.errors import StageError
from tasks.config.schema import Optimizer, Trainer
from tasks.nlp_tasks._prediction import Collate
from tasks.runtime.stage_runner import leads, say
from tasks.training.checkpoints import Checkpoints

_POINTS = 20  # largest number of points of a training curve
_BITSANDBYTES_ON_CPU = "0.50"  # first version whose optimizers run without a GPU
_LOGGED = ("loss", "learning_rate", "grad_norm")  # values that the Trainer itself logs


def train(
    model: PreTrainedModel,
    collate: Collate,
    data: Dataset,
    curve: Path,
    training: Optimization,
    trainer: Trainer,
    *,
    seed: int,
    rules: Sequence[Rule] = (),
    loss: Loss | None = None,
    dropout: bool = True,
    before: int = 0,
) -> int:
    """Train `model` in place for all steps, or until a rule is done; write the training curve to the file `curve`.

    A killed training resumes from its last checkpoint, and gives the same weights and curve, byte for byte.

    Args:
        collate: function that makes a batch from examples of `data`.
        training: settings of the optimizer, with the number of steps.
        trainer: how a step is computed. With a micro-batch, the gradients of a step's passes add up to those of the
            whole batch. `processes` is not read: they have been started by now.
        rules: methods that are called in each step, such as a pruning method.
        loss: the loss whose mean over examples is minimized; None: the model's own loss.
        dropout: whether the model's dropout is on.
        before: number of steps of the earlier trainings whose points are already in `curve`.

    Returns:
        The number of steps that were taken.

    Raises:
        StageError: the loss or a weight is not finite, the processes cannot share the examples of a step, or this
            machine cannot run the optimizer.
    """
    training = training.optimization  # a method's own settings may have several phases
    curve.parent.mkdir(parents=True, exist_ok=True)
    if not before and leads():
        curve.write_text("")
    if not training.steps:
        _finish(model, rules)
        return 0
    settings = _settings(training, trainer, seed)
    identity = {
        **settings,
        "batch_size": training.batch_size,
        "rate": [training.schedule, training.warmup, training.last_rate],
        "checkpoint_activations": trainer.checkpoint_activations,
        "micro_batch": trainer.micro_batch,
    }
    checkpoints = Checkpoints(curve.with_suffix(f".{before}"), model, data, rules, identity)
    recomputing = _recomputation(model, rules, dropout) if trainer.checkpoint_activations else nullcontext()
    with kept_config(model), recomputing:
        loop = _RuleTrainer(
            model,
            _arguments(checkpoints.folder, settings),
            train_dataset=data,
            data_collator=collate,
            callbacks=[_AfterUpdate(rules), _Curve(curve, before), checkpoints],
            rules=rules,
            rate=_rate(training),
            loss=loss,
            dropout=dropout,
            micro_batch=trainer.micro_batch or training.batch_size,
        )
        loop.remove_callback(PrinterCallback)  # prints every log as a raw dictionary
        loop.train(resume_from_checkpoint=checkpoints.resume())
    checkpoints.remove()
    if loop.model_wrapped is not model or trainer.precision:  # wrappers are removed: a loaded model has none
        loop.accelerator.unwrap_model(loop.model_wrapped, keep_fp32_wrapper=False)
    _finish(model, rules)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise StageError(f"the weights are not finite after step {training.steps}: lower the learning rate")
    return loop.state.global_step


def _settings(training: Optimization, trainer: Trainer, seed: int) -> dict[str, Any]:
    """Return those arguments of transformers' Trainer that differ between trainings."""
    _check_optimizer(trainer.optimizer)
    return {
        "max_steps": training.steps,
        "per_device_train_batch_size": _share_of_process(training.batch_size),
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "seed": seed,
        "logging_steps": math.ceil(training.steps / _POINTS),
        "bf16": trainer.precision == "bf16",
        **({} if trainer.optimizer == "adamw" else {"optim": trainer.optimizer}),
    }


def _rate(training: Optimization) -> Callable[[int], float]:
    """Return a function of the number of steps that are done: the next step's learning rate ÷ the peak."""
    steps = training.steps
    rising = min(steps_in(training.warmup, steps), steps - 1)  # the first has the rate 0, which a single step must not
    return partial(share_of_peak, training.schedule, steps=steps, warmup=rising, last=training.last_rate)


def _share_of_process(batch_size: int) -> int:
    """Return the number of examples of a step that each process gets."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if batch_size % processes:
        raise StageError(f"{batch_size} examples cannot be shared by {processes} processes: write a multiple of them")
    return batch_size // processes


def _check_optimizer(optimizer: Optimizer) -> None:
    if not optimizer.endswith("8bit"):
        return
    advice, gpu = f"trainer.optimizer is {optimizer}, which needs", torch.cuda.is_available()
    if optimizer.startswith("paged") and not gpu:
        raise StageError(f"{advice} a GPU, whose memory it pages: write adamw_8bit, whose states have the same size")
    if not (is_bitsandbytes_available() if gpu else is_bitsandbytes_available(_BITSANDBYTES_ON_CPU)):
        version = "" if gpu else f" {_BITSANDBYTES_ON_CPU} or newer"
        raise StageError(
            f"{advice} the package bitsandbytes{version}: install it (pip install -U bitsandbytes), or write adafactor"
        )


def _arguments(folder: Path, settings: Mapping[str, Any]) -> TrainingArguments:
    arguments = TrainingArguments(
        str(folder),
        **settings,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if "RANK" in os.environ and not torch.cuda.is_available() else None,
        ddp_find_unused_parameters=True,  # by default not with checkpointed activations, where some models need it, too
        average_tokens_across_devices=False,  # True would multiply the loss, already a mean, by the processes
        label_names=["labels"],  # kept in the batches even if the model itself reads none
        logging_nan_inf_filter=False,  # a loss that is not finite must be logged
        save_strategy="no",  # Checkpoints decides when to save
        save_total_limit=2,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # with more, DataParallel would copy the layers that rules refer to
    return arguments


@contextmanager
def _recomputation(model: PreTrainedModel, rules: Sequence[Rule], dropout: bool) -> Iterator[None]:
    """Let the layers of `model` recompute their activations in the backward pass instead of keeping them."""
    if not model.supports_gradient_checkpointing:
        raise StageError(
            f"a {type(model).__name__} cannot recompute activations: set trainer.checkpoint_activations to false"
        )
    still = [] if dropout else [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts for a layer's forward pass and for its recomputation."""
        return _in_eval_mode(still), _together([_in_eval_mode(still), *(rule.recomputation() for rule in rules)])

    # not set in transformers' arguments: it saves them, and rules cannot be saved
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()


@contextmanager
def _in_eval_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Put those of `layers` that are in training mode into eval mode; their own parts are not touched."""
    training = [layer for layer in layers if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@contextmanager
def _together(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _finish(model: PreTrainedModel, rules: Sequence[Rule]) -> None:
    for rule in rules:
        rule.finish()
    model.eval()


def _stop_dropout(model: nn.Module) -> None:
    """Put `model` into eval mode, but for layers that recompute activations, which they do in training mode only.

    Such layers leave this mode while they run (`_recomputation`).
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = module.gradient_checkpointing


class _RuleTrainer(transformers.Trainer):
    """Trainer that calls the rules in each step, and runs the examples of a step in one or more micro-batches."""

    def __init__(
        self,
        *args: Any,
        rules: Sequence[Rule],
        rate: Callable[[int], float],
        loss: Loss | None,
        dropout: bool,
        micro_batch: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rate = rate
        """Number of steps that are done → learning rate of the next one, as a share of the peak."""
        self.loss = loss
        self.dropout = dropout
        self.rules = rules
        self.micro_batch = micro_batch
        self.options = {name: value for rule in rules for name, value in rule.forward_options.items()}
        self.begins, self.share = True, 1.0
        """Whether a pass is the first one of its step, and its share of the step's examples."""
        self.step_loss = 0.0
        """Task loss of the examples of the present step that have been seen, times their share."""
        self.task_losses: list[float] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        lengths = [len(ids) for ids in self.train_dataset["input_ids"]]  # type: ignore[index]
        return _LengthGroups(self.args.train_batch_size * self.args.world_size, lengths, self.args.seed)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        for group in (group for rule in self.rules for group in rule.parameter_groups()):
            optimizer.add_param_group(dict(group))
        return optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.rate)  # type: ignore[arg-type]  # has one by now
        return self.lr_scheduler

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        for rule in self.rules if self.begins else ():
            rule.before_forward(self.state.global_step)
        if not self.dropout:
            _stop_dropout(model)
        batch = {**inputs, **self.options}
        if self.loss is None:
            # Without the number of labels, which the Trainer counts wrongly for some models: their own mean is right.
            loss, outputs = super().compute_loss(model, batch, return_outputs=True)
        else:  # the model may have no loss of its own
            outputs = model(**without_labels(batch))
            loss = mean_loss(self.loss, outputs, inputs)
        if self.rules:
            self.step_loss += self.share * float(loss.detach())
        for rule in self.rules:
            with self.accelerator.autocast() if rule.runs_a_model else nullcontext():
                extra = rule.extra_loss(model, inputs, outputs)  # type: ignore[arg-type]
            loss = loss if extra is None else loss + extra
        loss = loss if self.share == 1 else self.share * loss
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute the gradient of the mean loss over the examples of a step, and return this loss.

        The Trainer's own accumulation would draw other batches, and call the rules for each of them.
        """
        size = batch_size(inputs)
        if size <= self.micro_batch:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._accumulated(model, inputs, size)
        if self.rules:
            self.task_losses.append(self.step_loss)
            self.step_loss = 0.0
        for rule in self.rules:
            rule.after_backward(self.state.global_step)
        return loss

    def _accumulated(self, model: nn.Module, inputs: Batch, size: int) -> Tensor:
        losses = []
        for start in range(0, size, self.micro_batch):
            part = examples_of(inputs, start, start + self.micro_batch)
            self.begins, self.share = start == 0, batch_size(part) / size
            last = start + self.micro_batch >= size
            with nullcontext() if last else self.accelerator.no_sync(model):  # processes exchange gradients once
                losses.append(super().training_step(model, part))
        self.begins, self.share = True, 1.0
        return torch.stack(losses).sum()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save a checkpoint with the model's own names of tensors, since that is how the Trainer reads it.

        By default, `save_pretrained` writes those of the family's folders, in which a mixture's experts, for instance,
        are tensors of their own. The Trainer would leave such tensors as they were before the training.
        """
        with converted(self.model, []):  # type: ignore[arg-type]
            super()._save(output_dir, state_dict)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add to the log the mean task loss since the last log, and the rules' measures of the last step.

        With several processes, each is the mean over them, as the Trainer's loss is.
        """
        if "loss" in logs and self.rules:
            own = {"task_loss": sum(self.task_losses) / len(self.task_losses)}
            self.task_losses.clear()
            for rule in self.rules:
                own |= rule.measures()
            logs |= self._mean_over_processes(own)
        super().log(logs, *args, **kwargs)

    def _mean_over_processes(self, values: dict[str, float]) -> dict[str, float]:
        if self.args.world_size == 1:
            return values
        together = torch.tensor([*values.values()], dtype=torch.float64, device=self.args.device)
        return dict(zip(values, self.accelerator.reduce(together, "mean").tolist(), strict=True))


class _LengthGroups(LengthGroupedSampler):
    """Sampler that puts examples of similar length into a batch, in an order that depends only on seed and epoch.

    The Trainer's own sampler draws from the global random state, so a resumed training would see other examples.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def drawn(data: Dataset, steps: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the examples that `train` draws; of all, if it draws that many."""
    if steps * batch_size >= len(data):
        return list(range(len(data)))
    return list(_LengthGroups(batch_size, [len(ids) for ids in data["input_ids"]], seed))[: steps * batch_size]


class _AfterUpdate(TrainerCallback):
    """Callback that calls the rules after each optimizer step, and stops the training when a rule is done."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for rule in self.rules:
            rule.after_update(state.global_step - 1)
        if any(rule.done for rule in self.rules):
            control.should_training_stop = True
        if control.should_training_stop or state.global_step == state.max_steps:
            control.should_log = True  # the curve always has the last step


class _Curve(TrainerCallback):
    """Callback that appends each logged point of the training curve to a file and prints it."""

    def __init__(self, file: Path, before: int) -> None:
        self.file = file
        self.before = before

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write again the points that a killed training logged before its last checkpoint, if this one resumes it."""
        self._write([_point(logs) for logs in state.log_history if "loss" in logs])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        logs: Mapping[str, Any] = given["logs"]
        if "loss" not in logs:
            return
        point = _point({**logs, "step": state.global_step})
        if not all(map(math.isfinite, point.values())):
            raise StageError(f"the loss is not finite at step {state.global_step}: lower the learning rate")
        self._write([point])
        extras = "".join(f"  {name} {value:.4g}" for name, value in point.items() if name not in ("step", *_LOGGED))
        say(f"step {state.global_step}/{state.max_steps}  loss {point['loss']:.4f}{extras}")

    def _write(self, points: Sequence[Mapping[str, float]]) -> None:
        if leads():
            with self.file.open("a") as lines:
                lines.writelines(json.dumps({**point, "step": point["step"] + self.before}) + "\n" for point in points)


def _point(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return a point of the curve: the step, all logged values except the epoch, and the rules' measures."""
    measured = sorted({*logs} - {"step", "epoch", *_LOGGED})
    return {"step": logs["step"], **{name: float(logs[name]) for name in (*_LOGGED, *measured)}}
