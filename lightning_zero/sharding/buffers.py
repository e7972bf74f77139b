"""A module's buffers, which are not sharded: all ranks have rank 0's values.

Rank 0's values are sent to the other ranks when an engine is made (:func:`convert_buffers`), before code that shows or
saves buffers (:func:`broadcast_buffers`), and after a backward in which a rank has changed a buffer
(:class:`BufferWatch`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.sharding.checksum import checksum
from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage.accelerators import device_type
from lightning_zero.torch_private import has_own_apply, version_of

# In training these only write their statistics and do not read them, so the values of other ranks do not matter.
_NORMALIZATIONS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def convert_buffers(root: nn.Module, placement: BucketPlacement) -> None:
    """Move buffers to the device, give them the dtype of the policy and rank 0's values. Collective."""
    converted: dict[int, Tensor] = {}  # a buffer may be registered twice
    for module in root.modules():
        if has_own_apply(module) and next(module.parameters(), None) is None:
            module.to(placement.device)  # also moves other state, such as that of torchmetrics
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in converted:
                dtype = placement.precision.buffer_dtype(buffer.dtype)
                # Contiguous: an expanded buffer cannot be written to.
                strided = buffer.layout is torch.strided
                moved = buffer.to(placement.device, dtype)
                converted[id(buffer)] = moved.contiguous() if strided else moved
            setattr(module, name, converted[id(buffer)])
    broadcast_buffers(root, placement.mesh.world)


def broadcast_buffers(root: nn.Module, world: Group) -> None:
    """Give every rank rank 0's buffers. Collective."""
    for buffer in {id(b): b for b in root.buffers()}.values():
        if buffer.layout is torch.strided:
            _broadcast(buffer, world)


def _broadcast(buffer: Tensor, world: Group) -> None:
    # A buffer that was assigned in inference mode can only be written in that mode.
    with torch.inference_mode(buffer.is_inference()):
        data = world.broadcast_(buffer.detach().contiguous(), "broadcast a buffer")
        if data.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(data)


def _edits(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)  # torch does not count the changes of inference tensors


def _checksum(buffer: Tensor) -> Tensor:
    return checksum(buffer.detach().contiguous().view(-1).view(torch.uint8))


_Key = tuple[int, str]  # number of the module, and name in it


class _Seen(NamedTuple):
    """The state of a buffer when all ranks last had rank 0's values."""

    buffer: Tensor
    version: int
    checksum: Tensor | None  # only in the first steps


class BufferWatch:
    """Finds buffers that a training step changes, and gives every rank rank 0's values before the next step.

    :class:`~torch.nn.parallel.DistributedDataParallel` broadcasts all buffers before every forward. Here each rank says
    in the small all-reduce of a step whether it has changed a buffer. Only if one has, the ranks find out which buffers
    changed, and broadcast these. The statistics of torch's own normalization layers are left out while the layers
    train. As in torch, a module that has no buffer when training begins is ignored.

    torch counts in-place changes, but not changes through ``buffer.data``, which codebooks make. Those are found by
    checksums until :meth:`end_checks` is called, and a buffer that was changed in this way counts as changed in every
    later step. A buffer that is first changed in this way later is not found.

    Values are not compared: a counter that is equal on all ranks is broadcast as well.

    Args:
        root: the module with the buffers, the same on all ranks; all ranks have rank 0's values.
        world: all ranks.
        checks: begin with checksums.
    """

    def __init__(self, root: nn.Module, world: Group, checks: bool) -> None:
        self._world = world
        modules = [m for m in root.modules() if next(m.buffers(recurse=False), None) is not None]
        self._holders = modules if world.size > 1 else []  # one rank has nothing to share
        self._checks = checks
        self._hidden: set[_Key] = set()  # keys of buffers that were changed through `data`
        self._seen: dict[_Key, _Seen] = {}
        self._look()

    def has_changed(self) -> bool:
        """Whether this rank has changed a buffer since all ranks had rank 0's values."""
        return any(self._changed(self._watched()))

    def share(self) -> None:
        """Give every rank rank 0's values of the buffers that some rank has changed. Collective."""
        buffers = self._watched()
        changed = torch.tensor(self._changed(buffers), dtype=torch.float64)
        device = buffers[0][1].device
        sent = device_type(device).send(changed, device)
        with self._world.explaining(what := "tell which buffers changed"):
            counts = self._world.all_reduce_(sent, what).tolist()
        for (_, buffer), count in zip(buffers, counts, strict=True):
            if count:
                _broadcast(buffer, self._world)
        self._look()

    def end_checks(self) -> None:
        """Stop computing checksums, since the buffers that are changed through ``data`` are known."""
        self._checks = False

    def _look(self) -> None:
        self._seen.update(
            (key, _Seen(buffer, _edits(buffer), _checksum(buffer) if self._checks else None))
            for key, buffer in self._watched()
        )

    def _changed(self, buffers: list[tuple[_Key, Tensor]]) -> list[bool]:
        """Whether this rank has changed each of the buffers."""
        unchanged = set()  # according to torch's counters
        compared: dict[_Key, Tensor] = {}  # 0-dim bools: whether the bits of a buffer have changed
        for key, buffer in buffers:
            seen = self._seen.get(key)
            if (
                seen is not None
                and seen.buffer is buffer
                and seen.version == _edits(buffer)
                and not buffer.is_inference()
            ):
                unchanged.add(key)
                if self._checks and seen.checksum is not None:
                    compared[key] = _checksum(buffer) != seen.checksum
        if compared:  # one wait of the host for all buffers
            different = torch.stack(list(compared.values())).tolist()
            self._hidden.update(key for key, other in zip(compared, different, strict=True) if other)
        return [key not in unchanged or key in self._hidden for key, _ in buffers]

    def _watched(self) -> list[tuple[_Key, Tensor]]:
        """The buffers to watch; the same on all ranks."""
        # They include the statistics of normalization layers that no longer train, since their forward reads these.
        return [
            ((number, name), buffer)
            for number, module in enumerate(self._holders)
            if not (module.training and type(module) in _NORMALIZATIONS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.layout is torch.strided and buffer.numel()
        ]
