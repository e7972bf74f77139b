"""Keeps track of parameters that were rounded: an engine that only evaluates casts parameters and keeps no master.

So does an engine that is interrupted while it is made, if its masters are in shards. Masters must not be made from
rounded values, so a later training, or an evaluation in a wider dtype, must be able to find such parameters. A bucket
lists the indices of its rounded parameters (``Bucket.rounded``). When it is released, they are marked until other
values are written into them.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.advice import Case, advice
from lightning_zero.torch_private import version_of

_marks = WeakIdKeyDictionary()  # by parameter: the dtype that it was rounded to, and its version counter at that time


def mark_rounded(parameter: Parameter, dtype: torch.dtype) -> None:
    """Note that the values of ``parameter``, whose dtype may be wider, were rounded to ``dtype``."""
    _marks[parameter] = dtype, version_of(parameter)


def rounded_to(parameter: Parameter) -> torch.dtype | None:
    """The dtype that ``parameter`` was rounded to; ``None`` if it was not, or if other values were written since."""
    dtype, version = _marks.get(parameter, (None, None))
    return dtype if version == version_of(parameter) else None


def lost_digits(name: str, had: torch.dtype, needed: torch.dtype) -> ValueError:
    """The error for a parameter that was rounded to ``had`` although its values are needed in ``needed``."""
    return ValueError(
        f"parameter {name!r} was cast to {had} for evaluation before any training, or in a set-up that did not end, "
        f"without a copy of its original values, and now its values are needed in {needed}{advice(Case.ROUNDED, '. ')}"
    )
