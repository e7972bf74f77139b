"""The native kernels as ordinary torch optimizers: Adam, AdamW, Adagrad, Lion and SGD for parameters in host memory.

They take the arguments of the torch optimizer of the same name and exchange state dicts with it. In a strategy that
offloads, the same classes update shards by the same kernels, even if the model itself is on a GPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_zero.ops.arguments import check_betas, check_momentum, check_not_negative
from lightning_zero.update.cpu import CPUOptimizer, Params
from lightning_zero.update.native import ADAGRAD, ADAM, LION, SGD, MasterLayout, Numbers, StateDtypeName


class CPUAdam(CPUOptimizer):
    """:class:`torch.optim.Adam` for parameters in host memory; see :func:`lightning_zero.ops.adamw_` for the formulas.

    Args:
        params: as for any torch optimizer; fp32, bf16 or fp16 tensors.
        lr: learning rate, >= 0.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: factor of an L2 term in the gradient, >= 0; decoupled in :class:`CPUAdamW`.
        amsgrad: use the maximum of the second moments.
        maximize: follow the gradient upwards.
        decoupled_weight_decay: apply weight decay as :class:`CPUAdamW` does.
        master_layout: how a 16-bit parameter's fp32 master is kept: "fp32" takes 4 bytes per element more, "split" 2.
            Both give the same bits in bf16 training, and in fp16 training where 2^-16 <= |p| < 65520.
        state_dtype: dtype of the moments, or its name: ``torch.float32``; ``torch.bfloat16``, stochastically rounded;
            or ``torch.int8``, 8 bits in blocks of 256 elements (:class:`lightning_zero.ops.Quantized`), stochastically
            rounded, not with ``amsgrad``. State dicts have 8-bit moments in fp32.
        seed: seed of the stochastic rounding. A run that is resumed needs the same seed.
        adamw_mode: DeepSpeed's name for ``decoupled_weight_decay``, which it replaces if it is given. DeepSpeed's
            default is True.

    Raises:
        ValueError: an argument is out of range.
    """

    rule = ADAM

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        master_layout: MasterLayout = "fp32",
        state_dtype: torch.dtype | StateDtypeName = torch.float32,
        seed: int = 0,
        adamw_mode: bool | None = None,
    ) -> None:
        if adamw_mode is not None:
            decoupled_weight_decay = adamw_mode
            warnings.warn(
                f"adamw_mode={adamw_mode} is DeepSpeed's name; use {'CPUAdamW' if adamw_mode else 'CPUAdam'} instead",
                stacklevel=2,
            )
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, Numbers.of(master_layout, state_dtype, seed))


class CPUAdamW(CPUAdam):
    """:class:`torch.optim.AdamW` for parameters in host memory: :class:`CPUAdam` with decoupled weight decay.

    See :class:`CPUAdam` for the arguments.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_layout: MasterLayout = "fp32",
        state_dtype: torch.dtype | StateDtypeName = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            master_layout=master_layout,
            state_dtype=state_dtype,
            seed=seed,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of Adam has False here
            group["decoupled_weight_decay"] = True


class CPUAdagrad(CPUOptimizer):
    """:class:`torch.optim.Adagrad` for parameters in host memory; formulas: :func:`lightning_zero.ops.adagrad_`.

    Args:
        params: as for :class:`CPUAdam`.
        lr: learning rate, >= 0.
        lr_decay: decay of the learning rate with the number of steps, >= 0.
        weight_decay: factor of an L2 term in the gradient, >= 0.
        initial_accumulator_value: initial value of the sums of squares, >= 0.
        eps: added to the denominator, >= 0.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: dtype of the sums, as for :class:`CPUAdam`, but not ``torch.int8``.
        seed: as for :class:`CPUAdam`.

    Raises:
        ValueError: an argument is out of range.
    """

    rule = ADAGRAD

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        master_layout: MasterLayout = "fp32",
        state_dtype: torch.dtype | StateDtypeName = torch.float32,
        seed: int = 0,
    ) -> None:
        check_not_negative(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, Numbers.of(master_layout, state_dtype, seed))
        for group in self.param_groups:  # as torch does, whose step takes a state dict only if it has this state
            for parameter in group["params"]:
                total = self._filled(parameter, self.rule.initial(group))
                self.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), "sum": total}


class CPULion(CPUOptimizer):
    """Lion for parameters in host memory; see :func:`lightning_zero.ops.lion_` for the formulas and their source.

    Args:
        params: as for :class:`CPUAdam`.
        lr: learning rate, >= 0. A third to a tenth of Adam's is usual.
        betas: weights of the moving average in the step's direction and in its own update, each in [0, 1).
        weight_decay: decoupled weight decay, >= 0.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: dtype of the moving average, as for :class:`CPUAdam`.
        seed: as for :class:`CPUAdam`.

    Raises:
        ValueError: an argument is out of range.
    """

    rule = LION

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master_layout: MasterLayout = "fp32",
        state_dtype: torch.dtype | StateDtypeName = torch.float32,
        seed: int = 0,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, Numbers.of(master_layout, state_dtype, seed))


class CPUSGD(CPUOptimizer):
    """:class:`torch.optim.SGD` for parameters in host memory; see :func:`lightning_zero.ops.sgd_` for the formulas.

    Args:
        params: as for :class:`CPUAdam`.
        lr: learning rate, >= 0.
        momentum: factor of the momentum, >= 0.
        dampening: the momentum takes ``1 - dampening`` times the gradient.
        weight_decay: factor of an L2 term in the gradient, >= 0.
        nesterov: use Nesterov's momentum, which needs ``momentum`` > 0 and no dampening.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: dtype of the momentum, as for :class:`CPUAdam`, but not ``torch.int8``.
        seed: as for :class:`CPUAdam`.

    Raises:
        ValueError: an argument is out of range.
    """

    rule = SGD

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_layout: MasterLayout = "fp32",
        state_dtype: torch.dtype | StateDtypeName = torch.float32,
        seed: int = 0,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_momentum(momentum, dampening, nesterov)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, Numbers.of(master_layout, state_dtype, seed))
