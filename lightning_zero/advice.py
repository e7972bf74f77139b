"""Remedies at the end of messages, in the words of whoever drives the engine.

The floors below `integration` raise errors that state facts. Where only the driver can name the remedy (an option, a
method, a flag of its trainer), the message asks for it by a case, and the driver provides the text. So an error reads
the same wherever it is caught, also where no code of the driver is on the stack. Without a driver it says less.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Case(Enum):
    """Situations in which a message leaves the remedy to the driver."""

    INITIALIZED_IN_SHARDS = auto()  # a parameter is used that was initialized in shards and that no engine runs
    FREED = auto()  # a parameter is used where a rank holds only its shard
    RANKS_DIFFER = auto()  # the ranks' collectives do not fit together
    STATE_IS_SHARDED = auto()  # an optimizer's state is read
    STATE_DOES_NOT_FIT = auto()  # a checkpoint's optimizer state is another optimizer's
    DAMAGED = auto()  # a checkpoint's checksums do not match
    FOLDER = auto()  # somebody looks into a checkpoint that is a folder
    LOSS_IS_NOT_SCALED = auto()  # backward ran on a loss that the loss scaler has not seen
    NOT_FLUSHED = auto()  # a gradient is read or changed before it is averaged
    NOT_LAST_MICRO_BATCH = auto()  # one that more will be added to
    NOT_ON_HOST = auto()  # a CPU optimizer got a parameter on a device
    MASTERS_NOT_ON_HOST = auto()  # a kernel for host memory got masters on a device
    MASTERS_NOT_FP32 = auto()  # a kernel that needs fp32 masters got others
    SPLIT_MASTERS = auto()  # masters are to be split of an optimizer that no kernel runs
    RESIDENT_IN_FEWER_DIGITS = auto()  # state that stays on the device cannot have the numbers of what is offloaded
    NEEDS_WHOLE_PARAMETERS = auto()  # an optimizer joins late, for which parameters should have been left whole
    CANNOT_BE_SHARDED = auto()  # a parameter, a module or an optimizer
    RENORMALIZED_IN_FORWARD = auto()  # an embedding has a largest norm; the text has its `name` and `module`
    ROUNDED = auto()  # a parameter has lost digits that a training, or a wider dtype, needs
    MADE_LATE = auto()  # a parameter came into being, or got its values, too late
    UNEVEN_LOADERS = auto()  # loaders of different ranks have different numbers of batches
    DISK_PATH = auto()  # the folder for state on a disk is missing, read-only or taken
    DISK_FULL = auto()  # that disk has no room
    DISK_DAMAGED = auto()  # it gave back something else than was written
    NOT_IN_BACKWARD = auto()  # something does not go together with updates that begin in backward
    TORN = auto()  # a step has ended after some of its updates and before others
    STEP_OF_ITS_OWN = auto()  # an optimizer overrides `step`, and the driver has a hook for that


_TEXTS: dict[Case, str] = {}


def provide(texts: Mapping[Case, str]) -> None:
    """State the remedies of the driver; of two drivers the last one is heard."""
    _TEXTS.update(texts)


def advice(case: Case, before: str = "", default: str = "") -> str:
    """The driver's remedy after ``before``, or else ``default``."""
    return before + _TEXTS[case] if case in _TEXTS else default
