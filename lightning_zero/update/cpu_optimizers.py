"""The native kernels as ordinary torch optimizers: Adam, AdamW, Adagrad, Lion and SGD for parameters in host memory.

They take the arguments of the torch optimizer of the same name and exchange state dicts with it. In an offloading
strategy the same classes update shards by the same kernels, also where the model itself is on a GPU.
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
        weight_decay: L2 term in the gradient, >= 0; decoupled in :class:`CPUAdamW`.
        amsgrad: use the maximum of the second moments.
        maximize: follow the gradient upwards.
        decoupled_weight_decay: as :class:`CPUAdamW`.
        master_layout: how a 16-bit parameter's fp32 master is kept, "fp32" (4 bytes more) or "split" (2 bytes more);
            bf16 training gives the same bits with both, fp16 training where 2^-16 <= |p| < 65520.
        state_dtype: dtype of the moments, or its name: ``torch.float32``; ``torch.bfloat16``, stochastically rounded;
            ``torch.int8``, 8 bits in blocks of 256 elements (:class:`lightning_zero.ops.Quantized`), stochastically
            rounded, not with ``amsgrad``. State dicts have these in fp32.
        seed: of the stochastic rounding; a resumed run needs the same.
        adamw_mode: DeepSpeed's name for ``decoupled_weight_decay``, which is True there unless it is given.

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

    Arguments as there.
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
        for group in self.param_groups:  # a state dict of Adam brings its own
            group["decoupled_weight_decay"] = True


class CPUAdagrad(CPUOptimizer):
    """:class:`torch.optim.Adagrad` for parameters in host memory; formulas: :func:`lightning_zero.ops.adagrad_`.

    Args:
        params: as for :class:`CPUAdam`.
        lr: learning rate, >= 0.
        lr_decay: >= 0.
        weight_decay: L2 term in the gradient, >= 0.
        initial_accumulator_value: what the sums of squares start from, >= 0.
        eps: added to the denominator, >= 0.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: of the sums, as for :class:`CPUAdam`; not ``torch.int8``.
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
        for group in self.param_groups:  # as torch's: its step takes a state dict only where there is state
            for parameter in group["params"]:
                total = self._filled(parameter, self.rule.initial(group))
                self.state[parameter] = {"step": torch.tensor(0.0), "sum": total}


class CPULion(CPUOptimizer):
    """Lion for parameters in host memory; see :func:`lightning_zero.ops.lion_` for the formulas and their source.

    Args:
        params: as for :class:`CPUAdam`.
        lr: learning rate, >= 0; a third to a tenth of Adam's.
        betas: of the step's direction and of the moving average, each in [0, 1).
        weight_decay: decoupled, >= 0.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: of the moving average, as for :class:`CPUAdam`.
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
        momentum: >= 0.
        dampening: of the gradient's part in the momentum.
        weight_decay: L2 term in the gradient, >= 0.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        maximize: follow the gradient upwards.
        master_layout: as for :class:`CPUAdam`.
        state_dtype: of the momentum, as for :class:`CPUAdam`; not ``torch.int8``.
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
