"""Functions by which user code reads and writes a sharded module."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.engine.runtime import ENGINES, Engine
from lightning_zero.sharding.sharded_init import unsharded_inside
from lightning_zero.torch_private import version_of

_16_BITS = (torch.bfloat16, torch.float16)
_warned: WeakSet[Engine] = WeakSet()  # those whose user was told that they round what is written at full precision


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines that hold parameters of ``module``."""
    return _engines_with(module.parameters())


@contextlib.contextmanager
def gathered_parameters(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], writeback: bool = False, full_precision: bool = False
) -> Iterator[None]:
    """Hold parameters unsharded inside the context. Collective: all ranks must call it.

    If nothing is sharded, it does nothing. Inside, the module may run any number of forward passes, and a different
    number on each rank. Parameters that were initialized in shards and belong to no engine yet keep every change. A
    context may lie inside another one, which then shows what the inner one has taken over.

    A part of the loss may be computed inside, between the beginning of a forward and its backward: what such a context
    gathers at stage 3 stays so until backward has ended. Under ``torch.no_grad()`` it is freed at once.

    Args:
        module_or_params: a module (meaning all its parameters), a parameter, or several.
        writeback: at the end, take over rank 0's values on all ranks. Otherwise only changes that increment torch's
            version counter (``weight.clamp_(...)`` under ``no_grad``) are kept, and must be the same on all ranks;
            changes through ``.data`` are lost.
        full_precision: show masters in place of 16-bit parameters, and keep what is written in their dtype. Needed for
            changes that 16 bits would round off, such as those of an average that moves slowly. Parameters without
            masters stay 16-bit ones; the first time that some are written, a warning names one.
    """
    if isinstance(module_or_params, nn.Module):
        parameters = list(module_or_params.parameters())
    else:
        parameters = [module_or_params] if isinstance(module_or_params, Parameter) else list(module_or_params)
    engines = _engines_with(parameters)
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.gathered(parameters, writeback, full_precision))
        stack.enter_context(unsharded_inside(parameters))
        written = [_Written(engine, parameters) for engine in engines if full_precision]
        yield
        for each in written:
            each.warn_of_rounding(writeback)


class _Written:
    """Finds 16-bit parameters that user code writes in a context which shows masters, but not theirs: they have none.

    Args:
        engine: holds some of the parameters.
        parameters: as the context shows them.
    """

    def __init__(self, engine: Engine, parameters: Sequence[Parameter]) -> None:
        self._engine = engine
        held = [p for p in parameters if engine.bucket_of(p) is not None and p.dtype in _16_BITS]
        self._versions = [(p, version_of(p)) for p in held]

    def warn_of_rounding(self, everything: bool) -> None:
        """Warn on rank 0 if a parameter was written since; once for each engine.

        Args:
            everything: all parameters count as written, since writes through ``.data`` leave no trace.
        """
        written = [p for p, version in self._versions if everything or version_of(p) != version]
        if not written or self._engine in _warned or self._engine.placement.mesh.world.rank > 0:
            return
        _warned.add(self._engine)
        bucket = self._engine.bucket_of(written[0])
        assert bucket is not None
        warnings.warn(
            f"what was written at full precision into {bucket.names[bucket.index[id(written[0])]]!r} was rounded to "
            f"{bucket.dtype}, since it has no master; changes of less than half a unit in the last place are lost"
            f"{advice(Case.NO_MASTER, '. ')}",
            stacklevel=4,  # the end of the user's `with`
        )


def full_param(parameter: Parameter) -> Tensor:
    """A copy of the full values of ``parameter`` at full precision, that is, of its master. Collective.

    To change parameters, use :func:`gathered_parameters`.

    Args:
        parameter: any parameter; one that no engine holds is simply copied.

    Returns:
        A tensor of the parameter's shape on the device where the model computes; fp32 for 16-bit parameters with
        masters, otherwise the parameter's dtype.
    """
    engine = _engine_of(parameter)
    return parameter.detach().clone() if engine is None else engine.full_param(parameter)


def full_grad(parameter: Parameter) -> Tensor | None:
    """A copy of the full gradient of ``parameter`` that the next step will use. Collective.

    It is averaged over ranks and the micro-batches so far, unscaled, and clipped if clipping has already been applied.
    Call it on all ranks between backward and step, as in ``on_after_backward`` or ``on_before_optimizer_step``. At
    stages 0 and 1 a call between micro-batches costs an additional reduction.

    Args:
        parameter: any parameter; for one that no engine holds, the result is a copy of its ``grad``.

    Returns:
        A tensor of the parameter's shape on the device where the model computes, fp32 or wider; ``None`` if no rank has
        got a gradient since ``zero_grad``, or no attached optimizer updates the parameter.
    """
    engine = _engine_of(parameter)
    if engine is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    return engine.full_grad(parameter)


def full_optimizer_state(parameter: Parameter, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """A copy of the full optimizer state of ``parameter``, by torch's names (``exp_avg``, ``step``, ...). Collective.

    Args:
        parameter: a parameter that an engine holds.
        optimizer: the optimizer, needed if several optimizers update the parameter.

    Returns:
        State with one value per element as full tensors of the parameter's shape, on the device where the model
        computes; other state in the optimizer's own form; empty before the first update of the parameter.

    Raises:
        ValueError: no engine holds the parameter, or the number of matching optimizers is not one.
    """
    engine = _engine_of(parameter)
    bucket = None if engine is None else engine.bucket_of(parameter)
    if engine is None or bucket is None:
        raise ValueError("no engine holds this parameter now; read `optimizer.state[parameter]`")
    updaters = [
        updater
        for updater in engine.updaters
        if any(p is parameter for group in updater.optimizer.param_groups for p in group["params"])
        and (optimizer is None or updater.optimizer in (optimizer, getattr(optimizer, "optimizer", None)))
    ]
    if len(updaters) != 1:
        whose = "that are attached" if optimizer is None else f"that are this {type(optimizer).__name__}"
        remedy = "" if optimizer is None and not updaters else "; say which: full_optimizer_state(parameter, optimizer)"
        raise ValueError(
            f"{len(updaters)} optimizers {whose} update {bucket.names[bucket.index[id(parameter)]]!r}, not one{remedy}"
        )
    engine.in_backward.check_together()
    state = updaters[0].gather_state(bucket).get(bucket.index[id(parameter)], {})
    per_element = {
        name: engine.placement.on_device(value, bucket.name)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
    return state | per_element


def _engine_of(parameter: Tensor) -> Engine | None:
    return next(iter(_engines_with([parameter])), None)


def _engines_with(parameters: Iterable[Tensor]) -> list[Engine]:
    wanted = list(parameters)
    return [engine for engine in ENGINES.in_order() if any(engine.bucket_of(p) is not None for p in wanted)]
