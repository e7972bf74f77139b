"""Constructs buckets: takes over the initial values of parameters, and makes the masters that updates need.

:func:`move_own` comes before. :func:`release` gives the values back, and :func:`give_up` does where not all buckets
could be made.

Masters are made from the initial values before these are cast, never from rounded values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero import ops
from lightning_zero.sharding.bucket import Bucket, BucketState, absorb_edits
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.held import HeldParameter, release_parameter
from lightning_zero.sharding.masters import CopyMaster, NoMaster, SplitMaster, StoreHome
from lightning_zero.sharding.partition import check_supported
from lightning_zero.sharding.pending import mark_freed, mark_ordinary
from lightning_zero.sharding.rounded import mark_rounded
from lightning_zero.sharding.sharded_init import ShardedParameter, full_values, usable_inside
from lightning_zero.storage import Memory, Rested, note_freed
from lightning_zero.storage.rested import Resident, changing, pieces
from lightning_zero.storage.staged import StagedTensor


@torch.no_grad()
def move_own(module: nn.Module, device: torch.device) -> None:
    """Moves the parameters whose class has its own ``to``, as ``module.to(device)`` does, before there are buckets.

    Such a ``to`` may do more than move: bitsandbytes quantizes weights in it, and moves their scales, which are no
    parameters. All other parameters are moved with their buckets. Collective if a parameter is in shards.

    Raises:
        TypeError: see :func:`check_supported`.
    """
    own = [p for p in module.parameters() if type(p).to is not Tensor.to and not isinstance(p, HeldParameter)]
    if not own:
        return
    check_supported(module)
    with usable_inside(own):
        for parameter in own:
            if not parameter.is_meta:
                parameter.data = parameter.to(device).data


@torch.no_grad()
def make_bucket(name: str, form: BucketForm, detect_data_edits: bool = False) -> Bucket:
    """Makes a bucket with rank 0's values of its parameters; for the arguments see :class:`Bucket`. Collective."""
    bucket = Bucket(name, form, detect_data_edits)
    dtype, layout, placement = bucket.dtype, bucket.layout, bucket.placement
    start, stop = layout.shard_range(placement.mesh.shard.rank)
    sharded = bucket.shards_params and any(isinstance(p, ShardedParameter) for p in bucket.parameters)
    if sharded:  # the full bucket is never allocated
        flat = torch.empty(layout.padded_numel, dtype=dtype, device=placement.device)
    else:
        full = _initial_values(bucket)
        flat = full if full.dtype == dtype else full.to(dtype)
    shard: Rested = Resident(flat[start:stop], "device")
    owned: list[_Owned] = []  # the tensors that this rank's part of the values is copied to
    if bucket.shards_params:
        shard = placement.param_store.rest(layout.shard_numel, dtype, f"the parameters of {name}", crosses=True)
        owned.append(_Owned(shard, placement.param_store.memory))
    copy = _room_for_copy(bucket)
    owned += [] if copy is None else [_Owned(copy, placement.optimizer_store.memory)]
    if sharded:
        _distribute(bucket, flat, owned)
    else:
        for target in owned:
            _fill(bucket, target, 0, full[start:stop], "device")
    if placement.rounds(bucket.initial_dtype, dtype):
        bucket.rounded.update(range(len(bucket.parameters)))
    own = NoMaster(shard, placement.shard_memory)
    try:
        bucket.begin(flat, shard, own if copy is None else CopyMaster(shard, copy, StoreHome(placement, name)))
    except BaseException:
        give_up(bucket)
        raise
    return bucket


class _Owned(NamedTuple):
    """A tensor of this rank with the layout of the shard (1-D, Ψ/S), and the memory in which it is changed."""

    values: Rested
    memory: Memory


def _fill(bucket: Bucket, target: _Owned, first: int, source: Tensor, memory: Memory) -> None:
    """Copies ``source`` (1-D, in ``memory``) to ``target``, beginning at its element ``first``."""
    for low, high in pieces(target.values.tile, first, first + source.numel()):
        with changing(target.values, low, high) as into:
            part = source[low - first : high - first]
            bucket.placement.copy(into, part, (memory, target.memory), bucket.name)


def _initial_values(bucket: Bucket) -> Tensor:
    """Rank 0's full-precision values of the whole bucket: 1-D, Ψ, on the device. Collective."""
    placement = bucket.placement
    full = torch.zeros(bucket.layout.padded_numel, dtype=bucket.initial_dtype, device=placement.device)
    for view, parameter in zip(bucket.views(full), bucket.parameters, strict=True):
        view.copy_(full_values(parameter))
    return placement.mesh.world.broadcast_(full, f"broadcast the initial {bucket.name}")


def _distribute(bucket: Bucket, flat: Tensor, owned: Sequence[_Owned]) -> None:
    """Copies this rank's part of the initial values to the ``owned`` tensors, one parameter at a time. Collective.

    The parameters become views of ``flat``, which frees their own memory.
    """
    segments = {segment.param: segment for segment in bucket.segments}
    for index, parameter in enumerate(bucket.parameters):
        values = _broadcast(bucket, index)
        if (segment := segments.get(index)) is not None:
            part = values[segment.param_start : segment.param_start + segment.numel]
            for target in owned:
                _fill(bucket, target, segment.start, part, "device")
        del values  # before the next one is gathered
        parameter.data = bucket.view(flat, index)
        note_freed(parameter, parameter.nbytes)
        mark_freed(parameter, bucket.names[index])  # an error may come before all values have gone to the shards
    for parameter in bucket.parameters:
        mark_ordinary(parameter)


def _broadcast(bucket: Bucket, index: int) -> Tensor:
    """Rank 0's full values of one parameter: 1-D, on the device, the same on all ranks. Collective."""
    parameter, placement = bucket.parameters[index], bucket.placement
    sharded = isinstance(parameter, ShardedParameter)
    values = bucket.formats[index].flatten(full_values(parameter)).to(placement.device)
    what = f"broadcast the initial {bucket.names[index]}"
    return values if sharded else placement.mesh.world.broadcast_(values, what)


def _room_for_copy(bucket: Bucket) -> Rested | None:
    """A new tensor for the master (1-D, Ψ/S, in the optimizer's store); ``None`` if the shard is its own master."""
    form = bucket.placement.master(bucket.initial_dtype, bucket.dtype, bucket.optimized)
    if not form.pieces:
        return None
    numel, what = bucket.layout.shard_numel, f"the masters of {bucket.name}"
    copy = bucket.placement.optimizer_store.rest(numel, form.dtype, what, crosses=form.crosses)
    if copy.memory == "host":
        ops.zero_(copy.view(0, numel))  # the first touch places pages on the NUMA nodes of the threads that update them
    return copy


def begin_to_optimize(bucket: Bucket) -> None:
    """Makes a bucket ready for updates after an optimizer got one of its parameters. The same call on all ranks."""
    if not bucket.optimized:
        bucket.optimized = True
        _complete_master(bucket)


def begin_to_train(bucket: Bucket) -> None:
    """Makes the master of a bucket that was made for evaluation only, from the values of the shard.

    ``Bucket.rounded`` lists the parameters whose values were rounded. Edits of gathered parameters by user code that
    the shard does not have yet may be taken over later: they derive the master anew. The same call on all ranks.
    """
    bucket.placement = bucket.placement._replace(trains=True)
    _complete_master(bucket)


def load_full(bucket: Bucket, index: int, values: Tensor) -> None:
    """Loads values of a parameter as :meth:`Bucket.load` does, into a new master if the shard is one and rounds them.

    An optimizer may get the parameter later, and continues from these values. The same call on all ranks.
    """
    placement = bucket.placement
    wider = values.dtype.itemsize > bucket.initial_dtype.itemsize
    if wider and placement.trains and placement.precision.needs_master(bucket.dtype):
        bucket.initial_dtype = torch.float32
        _complete_master(bucket)
    bucket.load({index: values})


def _complete_master(bucket: Bucket) -> None:
    if isinstance(bucket.master, NoMaster) and (copy := _room_for_copy(bucket)) is not None:
        placement = bucket.placement
        target = _Owned(copy, placement.optimizer_store.memory)
        for low, high in pieces(bucket.shard.tile, 0, bucket.shard.numel):
            _fill(bucket, target, low, bucket.shard.read(low, high), placement.shard_memory)
        bucket.master = CopyMaster(bucket.shard, copy, StoreHome(placement, bucket.name))


@torch.no_grad()
def lay_out_master(bucket: Bucket, split: bool) -> None:
    """Converts the master of a 16-bit bucket to the layout of the CPU optimizers: fp32 in host memory.

    Afterwards bf16 values halfway between two numbers are rounded away from zero, with both layouts. The same call on
    all ranks.

    Args:
        bucket: the bucket; nothing changes if it is not a 16-bit one, has the layout already or is its own master.
        split: keep the low halves of the masters in a tensor and use the shard as the high halves; otherwise keep whole
            fp32 values in one tensor.
    """
    master = bucket.master
    fitting = isinstance(master, SplitMaster) if split else getattr(master, "ties", None) == "away"
    if bucket.dtype.itemsize == 2 and not fitting and not isinstance(master, NoMaster):
        bucket.await_moves()
        if bucket.state is BucketState.GATHERED or not bucket.shards_params:
            absorb_edits([bucket])
        store, numel = bucket.placement.optimizer_store, bucket.layout.shard_numel
        home, what = StoreHome(bucket.placement, bucket.name), f"the masters of {bucket.name}"
        if split:
            form, shard = bucket.placement.split_master(bucket.dtype), bucket.shard
            remainder, *high = (store.rest(numel, dtype, what) for dtype in form.pieces)
            if form.tile:
                shard = StagedTensor(shard, bucket.placement.executor, f"the high halves of {bucket.name}")
            bucket.master = SplitMaster(shard, high[0] if high else None, remainder, home)
        elif isinstance(master, CopyMaster):
            bucket.master = CopyMaster(bucket.shard, master.values, home, ties="away")
        else:
            bucket.master = CopyMaster(bucket.shard, store.rest(numel, master.dtype, what), home, ties="away")
        if not isinstance(master, CopyMaster) or split:
            for low, stop in pieces(bucket.master.tile, 0, numel):
                bucket.master.keep(low, master.read(low, stop).to("cpu", torch.float32))
        bucket.publish(0, numel)
        bucket.mark_updated(range(len(bucket.parameters)))


def release(bucket: Bucket) -> None:
    """Gives every parameter an ordinary tensor at full precision; the bucket is of no use afterwards. Collective."""
    if bucket.state is BucketState.GATHERED:
        bucket.absorb_edits()
    _hand_back(bucket, bucket.gather_master())


@torch.no_grad()
def give_up(bucket: Bucket) -> None:
    """Releases a new bucket after an error, which other ranks may not have: without communication.

    The parameters get the values that this rank has, rounded ones if the masters are in shards. If it has only a shard
    of the parameters, they stay freed; :func:`~lightning_zero.sharding.partition.check_initialized` finds them.
    """
    if bucket.layout.shards == 1:
        _hand_back(bucket, bucket.gather_master())
    elif bucket.shards_params:
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            mark_freed(parameter, name)
    else:
        if bucket.master.dtype != bucket.dtype:
            bucket.rounded.update(range(len(bucket.parameters)))
        _hand_back(bucket, bucket.flat)


def _hand_back(bucket: Bucket, full: Tensor) -> None:
    """Gives the parameters tensors of their own, with values of the layout of ``flat``."""
    for index, (view, parameter) in enumerate(zip(bucket.views(full), bucket.parameters, strict=True)):
        mark_ordinary(parameter)
        release_parameter(parameter)
        if index in bucket.rounded:
            parameter.data = view.to(bucket.initial_dtype)
            mark_rounded(parameter, bucket.dtype)
        else:
            parameter.data = view.clone()
