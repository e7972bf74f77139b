"""The optimizer step over shards: loss scale, clipping, torch's optimizers, and native kernels for host memory."""

from lightning_zero.update.block_state import BlockShardState, ScaleLayout
from lightning_zero.update.choice import choose_updater, kept_whole, make_updater
from lightning_zero.update.clipping import GradientStats
from lightning_zero.update.combined import CombinedUpdater
from lightning_zero.update.compact import Blocks, compacted, decoded, holds_compact, in_blocks, state_as_kept
from lightning_zero.update.cpu import CPUOptimizer, block_of
from lightning_zero.update.cpu_optimizers import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.gradient_scale import SharedScaler
from lightning_zero.update.in_backward import TornStepError, why_not_in_backward
from lightning_zero.update.loading import load_own_entries, own_entries
from lightning_zero.update.loss_scaler import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler
from lightning_zero.update.muon import Muon
from lightning_zero.update.native_updater import NativeUpdater
from lightning_zero.update.outcomes import SkippedStepsError, StepOutcome, StepOutcomes
from lightning_zero.update.rules import Traits, examine
from lightning_zero.update.state import OptimizerState, OwnedTensor, ShardState, WholeState
from lightning_zero.update.updaters import TorchUpdater, Updater
from lightning_zero.update.whole import WholeUpdater

__all__ = [
    "CPUSGD",
    "BlockShardState",
    "Blocks",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CPUOptimizer",
    "CombinedUpdater",
    "DynamicLossScaler",
    "Footprint",
    "GradientStats",
    "LossScaleError",
    "LossScaler",
    "Muon",
    "NativeUpdater",
    "OptimizerState",
    "OwnedTensor",
    "ScaleLayout",
    "ShardState",
    "SharedScaler",
    "SkippedStepsError",
    "StaticLossScaler",
    "StepOutcome",
    "StepOutcomes",
    "TorchUpdater",
    "TornStepError",
    "Traits",
    "Updater",
    "WholeState",
    "WholeUpdater",
    "block_of",
    "choose_updater",
    "compacted",
    "decoded",
    "examine",
    "holds_compact",
    "in_blocks",
    "kept_whole",
    "load_own_entries",
    "make_updater",
    "own_entries",
    "state_as_kept",
    "why_not_in_backward",
]
