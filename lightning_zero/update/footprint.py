"""Memory that an updater takes for a bucket."""

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

_SAMPLE, _STEPS = 64, 7  # elements and steps of a trial; RAdam has another rule from its sixth step on


class Apart(NamedTuple):
    """Memory and copies of the part of a step that is computed on the device while masters rest on the host.

    Attributes:
        device: bytes there while an update is under way.
        staged: bytes of host memory in passing that it holds meanwhile.
        moved: bytes that are copied to the device, and as many back.
    """

    device: int = 0
    staged: int = 0
    moved: int = 0


class Footprint(NamedTuple):
    """Memory that an updater takes for a bucket. What it takes in passing is where the master is.

    Attributes:
        master: its master, as the updater lays it out.
        state: dtypes of the per-element state after the first update, by name.
        gradients: bytes of the scaled or converted gradients that a tile is updated with.
        passing: bytes that the rule takes while it updates a tile.
        fresh: bytes of the state that the optimizer makes for a tile at the first update, from where it is copied.
        one_tile: whether all is updated at once; the copies are the last thing that the first update takes then.
        staged: bytes of parameters that pass through host memory on their way to the device.
        published: elements of which they pass together; ``None``: all.
        owned: bytes of the state of whole parameters, which the optimizer makes for each.
        scales: bytes of the scales of state in 8 bits, which stay in memory wherever that rests.
        window: elements that are fetched at once from where state rests, if that is more than a tile.
        apart: of what is computed on the device, if that is not where the master is.
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
        """The most that an update takes in passing, but for the first one."""
        return self.gradients + self.passing

    def state_bytes(self, shard_numel: int) -> int:
        """Bytes of state of a shard with so many elements."""
        return shard_numel * sum(dtype.itemsize for dtype in self.state.values()) + self.owned + self.scales


def passing_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, foreach: bool) -> int:
    """Bytes per element that a step takes beside parameter, gradient and state, from a trial on the host.

    Args:
        optimizer: element-wise; it is not changed.
        group: one of its parameter groups.
        dtype: of the parameter.
        foreach: whether torch updates several tensors at a time.
    """
    if group.get("fused"):
        return 0
    plain = portable(group)
    if "foreach" in plain:
        plain["foreach"] = foreach
    parameter = torch.ones(_SAMPLE, dtype=dtype)
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
    """Counts the bytes of tensors that operators make, as long as they live; of numbers, none.

    Attributes:
        most: at any moment.

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
        # Not by its address, which on the meta device all share.
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
