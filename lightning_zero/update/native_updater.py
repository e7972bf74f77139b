"""The update by the rules of the native kernels, in host memory and on devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.advice import Case, advice
from lightning_zero.ops import formulas
from lightning_zero.sharding import Bucket, BucketForm, BucketPlacement, MasterForm, Run, Segment, runs
from lightning_zero.sharding.masters import Master
from lightning_zero.storage.staged import staged_tile
from lightning_zero.update.block_state import BlockShardState, count_scales
from lightning_zero.update.cpu import CPUOptimizer
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.native import MasterLayout, NativeRule, Numbers, first_index
from lightning_zero.update.rules import Traits, settings_of
from lightning_zero.update.sizes import Passing
from lightning_zero.update.state import OptimizerState, ShardState
from lightning_zero.update.updaters import Updater, staged_bytes
from lightning_zero.update.view import UpdateView
from lightning_zero.update.windows import expect_first, in_windows

_SAMPLE = 64  # number of elements in a trial
# Results of trials, by rule, device and hyperparameters.
_BYTES_PER_ELEMENT: dict[tuple[NativeRule, torch.device, str], int] = {}


class NativeUpdater(Updater):
    """Runs a rule's kernel on masters in host memory: torch's Adam, AdamW, Adagrad and SGD, and the CPU optimizers.

    Scaling, decay, state, update and the 16-bit copy are done in one pass over memory. The state has the same names as
    torch's. Buckets that stay on a device while others are offloaded are updated there by torch's operations, with the
    same bits.

    Args:
        optimizer: as the user configured it.
        rule: the rule that the optimizer computes.
        numbers: how its masters and state are stored.
    """

    def __init__(self, optimizer: Optimizer, rule: NativeRule, numbers: Numbers) -> None:
        super().__init__(optimizer, Traits((), frozenset(rule.state)), numbers.state_dtype)
        self._rule = rule
        self._numbers = numbers
        self._ordinals: dict[int, int] = {}  # by parameter id: its number, counted through the groups

    def _new_state(self, bucket: Bucket) -> OptimizerState:
        return BlockShardState(bucket, self._rule.signed) if self._numbers.in_blocks else super()._new_state(bucket)

    def _portable_state(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        found = super()._portable_state()
        return self.optimizer.portable(found) if isinstance(self.optimizer, CPUOptimizer) else found

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        if (reason := why_not_native([bucket.master], bucket.placement)) is not None:
            raise ValueError(f"{type(self.optimizer).__name__} cannot update {bucket.name}: {reason}")
        if not isinstance(self.optimizer, CPUOptimizer) and self._numbers.master_layout == "fp32":
            return None  # the masters stay as they are, and 16-bit copies are rounded as torch does
        return "split" if self._splits(bucket.master, bucket.dtype) else "fp32"

    def _splits(self, master: Master | MasterForm, dtype: torch.dtype) -> bool:
        """Tell whether the masters of a 16-bit bucket are split. They are if they are in host memory, on request.

        Raises:
            ValueError: masters on a device would have other values than split ones, or state other roundings.
        """
        split = self._numbers.master_layout == "split"
        if ops.runs_on(master.device):
            return split
        name = type(self.optimizer).__name__
        if split and dtype == torch.float16:
            raise ValueError(
                f"{name} has master_layout='split', which holds fewer digits of fp16 than the fp32 masters of what "
                f"stays on the device{advice(Case.RESIDENT_IN_FEWER_DIGITS, '. ')}"
            )
        if self._numbers.state_dtype != torch.float32:
            raise ValueError(
                f"{name} has state_dtype={self._numbers.state_dtype}, and a part of the state stays on the device, "
                f"where only fp32 is updated{advice(Case.RESIDENT_IN_FEWER_DIGITS, '. ')}"
            )
        return False

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            self._rule.check(group, self._numbers)

    def state_names(self, group: dict[str, Any], parameter: Tensor) -> frozenset[str]:
        return frozenset(self._rule.names(group))

    def footprint(self, bucket: BucketForm) -> Footprint:
        """The memory for a bucket; see the base class. Kernels update in place, and round parameters for a device."""
        master = bucket.master
        split = self._splits(master, bucket.dtype)
        if split and master.pieces and bucket.dtype.itemsize == 2:
            master = bucket.placement.split_master(bucket.dtype)
        names = {name for _, group in self._members(bucket) for name in self._rule.names(group)}
        state = dict.fromkeys(sorted(names), self._numbers.state_dtype)
        scales = len(state) * count_scales(bucket) if self._numbers.in_blocks else 0
        staged = staged_bytes(bucket, bucket.master) if master.tile or not split else 0
        # If tiles would cut blocks, the shard is not updated in tiles: see `_tile`.
        whole = any((s.param_start - s.start) % self._numbers.block for s in bucket.segments)
        published = staged_tile(bucket.placement.executor, bucket.dtype) if staged and not whole else None
        passing = self._passing(bucket)
        return Footprint(master, state, passing=passing, staged=staged, published=published, scales=scales)

    def _passing(self, bucket: BucketForm) -> int:
        """Temporary bytes of an update. Kernels need none; torch's operations on a device do."""
        device, members = bucket.master.device, self._members(bucket)
        if ops.runs_on(device) or not members:
            return 0
        groups = {segment.param: group for segment, group in members}
        found = runs([s for s, _ in members], lambda s: id(groups[s.param]), gap=bucket.layout.align - 1)
        each = {id(group): _bytes_per_element(self._rule, group, device) for group in groups.values()}
        return max(each[id(groups[run.segments[0].param])] * min(run.numel, formulas.TILE) for run in found)

    def alike_under(self, defaults: Collection[torch.dtype]) -> bool:
        return True

    def update(self, view: UpdateView) -> None:
        state = view.state
        assert isinstance(state, ShardState)
        parts = list(self._parts(view, state))  # before any update, which changes the state of all parts of a segment
        for window in in_windows(view, state, parts, self._names):
            for part in window:
                self._update_part(view, state, part)

    def expect(self, view: UpdateView) -> None:
        state = view.state
        assert isinstance(state, ShardState)
        expect_first(view, state, self._parts(view, state), self._names)

    def _names(self, part: _NativePart) -> Sequence[str]:
        return self._rule.names(part.group)

    def _parts(self, view: UpdateView, state: ShardState) -> Iterator[_NativePart]:
        """Cut segments into runs that one call of a kernel updates."""
        groups = view.groups

        def key(segment: Segment) -> tuple[int, int, bool, int]:
            group = groups[segment.param]
            step = int(state.scalars(segment).get("step", 0)) if segment in state else 0
            fresh = not set(self._rule.names(group)).issubset(state.names(segment))
            return id(group), step, fresh, segment.param if self._numbers.rounds_randomly else 0

        # Padding between parameters is updated, too. This is harmless, since gradient and state are constant there.
        for run in runs(view.segments, key, gap=view.gap):
            _, step, fresh, _ = key(run.segments[0])
            group = groups[run.segments[0].param]
            pieces = run.cut_at(self._tile(view, run)) if ops.runs_on(view.master.device) else run.cut(formulas.TILE)
            yield from (_NativePart(part, group, step + 1, fresh) for part in pieces)

    def _tile(self, view: UpdateView, run: Run) -> int | None:
        """The multiples at which a run is cut. ``None``: nowhere, as cuts would divide blocks of its state.

        See :class:`BlockShardState`.
        """
        segment = run.segments[0]
        blocks_are_cut = (segment.param_start - segment.start) % self._numbers.block
        return None if blocks_are_cut else view.tile or view.master.published

    def _update_part(self, view: UpdateView, own: ShardState, part: _NativePart) -> None:
        run, group, step, fresh = part
        names = self._rule.names(group)
        states = [own.parts(name, self._numbers.state_dtype, run) for name in names]
        if fresh and step == 1 and (initial := self._rule.initial(group)):
            for tensor in states:
                assert isinstance(tensor, Tensor)  # rules with an initial value other than 0 have no blocks
                tensor.fill_(initial)
        with view.master.tensors(run.start, run.stop) as master:
            self._rule.update(
                master.param,
                states,
                view.gradient.read(run.start, run.stop),
                group,
                step if self._rule.counts_steps(self._numbers) else 1,
                fresh,
                grad_scale=view.grad_scale,
                remainder=master.remainder,
                copy_out=master.copy_out,
                copy_ties=master.copy_ties,
                seed=self._numbers.seed,
                index=self._index(view, run) if self._numbers.rounds_randomly else 0,
            )
        # All segments of the run may share the scalar, because nothing changes it in place.
        scalars = self._rule.scalars(step, self._numbers)
        if names or scalars:  # otherwise the state stays empty, as torch's does
            for segment in run.segments:
                own.put_scalars(segment, scalars, names)

    def _index(self, view: UpdateView, run: Run) -> int:
        """The index of the first element of a run of one parameter, for stochastic rounding."""
        segment = run.segments[0]
        parameter = view.parameters[segment.param]
        if id(parameter) not in self._ordinals:  # at the first call, and after a group was added
            parameters = (p for group in view.optimizer.param_groups for p in group["params"])
            self._ordinals = {id(p): number for number, p in enumerate(parameters)}
        return first_index(self._ordinals[id(parameter)]) + segment.param_start + run.start - segment.start


class _NativePart(NamedTuple):
    """A run that one call of a kernel updates."""

    run: Run
    group: dict[str, Any]
    step: int
    fresh: bool  # whether the run has no state yet


def _bytes_per_element(rule: NativeRule, group: dict[str, Any], device: torch.device) -> int:
    """Temporary bytes per element that an update on ``device`` needs beside parameter, gradient and state.

    They are found by a trial. A trial takes milliseconds, and a search for the best settings plans thousands of
    buckets, so results are kept.
    """
    key = rule, device, settings_of(group)
    if key not in _BYTES_PER_ELEMENT:
        # The gradient is copied to fp32 whatever its dtype is, so that fp32 stands for all dtypes.
        param, grad, *states = (
            torch.ones(_SAMPLE, dtype=torch.float32, device=device) for _ in range(2 + len(rule.names(group)))
        )
        formulas.fused_on(device)  # the first call tries the device, which must not be counted below
        with Passing([param, grad, *states]) as passing:
            rule.update(param, states, grad, group, 2, fresh=False)
        _BYTES_PER_ELEMENT[key] = -(-passing.most // _SAMPLE)
    return _BYTES_PER_ELEMENT[key]


def why_not_native(masters: Iterable[Master | MasterForm], placement: BucketPlacement) -> str | None:
    """Says why the rules of the kernels cannot update shards with these masters; ``None`` if they can."""
    precision = placement.precision
    for master in masters:
        if not ops.runs_on(master.device) and not placement.optimizer_store.as_on_host:
            return f"its masters are not in host memory{advice(Case.MASTERS_NOT_ON_HOST, '; ')}"
        if master.dtype != torch.float32 or torch.float64 in (precision.reduce_dtype, precision.grad_dtype):
            return (
                f"kernels need fp32 masters and gradients of at most fp32; the masters are {master.dtype}"
                f"{advice(Case.MASTERS_NOT_FP32, '. ')}"
            )
    return None
