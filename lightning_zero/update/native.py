"""The rules that the native kernels compute: they pass a torch optimizer's groups and state to `lightning_zero.ops`.

Both the CPU optimizers and the update over shards use these objects, so that they give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.advice import Case, advice

MasterLayout = Literal["fp32", "split"]
ParamGroup = dict[str, Any]

StateDtypeName = Literal["float32", "bfloat16", "int8"]

_STATE_DTYPES: dict[Any, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Numbers:
    """The formats in which masters and state are stored.

    Attributes:
        master_layout: how the fp32 master of a bf16 or fp16 parameter is stored: as a tensor of its own ("fp32"), or as
            the parameter and an int16 remainder ("split", see :func:`lightning_zero.ops.split_`).
        state_dtype: ``torch.float32``, or with stochastic rounding ``torch.bfloat16`` or ``torch.int8``. The latter
            means 8 bits in blocks (:class:`lightning_zero.ops.Quantized`).
        seed: seed of the stochastic rounding, in [0, 2^64).

    Raises:
        ValueError: a value is unknown or out of range.
    """

    master_layout: MasterLayout = "fp32"
    state_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.master_layout not in get_args(MasterLayout):
            raise ValueError(f"master_layout={self.master_layout!r} is unknown; expected 'fp32' or 'split'")
        if self.state_dtype not in _STATE_DTYPES.values():
            raise ValueError(
                f"state_dtype={self.state_dtype!r} is unknown; expected torch.float32, torch.bfloat16 or torch.int8"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed!r} is out of range; expected an int with 0 <= seed < 2**64")

    @classmethod
    def of(cls, master_layout: MasterLayout, state_dtype: torch.dtype | StateDtypeName, seed: int) -> Numbers:
        """Make the object from a dtype that may be given by its name, as in a YAML file."""
        dtype: Any = state_dtype
        return cls(master_layout, _STATE_DTYPES.get(dtype, dtype), seed)

    @property
    def rounds_randomly(self) -> bool:
        """Whether state is rounded stochastically, so that an update depends on the indices of its elements."""
        return self.state_dtype != torch.float32

    @property
    def in_blocks(self) -> bool:
        """Whether the elements of a block of state share a scale."""
        return self.state_dtype == torch.int8

    @property
    def block(self) -> int:
        """Number of elements of a block, counted from the beginning of a parameter; 1 without blocks."""
        return ops.BLOCK if self.in_blocks else 1


def first_index(parameter: int) -> int:
    """The index, for stochastic rounding, of the first element of an optimizer's ``parameter``-th parameter.

    Parameters are counted through the groups, as in a state dict. The index depends on nothing else, so that rounding
    does not depend on the sharding. No parameter has as many as 2^40 elements.
    """
    return parameter << 40


class NativeRule(ABC):
    """One kernel as the rule of a torch optimizer: the names of its state, and a step on flat tensors."""

    state: ClassVar[tuple[str, ...]]  # names of all per-element state that a group may have
    signed: ClassVar[Mapping[str, bool]] = {}  # names of the state that may be stored in 8 bits: whether it has a sign

    @abstractmethod
    def names(self, group: ParamGroup) -> tuple[str, ...]:
        """The names of the per-element state of a parameter in ``group``, in the order that :meth:`update` takes."""

    def initial(self, group: ParamGroup) -> float:
        """The value with which per-element state is filled before the first step."""
        return 0.0

    def counts_steps(self, numbers: Numbers) -> bool:
        """Whether the state has an entry ``step``."""
        return True

    def scalars(self, step: int, numbers: Numbers) -> dict[str, Tensor]:
        """The scalar state after ``step`` steps in torch's format: 0-dim fp32 tensors on the CPU."""
        return (
            {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")} if self.counts_steps(numbers) else {}
        )

    @abstractmethod
    def update(
        self,
        param: Tensor,
        states: Sequence[Any],
        grad: Tensor,
        group: ParamGroup,
        step: int,
        fresh: bool,
        **options: Unpack[ops.Options],
    ) -> None:
        """Make one step on flat (1-D) tensors of equal length.

        Args:
            param: the values to update in place; see :mod:`lightning_zero.ops`.
            states: the per-element state in the order of :meth:`names`, each a tensor or
                :class:`lightning_zero.ops.Quantized`.
            grad: the gradient.
            group: hyperparameters.
            step: number of the step, from 1; always 1 if steps are not counted.
            fresh: whether this is the first step with the state.
            **options: options that all kernels take.
        """

    def check_numbers(self, group: ParamGroup, numbers: Numbers) -> None:
        """Check that there is a kernel for state that is stored as ``numbers`` says.

        Raises:
            ValueError: 8-bit state of a rule other than Adam without amsgrad and Lion.
        """
        names = [name for name in self.names(group) or self.state if name not in self.signed]
        if numbers.in_blocks and names:
            raise ValueError(
                f"state_dtype={numbers.state_dtype} with the state {names[-1]!r}; 8 bits are for Adam and AdamW "
                "without amsgrad, and for Lion. Use torch.bfloat16"
            )

    def check(self, group: ParamGroup, numbers: Numbers) -> None:
        """Raise the errors that :meth:`update` would raise for these hyperparameters, before anything is written.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        self.check_numbers(group, numbers)
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True in a parameter group of an optimizer that a kernel drives; set it to False"
                f"{advice(Case.DIFFERENTIABLE, ', ')}"
            )
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self.update(nothing, [nothing for _ in self.names(group)], nothing, group, 1, fresh=True)


class AdamRule(NativeRule):
    """:class:`torch.optim.Adam` and :class:`torch.optim.AdamW`."""

    state = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    signed: ClassVar[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}

    def names(self, group: ParamGroup) -> tuple[str, ...]:
        return self.state if group["amsgrad"] else self.state[:2]

    def update(
        self,
        param: Tensor,
        states: Sequence[Any],
        grad: Tensor,
        group: ParamGroup,
        step: int,
        fresh: bool,
        **options: Unpack[ops.Options],
    ) -> None:
        exp_avg, exp_avg_sq, *maximum = states
        options["maximize"] = bool(group["maximize"])
        beta1, beta2 = group["betas"]
        ops.updates_on(param.device).adamw_(
            param,
            exp_avg,
            exp_avg_sq,
            grad,
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=bool(group["decoupled_weight_decay"]),
            max_exp_avg_sq=maximum[0] if maximum else None,
            **options,
        )


class AdagradRule(NativeRule):
    """:class:`torch.optim.Adagrad`."""

    state = ("sum",)

    def names(self, group: ParamGroup) -> tuple[str, ...]:
        return self.state

    def initial(self, group: ParamGroup) -> float:
        return float(group["initial_accumulator_value"])

    def update(
        self,
        param: Tensor,
        states: Sequence[Any],
        grad: Tensor,
        group: ParamGroup,
        step: int,
        fresh: bool,
        **options: Unpack[ops.Options],
    ) -> None:
        (total,) = states
        options["maximize"] = bool(group["maximize"])
        ops.updates_on(param.device).adagrad_(
            param,
            total,
            grad,
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            **options,
        )


class LionRule(NativeRule):
    """:class:`lightning_zero.CPULion`; torch has no Lion."""

    state = ("exp_avg",)
    signed: ClassVar[Mapping[str, bool]] = {"exp_avg": True}

    def names(self, group: ParamGroup) -> tuple[str, ...]:
        return self.state

    def update(
        self,
        param: Tensor,
        states: Sequence[Any],
        grad: Tensor,
        group: ParamGroup,
        step: int,
        fresh: bool,
        **options: Unpack[ops.Options],
    ) -> None:
        (exp_avg,) = states
        beta1, beta2 = group["betas"]
        options["maximize"] = bool(group["maximize"])
        ops.updates_on(param.device).lion_(
            param,
            exp_avg,
            grad,
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            weight_decay=float(group["weight_decay"]),
            step=step,
            **options,
        )


class SgdRule(NativeRule):
    """:class:`torch.optim.SGD`."""

    state = ("momentum_buffer",)

    def names(self, group: ParamGroup) -> tuple[str, ...]:
        return self.state if group["momentum"] else ()

    def counts_steps(self, numbers: Numbers) -> bool:
        # torch's SGD does not count steps. Stochastic rounding needs the count so that a resumed run does not repeat
        # its random numbers.
        return numbers.rounds_randomly

    def update(
        self,
        param: Tensor,
        states: Sequence[Any],
        grad: Tensor,
        group: ParamGroup,
        step: int,
        fresh: bool,
        **options: Unpack[ops.Options],
    ) -> None:
        options["maximize"] = bool(group["maximize"])
        ops.updates_on(param.device).sgd_(
            param,
            states[0] if states else None,
            grad,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"] and group["momentum"]),  # torch ignores `nesterov` without momentum
            first=fresh,
            step=step,
            **options,
        )


ADAM, ADAGRAD, LION, SGD = AdamRule(), AdagradRule(), LionRule(), SgdRule()

_OF_TORCH: dict[type[Optimizer], NativeRule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.SGD: SGD,
}


def rule_of_torch(optimizer: Optimizer) -> NativeRule | None:
    """The rule that computes the step of one of torch's own optimizers; ``None`` for others, and for subclasses."""
    return _OF_TORCH.get(type(optimizer))
