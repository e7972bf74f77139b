"""Shows the masters of a bucket in its parameters, which are views of another tensor than ``flat`` meanwhile."""

from __future__ import annotations

import torch

from lightning_zero.sharding.bucket import Bucket, BucketState


@torch.no_grad()
def show_masters(bucket: Bucket) -> bool:
    """Gives the parameters the gathered values of the masters; resharding does not free them. Collective.

    The bucket must be pinned.

    Returns:
        Whether :func:`end_masters` must follow, since the parameters are views of another tensor than ``flat`` now.
    """
    if bucket.full is not None:
        return False
    if bucket.master.dtype == bucket.dtype and not bucket.shards_params:
        bucket.unshard()
        return False
    if bucket.state is BucketState.GATHERED:
        bucket.absorb_edits()
    bucket.show(bucket.gather_master())
    return True


@torch.no_grad()
def take_masters(bucket: Bucket, writeback: bool) -> None:
    """Takes over edits of the parameters, which show masters and go on doing so. Collective.

    Args:
        bucket: the bucket.
        writeback: take over all of rank 0's values on all ranks; otherwise each rank's own of changed parameters.
    """
    full = bucket.full
    assert full is not None
    edited = bucket.edits.find(full, bucket.view, everything=writeback)
    if writeback:
        bucket.placement.mesh.world.broadcast_(full, f"write back {bucket.name}")
    if edited:
        bucket.load({index: bucket.view(full, index) for index in sorted(edited)})


def end_masters(bucket: Bucket, writeback: bool) -> None:
    """Makes the parameters views of ``flat`` again, after :func:`take_masters`. Collective."""
    take_masters(bucket, writeback)
    bucket.show(None)
