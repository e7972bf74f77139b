"""Logs tokens per second, model FLOPs and memory during training."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_zero.callbacks.run_report import peak_memory


class Throughput(ThroughputMonitor):
    """Lightning's throughput monitor for batches of tokens, which also logs this process's memory.

    The entries are `train/device/...` for one device and, with several devices, `train/...` for all of them:
    `items_per_sec` (tokens), `flops_per_sec`, `mfu`, and other entries of Lightning's monitor; also
    `train/device/peak_memory_bytes`. Validation has separate entries under `validate/`.

    Args:
        window_size: Number of batches over which a speed is averaged; entries begin with the first full window.
        peak_flops: Operations per second of one device in the run's precision, according to its data sheet; None
            leaves out the utilization `mfu`.
    """

    def __init__(self, window_size: int = 20, peak_flops: float | None = None) -> None:
        if window_size < 2:
            raise ValueError(f"callbacks.throughput.window_size={window_size} must be at least 2.")
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"callbacks.throughput.peak_flops={peak_flops} must be a number > 0, or null.")
        super().__init__(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), window_size=window_size)
        self.peak_flops = peak_flops

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # Lightning's table would give the value for fp32, because it knows only its own precision plugins.
        self.available_flops = self.peak_flops
        for throughput in self._throughputs.values():
            throughput.available_flops = self.peak_flops

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        pl_module.flops_per_batch = 3 * pl_module.flops_per_token() * batch[0].numel()  # backward costs two forwards
        super().on_train_batch_end(trainer, pl_module, outputs, batch, *rest)
        pl_module.log("train/device/peak_memory_bytes", float(peak_memory(pl_module.device)))

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *rest: Any
    ) -> None:
        pl_module.flops_per_batch = pl_module.flops_per_token() * batch[0].numel()
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, *rest)
