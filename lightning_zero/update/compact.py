"""The compact form of 8-bit state in checkpoints: codes and scales as in memory, a quarter of the bytes of fp32.

In this form the state of a parameter is::

    {"step": WARNING, "compact": {"exp_avg": {"codes": ..., "scales": ..., "blocks": {...}}, ..., "step": ...}}

Code that does not know the form must not take it for something else. Therefore "step" holds a warning: torch's Adam and
AdamW convert "step" to a number while they load, which fails here, and their error quotes the warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.memory_format import MemoryFormat

COMPACT = "compact"  # the key under which a parameter's entry has its state in this form
# This is bytes and not text because torch copies iterable values element by element: text would become a generator.
WARNING = (
    b"The moments of this checkpoint are in 8 bits (checkpoint_state='compact'), which only lightning_zero reads. "
    b"Write them in fp32 first: `lightning-zero consolidate CHECKPOINT NEW_FILE`, and load that."
)
_CODES, _SCALES, _BLOCKS = "codes", "scales", "blocks"
_TILE = 1 << 20  # number of elements that are decoded at a time


@dataclass(frozen=True)
class Blocks:
    """The blocks in which the elements of a tensor lie (:class:`lightning_zero.ops.Quantized`).

    Attributes:
        signed: which of the two formats the codes have.
        form: shape and strides of the tensor. Its codes are 1-D, in the order of its memory.
        starts: elements at which scales start anew, ascending, the first one 0. Blocks are counted from element 0 on.
            Where a shard border has cut a block, the block's second part has a scale of its own, and so a start.
    """

    signed: bool
    form: MemoryFormat
    starts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Blocks:
        """Make an object from the result of :meth:`describe`."""
        form = MemoryFormat(torch.Size(description["shape"]), tuple(description["strides"]))
        return cls(description["signed"], form, tuple(description["starts"]))

    def describe(self) -> dict[str, Any]:
        """Describe the blocks by numbers and lists, which any loader can read."""
        form = {"shape": list(self.form.shape), "strides": list(self.form.strides)}
        return {"signed": self.signed, **form, "starts": list(self.starts)}

    @property
    def numel(self) -> int:
        """The number of codes."""
        return self.form.shape.numel()

    @cached_property
    def _first_scales(self) -> tuple[int, ...]:
        """The index of the first scale of each start, and at the end the number of all scales."""
        ends = (*self.starts[1:], self.numel)
        counts = (ops.count_blocks(start, end - start) for start, end in zip(self.starts, ends, strict=True))
        return tuple(accumulate(counts, initial=0))

    def check(self, codes: Tensor, scales: Tensor) -> None:
        """Check the numbers of codes and scales.

        Raises:
            ValueError: there are more or fewer than the form and the starts require.
        """
        for what, found, expected in ((_CODES, codes, self.numel), (_SCALES, scales, self._first_scales[-1])):
            if found.shape != (expected,):
                raise ValueError(
                    f"{what} of 8-bit state of shape {tuple(self.form.shape)} have shape {tuple(found.shape)}; "
                    f"expected ({expected},). Somebody has changed the checkpoint: use another"
                )

    def decode(self, codes: Tensor, scales: Tensor, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Write the exact values of a range of elements.

        Args:
            codes: ``[numel]`` int8, in memory or in a file. Of a file no more is read than is needed.
            scales: ``[blocks]`` uint8, in memory or in a file, too.
            form: the order in which elements are counted here; has the shape of :attr:`form`.
            start: the first element to write.
            into: is filled; 1-D, of any dtype and device.
        """
        if form.order != self.form.order:
            form.read(self.full(codes, scales), start, into)
            return
        stop, ends = start + into.numel(), (*self.starts[1:], self.numel)
        for begin, end, first_scale in zip(self.starts, ends, self._first_scales, strict=False):
            low, high = max(begin, start), min(end, stop)
            for first in range(low, high, _TILE):
                part = into[first - start : min(first + _TILE, high) - start]
                scale = first_scale + first // ops.BLOCK - begin // ops.BLOCK
                own_scales = _read(scales, scale, ops.count_blocks(first, part.numel()), torch.uint8)
                quantized = ops.Quantized(_read(codes, first, part.numel(), torch.int8), own_scales)
                values = torch.empty(part.numel(), dtype=torch.float32, device="cpu")
                ops.dequantize_(values, quantized, signed=self.signed, index=first)
                part.copy_(values)

    def full(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The tensor that codes and scales stand for: fp32, in the shape and strides of :attr:`form`.

        Raises:
            ValueError: as :meth:`check`.
        """
        self.check(codes, scales)
        values = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        self.decode(codes, scales, self.form, 0, values)
        return self.form.view(values)


def _read(tensor: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    part = torch.empty(count, dtype=dtype, device="cpu")
    MemoryFormat(tensor.shape, (1,)).read(tensor, start, part)
    return part


def in_blocks(blocks: Blocks, codes: Tensor, scales: Tensor) -> dict[str, Any]:
    """The compact form of a tensor, which consists of ``codes`` (int8) and ``scales`` (uint8) in ``blocks``."""
    return {_CODES: codes, _SCALES: scales, _BLOCKS: blocks.describe()}


def compacted(state: dict[str, Any]) -> dict[str, Any]:
    """The entry of a parameter in a state dict, made from its state with tensors in compact form."""
    return {"step": WARNING, COMPACT: state}


def state_as_kept(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's state by name, from any entry of a state dict. Compact state is given as ``[codes, scales]``."""
    if not _is_compact(entry):
        return entry
    return {
        name: [value[_CODES], value[_SCALES]] if _is_in_blocks(value) else value
        for name, value in entry[COMPACT].items()
    }


def decoded(tree: Any, make: Callable[[Blocks, Tensor, Tensor], Tensor] = Blocks.full) -> Any:
    """Convert a checkpoint, or a part of it such as a state dict, so that nothing in it is in compact form.

    Args:
        tree: the checkpoint, which is not changed.
        make: gives the tensor that blocks, codes and scales stand for.

    Returns:
        The checkpoint with new dictionaries and lists.

    Raises:
        ValueError: as :meth:`Blocks.check`.
    """
    if _is_compact(tree):
        return {name: _moment(value, make) if _is_in_blocks(value) else value for name, value in tree[COMPACT].items()}
    if type(tree) is dict:
        return {key: decoded(value, make) for key, value in tree.items()}
    return [decoded(value, make) for value in tree] if type(tree) is list else tree


def holds_compact(tree: Any) -> bool:
    """Whether anything in a checkpoint is in compact form."""
    if type(tree) is dict:
        return _is_compact(tree) or any(map(holds_compact, tree.values()))
    return type(tree) is list and any(map(holds_compact, tree))


def _moment(value: Mapping[str, Any], make: Callable[[Blocks, Tensor, Tensor], Tensor]) -> Tensor:
    blocks = Blocks.of(value[_BLOCKS])
    blocks.check(value[_CODES], value[_SCALES])
    return make(blocks, value[_CODES], value[_SCALES])


def _is_compact(tree: Any) -> bool:
    # All that `compacted` makes is tested: a parameter, or an entry of the user's, may be called "compact", too.
    found = isinstance(tree, Mapping) and tree.keys() == {"step", COMPACT}
    return found and isinstance(tree["step"], type(WARNING)) and isinstance(tree[COMPACT], Mapping)


def _is_in_blocks(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {_CODES, _SCALES, _BLOCKS}
