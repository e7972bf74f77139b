"""Values that an optimizer's step writes to its groups and attributes, not its state: a count of steps, a flag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.update.shell import ShellGroup, StepCall, run_step


@dataclass(frozen=True)
class Written:
    """Entries of a parameter group, and attributes of the optimizer, that a step has set to other values.

    Attributes:
        group: the new values of the group's entries, by key.
        attributes: the new values of the attributes, by name.
    """

    group: dict[str, Any]
    attributes: dict[str, Any]

    @classmethod
    def by(cls, shell: Optimizer, group: dict[str, Any], attributes: dict[str, Any], index: int = 0) -> Written:
        """Compares a shell after a step with the values from before the step.

        Args:
            shell: the shell after the step.
            group: the hyperparameters of a group before the step.
            attributes: the optimizer's attributes before the step.
            index: number of the group.
        """
        return cls.between(group, attributes, shell.param_groups[index], attributes_of(shell))

    @classmethod
    def between(
        cls,
        group: dict[str, Any],
        attributes: dict[str, Any],
        new_group: dict[str, Any],
        new_attributes: dict[str, Any],
    ) -> Written:
        """Gives the entries that differ between two times, with their new values."""
        return cls(
            _changed(group, {k: v for k, v in new_group.items() if k != "params"}), _changed(attributes, new_attributes)
        )

    def __bool__(self) -> bool:
        return bool(self.group or self.attributes)

    def same(self, other: Written) -> bool:
        """Tell whether the other step wrote the same values."""
        return not self.unlike(other)

    def unlike(self, other: Written) -> set[str]:
        """The names of what only one of the two steps wrote, or wrote with another value."""
        pairs = ((self.group, other.group), (self.attributes, other.attributes))
        return {key for mine, theirs in pairs for key in (*_changed(mine, theirs), *_changed(theirs, mine))}


def advance(optimizer: Optimizer, call: StepCall) -> None:
    """Write to an optimizer's groups and attributes the values that one step writes there.

    The shells that update shards have copies of groups and attributes, so that each tile finds them as they were before
    the step.

    Args:
        optimizer: an optimizer for which a trial has found that these values do not depend on the updated parameters.
        call: the call of its ``step``.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for live, written in zip(optimizer.param_groups, written_alone(optimizer, groups, call), strict=True):
        live.update(written.group)
        vars(optimizer).update(written.attributes)


def written_alone(optimizer: Optimizer, groups: Sequence[dict[str, Any]], call: StepCall) -> list[Written]:
    """Returns what a step writes to each of some groups, and to attributes, if it updates nothing.

    Args:
        optimizer: gives the class and the attributes; it is not changed.
        groups: the hyperparameters of the groups, which are not changed.
        call: the call of its ``step``.
    """
    attributes = attributes_of(optimizer)
    shell = run_step(optimizer, [ShellGroup([], group) for group in groups], {}, call)
    return [Written.by(shell, group, attributes, index) for index, group in enumerate(groups)]


def check_alone(name: str, written: Sequence[Written], alone: Sequence[Written]) -> None:
    """Refuse writes of a step to its groups or to attributes that depend on what it updates.

    Args:
        name: name of the optimizer's class.
        written: what it has written.
        alone: what it writes if it updates nothing; what is missing counts as nothing.

    Raises:
        KeptOutsideError: these differ.
    """
    pairs = zip_longest(written, alone, fillvalue=Written({}, {}))
    if names := {repr(key) for mine, theirs in pairs for key in mine.unlike(theirs)}:
        raise KeptOutsideError(
            f"{name} keeps state outside `state`: a step changes {', '.join(sorted(names))} in its parameter groups or "
            "attributes, by what it updates or only after some steps. Keep it in self.state[parameter]"
            f"{advice(Case.CANNOT_BE_SHARDED, ', ')}"
        )


class KeptOutsideError(ValueError):
    """Raised if an optimizer keeps state in groups or attributes, where the shells of shards would lose it."""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that its class may use to count: numbers, also in tensors of one element."""
    return {
        k: v
        for k, v in vars(optimizer).items()
        if isinstance(v, int | float) or (isinstance(v, Tensor) and v.numel() == 1)
    }


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in new.items() if k not in old or not _same(old[k], v)}


def _same(old: Any, new: Any) -> bool:
    if old is new:  # values of tensors on a device need not be waited for
        return True
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return isinstance(old, Tensor) and isinstance(new, Tensor) and old.equal(new)
    return bool(old == new)
