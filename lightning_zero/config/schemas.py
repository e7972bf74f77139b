"""Typed schemas of the Hydra groups: a misspelt key or value fails while the configuration is composed.

Each option of a group in `lightning_zero.conf` extends one of these, as `/schema/<group>/<name>`. The strategy's schema
is derived from its dataclass of options. The other schemas configure classes that cannot be imported without torch,
which this module must not import, since Hydra's search-path plugin calls `register_schemas` in every Hydra application.
A test checks that their names and defaults are those of the constructors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

from lightning_zero.integration.options import (
    CHOSEN,
    FREE,
    AutoOptions,
    CheckpointStateName,
    FormatName,
    GradientStoreName,
    LayoutName,
    NativeName,
    PreflightName,
    StoreName,
    StrategyOptions,
)
from lightning_zero.integration.options import StartMethod as StartMethodName


class _Choice(StrEnum):
    """One of a few words, shown as plain text in checkpoints and messages."""

    def __repr__(self) -> str:
        return repr(self.value)


def _choice(name: str, words: Any) -> Any:
    """Makes an enum of a `Literal`; it must be a module's variable of that name, since configurations are pickled."""
    members = {word: word for word in get_args(words)}
    return _Choice(name, members, module=__name__)  # type: ignore[call-arg]


OffloadStore = _choice("OffloadStore", StoreName)
GradientStore = _choice("GradientStore", GradientStoreName)
NativeOptimizer = _choice("NativeOptimizer", NativeName)
Preflight = _choice("Preflight", PreflightName)
CheckpointFormat = _choice("CheckpointFormat", FormatName)
CheckpointState = _choice("CheckpointState", CheckpointStateName)
StartMethod = _choice("StartMethod", StartMethodName)


class MasterLayout(_Choice):
    """Layout in which the fp32 master of a 16-bit parameter is kept."""

    fp32 = "fp32"
    split = "split"  # type: ignore[assignment]  # a method of str


# Types of options that a configuration cannot hold, and the types that replace them.
_REPLACED = {
    StoreName: OffloadStore,
    GradientStoreName: GradientStore,
    NativeName: NativeOptimizer,
    LayoutName: MasterLayout,
    PreflightName: Preflight,
    FormatName: CheckpointFormat,
    CheckpointStateName: CheckpointState,
    StartMethodName: StartMethod,
    Sequence[str | type] | None: list[str] | None,  # classes by their names
}


def _derived_from(options: type) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, type and default of every field of a dataclass, in types that a configuration can hold."""
    hints = get_type_hints(options)
    for option in fields(options):
        kind = _REPLACED.get(hints[option.name], hints[option.name])
        is_enum = isinstance(kind, type) and issubclass(kind, _Choice)
        yield option.name, kind, kind(option.default) if is_enum else option.default


StrategyConf = make_dataclass(
    "StrategyConf",
    [
        ("_target_", str, "lightning_zero.ZeroStrategy"),
        ("_convert_", str, "all"),
        *_derived_from(StrategyOptions),
    ],
    namespace={"__doc__": "Arguments of `lightning_zero.ZeroStrategy`: its options.", "__module__": __name__},
)

AutoStrategyConf = make_dataclass(
    "AutoStrategyConf",
    [
        ("_target_", str, "lightning_zero.ZeroAutoStrategy"),
        ("_convert_", str, "all"),
        *_derived_from(AutoOptions),
        *(option for option in _derived_from(StrategyOptions) if option[0] not in (*CHOSEN, *FREE)),
    ],
    namespace={"__doc__": "Arguments of `lightning_zero.ZeroAutoStrategy`: its options.", "__module__": __name__},
)


@dataclass
class DDPConf:
    """Arguments of `lightning.pytorch.strategies.DDPStrategy`, most of them torch's."""

    _target_: str = "lightning.pytorch.strategies.DDPStrategy"
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: float = 25.0
    start_method: str = "popen"
    process_group_backend: str | None = None


@dataclass
class PrecisionConf:
    """Arguments of `lightning_zero.ZeroPrecision`."""

    _target_: str = "lightning_zero.ZeroPrecision"
    precision: str = "32-true"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None
    master_weights: bool = True
    scaler: Any = None  # one of those below
    cast_inputs: bool | None = None


@dataclass
class DynamicLossScalerConf:
    """Arguments of `lightning_zero.DynamicLossScaler`."""

    _target_: str = "lightning_zero.DynamicLossScaler"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    max_scale: float | None = None
    consecutive_hysteresis: bool = False
    on_min_scale: str = "raise"


@dataclass
class StaticLossScalerConf:
    """Arguments of `lightning_zero.StaticLossScaler`."""

    _target_: str = "lightning_zero.StaticLossScaler"
    scale: float = 1024.0


@dataclass
class AdamWConf:
    """Arguments of `torch.optim.AdamW`."""

    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False
    fused: bool | None = None


@dataclass
class AdamConf(AdamWConf):
    """Arguments of `torch.optim.Adam`."""

    _target_: str = "torch.optim.Adam"
    weight_decay: float = 0.0


@dataclass
class MuonConf:
    """Arguments of `lightning_zero.Muon`."""

    _target_: str = "lightning_zero.Muon"
    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.775, 2.0315])
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = "match_rms_adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    adamw_eps: float = 1e-8
    batched: bool | None = None
    on_device: bool = True


@dataclass
class AdafactorConf:
    """Arguments of `torch.optim.Adafactor`."""

    _target_: str = "torch.optim.Adafactor"
    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: list[float | None] = field(default_factory=lambda: [None, 1e-3])
    d: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass
class LambConf:
    """Arguments of `pytorch_optimizer.Lamb`, but for those that mix parameters."""

    _target_: str = "pytorch_optimizer.Lamb"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    weight_decay: float = 0.0
    weight_decouple: bool = True
    grad_averaging: bool = True
    rectify: bool = False
    maximize: bool = False


@dataclass
class SGDConf:
    """Arguments of `torch.optim.SGD`."""

    _target_: str = "torch.optim.SGD"
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass
class AdagradConf:
    """Arguments of `torch.optim.Adagrad`."""

    _target_: str = "torch.optim.Adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass
class RMSpropConf:
    """Arguments of `torch.optim.RMSprop`."""

    _target_: str = "torch.optim.RMSprop"
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False


class StateDtype(_Choice):
    """Dtype of an optimizer's state."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


@dataclass
class CPUOptimizerConf:
    """Arguments that the CPU optimizers share; each of them is used by its own name."""

    master_layout: MasterLayout = MasterLayout.fp32
    state_dtype: StateDtype = StateDtype.float32
    seed: int = 0
    maximize: bool = False


@dataclass
class CPUAdamWConf(CPUOptimizerConf):
    """Arguments of `lightning_zero.CPUAdamW`."""

    _target_: str = "lightning_zero.CPUAdamW"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False


@dataclass
class CPUAdamConf(CPUAdamWConf):
    """Arguments of `lightning_zero.CPUAdam`."""

    _target_: str = "lightning_zero.CPUAdam"
    weight_decay: float = 0.0


@dataclass
class CPUAdagradConf(CPUOptimizerConf):
    """Arguments of `lightning_zero.CPUAdagrad`."""

    _target_: str = "lightning_zero.CPUAdagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass
class CPULionConf(CPUOptimizerConf):
    """Arguments of `lightning_zero.CPULion`."""

    _target_: str = "lightning_zero.CPULion"
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    weight_decay: float = 0.0


@dataclass
class CPUSGDConf(CPUOptimizerConf):
    """Arguments of `lightning_zero.CPUSGD`."""

    _target_: str = "lightning_zero.CPUSGD"
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass
class CosineConf:
    """Arguments of `lightning_zero.schedulers.WarmupCosineLR`."""

    _target_: str = "lightning_zero.schedulers.WarmupCosineLR"
    total_steps: int | None = None
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.1


class WarmupType(_Choice):
    """Shape of the rise of a learning rate."""

    log = "log"
    linear = "linear"


@dataclass
class WarmupConf:
    """Arguments of `lightning_zero.schedulers.WarmupLR`."""

    _target_: str = "lightning_zero.schedulers.WarmupLR"
    min_lr: float = 0.0
    max_lr: float | None = None
    warmup_steps: int = 1000
    warmup_type: WarmupType = WarmupType.log


@dataclass
class WarmupDecayConf(WarmupConf):
    """Arguments of `lightning_zero.schedulers.WarmupDecayLR`."""

    _target_: str = "lightning_zero.schedulers.WarmupDecayLR"
    total_steps: int | None = None
    warmup_steps: int | None = None  # type: ignore[assignment]


@dataclass
class OneCycleConf:
    """Arguments of `lightning_zero.schedulers.OneCycleLR`."""

    _target_: str = "lightning_zero.schedulers.OneCycleLR"
    total_steps: int | None = None
    max_lr: float | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    cycle_momentum: bool = True
    base_momentum: float = 0.85
    max_momentum: float = 0.95
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False


SCHEMAS: dict[str, type] = {
    "strategy/zero": StrategyConf,
    "strategy/auto": AutoStrategyConf,
    "strategy/ddp": DDPConf,
    "precision/zero": PrecisionConf,
    "loss_scaler/dynamic": DynamicLossScalerConf,
    "loss_scaler/static": StaticLossScalerConf,
    "optimizer/adamw": AdamWConf,
    "optimizer/adam": AdamConf,
    "optimizer/muon": MuonConf,
    "optimizer/adafactor": AdafactorConf,
    "optimizer/lamb": LambConf,
    "optimizer/sgd": SGDConf,
    "optimizer/adagrad": AdagradConf,
    "optimizer/rmsprop": RMSpropConf,
    "optimizer/cpu_adamw": CPUAdamWConf,
    "optimizer/cpu_adam": CPUAdamConf,
    "optimizer/cpu_adagrad": CPUAdagradConf,
    "optimizer/cpu_lion": CPULionConf,
    "optimizer/cpu_sgd": CPUSGDConf,
    "scheduler/cosine": CosineConf,
    "scheduler/warmup": WarmupConf,
    "scheduler/warmup_decay": WarmupDecayConf,
    "scheduler/onecycle": OneCycleConf,
}


def register_schemas() -> None:
    """Makes every schema known to Hydra as `/schema/<group>/<name>`, unless it is already."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    known = store.repo.get("schema", {})
    for path, schema in SCHEMAS.items():
        group, name = path.split("/")
        if f"{name}.yaml" in known.get(group, {}):
            continue
        store.store(group=f"schema/{group}", name=name, node=schema, provider="lightning_zero")
