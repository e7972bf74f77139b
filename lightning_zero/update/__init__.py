"""The optimizer step over shards: loss scale, clipping, torch's optimizers, and the native kernels on the host."""

from lightning_zero.update.attached import Updater
from lightning_zero.update.clipping import GradientStats
from lightning_zero.update.cpu import CPUOptimizer
from lightning_zero.update.cpu_optimizers import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.loss_scaler import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler
from lightning_zero.update.outcomes import SkippedStepsError, StepOutcome, StepOutcomes
from lightning_zero.update.rules import check_element_wise
from lightning_zero.update.state import ShardState
from lightning_zero.update.updaters import NativeUpdater, ShardUpdater, TorchUpdater, choose_updater, make_updater

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CPUOptimizer",
    "DynamicLossScaler",
    "Footprint",
    "GradientStats",
    "LossScaleError",
    "LossScaler",
    "NativeUpdater",
    "ShardState",
    "ShardUpdater",
    "SkippedStepsError",
    "StaticLossScaler",
    "StepOutcome",
    "StepOutcomes",
    "TorchUpdater",
    "Updater",
    "check_element_wise",
    "choose_updater",
    "make_updater",
]
