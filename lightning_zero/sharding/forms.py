"""Computes sizes, dtypes and places of a bucket's tensors before they are made; a plan makes none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import Parameter

from lightning_zero.sharding.layout import FlatLayout, Segment
from lightning_zero.sharding.partition import BucketSpec, layout_of
from lightning_zero.sharding.placement import BucketPlacement, MasterForm


@dataclass(frozen=True)
class BucketForm:
    """A bucket of which no tensor has been made: what :class:`~lightning_zero.sharding.bucket.Bucket` is made by.

    Attributes:
        spec: its parameters, dtypes and flags.
        shared: the placement that the buckets of the engine share.
    """

    spec: BucketSpec
    shared: BucketPlacement

    @cached_property
    def placement(self) -> BucketPlacement:
        """The placement of this bucket; that of a persistent or resident bucket differs from the shared one."""
        return self.spec.placed(self.shared)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters in module order."""
        return tuple(spec.parameter for spec in self.spec.specs)

    @property
    def optimized(self) -> bool:
        """Whether an optimizer may update them."""
        return self.spec.optimized

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in forward and backward."""
        return self.spec.dtype

    @cached_property
    def layout(self) -> FlatLayout:
        """Offsets in the flat buffer."""
        return layout_of(self.spec, self.shared)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of this rank."""
        return self.layout.segments(self.placement.mesh.shard.rank)

    @cached_property
    def master(self) -> MasterForm:
        """The form of the master that the bucket is made with."""
        return self.placement.master(self.spec.given, self.dtype, self.spec.optimized)

    @property
    def trained(self) -> bool:
        """Whether its gradients are reduced and its parameters updated."""
        return self.spec.optimized and any(p.requires_grad for p in self.parameters)
