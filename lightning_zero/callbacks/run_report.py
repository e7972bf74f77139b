"""A report of a run: its loss curves and a summary of measurements."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.storage import device_type

LAST = 100  # the reported training loss is the mean of this many steps


class Stopwatch:
    """Seconds while it runs; it can be stopped and started again."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None


class RunReport(pl.Callback):
    """Measures a fit, shows speed and learning rate on the progress bar, and writes `loss.png` and `summary.json`.

    The module must log `train_loss` for every micro-batch and `val_loss` in validation, both with `sync_dist=True`. The
    speed is that of training, without validation and without the time before the first step. Call :meth:`write` after
    the run, on all ranks; the plot needs matplotlib.

    Args:
        run_dir: local folder to write to, which is made when a run begins. A relative path is taken from where the
            callback is made.
        strategy: name of the strategy, for the summary and the plot's title.
        step_size: units of data in an optimizer step, over all ranks.
        unit: name of these units in the plural: "tokens", "images". The speed is logged as `<unit>_per_second`.
        loss_unit: unit of the loss, for the plot.

    Raises:
        ValueError: ``run_dir`` is a URL.
    """

    def __init__(self, run_dir: str | Path, strategy: str, step_size: int, unit: str, loss_unit: str = "nats") -> None:
        if "://" in str(run_dir):
            raise ValueError(
                f"run_dir={str(run_dir)!r} is a URL; expected the path of a local folder. Write there, and copy the "
                "files when the run has ended"
            )
        self.run_dir, self.strategy = Path(run_dir).absolute(), strategy
        self.step_size, self.speed_name, self.loss_unit = step_size, f"{unit}_per_second", loss_unit
        self.train_curve: list[tuple[int, float]] = []  # optimizer step, loss of the global batch
        self.val_curve: list[tuple[int, float]] = []
        self.clock = Stopwatch()  # runs in training, is stopped in validation
        self.peak_memory = 0  # bytes, the largest of all ranks

    @property
    def validated_step(self) -> int | None:
        """The optimizer step of the last validation."""
        return self.val_curve[-1][0] if self.val_curve else None

    @property
    def val_loss(self) -> float | None:
        """The loss of the last validation."""
        return self.val_curve[-1][1] if self.val_curve else None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:  # now, so that a run does not end with an error about its folder
            self.run_dir.mkdir(parents=True, exist_ok=True)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = self._mark_step = trainer.global_step
        self._mark_seconds, self._speed = self.clock.seconds, 0.0
        self._losses: list[Tensor] = []  # of the micro-batches since the last step
        self.clock.start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._losses.append(trainer.callback_metrics["train_loss"].detach().clone())
        if trainer.global_step == self._step:
            return  # a micro-batch, and the optimizer has not stepped yet
        self._step = trainer.global_step
        self.train_curve.append((self._step, float(torch.stack(self._losses).mean())))
        self._losses = []
        if self._step - self._mark_step >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._measure_speed()
        if self._speed:
            pl_module.log(self.speed_name, self._speed, prog_bar=True)
        pl_module.log("lr", trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True, logger=False)

    def _measure_speed(self) -> None:
        seconds = self.clock.seconds
        self._speed = (self._step - self._mark_step) * self.step_size / (seconds - self._mark_seconds)
        self._mark_step, self._mark_seconds = self._step, seconds

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resume = self.clock.running
        self.clock.stop()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.val_curve.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))
        if self._resume:
            self.clock.start()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock.stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.clock.stop()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures the weights that the fit leaves, which other callbacks may change up to `on_train_end`."""
        if pl_module.device != trainer.strategy.root_device:  # Lightning's strategies leave it on the host
            pl_module.to(trainer.strategy.root_device)
        self.measure(trainer, pl_module)

    def measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures at the end of a fit, while all ranks are still running; to be extended."""
        peak = torch.tensor(peak_memory(pl_module.device), dtype=torch.int64, device=pl_module.device)
        self.peak_memory = int(trainer.strategy.reduce(peak, reduce_op="max"))

    def summary(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Collects key figures, to be extended; figures of training or validation are None if it did not run."""
        last = [loss for _, loss in self.train_curve[-LAST:]]
        trained = len(self.train_curve) * self.step_size
        return {
            "val_loss": self.val_loss,
            "train_loss": fmean(last) if last else None,
            "steps": trainer.global_step,
            **skips_of(trainer),
            self.speed_name: round(trained / self.clock.seconds, 1) if last else None,
            "strategy": self.strategy,
            "world_size": trainer.world_size,
            "peak_memory_bytes": self.peak_memory,
        }

    def write(self, trainer: pl.Trainer) -> None:
        """Writes plot and summary to the run folder and shows them, on rank 0; to be extended."""
        if not trainer.is_global_zero:
            return
        summary = self.summary(trainer)
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.plot(self.run_dir / "loss.png")
        print("\nsummary.json:")
        print(*(f"  {key}: {value}" for key, value in summary.items()), sep="\n")
        print(f"\n{self.run_dir}")

    def plot(self, path: Path) -> None:
        """Draws the curves of both losses."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="optimizer step", ylabel=f"loss ({self.loss_unit})")
        if self.train_curve:
            steps, losses = zip(*self.train_curve, strict=True)
            axes.plot(steps, losses, color="tab:blue", alpha=0.3, lw=0.8, label="training")
            axes.plot(steps, running_means(losses), color="tab:blue", label=f"training, mean of {LAST} steps")
        if self.val_curve:
            axes.plot(*zip(*self.val_curve, strict=True), color="tab:orange", marker="o", label="validation")
        result = "" if self.val_loss is None else f": validation loss {self.val_loss:.3f}"
        axes.set_title(self.strategy + result)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        figure.savefig(path, dpi=150)


def skips_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Reads how many steps a strategy of this package has skipped; empty for other strategies."""
    plugin = trainer.strategy.precision_plugin
    return {"skipped_steps": plugin.skipped_steps} if isinstance(plugin, ZeroPrecision) else {}


def running_means(values: Sequence[float]) -> list[float]:
    """Averages each value with its predecessors: `LAST` values together, or fewer at the start."""
    return [fmean(values[max(0, end - LAST) : end]) for end in range(1, len(values) + 1)]


def peak_memory(device: torch.device) -> int:
    """Reads this process's peak memory in bytes: of the device if it is counted there, else of the host."""
    if (peak := device_type(device).peak_bytes(device)) is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
