"""Typed schemas of the Hydra groups: a misspelt key or value fails while the configuration is composed.

Each option of a group in `lightning_zero.conf` extends one of these, as `/schema/<group>/<name>`.
This module imports the standard library only; `register_schemas` imports Hydra, whose search-path plugin calls it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Store(StrEnum):
    """Where a kind of state rests between its uses."""

    none = "none"  # on the device
    cpu = "cpu"  # in host memory
    nvme = "nvme"  # in files

    def __repr__(self) -> str:
        return repr(self.value)


class NativeOptimizer(StrEnum):
    """Whether the compiled kernels may do the update on the host."""

    auto = "auto"
    off = "off"

    def __repr__(self) -> str:
        return repr(self.value)


class CheckpointFormat(StrEnum):
    """What a checkpoint is."""

    full = "full"  # one file
    sharded = "sharded"  # a folder

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass
class StrategyConf:
    """Arguments of `lightning_zero.ZeroStrategy`."""

    _target_: str = "lightning_zero.ZeroStrategy"
    _convert_: str = "all"
    stage: int = 2
    offload_optimizer: Store = Store.none
    offload_params: Store = Store.none
    shard_size: int | None = None
    bucket_size_mb: float = 25.0
    units: list[str] | None = None
    persistence_numel: int = 10_000
    max_live_numel: int | None = None
    check_steps: int = 10
    native_optimizer: NativeOptimizer = NativeOptimizer.auto
    skip_nonfinite: bool = True
    checkpoint_format: CheckpointFormat = CheckpointFormat.full
    async_save: bool = False
    checksums: bool = True
    timeout: float = 1800.0
    start_method: str = "popen"
    process_group_backend: str | None = None


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


class MasterLayout(StrEnum):
    """How the fp32 master of a 16-bit parameter is kept."""

    fp32 = "fp32"
    split = "split"  # type: ignore[assignment]  # a method of str

    def __repr__(self) -> str:
        return repr(self.value)


class StateDtype(StrEnum):
    """Dtype of an optimizer's state."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass
class CPUOptimizerConf:
    """What the CPU optimizers share; each of them is used by its own name."""

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
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1


class WarmupType(StrEnum):
    """How a learning rate rises."""

    log = "log"
    linear = "linear"

    def __repr__(self) -> str:
        return repr(self.value)


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
    "strategy/ddp": DDPConf,
    "precision/zero": PrecisionConf,
    "loss_scaler/dynamic": DynamicLossScalerConf,
    "loss_scaler/static": StaticLossScalerConf,
    "optimizer/adamw": AdamWConf,
    "optimizer/adam": AdamConf,
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
    """Make every schema known to Hydra as `/schema/<group>/<name>`."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for path, schema in SCHEMAS.items():
        group, name = path.split("/")
        store.store(group=f"schema/{group}", name=name, node=schema, provider="lightning_zero")
