"""The host memory that is pinned is what crosses between host and device, as the plan says by kind, and no more."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from device.test_peak import Deep, make_late
from device.where import DevicePool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import make_trainer

from lightning_zero import ZeroStrategy
from lightning_zero.callbacks import EMA
from lightning_zero.integration import strategy as integration
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning import Bytes, Plan
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.storage import device_type
from lightning_zero.storage.host import pinned_bytes

MIB = 2**20
# Bytes per element of this rank's shards, pinned by kind: of all else none are.
Case = tuple[str, str, str]  # name of the strategy, precision, layout of masters
KINDS: dict[Case, dict[str, int]] = {
    ("zero1_offload", "32-true", "fp32"): {"masters": 4, "sharded_gradient": 4},
    ("zero2_offload", "bf16-true", "fp32"): {"sharded_gradient": 4},  # of two micro-batches
    ("zero2_offload", "bf16-true", "split"): {"sharded_gradient": 4},
    ("zero3_offload", "32-true", "fp32"): {"param_shards": 4, "sharded_gradient": 4},
    ("zero3_offload", "bf16-true", "fp32"): {"param_shards": 2, "sharded_gradient": 4},
    ("zero3_offload", "bf16-true", "split"): {"param_shards": 2, "sharded_gradient": 4},
    ("zero2", "bf16-true", "fp32"): {"averages": 4},  # on the host, of masters on the device
}
SMALL = 1.25  # MiB of staging memory: two to four of what passes at a time fit


class Locked:
    """The bytes that the device's type has pinned, now and at most, by what it was asked for."""

    def __init__(self, device: torch.device) -> None:
        kind = device_type(device)
        self._pin, self._unpin = kind.pin, kind.unpin
        self._blocks: dict[int, int] = {}
        self._lock = threading.Lock()
        self.most = 0

    @property
    def now(self) -> int:
        return sum(self._blocks.values())

    def pin(self, address: int, nbytes: int) -> None:
        self._pin(address, nbytes)
        with self._lock:
            self._blocks[address] = nbytes
            self.most = max(self.most, self.now)

    def unpin(self, address: int) -> None:
        self._unpin(address)
        with self._lock:
            del self._blocks[address]


@dataclasses.dataclass
class Found:
    """In bytes: planned, measured by the engine's tensors, and what the device's type was asked to pin."""

    plan: Plan
    held: dict[str, Bytes]
    locked: int
    most: int
    counted: int
    staged: int  # at most


class Watch(Callback):
    """Looks when the second step has ended."""

    def __init__(self, locked: Locked) -> None:
        self.locked = locked
        self.found: Found | None = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        torch.accelerator.synchronize()
        gc.collect()
        planned, staged = strategy.memory.plan, strategy._executor.staged_bytes
        self.found = Found(planned, held_by(strategy.engine), self.locked.now, self.locked.most, pinned_bytes(), staged)


def fit(accelerator: str, cases: Sequence[Case]) -> dict[Case, Found]:
    found = {}
    device = torch.device(accelerator, torch.accelerator.current_device_index())
    for case in cases:
        name, precision, layout = case
        gc.collect()
        locked = Locked(device)
        watch = Watch(locked)
        options: dict[str, Any] = {**STRATEGIES[name], "master_layout": layout, "staging_buffer_mb": SMALL}
        strategy = ZeroStrategy(**options, bucket_size_mb=1.0, persistence_numel=0, check_steps=1)
        callbacks = [watch, *([] if "offload" in name else [EMA(device="cpu")])]
        trainer = make_trainer(
            strategy, accelerator=accelerator, callbacks=callbacks, accumulate_grad_batches=2, precision=precision
        )
        kind = device_type(device)
        with (
            mock.patch.object(kind, "pin", locked.pin),
            mock.patch.object(kind, "unpin", locked.unpin),
            mock.patch.object(integration, "make_executor", make_late),
        ):
            trainer.fit(Deep())
            assert watch.found is not None
            found[case] = watch.found
            trainer.strategy.release(trainer.lightning_module)
            del trainer, strategy, watch, callbacks
            gc.collect()
    return found


@pytest.mark.simulated
@pytest.mark.device
@pytest.mark.parametrize(
    "cases", [[("zero3_offload", "bf16-true", "split")], pytest.param([*KINDS], marks=pytest.mark.slow)], ids=len
)
def test_what_crosses_is_pinned_and_nothing_else(device_pool2: DevicePool, cases: list[Case]) -> None:
    pool = device_pool2
    for found in pool.run(fit, pool.where.accelerator, cases):
        for case, each in found.items():
            print(case, {name: part.pinned for name, part in each.held.items()}, each.locked, each.most)
            planned = planned_parts(each.plan)
            numel = sum(bucket.padded_numel for bucket in each.plan.buckets) // 2
            kinds = dict.fromkeys(planned, 0) | {kind: size * numel for kind, size in KINDS[case].items()}
            resting = {name: part.pinned for name, part in planned.items() if name != "staging"}
            assert resting == {name: nbytes for name, nbytes in kinds.items() if name != "staging"}, case
            for name, part in each.held.items():
                if name != "staging":
                    assert part == planned[name], (case, name)
            # No other memory is pinned, in no other size.
            assert each.locked == each.counted == sum(part.pinned for part in each.held.values()), case
            # The staging memory is bounded: by the option in each direction.
            assert each.staged <= planned["staging"].pinned <= 2 * SMALL * MIB, case
            assert each.most <= each.plan.peak.pinned, case
            assert each.plan.held.pinned == sum(part.pinned for part in planned.values()) <= each.plan.held.host
