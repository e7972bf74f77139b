"""Finds edits of parameters by user code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.sharding.checksum import checksum
from lightning_zero.torch_private import shift_versions, version_of


class EditWatch:
    """Finds the parameters of a bucket that were edited since they were noted.

    An edit in place changes the version counter of a tensor, and an assignment to ``data`` its place. An edit in place
    through ``data`` changes neither; a checksum finds it.

    Args:
        parameters: views of a tensor with the layout of the flat buffer.
        offsets: where they begin in it.
    """

    def __init__(self, parameters: Sequence[Parameter], offsets: Sequence[int]) -> None:
        self._parameters = parameters
        self._offsets = offsets
        self._versions: list[int] = []
        self._checksum: Tensor | None = None

    def note(self, watched: Tensor | None) -> None:
        """Note the present values; of ``watched``, a part of them, also a checksum."""
        self.note_versions()
        self._checksum = None if watched is None else checksum(watched)

    def note_versions(self) -> None:
        """Note the present versions alone, after a change that is no edit."""
        self._versions = [version_of(p) for p in self._parameters]

    def shift_versions(self, by: int) -> None:
        """Add to the version counters, which is no edit."""
        shift_versions(self._parameters, by)
        self._versions = [version + by for version in self._versions]

    def hidden(self, watched: Callable[[], Tensor]) -> Tensor | None:
        """Whether the checksum of ``watched()`` is another than the noted one: 0-dim bool; ``None`` without one."""
        return None if self._checksum is None else checksum(watched()) != self._checksum

    def find(self, flat: Tensor, view: Callable[[Tensor, int], Tensor], everything: bool = False) -> set[int]:
        """The indices of edited parameters. All parameters are views of ``flat`` again afterwards, with their values.

        Args:
            flat: the tensor that they were views of.
            view: gives the view of a parameter in it.
            everything: take all parameters as edited.
        """
        return {
            index
            for index, parameter in enumerate(self._parameters)
            if self._reattach(flat, view, index) or everything or version_of(parameter) != self._versions[index]
        }

    def _reattach(self, flat: Tensor, view: Callable[[Tensor, int], Tensor], index: int) -> bool:
        """Undo an assignment to ``data``, as ``module.double()`` makes one; tell whether there was one."""
        parameter, start = self._parameters[index], self._offsets[index] * flat.itemsize
        if parameter.data_ptr() == flat.data_ptr() + start or not parameter.numel():
            return False
        own = view(flat, index)
        own.copy_(parameter.data)
        parameter.data = own
        return True
