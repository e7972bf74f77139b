"""Tensors that lie in memory in pieces, such as the gradients of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.storage import use_huge_pages

# Bytes. A smaller piece is copied faster than a kernel is called for it.
_SMALL = 1 << 16


def bytes_of_blocks(nbytes: int) -> int:
    """The most bytes that :meth:`Pieces.blocks` and :meth:`Pieces.join` take at a time, beside the result."""
    return min(nbytes, 2 * _SMALL) + min(nbytes, _SMALL)  # a block, and zeros


@dataclass(frozen=True)
class Pieces:
    """A 1-D tensor in host memory that lies there in pieces. Between them it is zero.

    Attributes:
        numel: number of elements.
        dtype: dtype of the pieces.
        parts: by the index of its first element, each piece: 1-D, contiguous, not empty; in order, without overlap.
    """

    numel: int
    dtype: torch.dtype
    parts: Sequence[tuple[int, Tensor]]

    @classmethod
    def of(cls, flat: Tensor) -> Pieces:
        """``flat`` (contiguous) as one piece."""
        return cls(flat.numel(), flat.dtype, [(0, flat.view(-1))] if flat.numel() else [])

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def chunk(self, number: int) -> list[Pieces]:
        """Slices of equal sizes; ``number`` divides :attr:`numel`."""
        return self.split(self.numel // number) if self.numel else [self] * number

    def split(self, size: int) -> list[Pieces]:
        """Slices of ``size`` elements, at least 1; the last one may be shorter."""
        slices: list[list[tuple[int, Tensor]]] = [[] for _ in range(0, self.numel, size)]
        for start, part in self.parts:
            stop = start + part.numel()
            for index in range(start // size, -(-stop // size)):
                low, high = max(start, index * size), min(stop, (index + 1) * size)
                whole = high - low == part.numel()
                slices[index].append((low - index * size, part if whole else part[low - start : high - start]))
        return [Pieces(min(size, self.numel - i * size), self.dtype, parts) for i, parts in enumerate(slices)]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The tensor in consecutive blocks, by the index of their first element.

        Large pieces are blocks as they are. Small ones are joined, with the zeros between them, since a kernel's call
        for each of them would cost more than the copy. Such a block is there until the next one; see
        :func:`bytes_of_blocks`.
        """
        run: list[Tensor] = []
        begin = length = 0
        for part in self._with_zeros():
            large = part.nbytes >= _SMALL
            if run and (large or length * self.dtype.itemsize >= _SMALL):
                yield begin, torch.cat(run)
                begin, length, run = begin + length, 0, []
            if large:
                yield begin, part
                begin += part.numel()
            else:
                run.append(part)
                length += part.numel()
        if run:
            yield begin, torch.cat(run)

    def _with_zeros(self) -> Iterator[Tensor]:
        """All pieces, and what lies between them, of which no tensor is large."""
        most, zeros = _SMALL // self.dtype.itemsize - 1, torch.empty(0, dtype=self.dtype, device="cpu")
        end = 0
        for start, part in (*self.parts, (self.numel, zeros)):
            if start > end and not zeros.numel():
                zeros = torch.zeros(min(most, self.numel), dtype=self.dtype, device="cpu")
            for at in range(end, start, most):
                yield zeros[: min(most, start - at)]
            if part.numel():
                yield part
            end = start + part.numel()

    def join(self) -> Tensor:
        """The tensor in one piece: the same memory if it is one already, otherwise a copy."""
        if len(self.parts) == 1 and self.parts[0][1].numel() == self.numel:
            return self.parts[0][1]
        flat = use_huge_pages(torch.empty(self.numel, dtype=self.dtype, device="cpu"))
        for start, block in self.blocks():
            flat[start : start + block.numel()] = block
        return flat
