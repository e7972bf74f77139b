"""The precision plugin: the dtypes of forward, backward, communication and update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.runtime import ENGINES, Engine
from lightning_zero.sharding import MixedPrecisionPolicy
from lightning_zero.torch_private import CLEAN_STEPS
from lightning_zero.update import DynamicLossScaler, LossScaler, SharedScaler, StaticLossScaler

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]
DtypeName = Literal["float16", "bfloat16", "float32", "float64"]


class _Mode(NamedTuple):
    """The dtypes of a precision name; ``None`` changes nothing."""

    param_dtype: torch.dtype | None
    autocast_dtype: torch.dtype | None
    keep_norms: bool
    cast_inputs: bool  # also buffers, and the default dtype of tensors made in a step


_MODES: dict[str, _Mode] = {
    "32-true": _Mode(None, None, keep_norms=True, cast_inputs=False),
    "64-true": _Mode(torch.float64, None, keep_norms=False, cast_inputs=True),
    "bf16-mixed": _Mode(torch.bfloat16, torch.bfloat16, keep_norms=True, cast_inputs=False),
    "bf16-true": _Mode(torch.bfloat16, None, keep_norms=False, cast_inputs=True),
    "16-mixed": _Mode(torch.float16, torch.float16, keep_norms=True, cast_inputs=False),
    "16-true": _Mode(torch.float16, None, keep_norms=False, cast_inputs=True),
}
# The defaults of torch.amp.GradScaler() in our terms. A plugin made by a flag has them, and gets our defaults instead.
_STOCK_SCALER = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "window": 2000}


class ZeroPrecision(Precision):
    """Precision under :class:`~lightning_zero.ZeroStrategy`.

    ==============  ======================  ========  ===============================================
    ``precision``   parameters              autocast  masters
    ==============  ======================  ========  ===============================================
    ``32-true``     as the module has them  no        none: they are the parameters
    ``64-true``     fp64                    no        none
    ``bf16-mixed``  bf16, norms fp32        bf16      fp32, sharded
    ``bf16-true``   bf16                    no        fp32, sharded, unless ``master_weights=False``
    ``16-mixed``    fp16, norms fp32        fp16      fp32, sharded
    ``16-true``     fp16                    no        fp32, sharded, unless ``master_weights=False``
    ==============  ======================  ========  ===============================================

    Masters are made from the initial values before these are cast. A ``precision=`` flag of the Trainer becomes this
    plugin with its defaults; to set options, pass the plugin yourself (``plugins=[ZeroPrecision(...)]``). On a CPU
    Lightning turns the flag ``"16-mixed"`` into bf16 before any strategy sees it, so fp16 needs ``plugins`` there.

    In fp16 the loss is multiplied by the scaler's scale, and the update divides by the scale that its backward used. A
    step with a gradient that is not finite, on any rank and in any micro-batch, is skipped on all ranks.

    Args:
        precision: see the table.
        param_dtype: dtype of parameters in forward and backward instead of the table's. ``float32`` with ``bf16-mixed``
            is Lightning's own mixed precision: fp32 parameters that autocast casts at every use.
        reduce_dtype: dtype in which gradients cross the network; default: that of the parameters, or fp32 if
            micro-batches were summed in fp32 before.
        grad_dtype: dtype in which the reduced gradient is kept until the step; default: the reduce dtype, and fp32 from
            the second micro-batch on.
        master_weights: keep fp32 masters of 16-bit parameters. Without them updates below half a unit in the last place
            of a 16-bit value are lost.
        scaler: loss scaler; default: :class:`~lightning_zero.DynamicLossScaler` if parameters or autocast are fp16,
            else none. All optimizers share it; its running state is saved in checkpoints.
        cast_inputs: cast floating-point inputs of a step to the parameters' dtype; default: in the ``-true`` modes, but
            not in ``32-true``, which needs a ``param_dtype`` for it.

    Raises:
        ValueError: unknown precision or dtype, or inputs are to be cast to no dtype.
        TypeError: ``scaler`` is not a loss scaler, or a switch is not a bool.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        param_dtype: DtypeName | torch.dtype | None = None,
        reduce_dtype: DtypeName | torch.dtype | None = None,
        grad_dtype: DtypeName | torch.dtype | None = None,
        master_weights: bool = True,
        scaler: LossScaler | None = None,
        cast_inputs: bool | None = None,
    ) -> None:
        if precision not in _MODES:
            raise ValueError(f"precision={precision!r} is unknown; expected one of {', '.join(map(repr, _MODES))}")
        for name, flag in (("master_weights", master_weights), ("cast_inputs", cast_inputs)):
            if flag not in (True, False) and not (name == "cast_inputs" and flag is None):
                raise TypeError(f"{name}={flag!r} must be True or False")
        # A class also has the attributes of the protocol, so that `isinstance` alone does not find it.
        if scaler is not None and (isinstance(scaler, type) or not isinstance(scaler, LossScaler)):
            raise TypeError(
                f"scaler={scaler!r} is not a loss scaler; "
                "expected DynamicLossScaler(...), StaticLossScaler(scale) or None"
            )
        mode = _MODES[precision]
        self.precision = precision
        self._autocast_dtype = mode.autocast_dtype
        self._cast_inputs = mode.cast_inputs if cast_inputs is None else cast_inputs
        self._input_dtype = _dtype("param_dtype", param_dtype) or mode.param_dtype
        self._default_dtype = self._input_dtype if mode.cast_inputs else None
        if self._cast_inputs and self._input_dtype is None:
            raise ValueError(
                f"cast_inputs=True with precision={precision!r} names no dtype, since parameters stay as the module "
                "has them; expected a param_dtype, such as param_dtype='float32', or cast_inputs=False"
            )
        self.policy = MixedPrecisionPolicy(
            param_dtype=self._input_dtype,
            keep_norms=mode.keep_norms,
            reduce_dtype=_dtype("reduce_dtype", reduce_dtype),
            grad_dtype=_dtype("grad_dtype", grad_dtype),
            master_weights=master_weights,
            cast_buffers=mode.cast_inputs,
        )
        if scaler is None and torch.float16 in (self._input_dtype, mode.autocast_dtype):
            scaler = DynamicLossScaler()
        self.scaler = scaler
        self.shared_scaler = None if scaler is None else SharedScaler(scaler)  # for all engines that this plugin serves
        self._skipped_steps = 0  # counted before there was an engine
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Scale, clip and count through ``engine`` from now on."""
        if engine is not self._engine:
            engine.outcomes.skipped = self.skipped_steps
            self._engine = engine

    @property
    def module_dtype(self) -> torch.dtype | None:
        """The dtype that a whole module has in this precision; ``None``: its tensors have dtypes of their own."""
        return self._default_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products in a step."""
        return self._autocast_dtype or self._input_dtype or torch.float32

    def __getstate__(self) -> dict[str, Any]:
        # A pickled or copied Trainer has no shards; its next run attaches a new engine.
        return {**vars(self), "_skipped_steps": self.skipped_steps, "_engine": None}

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped so far, over all fits with this plugin."""
        return self._skipped_steps if self._engine is None else self._engine.outcomes.skipped

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(
                "ZeroPrecision has no engine: it works inside Trainer.fit, validate, test, predict with a "
                f"ZeroStrategy; with another strategy use Trainer(precision={self.precision!r})"
            )
        return self._engine

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self.engine  # noqa: B018  # raises under a strategy that has none, before training starts
        return model, optimizers, lr_schedulers

    @override
    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        # 16-bit modes initialize in fp32, from which the masters are made.
        wide = self._default_dtype == torch.float64
        return default_dtype(torch.float64) if wide else contextlib.nullcontext()

    @override
    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with self.computing_on(self.engine.placement.device.type):
            yield

    @contextlib.contextmanager
    def computing_on(self, device_type: str) -> Iterator[None]:
        """Make a context in which operations on a type of device compute in this precision."""
        with contextlib.ExitStack() as stack:
            if self._autocast_dtype is not None:
                # Without the cache, as in Lightning: it would return casts of fp32 weights from before a step.
                stack.enter_context(torch.autocast(device_type, dtype=self._autocast_dtype, cache_enabled=False))
            if self._default_dtype is not None:
                stack.enter_context(default_dtype(self._default_dtype))
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        if not self._cast_inputs or self._input_dtype is None:
            return data
        return apply_to_collection(data, Tensor, _cast_floating, self._input_dtype)

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, after the hooks have seen the unscaled one."""
        return self.engine.scale_loss(super().pre_backward(tensor, module))

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward and reduce all gradients, before ``on_after_backward`` is called."""
        self.engine.begin_backward()
        super().backward(*args, **kwargs)
        self.engine.flush()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the averaged gradients of ``optimizer`` by their global norm over all shards."""
        self.engine.clip_grad_norm_(unwrap(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each averaged gradient of ``optimizer`` in its shard."""
        self.engine.clip_grad_value_(unwrap(optimizer), clip_val)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scaler's running state and the number of skipped steps, as plain numbers."""
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        return {"skipped_steps": self.skipped_steps, "scaler": scaler}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the saved scale and counts; this object keeps its own configuration."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        if self._engine is None:
            self._skipped_steps = state_dict["skipped_steps"]
        else:
            self._engine.outcomes.skipped = state_dict["skipped_steps"]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the scale of a run under Lightning's own mixed precision."""
        stock = checkpoint.get(MixedPrecision.__qualname__)
        if stock and self.scaler is not None and type(self).__qualname__ not in checkpoint:
            self.scaler.load_state_dict({"scale": stock["scale"], "clean_steps": stock[CLEAN_STEPS]})


# Lightning's plugins for the flags, of Trainer and of Fabric.
_STOCK = (
    *(Precision, DoublePrecision, HalfPrecision, MixedPrecision),
    *(fabric.Precision, fabric.DoublePrecision, fabric.HalfPrecision, fabric.MixedPrecision),
)


def as_zero_precision(plugin: fabric.Precision) -> ZeroPrecision:
    """Returns the plugin with which ZeroStrategy computes as other strategies do with ``plugin``.

    Raises:
        TypeError: for a plugin of another kind.
    """
    if isinstance(plugin, ZeroPrecision):
        return plugin
    if type(plugin) in _STOCK:
        return ZeroPrecision(plugin.precision, scaler=_scaler_of(plugin))  # type: ignore[arg-type]
    raise TypeError(
        f"{type(plugin).__name__} does not work with ZeroStrategy, which casts and clips shards itself; expected "
        f"ZeroPrecision, or one of the flags precision={', '.join(map(repr, _MODES))}"
    )


def _scaler_of(plugin: fabric.Precision) -> LossScaler | None:
    """Makes a scaler with the settings of a plugin's own ``GradScaler``; ``None`` if they are torch's defaults."""
    if not isinstance(plugin, MixedPrecision | fabric.MixedPrecision) or plugin.scaler is None:
        return None
    if not plugin.scaler.is_enabled():
        # Torch itself disables the scaler of a device that is missing.
        return StaticLossScaler(1.0) if torch.get_device_module(plugin.device).is_available() else None
    stock = plugin.scaler.state_dict()
    given = {
        "init_scale": stock["scale"],
        "growth_factor": stock["growth_factor"],
        "backoff_factor": stock["backoff_factor"],
        "window": stock["growth_interval"],
    }
    if given == _STOCK_SCALER:
        return None
    # torch has neither hysteresis nor a minimum.
    return DynamicLossScaler(**given, hysteresis=1, min_scale=min(1.0, stock["scale"]))


def _dtype(name: str, value: str | torch.dtype | None) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in get_args(DtypeName):
        raise ValueError(f"{name}={value!r} is not a dtype; expected one of {', '.join(get_args(DtypeName))}")
    dtype: torch.dtype = getattr(torch, value)
    return dtype


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a context with this default dtype of torch. Updates that use it end before it changes."""
    previous = torch.get_default_dtype()
    _await_updates_between({previous, dtype})
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        try:
            _await_updates_between({previous, dtype})
        finally:  # also where the user interrupts the wait
            torch.set_default_dtype(previous)


def _await_updates_between(defaults: set[torch.dtype]) -> None:
    """Wait for updates that may use torch's default dtype, which is that of other threads, too, before it changes."""
    for engine in ENGINES.in_order() if len(defaults) > 1 else ():
        # An update that has failed has ended, too. Whoever needs it raises its error: here it may be another fit's.
        with contextlib.suppress(Exception):
            engine.await_updates(defaults)


def _cast_floating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
