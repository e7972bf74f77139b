"""Parameters that have lost digits: an engine that only evaluates casts them and keeps no master.

Masters are never made of rounded values. So whoever takes such parameters over later, for a training or in a wider
dtype, must know: a bucket has the indices of its own, and what it gives back is marked until something else is written
into it.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.advice import Case, advice
from lightning_zero.torch_private import version_of

_marks = WeakIdKeyDictionary()  # of parameters: the dtype, and the version that has no more digits


def mark_rounded(parameter: Parameter, dtype: torch.dtype) -> None:
    """Note that the values of ``parameter``, whatever its dtype, have no more digits than those of ``dtype``."""
    _marks[parameter] = dtype, version_of(parameter)


def rounded_to(parameter: Parameter) -> torch.dtype | None:
    """The dtype to which the values of ``parameter`` were rounded; ``None``: to none, or others came since."""
    dtype, version = _marks.get(parameter, (None, None))
    return dtype if version == version_of(parameter) else None


def lost_digits(name: str, had: torch.dtype, needed: torch.dtype) -> ValueError:
    """The error for a parameter of which there are fewer digits than are needed."""
    return ValueError(
        f"parameter {name!r} was cast to {had} for evaluation before any training, which kept nothing else of it, and "
        f"now its values are needed in {needed}{advice(Case.ROUNDED, '. ')}"
    )
