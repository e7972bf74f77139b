"""The memory that an updater needs for a bucket."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.sharding import MasterForm
from lightning_zero.torch_private import TorchDispatchMode, storage_number, tree_leaves
from lightning_zero.update.rules import fresh_state, portable
from lightning_zero.update.shell import ShellGroup, run_step, trial_call

_SAMPLE, _STEPS = 64, 7  # elements and steps of a trial. RAdam uses another formula from its sixth step on


class Apart(NamedTuple):
    """Memory and copies of the part of a step that is computed on the device while masters rest on the host.

    Attributes:
        device: bytes of device memory that an update needs while it runs.
        staged: bytes of buffers in host memory that an update holds while it runs.
        moved: bytes that are copied to the device; as many are copied back.
    """

    device: int = 0
    staged: int = 0
    moved: int = 0


class Footprint(NamedTuple):
    """The memory that an updater needs for a bucket. Temporary memory is where the master is.

    Attributes:
        master: the form of the bucket's master, as the updater lays it out.
        state: dtypes of the per-element state after the first update, by name.
        gradients: temporary bytes of the scaled or converted gradients of a tile.
        passing: temporary bytes of the rule while it updates a tile.
        fresh: bytes of the new state that the optimizer makes for a tile at the first update. It is then copied to
            where state rests.
        one_tile: whether the whole shard is updated at once. Then these copies are the last memory that the first
            update allocates.
        staged: bytes of parameters that go through buffers in host memory on their way to the device.
        published: number of elements whose parameters go through a buffer together; ``None``: all.
        owned: bytes of state that the optimizer makes and keeps for each whole parameter.
        scales: bytes of the scales of 8-bit state, which stay in memory wherever the state rests.
        window: number of elements that are fetched at once from where state rests, if that is more than a tile.
        apart: memory and copies of what is computed on the device, if the master is not there.
    """

    master: MasterForm
    state: Mapping[str, torch.dtype]
    gradients: int = 0
    passing: int = 0
    fresh: int = 0
    one_tile: bool = False
    staged: int = 0
    published: int | None = None
    owned: int = 0
    scales: int = 0
    window: int = 0
    apart: Apart = Apart()

    @property
    def scratch(self) -> int:
        """The most bytes of temporary memory that an update needs, except for the first one."""
        return self.gradients + self.passing

    def state_bytes(self, shard_numel: int) -> int:
        """Bytes of the state of a shard with ``shard_numel`` elements."""
        return shard_numel * sum(dtype.itemsize for dtype in self.state.values()) + self.owned + self.scales


def passing_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, foreach: bool) -> int:
    """Temporary bytes per element that a step needs beside parameter, gradient and state, from a trial on the host.

    Args:
        optimizer: an element-wise optimizer, which is not changed.
        group: one of its parameter groups.
        dtype: dtype of the parameter.
        foreach: whether torch updates several tensors at a time.
    """
    if group.get("fused"):
        return 0
    plain = portable(group)
    if "foreach" in plain:
        plain["foreach"] = foreach
    parameter = torch.ones(_SAMPLE, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    states = {parameter: fresh_state(optimizer, parameter)}
    run_step(optimizer, [ShellGroup([parameter], plain)], states, trial_call(optimizer))  # makes the state
    known = [parameter, parameter.grad, *(v for v in states[parameter].values() if isinstance(v, Tensor))]
    with Passing(known) as passing:
        for _ in range(1, _STEPS):
            run_step(optimizer, [ShellGroup([parameter], plain)], states, trial_call(optimizer))
    most: int = -(-passing.most // _SAMPLE)
    return most


class Passing(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, as long as these are alive. Small tensors are not counted.

    Attributes:
        most: the most bytes that were alive at one time.

    Args:
        known: tensors that are not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known = {storage_number(tensor.untyped_storage()) for tensor in known}
        self._users: dict[int, int] = {}  # tensors that share a storage, by its number
        self._seen: set[int] = set()  # ids of living tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.numel() >= _SAMPLE and id(made) not in self._seen:
                self._note(made)
        return result

    def _note(self, made: Tensor) -> None:
        # The address would not do: on the meta device all tensors share it.
        address, nbytes = storage_number(made.untyped_storage()), made.untyped_storage().nbytes()
        if address in self._known:
            return
        users = self._users[address] = self._users.get(address, 0) + 1
        self._seen.add(id(made))
        if users == 1:
            self._now += nbytes
            self.most = max(self.most, self._now)
        weakref.finalize(made, self._forget, id(made), address, nbytes)

    def _forget(self, number: int, address: int, nbytes: int) -> None:
        self._seen.discard(number)
        self._users[address] -= 1
        if not self._users[address]:
            self._now -= nbytes
