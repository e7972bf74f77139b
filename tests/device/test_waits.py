"""Where the host waits for the device, and what it copies through pageable memory, in a step of every strategy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from device import sim
from device.where import DevicePool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import NAMES, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES

pytestmark = pytest.mark.simulated

WIDTH, DEPTH, STEPS, MICRO = 16, 3, 3, 2
Calls = Counter[tuple[str, str, str]]  # by kind, call site and reason: their number, or their bytes
KINDS = {"waits": "host waits", "bytes": "pageable bytes"}

# What one step of two micro-batches costs on one rank, in steady state: how often the host waits for the device, and
# the bytes of copies from and to memory that is not pinned. The model has three blocks, each a unit and a bucket of
# 544 elements. "o" stands for "_offload". A test that fails prints the table as it is now, to be put in here.
TABLES = {
    (1, "32-true"): """
host waits                                                 zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:batch_to, blocking copy to the device                2      2      2      2      2      2      2
update/clipping.py:_all_reduce, blocking copy to the host      1      1      1      1      1      1      1
pageable bytes                                             zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:batch_to, copy to the device                       128    128    128    128    128    128    128
update/clipping.py:_all_reduce, copy to the host             152    152    152    152    152    152    152
""",
    (1, "bf16-true"): """
host waits                                                 zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:batch_to, blocking copy to the device                2      2      2      2      2      2      2
update/clipping.py:_all_reduce, blocking copy to the host      1      1      1      1      1      1      1
pageable bytes                                             zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:batch_to, copy to the device                        64     64     64     64     64     64     64
update/clipping.py:_all_reduce, copy to the host             152    152    152    152    152    152    152
""",
    (2, "32-true"): """
host waits                                                        zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:_broadcast_sigterm_tensor, blocking copy to the device      1      1      1      1      1      1      1
lightning:_broadcast_sigterm_tensor, item                             1      1      1      1      1      1      1
lightning:batch_to, blocking copy to the device                       2      2      2      2      2      2      2
update/clipping.py:_all_reduce, blocking copy to the host             1      1      1      1      1      1      1
pageable bytes                                                    zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:_broadcast_sigterm_tensor, copy to the device               8      8      8      8      8      8      8
lightning:batch_to, copy to the device                              128    128    128    128    128    128    128
update/clipping.py:_all_reduce, copy to the host                    168    168    168    168    168    168    168
""",
    (2, "bf16-true"): """
host waits                                                        zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:_broadcast_sigterm_tensor, blocking copy to the device      1      1      1      1      1      1      1
lightning:_broadcast_sigterm_tensor, item                             1      1      1      1      1      1      1
lightning:batch_to, blocking copy to the device                       2      2      2      2      2      2      2
update/clipping.py:_all_reduce, blocking copy to the host             1      1      1      1      1      1      1
pageable bytes                                                    zero0  zero1  zero2  zero3 zero1o zero2o zero3o
lightning:_broadcast_sigterm_tensor, copy to the device               8      8      8      8      8      8      8
lightning:batch_to, copy to the device                               64     64     64     64     64     64     64
update/clipping.py:_all_reduce, copy to the host                    168    168    168    168    168    168    168
""",
}


class Blocks(LightningModule):
    """Three units of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(STEPS * MICRO, WIDTH), batch_size=None)


class CountedStep(Callback):
    """Counts in the last step, from the end of the one before: the batches' way to the device is in it."""

    def __init__(self) -> None:
        self.calls: Calls = Counter()
        self._counting = sim.counted()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == (STEPS - 1) * MICRO - 1:
            torch.accelerator.synchronize()
            self._counts = self._counting.__enter__()
        elif index == STEPS * MICRO - 1:
            self._counting.__exit__(None, None, None)
            self.calls.update({("waits", *key): count for key, count in self._counts.waits.items()})
            self.calls.update({("bytes", *key): nbytes for key, nbytes in self._counts.pageable.items()})


def count(precision: str) -> dict[str, Calls]:
    """By name of the strategy."""
    found = {}
    for name in NAMES:
        step = CountedStep()
        # Each block a bucket, no parameter too small to be sharded, and ranks no longer compare notes.
        strategy = ZeroStrategy(**STRATEGIES[name], bucket_size_mb=0.001, persistence_numel=0, check_steps=1)
        flags: dict[str, Any] = {"accumulate_grad_batches": MICRO, "gradient_clip_val": 1e-3, "precision": precision}
        make_trainer(strategy, accelerator=sim.DEVICE, callbacks=[step], **flags).fit(Blocks())
        found[name] = step.calls
    return found


def table(found: dict[str, Calls]) -> str:
    heads = [name.replace("_offload", "o") for name in found]
    keys = sorted({key for calls in found.values() for key in calls})
    width = max(len(f"{site}, {why}") for _, site, why in keys)
    lines = []
    for kind, title in KINDS.items():
        lines.append(f"{title:{width}}" + "".join(f"{head:>7}" for head in heads))
        for key in keys:
            if key[0] == kind:
                cells = (calls[key] or "." for calls in found.values())
                lines.append(f"{f'{key[1]}, {key[2]}':{width}}" + "".join(f"{cell:>7}" for cell in cells))
    return "\n".join(lines)


@pytest.mark.device
@pytest.mark.parametrize(
    ("ranks", "precision"), [pytest.param(*case, marks=[pytest.mark.slow] if case[0] > 1 else []) for case in TABLES]
)
def test_waits_and_pageable_bytes_of_a_step(
    device_pool1: DevicePool, device_pool2: DevicePool, ranks: int, precision: str
) -> None:
    pool = {1: device_pool1, 2: device_pool2}[ranks]
    for found in pool.run(count, precision):
        actual = table(found)
        assert actual == TABLES[ranks, precision].strip("\n"), f"it is now:\n{actual}"
