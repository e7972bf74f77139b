"""Remedies at the end of error messages, provided by the code that drives the engine.

The packages below `integration` raise errors that state facts. If only the driver of the engine can name the remedy (an
option, a method, a flag of its trainer), the message requests it by a case, and the driver provides the text. So an
error has the same text wherever it is caught, even if no code of the driver is on the stack. Without a driver the
message lacks the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Case(Enum):
    """Situations in which the driver provides the remedy."""

    INITIALIZED_IN_SHARDS = auto()  # a parameter is used that was initialized in shards and belongs to no engine yet
    FREED = auto()  # a parameter is used while the rank holds only its shard
    RANKS_DIFFER = auto()  # the ranks issue different collectives
    STATE_IS_SHARDED = auto()  # an optimizer's state is read
    STATE_DOES_NOT_FIT = auto()  # a checkpoint has the state of another kind of optimizer
    DAMAGED = auto()  # a checkpoint's checksums do not match
    FOLDER = auto()  # the README file in a checkpoint that is a folder
    LOSS_IS_NOT_SCALED = auto()  # backward ran on a loss that was not multiplied by the loss scale
    NOT_FLUSHED = auto()  # a gradient is read or changed before it is averaged
    NOT_LAST_MICRO_BATCH = auto()  # a gradient is read or changed to which further micro-batches will be added
    STEP_IN_BACKWARD = auto()  # a hook of autograd makes a step at stage 3
    NOT_ON_HOST = auto()  # a CPU optimizer got a parameter on a device
    MASTERS_NOT_ON_HOST = auto()  # a kernel for host memory got masters on a device
    MASTERS_NOT_FP32 = auto()  # a kernel that needs fp32 masters got others
    SPLIT_MASTERS = auto()  # split masters are requested for an optimizer that no kernel runs
    RESIDENT_IN_FEWER_DIGITS = auto()  # state that stays on the device would be less precise than offloaded state
    NEEDS_WHOLE_PARAMETERS = auto()  # an optimizer that needs whole parameters is attached after sharding
    CANNOT_BE_SHARDED = auto()  # a parameter, a module or an optimizer cannot be sharded
    RENORMALIZED_IN_FORWARD = auto()  # an embedding has `max_norm`; the text has the fields `name` and `module`
    ROUNDED = auto()  # a parameter was rounded, but training or a wider dtype needs its original values
    NO_MASTER = auto()  # a 16-bit parameter without a master was written at full precision
    MADE_LATE = auto()  # a parameter was created, or got its values, too late
    UNEVEN_LOADERS = auto()  # loaders of different ranks have different numbers of batches
    DISK_PATH = auto()  # the folder for state on a disk is missing, read-only or taken
    DISK_FULL = auto()  # the disk for state is full
    DISK_DAMAGED = auto()  # the disk returned other data than were written
    NOT_IN_BACKWARD = auto()  # something cannot be combined with updates that begin in backward
    NOT_PINNED = auto()  # host memory could not be pinned
    SMALLEST_SCALE = auto()  # gradients overflow at the smallest loss scale
    DIFFERENTIABLE = auto()  # an optimizer that a kernel runs has groups with `differentiable=True`
    SKIPPED_TOO_OFTEN = auto()  # too many steps in a row were skipped
    COMPILED_AS_A_WHOLE = auto()  # a compiled module contains units; the text has the field `name`
    TORN = auto()  # a step failed after some of its updates had been made and before others
    STEP_OF_ITS_OWN = auto()  # an optimizer overrides `step`; the driver has a hook for that purpose


_TEXTS: dict[Case, str] = {}


def provide(texts: Mapping[Case, str]) -> None:
    """Register the driver's remedies; those of a later call replace earlier ones."""
    _TEXTS.update(texts)


def advice(case: Case, before: str = "", default: str = "") -> str:
    """The driver's remedy for ``case``, preceded by ``before``; ``default`` if there is none."""
    return before + _TEXTS[case] if case in _TEXTS else default
