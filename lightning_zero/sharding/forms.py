"""Buckets before any of their tensors is made: their sizes, dtypes and places, by the rules that make the tensors."""

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
    """A bucket before any of its tensors is made.

    Attributes:
        spec: its parameters.
        of: what the buckets of the engine share.
    """

    spec: BucketSpec
    of: BucketPlacement

    @property
    def placement(self) -> BucketPlacement:
        """Its own placement, which for persistent parameters is not that of all."""
        return self.spec.placed(self.of)

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
        """The dtype that forward and backward see."""
        return self.spec.dtype

    @cached_property
    def layout(self) -> FlatLayout:
        """Offsets in the flat buffer."""
        return layout_of(self.spec, self.of)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of this rank."""
        return self.layout.segments(self.placement.mesh.shard.rank)

    @cached_property
    def master(self) -> MasterForm:
        """The master that the bucket is made with."""
        return self.placement.master(self.spec.given, self.dtype, self.spec.optimized)

    @property
    def trained(self) -> bool:
        """Whether it is reduced and updated."""
        return self.spec.optimized and any(p.requires_grad for p in self.parameters)
