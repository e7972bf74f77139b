"""The compact form of 8-bit state in checkpoints: codes and scales as they are kept, a quarter of the bytes of fp32.

The state of a parameter is then::

    {"step": WARNING, "compact": {"exp_avg": {"codes": ..., "scales": ..., "blocks": {...}}, ..., "step": ...}}

Who does not know the form must not take it for something else: torch's Adam and AdamW make a number of what is called
"step" while they load, and their error quotes what it was.
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

COMPACT = "compact"  # what the state of a parameter in this form is under
# Bytes, since torch copies the elements of what can be iterated on, and of text would leave a generator.
WARNING = (
    b"The moments of this checkpoint are in 8 bits (checkpoint_state='compact'), which only lightning_zero reads. "
    b"Write them in fp32 first: `lightning-zero consolidate CHECKPOINT NEW_FILE`, and load that."
)
_CODES, _SCALES, _BLOCKS = "codes", "scales", "blocks"
_TILE = 1 << 20  # elements that are decoded at a time


@dataclass(frozen=True)
class Blocks:
    """How the elements of a tensor lie in blocks (:class:`lightning_zero.ops.Quantized`).

    Attributes:
        signed: which of the two formats.
        form: shape and strides of the tensor; codes are 1-D, in the order of its memory.
        starts: ascending; blocks are counted from element 0 on. Where a shard border cut a block, its second part has
            a scale of its own: there is another start.
    """

    signed: bool
    form: MemoryFormat
    starts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Blocks:
        """Make them of what :meth:`describe` has given."""
        form = MemoryFormat(torch.Size(description["shape"]), tuple(description["strides"]))
        return cls(description["signed"], form, tuple(description["starts"]))

    def describe(self) -> dict[str, Any]:
        """The same in numbers and lists, which any loader reads."""
        form = {"shape": list(self.form.shape), "strides": list(self.form.strides)}
        return {"signed": self.signed, **form, "starts": list(self.starts)}

    @property
    def numel(self) -> int:
        """The number of codes."""
        return self.form.shape.numel()

    @cached_property
    def _first_scales(self) -> tuple[int, ...]:
        """The first scale of the elements from each start on, and the number of all."""
        ends = (*self.starts[1:], self.numel)
        counts = (ops.count_blocks(start, end - start) for start, end in zip(self.starts, ends, strict=True))
        return tuple(accumulate(counts, initial=0))

    def check(self, codes: Tensor, scales: Tensor) -> None:
        """Raise a :class:`ValueError` unless there are as many codes and scales as there should be."""
        for what, found, expected in ((_CODES, codes, self.numel), (_SCALES, scales, self._first_scales[-1])):
            if found.shape != (expected,):
                raise ValueError(
                    f"{what} of 8-bit state of shape {tuple(self.form.shape)} have shape {tuple(found.shape)}; "
                    f"expected ({expected},). Somebody has changed the checkpoint: use another"
                )

    def decode(self, codes: Tensor, scales: Tensor, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Write values, exactly.

        Args:
            codes: [n] int8; in memory or a file, of which no more is read than is needed.
            scales: [one for a block] uint8, likewise.
            form: of the shape of :attr:`form`; says in which order elements are counted here.
            start: the first one that is wanted.
            into: filled; 1-D, of any dtype and device.
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
                values = torch.empty(part.numel(), dtype=torch.float32)
                ops.dequantize_(values, quantized, signed=self.signed, index=first)
                part.copy_(values)

    def full(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The tensor, fp32."""
        self.check(codes, scales)
        values = torch.empty(self.numel, dtype=torch.float32)
        self.decode(codes, scales, self.form, 0, values)
        return self.form.view(values)


def _read(tensor: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    part = torch.empty(count, dtype=dtype)
    MemoryFormat(tensor.shape, (1,)).read(tensor, start, part)
    return part


def in_blocks(blocks: Blocks, codes: Tensor, scales: Tensor) -> dict[str, Any]:
    """A tensor in compact form."""
    return {_CODES: codes, _SCALES: scales, _BLOCKS: blocks.describe()}


def compacted(state: dict[str, Any]) -> dict[str, Any]:
    """The entry of a parameter in a state dict, of its state, of which tensors are in compact form."""
    return {"step": WARNING, COMPACT: state}


def state_as_kept(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's state by name, of any entry of a state dict: of what is in compact form codes and scales."""
    if not _is_compact(entry):
        return entry
    return {
        name: [value[_CODES], value[_SCALES]] if _is_in_blocks(value) else value
        for name, value in entry[COMPACT].items()
    }


def decoded(tree: Any, make: Callable[[Blocks, Tensor, Tensor], Tensor] = Blocks.full) -> Any:
    """A checkpoint or a part of it, such as a state dict, without compact form; dictionaries and lists are new ones.

    Args:
        tree: is not changed.
        make: gives the tensor that blocks, codes and scales stand for.

    Raises:
        ValueError: as :meth:`Blocks.check`.
    """
    if _is_compact(tree):
        return {name: _moment(value, make) if _is_in_blocks(value) else value for name, value in tree[COMPACT].items()}
    if type(tree) is dict:
        return {key: decoded(value, make) for key, value in tree.items()}
    return [decoded(value, make) for value in tree] if type(tree) is list else tree


def holds_compact(tree: Any) -> bool:
    """Whether there is anything in compact form in a checkpoint."""
    if type(tree) is dict:
        return _is_compact(tree) or any(map(holds_compact, tree.values()))
    return type(tree) is list and any(map(holds_compact, tree))


def _moment(value: Mapping[str, Any], make: Callable[[Blocks, Tensor, Tensor], Tensor]) -> Tensor:
    blocks = Blocks.of(value[_BLOCKS])
    blocks.check(value[_CODES], value[_SCALES])
    return make(blocks, value[_CODES], value[_SCALES])


def _is_compact(tree: Any) -> bool:
    # As `compacted` makes it: a parameter, or an entry of the user's, may have the same name.
    found = isinstance(tree, Mapping) and tree.keys() == {"step", COMPACT}
    return found and isinstance(tree["step"], type(WARNING)) and isinstance(tree[COMPACT], Mapping)


def _is_in_blocks(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {_CODES, _SCALES, _BLOCKS}
