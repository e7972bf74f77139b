"""Values that an optimizer's step writes to its groups and attributes, not its state: a count of steps, a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
        pairs = ((self.group, other.group), (self.attributes, other.attributes))
        return all(mine.keys() == theirs.keys() and not _changed(mine, theirs) for mine, theirs in pairs)


def advance(optimizer: Optimizer, call: StepCall) -> None:
    """Write to an optimizer's groups and attributes the values that one step writes there.

    The shells that update shards have copies of groups and attributes, so that each tile finds them as they were before
    the step.

    Args:
        optimizer: an optimizer for which a trial has found that these values do not depend on the updated parameters.
        call: the call of its ``step``.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    attributes = attributes_of(optimizer)
    shell = run_step(optimizer, [ShellGroup([], group) for group in groups], {}, call)
    for index, (live, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        live.update(Written.by(shell, group, attributes, index).group)
    vars(optimizer).update(_changed(attributes, attributes_of(shell)))


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
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return isinstance(old, Tensor) and isinstance(new, Tensor) and old.equal(new)
    return bool(old == new)
