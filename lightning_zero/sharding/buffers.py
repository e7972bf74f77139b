"""Keeps the buffers of a module, which are not sharded, equal to rank 0's on all ranks.

Rank 0's values are broadcast when an engine is made (:func:`convert_buffers`), before buffers are shown or saved
(:func:`broadcast_buffers`), and after a backward in which some rank has changed a buffer (:class:`BufferWatch`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.sharding.checksum import checksum
from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage.accelerators import device_type
from lightning_zero.torch_private import has_own_apply, move_other_state, version_of

# In training mode these layers write their statistics but do not read them, so the ranks' statistics may differ.
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
    """Move buffers to the device, convert them to the dtype of the policy, and broadcast rank 0's. Collective.

    State that only a module's own ``_apply`` knows, such as that of metrics, is moved, too.
    """
    # By id, since a buffer may be registered twice; with the buffer itself, whose id another tensor may get after it.
    converted: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        if has_own_apply(module):
            move_other_state(module, placement.device)  # as torchmetrics has
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in converted:
                dtype = placement.precision.buffer_dtype(buffer.dtype)
                # Contiguous, since an expanded buffer cannot be written to.
                strided = buffer.layout is torch.strided
                moved = buffer.to(placement.device, dtype)
                converted[id(buffer)] = buffer, moved.contiguous() if strided else moved
            setattr(module, name, converted[id(buffer)][1])
    broadcast_buffers(root, placement.mesh.world)


def broadcast_buffers(root: nn.Module, world: Group) -> None:
    """Broadcast rank 0's values of all buffers to all ranks. Collective."""
    for buffer in {id(b): b for b in root.buffers()}.values():
        if buffer.layout is torch.strided:
            _broadcast(buffer, world)


def _broadcast(buffer: Tensor, world: Group) -> None:
    # A buffer that was assigned in inference mode can be written in that mode only.
    with torch.inference_mode(buffer.is_inference()):
        data = world.broadcast_(buffer.detach().contiguous(), "broadcast a buffer")
        if data.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(data)


def _edits(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)  # torch does not count changes of inference tensors


def _checksum(buffer: Tensor) -> Tensor:
    return checksum(buffer.detach().contiguous().view(-1).view(torch.uint8))


_Key = tuple[int, str]  # number of the module, and name of the buffer in it


class _Seen(NamedTuple):
    """A buffer at the time when all ranks last had rank 0's values."""

    buffer: Tensor
    version: int
    checksum: Tensor | None  # only while checksums are taken


class BufferWatch:
    """Finds buffers that a training step changes, and broadcasts rank 0's values of them before the next step.

    :class:`~torch.nn.parallel.DistributedDataParallel` broadcasts all buffers before every forward. Here each rank
    reports in the small all-reduce of a step whether it has changed a buffer. Only then do the ranks determine which
    buffers changed, and broadcast only those. The statistics of torch's own normalization layers are ignored while
    these layers are in training mode. As in torch, a module that has no buffer when training begins is ignored.

    torch counts changes in place, but not those made through ``buffer.data``, as some codebooks do. Checksums find such
    changes until :meth:`end_checks` is called; afterwards a buffer in which one was found counts as changed in every
    step. A buffer that is changed through ``data`` for the first time after :meth:`end_checks` is not found.

    The values on different ranks are not compared, so a changed counter that is equal on all ranks is broadcast, too.

    Args:
        root: the module with the buffers; all ranks must have rank 0's values of them.
        world: the group of all ranks.
        checks: whether to take checksums at first.
    """

    def __init__(self, root: nn.Module, world: Group, checks: bool) -> None:
        self._world = world
        modules = [m for m in root.modules() if next(m.buffers(recurse=False), None) is not None]
        self._holders = modules if world.size > 1 else []  # one rank has nothing to share
        self._checks = checks
        self._hidden: set[_Key] = set()  # keys of the buffers that were changed through `data`
        self._seen: dict[_Key, _Seen] = {}
        self._look()

    def has_changed(self) -> bool:
        """Whether this rank has changed a buffer since all ranks last had rank 0's values."""
        return any(self._changed(self._watched()))

    def share(self) -> None:
        """Broadcast rank 0's values of the buffers that some rank has changed. Collective."""
        buffers = self._watched()
        changed = torch.tensor(self._changed(buffers), dtype=torch.float64, device="cpu")
        device = buffers[0][1].device
        sent = device_type(device).send(changed, device)
        with self._world.explaining(what := "tell which buffers changed"):
            counts = self._world.all_reduce_(sent, what).tolist()
        for (_, buffer), count in zip(buffers, counts, strict=True):
            if count:
                _broadcast(buffer, self._world)
        self._look()

    def end_checks(self) -> None:
        """Stop taking checksums; the buffers found so far count as changed in every step."""
        self._checks = False

    def _look(self) -> None:
        self._seen.update(
            (key, _Seen(buffer, _edits(buffer), _checksum(buffer) if self._checks else None))
            for key, buffer in self._watched()
        )

    def _changed(self, buffers: list[tuple[_Key, Tensor]]) -> list[bool]:
        """Returns for each buffer whether this rank has changed it."""
        unchanged = set()  # according to torch's version counters
        compared: dict[_Key, Tensor] = {}  # 0-dim bools: whether the checksum differs
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
        if compared:  # one wait for the device, for all buffers
            different = torch.stack(list(compared.values())).tolist()
            self._hidden.update(key for key, other in zip(compared, different, strict=True) if other)
        return [key not in unchanged or key in self._hidden for key, _ in buffers]

    def _watched(self) -> list[tuple[_Key, Tensor]]:
        """The buffers that may have to be broadcast, with their keys; the same on all ranks."""
        # A normalization layer in evaluation mode reads its statistics in forward, so they are included.
        return [
            ((number, name), buffer)
            for number, module in enumerate(self._holders)
            if not (module.training and type(module) in _NORMALIZATIONS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.layout is torch.strided and buffer.numel()
        ]
