"""The choice of an optimizer's updater, and of the parameters that it needs whole on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import Bucket, BucketPlacement, MasterForm
from lightning_zero.sharding.adoption import begin_to_optimize
from lightning_zero.sharding.masters import Master
from lightning_zero.update.combined import CombinedUpdater, steps_by_rules
from lightning_zero.update.cpu import CPUOptimizer
from lightning_zero.update.native import NativeRule, Numbers, rule_of_torch
from lightning_zero.update.native_updater import NativeUpdater, why_not_native
from lightning_zero.update.newton_schulz import parts_of
from lightning_zero.update.rules import ELEMENT_WISE, examine
from lightning_zero.update.two_places import TwoPlacesUpdater
from lightning_zero.update.updaters import NativeOptimizer, TorchUpdater, Updater
from lightning_zero.update.whole import WholeUpdater


def kept_whole(optimizers: Iterable[Optimizer], device: torch.device) -> list[Parameter]:
    """The parameters that must each be whole on one rank, because the rule of their group is not element-wise.

    Args:
        optimizers: as the user configured them.
        device: where their state rests.

    Raises:
        ValueError: one of the optimizers cannot run over shards (see :func:`~lightning_zero.update.rules.examine`).
    """
    whole: list[Parameter] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, CPUOptimizer) and type(optimizer) not in ELEMENT_WISE:
            needs = examine(optimizer, device).whole
            for group, needed in zip(optimizer.param_groups, needs, strict=True):
                whole += group["params"] if needed else ()
    return whole


class HoldsBuckets(Protocol):
    """A holder of buckets: an :class:`lightning_zero.engine.Engine`."""

    @property
    def placement(self) -> BucketPlacement: ...

    def bucket_of(self, parameter: Tensor) -> Bucket | None: ...


def make_updater(optimizer: Optimizer, engine: HoldsBuckets, native: NativeOptimizer = "auto") -> Updater:
    """Makes the updater for ``optimizer`` on the engine's shards.

    Args:
        optimizer: any optimizer that updates each parameter independently of the others. The engine must have been made
            with the parameters that :func:`kept_whole` gives for it.
        engine: holds the optimizer's parameters.
        native: ``"auto"`` uses our kernels for torch's Adam, AdamW, Adagrad and SGD, and for the AdamW of
            :class:`~lightning_zero.update.Muon`, where state rests in host memory. ``"off"`` uses them for none of
            these. The CPU optimizers always use them.

    Raises:
        ValueError: the optimizer cannot run over shards (see :func:`~lightning_zero.update.rules.examine`), or not over
            these shards because of their placement or layout.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    buckets = {id(b): b for p in parameters if (b := engine.bucket_of(p)) is not None}.values()
    for bucket in buckets:
        begin_to_optimize(bucket)
    return choose_updater(optimizer, engine.placement, [bucket.master for bucket in buckets], native)


def choose_updater(
    optimizer: Optimizer,
    placement: BucketPlacement,
    masters: Sequence[Master | MasterForm],
    native: NativeOptimizer = "auto",
) -> Updater:
    """Makes an updater as :func:`make_updater` does, for shards with these masters.

    The masters need not exist yet: planning gives their forms.

    Raises:
        ValueError: as :func:`make_updater`.
    """
    return _choose(optimizer, placement, why_not_native(masters, placement), native)


def _choose(optimizer: Optimizer, placement: BucketPlacement, unfit: str | None, native: NativeOptimizer) -> Updater:
    """Does the work of :func:`choose_updater`. ``unfit``: why no kernel can update the shards, or None if one can."""
    store = placement.optimizer_store
    if isinstance(optimizer, CPUOptimizer):
        if unfit is not None:
            raise ValueError(f"{type(optimizer).__name__} cannot update these shards: {unfit}")
        if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(CPUOptimizer.step):
            raise ValueError(
                f"{type(optimizer).__name__} has a step of its own, which does not run over shards; derive it from a "
                f"torch optimizer{advice(Case.STEP_OF_ITS_OWN, ', ')}"
            )
        if store.tile is not None and placement.block % optimizer.numbers.block:
            raise ValueError(
                f"{type(optimizer).__name__} has state in blocks of {optimizer.numbers.block} elements, and parameters "
                f"were laid out on the disk in blocks of {placement.block} before it was known: tiles would cut its "
                "blocks. Give it when the module is set up, rest its state in host memory, or give it another "
                "state_dtype, such as torch.bfloat16"
            )
        return NativeUpdater(optimizer, optimizer.rule, optimizer.numbers)
    rule = rule_of_torch(optimizer)
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if rule is not None and native == "auto" and store.exact and not differentiable and not unfit:
        return NativeUpdater(optimizer, rule, Numbers("split" if placement.split_masters else "fp32"))
    if placement.split_masters and not steps_by_rules(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} would be updated by torch's operations, which need fp32 masters, and they are "
            f"to be split: {_why_by_torch(rule, native, differentiable, unfit)}{advice(Case.SPLIT_MASTERS, '; ')}"
        )
    if type(optimizer) in ELEMENT_WISE:
        return TorchUpdater(optimizer, examine(optimizer, store.device))

    def make_whole() -> WholeUpdater:
        traits, parts = examine(optimizer, store.device), parts_of(optimizer)
        if parts is None or not placement.updates_apart:
            return WholeUpdater(optimizer, traits, store.device)
        return TwoPlacesUpdater(optimizer, traits, store.device, parts)

    if not steps_by_rules(optimizer):
        return make_whole()
    choose = partial(_choose, placement=placement, unfit=unfit, native=native)
    return CombinedUpdater(optimizer, choose, make_whole)


def _why_by_torch(rule: NativeRule | None, native: NativeOptimizer, differentiable: bool, unfit: str | None) -> str:
    """Says why no kernel runs a torch optimizer."""
    if rule is None:
        return "no kernel has its rule"
    if native != "auto":
        return "native kernels are off"
    if differentiable:
        return "it is differentiable"
    return unfit or "its state rests where parameters are computed with"
