"""Functions by which user code reads and writes a sharded module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.engine.runtime import ENGINES, Engine
from lightning_zero.sharding.sharded_init import unsharded_inside


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines that hold parameters of ``module``."""
    return _engines_with(module.parameters())


@contextlib.contextmanager
def gathered_parameters(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], writeback: bool = False
) -> Iterator[None]:
    """Hold parameters unsharded inside the context; a collective call that all ranks must make.

    Where nothing is sharded it does nothing. Inside, the module may run any number of forward passes, a different
    number on each rank. Parameters that were initialized in shards and are in no engine yet keep every change.

    Args:
        module_or_params: a module (all its parameters), a parameter, or several.
        writeback: keep what was changed inside, as rank 0 has it. Without it, changes that torch's version counter sees
            (``weight.clamp_(...)`` under ``no_grad``) are kept too, and must be the same on all ranks; changes through
            ``.data`` are lost.
    """
    if isinstance(module_or_params, nn.Module):
        parameters = list(module_or_params.parameters())
    else:
        parameters = [module_or_params] if isinstance(module_or_params, Parameter) else list(module_or_params)
    with contextlib.ExitStack() as stack:
        for engine in _engines_with(parameters):
            stack.enter_context(engine.gathered(parameters, writeback))
        stack.enter_context(unsharded_inside(parameters))
        yield


def full_param(parameter: Parameter) -> Tensor:
    """A copy of ``parameter``, in full and at full precision: the master's values. Collective.

    To change parameters, use :func:`gathered_parameters`.

    Args:
        parameter: any; one that no engine holds is copied as it is.

    Returns:
        In the parameter's shape, on the device where the model computes; fp32 where 16-bit parameters have masters.
    """
    engine = _engine_of(parameter)
    return parameter.detach().clone() if engine is None else engine.full_param(parameter)


def full_grad(parameter: Parameter) -> Tensor | None:
    """A copy of the gradient of ``parameter`` as the next step will use it: averaged over ranks and micro-batches so
    far, unscaled, clipped as far as it has been. Collective.

    Call it between backward and step, as in ``on_after_backward`` or ``on_before_optimizer_step``, on all ranks. At
    stages 0 and 1 a call between micro-batches costs a reduction of its own.

    Args:
        parameter: any; for one that no engine holds it is its ``grad``.

    Returns:
        In the parameter's shape, on the device where the model computes, fp32 or wider; ``None`` where no rank has
        seen a gradient since ``zero_grad``, or no attached optimizer updates the parameter.
    """
    engine = _engine_of(parameter)
    if engine is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    return engine.full_grad(parameter)


def full_optimizer_state(parameter: Parameter, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """A copy of the optimizer's state of ``parameter``, by torch's names (``exp_avg``, ``step``, ...). Collective.

    Args:
        parameter: one that an engine holds.
        optimizer: whose state, where several update the parameter.

    Returns:
        Per-element state as full tensors in the parameter's shape, on the device where the model computes, and
        scalars as the optimizer keeps them; empty before the parameter's first update.

    Raises:
        ValueError: where no engine, no optimizer or not just one of them has the parameter.
    """
    engine = _engine_of(parameter)
    bucket = None if engine is None else engine.bucket_of(parameter)
    if engine is None or bucket is None:
        raise ValueError("no strategy holds this parameter now; read `optimizer.state[parameter]`")
    updaters = [
        updater
        for updater in engine.updaters
        if any(p is parameter for group in updater.optimizer.param_groups for p in group["params"])
        and (optimizer is None or updater.optimizer in (optimizer, getattr(optimizer, "optimizer", None)))
    ]
    if len(updaters) != 1:
        whose = "of those attached" if optimizer is None else f"that is this {type(optimizer).__name__}"
        remedy = "" if optimizer is None and not updaters else "; say which: full_optimizer_state(parameter, optimizer)"
        raise ValueError(
            f"{len(updaters)} optimizers {whose} update {bucket.names[bucket.index[id(parameter)]]!r}, not one{remedy}"
        )
    engine.in_backward.check_together()
    state = updaters[0].gather_state(bucket).get(bucket.index[id(parameter)], {})
    device = engine.placement.device
    return {
        name: value.to(device) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in state.items()
    }


def _engine_of(parameter: Tensor) -> Engine | None:
    return next(iter(_engines_with([parameter])), None)


def _engines_with(parameters: Iterable[Tensor]) -> list[Engine]:
    wanted = list(parameters)
    return [engine for engine in ENGINES.in_order() if any(engine.bucket_of(p) is not None for p in wanted)]
