"""Policies as small frozen dataclasses: which tensors a stage shards, and the dtypes of all tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STAGES = (0, 1, 2, 3)
# Parameters of other dtypes, such as fp8, hold codes that their layer decodes, and are not cast.
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ShardingPolicy:
    """Decides which tensors each rank keeps between the passes of a step (ZeRO, https://arxiv.org/abs/1910.02054).

    Attributes:
        shard_grads: reduce-scatter gradients after every micro-batch and keep only the owned slice. Costs one
            reduce-scatter per micro-batch instead of one per step; saves the memory of the unsharded gradients between
            micro-batches.
        shard_params: free a unit's parameters outside its own forward and backward. Costs two all-gathers per
            micro-batch instead of one per step; saves the memory of the parameters of all other units.

    Optimizer state is always sharded over the shard group. Stage 0 is stage 1 with a shard group of one rank.
    """

    shard_grads: bool = False
    shard_params: bool = False

    def __post_init__(self) -> None:
        if self.shard_params and not self.shard_grads:
            raise ValueError(
                "shard_params=True needs shard_grads=True: a freed parameter cannot keep an unsharded gradient"
            )

    @classmethod
    def from_stage(cls, stage: int) -> ShardingPolicy:
        """The policy of ZeRO stage 0, 1, 2 or 3."""
        if not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES:
            raise ValueError(f"stage={stage!r} is not a ZeRO stage; expected one of {', '.join(map(str, STAGES))}")
        return cls(shard_grads=stage >= 2, shard_params=stage == 3)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of parameters, communication, gradients and masters.

    Attributes:
        param_dtype: dtype of floating-point parameters in forward and backward; ``None``: the parameters' own.
        keep_norms: leave the parameters of normalization layers in their own dtype, or in fp32 if this is a 16-bit one
            other than ``param_dtype``. They are small, and a 16-bit norm loses accuracy or refuses fp32 input.
        reduce_dtype: dtype in which gradients are sent between ranks; ``None``: the dtype of the bucket.
        grad_dtype: dtype in which the owned slice of the reduced gradient is kept until the step, the same at every
            stage and in every store; ``None``: the reduce dtype, or fp32 if that is wider once a second micro-batch is
            added.
        master_weights: keep an fp32 master of 16-bit parameters, made before they are cast.
        cast_buffers: cast floating-point buffers to ``param_dtype`` as well.
    """

    param_dtype: torch.dtype | None = None
    keep_norms: bool = True
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_weights: bool = True
    cast_buffers: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"{name}={dtype!r} is not a real floating-point torch.dtype such as torch.bfloat16")

    def target_dtype(self, dtype: torch.dtype, in_norm: bool) -> torch.dtype:
        """The dtype that a parameter of ``dtype`` takes in forward and backward."""
        if self.param_dtype is None or dtype not in _NUMBERS:
            return dtype
        if in_norm and self.keep_norms:
            # 16 bits without a master would lose updates, and small squares of gradients in the optimizer's state.
            return dtype if dtype == self.param_dtype else torch.promote_types(dtype, torch.float32)
        return self.param_dtype

    def buffer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a buffer of ``dtype`` takes."""
        if self.param_dtype is None or not self.cast_buffers or dtype not in _NUMBERS:
            return dtype
        return self.param_dtype

    def needs_master(self, dtype: torch.dtype) -> bool:
        """Whether parameters cast to ``dtype`` have an fp32 master of their own."""
        return self.master_weights and self.param_dtype == dtype and dtype.itemsize < 4
