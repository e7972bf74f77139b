"""Shared code of the ranks of `benchmarks.step` and `benchmarks.offload`: loops, their clock, and the process's memory.

It requires only torch, and the packages that a function imports, because interpreters of peers and of other checkouts
import it, too.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 8  # sequences begin with a number below this
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")


def counting(draw: random.Random, sequences: int, tokens: int) -> Tensor:
    """A micro-batch ([sequences, tokens + 1]) of numbers that count up from small random ones, so that losses fall."""
    starts = torch.tensor([[draw.randrange(SMALL)] for _ in range(sequences)])
    return starts + torch.arange(tokens + 1)


def forget_gradient(parameter: Tensor) -> None:
    """Frees a parameter's gradient; a hook for forward and backward without an update."""
    parameter.grad = None


class Clock:
    """Measures seconds and peak memory of the measured steps.

    Args:
        warmup: number of optimizer steps before the measured ones, at least 1.
        steps: number of measured steps.
        align: waits for slower ranks and devices; called before the first and after the last measured step.
    """

    def __init__(self, warmup: int, steps: int, align: Callable[[], object]) -> None:
        self._warmup, self._steps, self._align = warmup, steps, align
        self._ends: list[float] = []
        self._done = 0
        self.initial_peak = 0.0

    def tick(self) -> None:
        """Note that an optimizer step, measured or not, has ended."""
        self._done += 1
        if self._done == self._warmup:
            self.initial_peak = peak()
            self._align()
            forget_peak()
        elif self._done == self._warmup + self._steps:
            self._align()
        if self._done >= self._warmup:
            self._ends.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        if len(seconds) != self._steps:
            raise RuntimeError(f"{len(seconds)} steps were measured; expected {self._steps}")
        last = peak()
        return {
            "seconds": sum(seconds) / len(seconds),
            "of_each_step": seconds,
            "peak_gib": max(self.initial_peak, last) / 2**30,
            "peak_of_steps_gib": last / 2**30,
        }


def peak() -> float:
    """The peak of resident memory in bytes since the start, or since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Reset the peak of resident memory, if the system can."""
    Path("/proc/self/clear_refs").write_text("5")


def accumulate(
    batches: Sequence[Tensor],
    micro_batches: int,
    clock: Clock,
    micro: Callable[[Tensor, bool], Tensor],
    step: Callable[[], object],
) -> list[Tensor]:
    """The plain training loop of the peers.

    Args:
        batches: the micro-batches of all steps.
        micro_batches: number of micro-batches per step.
        clock: notified of the end of every step.
        micro: runs forward and backward of a micro-batch; its second argument tells whether it is the step's last one.
        step: updates the parameters and clears the gradients.

    Returns:
        For each step, the loss of its last micro-batch.
    """
    losses = []
    for number, batch in enumerate(batches, 1):
        last = number % micro_batches == 0
        loss = micro(batch, last)
        if last:
            step()
            clock.tick()
            losses.append(loss.detach())
    return losses


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Tensor],
    micro_batches: int,
    clock: Clock,
    begin: Callable[[bool], object] = lambda last: None,
) -> list[Tensor]:
    """Call :func:`accumulate` for a model that returns its loss, and an optimizer.

    Args:
        model: the model to train.
        optimizer: the optimizer of its parameters.
        batches: the micro-batches of all steps.
        micro_batches: number of micro-batches per step.
        clock: notified of the end of every step.
        begin: called before each micro-batch; its argument tells whether it is the step's last one.
    """

    def micro(batch: Tensor, last: bool) -> Tensor:
        begin(last)
        loss: Tensor = model(batch) / micro_batches
        loss.backward()
        return loss * micro_batches

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return accumulate(batches, micro_batches, clock, micro, step)


@dataclass(frozen=True)
class Engine:
    """DeepSpeed's engine, with its defaults but without clipping.

    Attributes:
        batch: number of sequences per micro-batch.
        micro_batches: number of micro-batches per step.
        zero: the entry `zero_optimization` of its configuration.
        bf16: whether it trains in bf16.
    """

    batch: int
    micro_batches: int
    zero: dict[str, Any]
    bf16: bool = True

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 0.0,  # the default is 1
            "zero_optimization": self.zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.bf16},
            "steps_per_print": 1 << 30,
        }

    def run(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor], clock: Clock
    ) -> list[Tensor]:
        """Train; returns the same as :func:`accumulate`."""
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self.config())

        def micro(batch: Tensor, last: bool) -> Tensor:
            loss: Tensor = engine(batch)
            engine.backward(loss)
            engine.step()  # it counts micro-batches, and updates after the last one
            return loss

        return accumulate(batches, self.micro_batches, clock, micro, lambda: None)


def fit(
    model: nn.Module,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[Tensor],
    micro_batches: int,
    clock: Clock,
    callbacks: Sequence[Any] = (),
    **flags: Any,
) -> list[Tensor]:
    """Train by Lightning's Trainer with all optional parts off; arguments and result as for :func:`accumulate`."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    losses: list[Tensor] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch)
            if (index + 1) % micro_batches == 0:
                losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

    class Ticks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if (rest[-1] + 1) % micro_batches == 0:
                clock.tick()

    off = dict.fromkeys(QUIET, False)
    flags = {"callbacks": [Ticks(), *callbacks], **off, **flags}
    trainer = pl.Trainer(accumulate_grad_batches=micro_batches, max_epochs=1, **flags)
    trainer.fit(Module(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return losses
