"""Optimizers that combine several of torch's optimizers: each parameter group is updated by one of them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.sharding import Bucket, BucketForm
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.native import MasterLayout, ParamGroup
from lightning_zero.update.rules import Traits
from lightning_zero.update.shell import ShellGroup, loss_by, run_step, snapshot
from lightning_zero.update.state import OptimizerState
from lightning_zero.update.updaters import Updater
from lightning_zero.update.view import UpdateView


class GroupRule(NamedTuple):
    """The optimizer that updates a parameter group, and its hyperparameters.

    Attributes:
        optimizer: an optimizer of the class that updates the group; its own groups and state are not used.
        hyperparameters: the hyperparameters for that class.
    """

    optimizer: Optimizer
    hyperparameters: ParamGroup


class CombinedOptimizer(Optimizer, ABC):
    """Base class of optimizers that have one of torch's optimizers update each of their groups."""

    @abstractmethod
    def rule_of(self, group: ParamGroup) -> GroupRule:
        """The optimizer that updates a group, and its hyperparameters. They must depend on ``group`` alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; returns what ``closure`` returns, or None without one."""
        loss = loss_by(closure)
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            state = {parameter: self.state[parameter] for parameter in members if parameter in self.state}
            rule = self.rule_of(group)
            run_step(rule.optimizer, [ShellGroup(members, rule.hyperparameters)], state)
            self.state.update(state)
        return loss


def steps_by_rules(optimizer: Optimizer) -> TypeGuard[CombinedOptimizer]:
    """Tell whether an optimizer steps by its groups' rules, and not by a ``step`` that a subclass defines."""
    own = inspect.unwrap(type(optimizer).step)
    return isinstance(optimizer, CombinedOptimizer) and own is inspect.unwrap(CombinedOptimizer.step)


class CombinedUpdater(Updater):
    """Updates each bucket with the updater that the rule of its parameters has when used alone.

    For AdamW this is the updater of a native kernel, where one fits.

    A bucket whose parameters have several rules is updated by the optimizer's own step. This happens only to buckets
    that keep each parameter whole on one rank: a bucket holds either parameters that are cut, or parameters that are
    not.

    Args:
        optimizer: as the user configured it.
        choose: gives the updater of one of torch's optimizers over the same buckets.
        make_own: gives the updater that runs the optimizer's own step.
    """

    optimizer: CombinedOptimizer

    def __init__(
        self,
        optimizer: CombinedOptimizer,
        choose: Callable[[Optimizer], Updater],
        make_own: Callable[[], Updater],
    ) -> None:
        super().__init__(optimizer, Traits((), frozenset()))
        self._choose = choose
        self._make_own = make_own
        self._by_rule: dict[type[Optimizer], Updater] = {}
        self._by_bucket: dict[int, Updater] = {}  # by id of the bucket

    @cached_property
    def _own(self) -> Updater:
        return self._make_own()

    def _follow_groups(self) -> list[tuple[type[Optimizer], ParamGroup]]:
        """Give the rules' updaters the groups as they are now; returns the class of each group's rule, and the group.

        These groups have the hyperparameters of their rules.
        """
        followed: list[tuple[type[Optimizer], ParamGroup]] = []
        rules: dict[type[Optimizer], Optimizer] = {}
        for group in self.optimizer.param_groups:
            rule = self.optimizer.rule_of(group)
            rules.setdefault(type(rule.optimizer), rule.optimizer)
            followed.append((type(rule.optimizer), {**rule.hyperparameters, "params": group["params"]}))
        for kind, optimizer in rules.items():
            groups = [group for other, group in followed if other is kind]
            if kind in self._by_rule:
                self._by_rule[kind].optimizer.param_groups = groups
            else:
                alone = snapshot(optimizer)
                alone.param_groups, alone.state = groups, {}  # type: ignore[assignment]
                self._by_rule[kind] = self._choose(alone)
        return followed

    def _find(self, bucket: Bucket | BucketForm) -> Updater:
        """Choose the updater of a bucket, given the parameters that the groups have now."""
        members = set(map(id, bucket.parameters))
        followed = self._follow_groups()
        found = {kind for kind, group in followed if not members.isdisjoint(map(id, group["params"]))}
        # If the optimizer has no parameter in the bucket, any updater will do, since there is no state.
        return self._own if len(found) > 1 else self._by_rule[found.pop() if found else followed[0][0]]

    def _updater_of(self, bucket: Bucket) -> Updater:
        """The updater that has a bucket's state."""
        if id(bucket) not in self._by_bucket:
            self._by_bucket[id(bucket)] = self._find(bucket)
        return self._by_bucket[id(bucket)]

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        before, now = self._updater_of(bucket), self._find(bucket)
        layout = now.master_layout(bucket)
        if now is not before:  # a group has joined
            state = before.gather_state(bucket)
            before.own_state(bucket).clear()
            self._by_bucket[id(bucket)] = now
            for index, values in state.items():
                now.load(bucket, index, values)
        return layout

    def check(self, groups: Iterable[ParamGroup]) -> None:
        self._follow_groups()
        for group in groups:
            rule = self.optimizer.rule_of(group)
            self._by_rule[type(rule.optimizer)].check([rule.hyperparameters])

    def alike_under(self, defaults: Collection[torch.dtype]) -> bool:
        return all(updater.alike_under(defaults) for updater in self._by_rule.values())

    def update(self, view: UpdateView) -> None:
        updater, own = self._by_rules(view)
        updater.update(own)

    def expect(self, view: UpdateView) -> None:
        updater, own = self._by_rules(view)
        updater.expect(own)

    def _by_rules(self, view: UpdateView) -> tuple[Updater, UpdateView]:
        """The updater of a bucket, and the view in the form that this updater takes."""
        rules = {id(group): self.optimizer.rule_of(group) for group in view.groups.values()}
        kinds = {type(rule.optimizer) for rule in rules.values()}
        if len(kinds) > 1:
            return self._own, view
        updater = self._by_rule[kinds.pop()]
        groups = {index: rules[id(group)].hyperparameters for index, group in view.groups.items()}
        return updater, replace(view, optimizer=updater.optimizer, groups=groups)

    def state_of(self, bucket: Bucket) -> OptimizerState:
        return self._updater_of(bucket).state_of(bucket)

    def own_state(self, bucket: Bucket) -> OptimizerState:
        return self._updater_of(bucket).own_state(bucket)

    def load(self, bucket: Bucket, index: int, state: dict[str, Any]) -> None:
        self._updater_of(bucket).load(bucket, index, state)

    def clear(self) -> None:
        for updater in self._by_bucket.values():
            updater.clear()

    def state_names(self, group: ParamGroup, parameter: Tensor) -> frozenset[str]:
        updater, own = self._rule_of(group)
        return updater.state_names(own, parameter)

    def state_shapes(self, group: ParamGroup, parameter: Tensor) -> dict[str, torch.Size]:
        updater, own = self._rule_of(group)
        return updater.state_shapes(own, parameter)

    def _rule_of(self, group: ParamGroup) -> tuple[Updater, ParamGroup]:
        self._follow_groups()
        rule = self.optimizer.rule_of(group)
        return self._by_rule[type(rule.optimizer)], rule.hyperparameters

    def footprint(self, bucket: BucketForm) -> Footprint:
        return self._find(bucket).footprint(bucket)
