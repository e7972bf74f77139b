"""What a run leaves behind: loss curves, a sampled text and a summary, measured by a callback."""

import json
import resource
import sys
import time
from pathlib import Path

import lightning as L
import torch

from lightning_zero import gathered_parameters

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


class Report(L.Callback):
    """Measures a run, shows speed and learning rate on the progress bar and writes the results.

    Args:
        run_dir: Folder to write to.
        strategy: Name of the strategy, for the summary.
        tokens_per_step: Tokens of an optimizer step over all ranks.
        prompt: Text that the sample continues.
        sampling: Arguments of the model's `generate`.
    """

    def __init__(self, run_dir: str, strategy: str, tokens_per_step: int, prompt: str, sampling: dict) -> None:
        self.run_dir, self.strategy, self.tokens_per_step = Path(run_dir), strategy, tokens_per_step
        self.prompt, self.sampling = prompt, sampling
        self.train_curve: list[tuple[int, float]] = []  # optimizer step, loss of the global batch
        self.val_curve: list[tuple[int, float]] = []
        self.clock = Stopwatch()  # runs in training, stands still in validation
        self.peak_memory = 0  # bytes, the largest of all ranks
        self.sample = ""

    @property
    def validated_step(self) -> int | None:
        """The optimizer step of the last validation."""
        return self.val_curve[-1][0] if self.val_curve else None

    @property
    def val_loss(self) -> float | None:
        """The loss of the last validation."""
        return self.val_curve[-1][1] if self.val_curve else None

    def on_train_start(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self._step = self._mark_step = trainer.global_step
        self._mark_seconds = self._speed = 0.0
        self.clock.start()

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch, and the optimizer has not stepped yet
        self._step = trainer.global_step
        self.train_curve.append((self._step, float(trainer.callback_metrics["train_loss"])))
        if self._step - self._mark_step >= trainer.log_every_n_steps:
            self._measure_speed()
        if self._speed:
            model.log("tokens_per_second", self._speed, prog_bar=True)
        model.log("lr", trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True, logger=False)

    def _measure_speed(self) -> None:
        seconds = self.clock.seconds
        tokens = (self._step - self._mark_step) * self.tokens_per_step
        self._speed = tokens / (seconds - self._mark_seconds)
        self._mark_step, self._mark_seconds = self._step, seconds

    def on_validation_start(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self._resume = self.clock.running
        self.clock.stop()

    def on_validation_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self.val_curve.append((trainer.global_step, model.val_loss))
        if self._resume:
            self.clock.start()

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self.clock.stop()
        self._measure(trainer, model)

    def on_fit_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Without a step to train, Lightning leaves out `on_train_end`."""
        if not self.peak_memory:
            if model.device != trainer.strategy.root_device:  # Lightning's strategies leave it on the host
                model.to(trainer.strategy.root_device)
            self._measure(trainer, model)

    def _measure(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Measure and sample while the ranks are still together: both need all of them."""
        peak = torch.tensor(peak_memory(model.device), device=model.device)
        self.peak_memory = int(trainer.strategy.reduce(peak, reduce_op="max"))
        model.eval()
        with gathered_parameters(model), trainer.precision_plugin.forward_context():
            tokens = model.generate(list(self.prompt.encode()), **self.sampling)
        model.train()
        self.sample = self.prompt + bytes(tokens).decode(errors="replace")

    def write(self, trainer: L.Trainer) -> None:
        """Put plot, sample and summary into the run folder and show them, on rank 0."""
        if not trainer.is_global_zero:
            return
        summary = self.summary(trainer)
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (self.run_dir / "sample.txt").write_text(self.sample)
        self.plot(self.run_dir / "loss.png")
        print(f"\nsample.txt:\n{self.sample}\n\nsummary.json:")
        print(*(f"  {key}: {value}" for key, value in summary.items()), sep="\n")
        print(f"\n{self.run_dir}")

    def summary(self, trainer: L.Trainer) -> dict:
        """Key figures; those of training or validation are None where there was none."""
        last = [loss for _, loss in self.train_curve[-LAST:]]
        tokens = len(self.train_curve) * self.tokens_per_step
        return {
            "val_loss": self.val_loss,
            "train_loss": sum(last) / len(last) if last else None,
            "steps": trainer.global_step,
            "tokens_per_second": round(tokens / self.clock.seconds, 1) if last else None,
            "strategy": self.strategy,
            "world_size": trainer.world_size,
            "peak_memory_bytes": self.peak_memory,
        }

    def plot(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per token)")
        if self.train_curve:
            axes.plot(*zip(*self.train_curve, strict=True), color="tab:blue", alpha=0.4, lw=0.8, label="training")
        if self.val_curve:
            axes.plot(*zip(*self.val_curve, strict=True), color="tab:orange", marker="o", label="validation")
        result = "" if self.val_loss is None else f": validation loss {self.val_loss:.3f}"
        axes.set_title(self.strategy + result)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        figure.savefig(path, dpi=150)


def peak_memory(device: torch.device) -> int:
    """Most memory this process held so far: of the GPU if it trains on one, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
