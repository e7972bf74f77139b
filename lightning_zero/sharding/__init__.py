"""Splits parameters, gradients and masters over ranks, gathers and reduces them.

Glossary of terms that the whole package uses:

unit
    A module whose parameters are gathered together, such as one block of a transformer. Parameters outside every unit
    belong to the root.
bucket
    Parameters of one dtype in one flat buffer, which are gathered, reduced and updated together. They belong to one
    unit, or to several small units at stages 0 to 2.
flat buffer
    The 1-D tensor that contains the parameters of a bucket one after the other; the parameters are views of it.
shard
    The part of a flat buffer that one rank owns; all shards have the same length. Masters, gradients and optimizer
    state with the same layout are split into shards too.
segment
    The part of one parameter that lies in one shard. It is the unit of update: hyperparameters and scalar optimizer
    state are kept per segment.
run
    Adjacent segments with equal hyperparameters and step, which one kernel call updates.
tile
    Segments, or a range of a shard, that are processed at a time to bound temporary memory.
master
    The full-precision values of a shard, which updates change. They are the shard itself, a tensor of their own, or
    split into a high half, usually the shard itself, and a low half.
sharded gradient
    A shard of the averaged gradient. Before the reduction a gradient is unsharded and local, that is, one rank's own.
pieces
    A tensor with the flat buffer's layout that is not in one place, such as gradients where autograd has left them.
unshard, reshard
    Gather all shards into the flat buffer; free the flat buffer. A full-precision unshard gathers masters instead.
stale
    Said of a flat buffer whose values are older than the last update of the shards.
pending
    Said of a parameter whose values are not complete, because an update or a deferred gather of its bucket is running.
settle
    To finish updates and gathers and to take over edits by user code, so that shards and parameters agree.
store
    Allocates long-lived tensors in one kind of memory: masters, optimizer state, sharded gradients, parameter shards.
lane, ticket
    An ordered queue of an executor, such as that for copies to the host; a handle to wait for one job in a lane.
"""

from lightning_zero.sharding.board import Board, Subject
from lightning_zero.sharding.bucket import Bucket, BucketState
from lightning_zero.sharding.collective_errors import CollectiveError, is_communication_error, tells_an_end
from lightning_zero.sharding.collectives import Group
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
