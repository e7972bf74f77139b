"""Lets each transfer of a training step whose state rests on a disk fail in turn, below the engine of transfers.

    LD_PRELOAD=disk_faults.so PYTHONPATH=tests python -P -m engine.disk_faults FOLDER

The library is `helpers/disk_faults.c`. What became of each run is printed as JSON, a line for each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine import driver
from engine.driver import Setup
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_zero.checkpoint.state import (
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
)
from lightning_zero.sharding import Mesh
from lightning_zero.storage import DiskError, DiskStore
from lightning_zero.storage.disk_speed import Way
from lightning_zero.storage.nvme import DiskTensor

WIDTH = 96
READS, WRITES = 0, 1  # as `disk_faults.c` has them, and a transfer that comes short
SHORT = -1
# Two buckets of three tiles each, and blocks of a tile, moved one by one.
SETUP = Setup(2, offload=True, native="auto", bucket_size_mb=0.03, disk_gradients=True, way=Way(1, 1 << 14))
# The part of the file whose transfers fail: gradients, or all, among which are parameters, too.
PARTS = {
    "gradients": SETUP,
    "all": dataclasses.replace(SETUP, stage=3, units=("0", "1"), disk_params=True, disk_gradients=None),
}


class Fault(NamedTuple):
    """What happens to a transfer: an errno or :data:`SHORT`, so many times one after the other."""

    name: str
    code: int = 0
    times: int = 1


NONE = Fault("none", times=0)
TRUNCATED = Fault("truncated", times=0)
# Each transfer meets one that ends the run and one that the run survives, the kinds of each by turns.
ENDING = (Fault("EIO", errno.EIO), Fault("ENOSPC", errno.ENOSPC))
SURVIVED = (Fault("short", SHORT), Fault("EAGAIN", errno.EAGAIN, times=3))


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        part: of the file, one of :data:`PARTS`.
        fault: its name.
        direction: of the transfer that it happened to.
        number: of that transfer, among those of the part in one step and direction.
        overlap: whether lanes had threads.
        error: what ended the run: its text and errno; ``None``: nothing did.
        same: whether its weights are those of a run without faults.
        file: the path of what failed.
    """

    part: str
    fault: str
    direction: int
    number: int
    overlap: bool
    error: tuple[str, int] | None
    same: bool
    file: str


class Run:
    """A training of which a step can be made to fail; ``part`` is one of :data:`PARTS`."""

    def __init__(self, folder: Path, part: str, overlap: bool) -> None:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        setup = dataclasses.replace(PARTS[part], disk=str(folder), overlap=overlap)
        self.part = part
        make_optimizer = partial(torch.optim.AdamW, lr=0.01)
        self.session = driver.start(model, lambda m: make_optimizer(m.parameters()), setup, Mesh.single())
        store = self.session.engine.placement.optimizer_store
        assert isinstance(store, DiskStore)
        self.store = store

    def step(self, seed: int, before_update: Callable[[], object] = lambda: None) -> None:
        """Of two micro-batches, until all is written."""
        session, generator = self.session, torch.Generator().manual_seed(seed)
        session.optimizer.zero_grad()
        for last in (False, True):
            loss = session.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
            driver.backward(session.engine, loss, last=last)
        before_update()
        session.optimizer.step()
        session.engine.settle()
        self.store.settle()

    def save(self, file: Path) -> None:
        states = module_state_dict(self.session.engine), optimizer_state_dict(self.session.engine, self.session.updater)
        torch.save(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, states), file)

    def load(self, file: Path) -> None:
        weights, state = torch.load(file, weights_only=False)
        load_module_state_dict(self.session.engine, weights)
        load_optimizer_state_dict(self.session.engine, self.session.updater, state)

    @property
    def weights(self) -> dict[str, Tensor]:
        return driver.copy_of_parameters(self.session.engine)

    def place(self) -> tuple[int, int]:
        """The part of the file; where it is that of gradients, it holds nothing else."""
        if self.part == "all":
            return 0, self.store.opened.nbytes
        found = [self.session.engine.gradients_of(b).sharded._values for b in self.session.engine.buckets]
        tensors = [tensor for tensor in found if isinstance(tensor, DiskTensor)]
        assert len(tensors) == 2
        begin, last = sorted(tensor.offset_of(0) for tensor in tensors)
        end = last + tensors[0].numel * 4
        for bucket in self.session.engine.buckets:
            state = self.session.updater.state_of(bucket).flat.values()
            for tensor in (*bucket.master.rested, *state):  # type: ignore[attr-defined]
                assert not begin <= tensor.offset_of(0) < end, "state lies between gradients"
        return begin, end


class Faults:
    """The preloaded library.

    Attributes:
        seen: transfers that there were in the last step.
    """

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        self.seen = 0

    def try_step(self, run: Run, fault: Fault, direction: int, number: int) -> DiskError | None:
        """What a step with a fault ends with."""
        begin, end = run.place()
        truncate = partial(os.truncate, run.store.opened.path, begin + (1 << 14) + 100)
        self._library.fault(*map(ctypes.c_long, (direction, begin, end, number, fault.times, fault.code)))
        try:
            run.step(1, truncate if fault is TRUNCATED else lambda: None)
        except DiskError as error:
            return error
        finally:
            self.seen = self._library.end_of_faults()
        return None


def try_all(folder: Path, part: str, faults: Faults) -> None:
    """Print what becomes of each run in which a transfer of a part of the file fails."""
    checkpoint = folder / f"{part}.ckpt"
    first = Run(folder, part, overlap=False)
    first.step(0)
    first.save(checkpoint)
    assert faults.try_step(first, NONE, READS, 0) is None
    expected, counts = first.weights, {READS: faults.seen}
    assert faults.try_step(first, NONE, WRITES, 0) is None
    counts[WRITES] = faults.seen
    print(json.dumps([part, counts]))
    cases = [
        (fault, direction, number, bool(number % 2))
        for direction, count in counts.items()
        for number in range(count)
        for fault in (ENDING[number // 2 % 2 if direction == WRITES else 0], SURVIVED[number // 2 % 2])
    ]
    truncated = [(TRUNCATED, READS, 0, False)] if part == "gradients" else []
    for fault, direction, number, overlap in [*cases, *truncated, (NONE, READS, 0, True)]:
        run = Run(folder, part, overlap)
        run.step(7)  # on other values: it makes the room of the gradients
        run.load(checkpoint)
        error = faults.try_step(run, fault, direction, number)
        told = None if error is None else (str(error), error.errno or 0)
        same = error is None and all(torch.equal(value, expected[name]) for name, value in run.weights.items())
        outcome = Outcome(part, fault.name, direction, number, overlap, told, same, str(run.store.opened.path))
        print(json.dumps(outcome._asdict()), flush=True)
        run.store.close()
    first.store.close()


def main() -> None:
    torch.set_num_threads(1)  # products are tiny, and other tests use the cores
    faults = Faults()
    for part in PARTS:
        try_all(Path(sys.argv[1]), part, faults)


if __name__ == "__main__":
    main()
