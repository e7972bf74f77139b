"""Parameters, gradients and masters: how they are split over ranks, gathered and reduced.

Glossary of terms that all floors use:

unit
    A module whose parameters are gathered together, such as one block of a transformer. Parameters outside of all
    units belong to the root.
bucket
    The parameters of one unit (of several small ones at stages 0 to 2) that have one dtype, in one flat buffer. They
    are gathered, reduced and updated together.
flat buffer
    The 1-D tensor in which a bucket's parameters lie one after the other; the parameters are views of it.
shard
    A rank's part of a flat buffer, or of another tensor with the same layout. All shards have the same size.
segment
    The part of one parameter that lies in one shard. Each segment is updated with its own hyperparameters and scalar
    state.
run
    Adjacent segments with equal hyperparameters and step, which one kernel call updates.
tile
    Segments, or a range of a shard, that are processed at a time to limit temporary memory.
master
    The values of a shard at full precision, which updates change: the shard itself, a copy of it, or a split form in
    which the shard is the upper half.
sharded gradient
    A shard of the averaged gradient. Before its reduction a gradient is unsharded and local to one rank.
unshard, reshard
    To gather all shards into the flat buffer, and to free it. A full-precision unshard gathers masters instead.
stale
    Said of a flat buffer that holds values from before the last update of the shards.
pending
    Said of a parameter whose values are not available yet, since an update or a deferred gather of its bucket is
    running.
settle
    To finish updates and gathers and to take over edits by user code, so that shards and parameters agree.
store
    A memory from which long-lived tensors are allocated: masters, optimizer state, sharded gradients, parameter shards.
lane, ticket
    An ordered queue of an executor, such as copies to the host, and the handle with which code waits for work in it.
"""

from lightning_zero.sharding.board import Board, Subject
from lightning_zero.sharding.bucket import Bucket, BucketState, ParameterSpec
from lightning_zero.sharding.collectives import CollectiveError, Group, is_communication_error, tells_an_end
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.freed import FreedParameter
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.layout import FlatLayout, Run, Segment, WholeLayout, runs, tiles
from lightning_zero.sharding.mesh import Mesh
from lightning_zero.sharding.partition import Unit, find_units
from lightning_zero.sharding.placement import BucketPlacement, MasterForm
from lightning_zero.sharding.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.sharding.sharded_gradient import ShardedGradient
from lightning_zero.sharding.sharded_init import (
    ShardedInit,
    ShardedParameter,
    sharded_init,
    unshard_parameters,
    values_held,
)

__all__ = [
    "Board",
    "Bucket",
    "BucketForm",
    "BucketGradients",
    "BucketPlacement",
    "BucketState",
    "CollectiveError",
    "FlatLayout",
    "FreedParameter",
    "Group",
    "MasterForm",
    "Mesh",
    "MixedPrecisionPolicy",
    "ParameterSpec",
    "Run",
    "Segment",
    "ShardedGradient",
    "ShardedInit",
    "ShardedParameter",
    "ShardingPolicy",
    "Subject",
    "Unit",
    "WholeLayout",
    "find_units",
    "is_communication_error",
    "runs",
    "sharded_init",
    "tells_an_end",
    "tiles",
    "unshard_parameters",
    "values_held",
]
