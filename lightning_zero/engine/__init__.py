"""Sharding, free of Lightning: buckets, stores, collectives and the runtime that drives them."""

from lightning_zero.engine.access import (
    engines_of,
    full_grad,
    full_optimizer_state,
    full_param,
    gathered_parameters,
)
from lightning_zero.engine.bucket import Bucket, BucketState, ParameterSpec
from lightning_zero.engine.collectives import CollectiveError, Group, Mesh
from lightning_zero.engine.freed import FreedParameter
from lightning_zero.engine.gradients import GradientLog
from lightning_zero.engine.layout import FlatLayout, Run, Segment, runs, tiles
from lightning_zero.engine.loss_scaler import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler
from lightning_zero.engine.optimizers import Updater
from lightning_zero.engine.owned_gradients import GradientStats
from lightning_zero.engine.partition import Unit, find_units
from lightning_zero.engine.placement import MasterForm, Placement
from lightning_zero.engine.plan import BucketForm, BucketPlan, Bytes, Footprint, Peak, Plan, plan
from lightning_zero.engine.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.engine.runtime import Engine, StepOutcome
from lightning_zero.engine.shadow import Shadow, follow
from lightning_zero.engine.sharded_init import ShardedInit, ShardedParameter, make_whole, sharded_init
from lightning_zero.engine.stores import DeviceStore, HostStore, Store
from lightning_zero.engine.timers import Phase, Timers

__all__ = [
    "Bucket",
    "BucketForm",
    "BucketPlan",
    "BucketState",
    "Bytes",
    "CollectiveError",
    "DeviceStore",
    "DynamicLossScaler",
    "Engine",
    "FlatLayout",
    "Footprint",
    "FreedParameter",
    "GradientLog",
    "GradientStats",
    "Group",
    "HostStore",
    "LossScaleError",
    "LossScaler",
    "MasterForm",
    "Mesh",
    "MixedPrecisionPolicy",
    "ParameterSpec",
    "Peak",
    "Phase",
    "Placement",
    "Plan",
    "Run",
    "Segment",
    "Shadow",
    "ShardedInit",
    "ShardedParameter",
    "ShardingPolicy",
    "StaticLossScaler",
    "StepOutcome",
    "Store",
    "Timers",
    "Unit",
    "Updater",
    "engines_of",
    "find_units",
    "follow",
    "full_grad",
    "full_optimizer_state",
    "full_param",
    "gathered_parameters",
    "make_whole",
    "plan",
    "runs",
    "sharded_init",
    "tiles",
]
