"""Keeps the buffers of a module, which are not sharded, equal to rank 0's on all ranks.

Rank 0's values are broadcast when an engine is made (:func:`convert_buffers`), and by :class:`BufferWatch` before
buffers are shown or saved, and after a backward in which some rank has changed a buffer. Buffers that not all ranks
have with the same shape, such as caches by the length of a sequence, stay as each rank has them.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.sharding.checksum import checksum
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


def convert_buffers(root: nn.Module, placement: BucketPlacement) -> list[str]:
    """Move buffers to the device, convert them to the dtype of the policy, and broadcast rank 0's. Collective.

    State that only a module's own ``_apply`` knows, such as that of metrics, is moved, too.

    Returns:
        The names of the buffers that were broadcast, the same on all ranks.
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
    return _broadcast_buffers(root, placement)


def _broadcast_buffers(root: nn.Module, placement: BucketPlacement) -> list[str]:
    """Broadcast rank 0's values of all buffers that are alike on all ranks, and return their names. Collective."""
    held = {name: buffer for name, buffer in root.named_buffers() if buffer.layout is torch.strided}
    for name in (names := _alike(held, placement)):
        _broadcast(held[name], placement)
    return names


def _alike(held: dict[str, Tensor], placement: BucketPlacement) -> list[str]:
    """The names of the buffers that all ranks have with the same shape, dtype and type of device. Collective."""
    world = placement.mesh.world
    if world.size == 1:
        return [*held]
    mine = {name: _form(buffer) for name, buffer in held.items()}
    checksums = torch.zeros(world.size, dtype=torch.int64, device="cpu")
    checksums[world.rank] = zlib.crc32(repr(mine).encode())
    sent = device_type(placement.device).send(checksums, placement.device)
    with world.explaining(what := "compare the buffers"):
        world.all_gather_(sent, what)  # not of objects: checks know it, and so tell which rank does something else
        same = len(set(sent.tolist())) == 1
    if same:
        return [*mine]
    first, *others = world.all_gather_object(mine, what)
    return [name for name in first if all(other.get(name) == first[name] for other in others)]


def _form(buffer: Tensor) -> str:
    """Describe what ranks must have in common to exchange a buffer."""
    return f"{tuple(buffer.shape)} {buffer.dtype} {buffer.device.type}"


def _broadcast(buffer: Tensor, placement: BucketPlacement) -> None:
    # A buffer that was assigned in inference mode can be written in that mode only.
    with torch.inference_mode(buffer.is_inference()):
        data = placement.mesh.world.broadcast_(buffer.detach().contiguous(), "broadcast a buffer")
        if data.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(data)


def _edits(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)  # torch does not count changes of inference tensors


def _checksum(buffer: Tensor) -> Tensor:
    return checksum(buffer.detach().contiguous().view(-1).view(torch.uint8))


_CODES = 1 << 20  # with codes of 20 bits, sums of squares over 4096 ranks are exact in float64


def _code(buffer: Tensor) -> int:
    """A number for the form of a buffer, from 1 to 2²⁰."""
    return zlib.crc32(_form(buffer).encode()) % _CODES + 1


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
    these layers are in training mode. As in torch, a buffer that is not there when training begins is ignored. So is,
    in a step, one that the ranks have in different shapes then.

    torch counts changes in place, but not those made through ``buffer.data``, as some codebooks do. Checksums find such
    changes in the first optimizer steps; afterwards a buffer in which one was found counts as changed in every step. A
    buffer that is changed through ``data`` for the first time after these steps is not found.

    The values on different ranks are not compared, so a changed counter that is equal on all ranks is broadcast, too.

    Args:
        root: the module with the buffers.
        placement: groups and device.
        names: of the buffers of which all ranks have rank 0's values; the same on all ranks.
        check_steps: number of first optimizer steps in which checksums are taken.
    """

    def __init__(self, root: nn.Module, placement: BucketPlacement, names: list[str], check_steps: int) -> None:
        self._root, self._placement = root, placement
        shared = names if placement.mesh.world.size > 1 else []  # one rank has nothing to share
        paths = [name.rpartition(".") for name in shared]
        self._places = [(root.get_submodule(path), name) for path, _, name in paths]
        self._steps_to_check = check_steps
        self._hidden: set[int] = set()  # numbers of the places whose buffers were changed through `data`
        self._seen: dict[int, _Seen] = {}  # by number of the place
        self._look()

    def share_all(self) -> None:
        """Broadcast rank 0's values of all buffers, also of later ones, if there were any at first. Collective then."""
        if self._places:  # the same on all ranks
            _broadcast_buffers(self._root, self._placement)

    def has_changed(self) -> bool:
        """Whether this rank has changed a buffer since all ranks last had rank 0's values."""
        return any(self._changed(self._watched()))

    def share(self) -> None:
        """Broadcast rank 0's values of the buffers that some rank has changed. Collective."""
        buffers, world, device = self._watched(), self._placement.mesh.world, self._placement.device
        rows = torch.zeros(len(self._places), 3, dtype=torch.float64, device="cpu")
        for (number, buffer), changed in zip(buffers, self._changed(buffers), strict=True):
            code = _code(buffer)
            rows[number] = torch.tensor([changed, code, code**2], dtype=torch.float64, device="cpu")
        sent = device_type(device).send(rows.view(-1), device)
        with world.explaining(what := "tell which buffers changed"):
            sums = world.all_reduce_(sent, what).view(-1, 3).tolist()
        held = dict(buffers)
        for number, (count, codes, squares) in enumerate(sums):
            # Numbers are equal if their variance is 0. What a rank does not have, or not so, stays as each rank has it.
            if count and world.size * int(squares) == int(codes) ** 2:
                _broadcast(held[number], self._placement)
        self._look()

    def count_step(self) -> None:
        """Count an optimizer step. After the last one to check, no more checksums are taken."""
        self._steps_to_check -= 1

    @property
    def _checks(self) -> bool:
        return self._steps_to_check > 0

    def _look(self) -> None:
        self._seen.update(
            (key, _Seen(buffer, _edits(buffer), _checksum(buffer) if self._checks else None))
            for key, buffer in self._watched()
        )

    def _changed(self, buffers: list[tuple[int, Tensor]]) -> list[bool]:
        """Returns for each buffer whether this rank has changed it."""
        unchanged = set()  # according to torch's version counters
        compared: dict[int, Tensor] = {}  # 0-dim bools: whether the checksum differs
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

    def _watched(self) -> list[tuple[int, Tensor]]:
        """The buffers that may have to be broadcast, with the numbers of their places."""
        # A normalization layer in evaluation mode reads its statistics in forward, so they are included.
        return [
            (number, buffer)
            for number, (module, name) in enumerate(self._places)
            if not (module.training and type(module) in _NORMALIZATIONS)
            and isinstance(buffer := getattr(module, name, None), Tensor)
            and buffer.layout is torch.strided
            and buffer.numel()
        ]
