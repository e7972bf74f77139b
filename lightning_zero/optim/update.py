"""The update over shards: what an attached optimizer does when the engine has reduced gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.engine import Bucket, Engine, Segment, runs, tiles
from lightning_zero.optim.rules import check_element_wise
from lightning_zero.optim.shell import ShellGroup, run_step
from lightning_zero.optim.state import ShardState

NativeOptimizer = Literal["auto", "off"]

_TILE = 1 << 22  # elements whose gradients are converted and scaled at a time

Groups = dict[int, dict[str, Any]]


class ShardUpdater(ABC):
    """Applies an optimizer's rule to segments and keeps their state.

    Args:
        optimizer: as the user configured it. State that its constructor made (Adagrad) is taken over and freed there.
        per_element: names of the state with one value per element.
    """

    def __init__(self, optimizer: Optimizer, per_element: frozenset[str]) -> None:
        self.optimizer = optimizer
        self._per_element = per_element
        self._states: dict[int, ShardState] = {}  # by id of the bucket

    def state_of(self, bucket: Bucket) -> ShardState:
        """The state of this rank's segments of ``bucket``."""
        if id(bucket) not in self._states:
            self._states[id(bucket)] = ShardState(bucket, self._per_element)
        return self._states[id(bucket)]

    def adopt(self, engine: Engine) -> None:
        """Move state out of the user's optimizer into shards."""
        for parameter, state in self.optimizer.state.items():
            if (bucket := engine.bucket_of(parameter)) is not None:
                self.load(bucket, bucket.index[id(parameter)], state)
        self.optimizer.state.clear()

    def load(self, bucket: Bucket, index: int, state: dict[str, Any]) -> None:
        """Overwrite the state of one parameter from a whole one (tensors in the parameter's shape)."""
        for segment in bucket.segments:
            if segment.param == index:
                self.state_of(bucket).put_slice(segment, state)

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        for state in self._states.values():
            state.clear()

    @abstractmethod
    def update(self, bucket: Bucket, segments: Sequence[Segment], groups: Groups, grad_scale: float) -> None:
        """See :class:`lightning_zero.engine.Updater`."""


class TorchUpdater(ShardUpdater):
    """Runs any element-wise torch optimizer through a shell of it, a tile of segments at a time."""

    def update(self, bucket: Bucket, segments: Sequence[Segment], groups: Groups, grad_scale: float) -> None:
        for tile in tiles(segments, _TILE):
            self._update_tile(bucket, tile, groups, grad_scale)
            bucket.master.write(tile[0].start, tile[-1].stop)

    def _update_tile(self, bucket: Bucket, tile: Sequence[Segment], groups: Groups, grad_scale: float) -> None:
        shard_state = self.state_of(bucket)
        shell_groups: dict[int, ShellGroup] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        by_tensor: dict[Tensor, Segment] = {}
        for segment in tile:
            tensor = bucket.master.read(segment.start, segment.stop)
            gradient = bucket.gradients.read(segment.start, segment.stop)
            if grad_scale != 1.0:
                # Out of place: the log keeps the averaged gradient until zero_grad. In the wider dtype: a scaled fp32
                # gradient may exceed what fp16 holds, an unscaled fp16 gradient may fall below it.
                gradient = gradient.to(torch.promote_types(gradient.dtype, tensor.dtype)) * grad_scale
            tensor.grad = gradient.to(tensor.dtype)
            hyperparameters = groups[segment.param]
            shell_groups.setdefault(id(hyperparameters), ShellGroup([], hyperparameters)).tensors.append(tensor)
            state[tensor] = shard_state.get(segment)
            by_tensor[tensor] = segment
        run_step(self.optimizer, list(shell_groups.values()), state)
        for tensor, segment in by_tensor.items():
            shard_state.put(segment, state[tensor])


class NativeAdamUpdater(ShardUpdater):
    """torch's Adam and AdamW on fp32 masters in host memory, by the package's own kernel.

    Scaling, decay, moments, update and the 16-bit copy are one pass over memory. The state is torch's, name for name.
    """

    def __init__(self, optimizer: Optimizer, per_element: frozenset[str]) -> None:
        super().__init__(optimizer, per_element)
        self._decoupled = decoupled_weight_decay(optimizer)

    @staticmethod
    def supports(optimizer: Optimizer, engine: Engine) -> bool:
        """Whether the kernel computes what this optimizer is configured to, on the shards as they are placed."""
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        if any(g["amsgrad"] or g["maximize"] or g["differentiable"] for g in optimizer.param_groups):
            return False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        masters = [b.master for p in parameters if (b := engine.bucket_of(p)) is not None]
        precision = engine.placement.precision
        wide = torch.float64 in (precision.reduce_dtype, precision.grad_dtype)
        return not wide and all(m.dtype == torch.float32 and m.device.type == "cpu" for m in masters)

    def update(self, bucket: Bucket, segments: Sequence[Segment], groups: Groups, grad_scale: float) -> None:
        state = self.state_of(bucket)
        exp_avg = state.zeros("exp_avg", torch.float32)
        exp_avg_sq = state.zeros("exp_avg_sq", torch.float32)

        def key(segment: Segment) -> tuple[int, int]:
            step = int(state.scalars(segment)["step"]) if segment in state else 0
            return id(groups[segment.param]), step

        # Padding between parameters is updated too: gradient and state are zeros there.
        for run in runs(segments, key, gap=bucket.layout.align - 1):
            step = key(run.segments[0])[1] + 1
            span = slice(run.start, run.stop)
            copy_out = bucket.master.copy_out(run.start, run.stop)
            ops.adamw_(
                bucket.master.read(run.start, run.stop),
                exp_avg[span],
                exp_avg_sq[span],
                bucket.gradients.read(run.start, run.stop),
                step=step,
                grad_scale=grad_scale,
                decoupled=self._decoupled,
                copy_out=copy_out,
                **_hyperparameters(groups[run.segments[0].param]),
            )
            if copy_out is None:
                bucket.master.write(run.start, run.stop)
            # One scalar for all segments of the run: nobody changes it in place.
            scalars = {"step": torch.tensor(float(step))}
            for segment in run.segments:
                state.put_scalars(segment, scalars, ("exp_avg", "exp_avg_sq"))


def decoupled_weight_decay(optimizer: Optimizer) -> bool:
    """Whether Adam's weight decay acts on the parameter (AdamW) or on the gradient (Adam)."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    if group["amsgrad"] or group["maximize"]:
        raise ValueError(
            f"a parameter group with amsgrad={group['amsgrad']}, maximize={group['maximize']} joined an optimizer that "
            "the native kernel drives; set both to False, or use native_optimizer='off'"
        )
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "betas": (float(beta1), float(beta2)),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
    }


def make_updater(optimizer: Optimizer, engine: Engine, native: NativeOptimizer = "auto") -> ShardUpdater:
    """The updater for ``optimizer`` on the engine's shards.

    Args:
        optimizer: any element-wise torch optimizer.
        engine: holds its parameters.
        native: ``"auto"`` runs torch's Adam and AdamW by our kernel where state rests in host memory, ``"off"`` never.

    Raises:
        ValueError: the optimizer is not element-wise (see :func:`check_element_wise`).
    """
    store = engine.placement.optimizer_store
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if (bucket := engine.bucket_of(parameter)) is not None:
            bucket.optimize()
    per_element = check_element_wise(optimizer, store.device)
    use_native = native == "auto" and store.exact and NativeAdamUpdater.supports(optimizer, engine)
    return (NativeAdamUpdater if use_native else TorchUpdater)(optimizer, per_element)
