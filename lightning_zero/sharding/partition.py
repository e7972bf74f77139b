"""Divides a module tree into units, and the parameters of the units into buckets.

A *unit* is a module whose parameters are gathered together at stage 3. By default the units are the outermost repeated
blocks (the layers of a transformer, the stages of a ResNet). Parameters outside every unit belong to the *root*; they
stay gathered during the whole step. The parameters of a unit are split into buckets by their dtype and by whether an
optimizer may update them.
"""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.collective_errors import CollectiveError
from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.compiled import inside_graphs, named_modules, original, plain_name
from lightning_zero.sharding.freed import FreedParameter
from lightning_zero.sharding.layout import FlatLayout
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.sharding.rounded import lost_digits, rounded_to
from lightning_zero.sharding.sharded_init import ShardedParameter
from lightning_zero.torch_private import is_traceable_wrapper_subclass

ROOT = "(root)"
MAX_IMBALANCE = 0.2  # of whole-parameter layouts, see `FlatLayout.imbalance`; larger ones waste memory and traffic

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    nn.LocalResponseNorm,
)
# Normalization layers that libraries define themselves (LlamaRMSNorm, T5LayerNorm, LayerNorm2d, ...).
_NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together, and its name in the module tree."""

    name: str
    module: nn.Module


class ParameterSpec(NamedTuple):
    """A parameter and its name in the module tree (its first name if it is tied)."""

    name: str
    parameter: Parameter


@dataclass
class BucketSpec:
    """Describes a bucket that is to be made.

    Attributes:
        units: names of the units that share it (:data:`ROOT` for the root).
        given: dtype of the parameters in the user's module.
        dtype: dtype of the parameters in forward and backward.
        optimized: whether an optimizer may update the parameters.
        persistent: whether the parameters stay unsharded at stage 3.
        whole: whether each parameter lies entirely in one shard.
        resident: whether masters, optimizer state and gradients stay on the device while those of other buckets are
            offloaded.
        gradients_rest: whether the sharded gradient rests on a disk, provided that the optimizer state does.
        specs: the parameters in module order.
    """

    units: list[str]
    given: torch.dtype
    dtype: torch.dtype
    optimized: bool
    persistent: bool = False
    whole: bool = False
    resident: bool = False
    gradients_rest: bool = False
    specs: list[ParameterSpec] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(spec.parameter.numel() for spec in self.specs)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def in_root(self) -> bool:
        """Whether the bucket stays unsharded during a whole step."""
        return ROOT in self.units or self.persistent

    def placed(self, placement: BucketPlacement) -> BucketPlacement:
        """The placement of this bucket, derived from the ``placement`` that all buckets share."""
        own = placement.resident() if self.resident else placement
        own = own.persistent() if self.persistent else own
        return own._replace(whole=own.whole or self.whole, gradients_rest=self.gradients_rest)


class Partition(NamedTuple):
    """The units and buckets of a module.

    Attributes:
        units: in module order.
        buckets: in forward order.
    """

    units: list[Unit]
    buckets: list[BucketSpec]


def partition(
    root: nn.Module,
    placement: BucketPlacement,
    optimized: Iterable[Parameter] | None,
    units: Sequence[str | type[nn.Module]] | None,
    bucket_size_mb: float,
    persistence_numel: int,
    dtypes: Mapping[int, torch.dtype] | None = None,
    whole: Iterable[Parameter] = (),
) -> Partition:
    """Divides ``root`` into units and buckets.

    Args:
        root: the module tree.
        placement: groups, policies, device and stores, shared by all buckets.
        optimized: the parameters that an optimizer may update; ``None``: those that require a gradient.
        units: see :func:`find_units`.
        bucket_size_mb: size in 2^20 bytes up to which units share a bucket.
        persistence_numel: see :func:`make_buckets`.
        dtypes: by parameter id, the dtypes that parameters had before an engine changed them.
        whole: parameters that must each lie entirely in one shard. If there are any, the parameters that no optimizer
            has yet lie so too, because the same optimizer may get them later.

    Raises:
        ValueError: ``bucket_size_mb`` is not greater than 0, or there are several ranks and a module's forward changes
            parameters; also the errors of :func:`find_units`.
        TypeError: see :func:`make_buckets`.
    """
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb!r} must be greater than 0; 25 is a good start")
    if placement.mesh.world.size > 1:
        _check_forward_changes_nothing(root, placement.mesh.world.size)
    if optimized is None:
        optimized = (p for p in root.parameters() if p.requires_grad)
    chosen, size = {id(p) for p in optimized}, int(bucket_size_mb * 2**20)
    found = find_units(root, units)
    whole_ids = {id(p) for p in whole}
    if whole_ids:
        whole_ids |= {id(p) for p in root.parameters()} - chosen

    def balanced(spec: BucketSpec) -> bool:
        return layout_of(spec, placement).imbalance <= MAX_IMBALANCE

    rest = placement.sharding, placement.precision, size, persistence_numel, dtypes
    buckets = make_buckets(root, found, chosen, *rest, whole_ids, balanced)
    keep_last_on_device(buckets, placement.offload_fraction)
    rest_gradients(buckets, placement)
    return Partition(found, buckets)


def keep_last_on_device(buckets: Iterable[BucketSpec], offloaded: float) -> None:
    """Offloads the first buckets that an optimizer updates, and marks the others as resident.

    Args:
        buckets: in forward order.
        offloaded: fraction of the updated elements to offload, in (0, 1]. The bucket in which the fraction ends is
            offloaded, so the first one always is.
    """
    updated = [spec for spec in buckets if spec.optimized]
    enough, before = offloaded * sum(spec.numel for spec in updated), 0
    for spec in updated:
        spec.resident = 0 < enough <= before
        before += spec.numel


def rest_gradients(buckets: Iterable[BucketSpec], placement: BucketPlacement) -> None:
    """Marks the buckets whose sharded gradients rest on a disk: all buckets whose optimizer state does, or none.

    If ``placement.gradients_rest`` is ``None``, the gradients rest on the disk when those of the rank, in the dtype in
    which micro-batches are summed, do not fit into the memory for tiles in transit (``TensorStore.passing_bytes``).
    """
    on_disk = [spec for spec in buckets if spec.optimized and spec.placed(placement).optimizer_store.tile is not None]
    sizes = [layout_of(s, placement).shard_numel * placement.widest_gradient(s.dtype).itemsize for s in on_disk]
    fits = sum(sizes) <= placement.optimizer_store.passing_bytes
    for spec in on_disk:
        spec.gradients_rest = not fits if placement.gradients_rest is None else placement.gradients_rest


def layout_of(spec: BucketSpec, placement: BucketPlacement) -> FlatLayout:
    """The layout of a bucket, derived from the ``placement`` that all buckets share."""
    return spec.placed(placement).layout(tuple(s.parameter.numel() for s in spec.specs), spec.dtype)


def _check_forward_changes_nothing(root: nn.Module, ranks: int) -> None:
    for name, module in named_modules(root):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name!r} has max_norm={module.max_norm}: its forward renormalizes the rows of the weight that "
                f"a rank looks up, and {ranks} ranks look up different rows, so that their weights would differ. Set "
                f"max_norm=None and renormalize all rows after each step, on all ranks"
                f"{advice(Case.RENORMALIZED_IN_FORWARD, ': ').format(name=name, module=module)}"
            )


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a normalization layer: one of torch's, or one whose class name says so."""
    return isinstance(module, _NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def find_units(root: nn.Module, patterns: Sequence[str | type[nn.Module]] | None = None) -> list[Unit]:
    """Finds the units of ``root``, in module order; units never nest.

    Args:
        root: the module tree.
        patterns: classes, class names or :mod:`fnmatch` patterns of module names; each matching module becomes a unit,
            unless it lies in one. ``None``: the outermost repeated blocks.

    Raises:
        ValueError: a pattern matches no module with parameters.
    """
    if patterns is None:
        return list(_repeated_blocks(original(root), ""))
    units: list[Unit] = []
    unmatched = list(patterns)
    for name, module in named_modules(root):
        candidate = module is not root and _has_parameters(module)
        hits = [p for p in patterns if candidate and _matches(p, name, module)]
        unmatched = [p for p in unmatched if p not in hits]
        inside = any(name.startswith(f"{unit.name}.") for unit in units)
        if hits and not inside:
            units.append(Unit(name, module))
    if unmatched:
        candidates = (original(m) for m in root.modules() if m is not root and _has_parameters(m))
        classes = sorted({type(m).__name__ for m in candidates})
        raise ValueError(
            f"units={unmatched} match no module of {type(root).__name__}; give class names (here: "
            f"{', '.join(classes)}) or patterns of module names such as 'transformer.h.*'"
        )
    return units


def _matches(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(original(module), pattern)
    return type(original(module)).__name__ == pattern or fnmatch.fnmatchcase(name, pattern)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[Unit]:
    """Walks depth first; a container with two or more composite children of one class yields these children.

    An expert is never a unit of its own, since a rank may route nothing to it. If a container of experts lies outside
    every block, the module that holds the container is the unit; experts that the root itself holds belong to the root.
    """
    blocks = _blocks_of(module) if isinstance(module, _CONTAINERS) else set()
    for child_name, child in module.named_children():
        name = plain_name(f"{prefix}{child_name}")
        if child_name in blocks or _holds_experts(child):
            yield Unit(name, child)
        elif not _is_experts(child_name, child):
            yield from _repeated_blocks(original(child), f"{name}.")


def _blocks_of(container: nn.Module) -> set[str]:
    children = {k: original(m) for k, m in container.named_children()}
    composite = {k: m for k, m in children.items() if _has_parameters(m) and any(True for _ in m.children())}
    counts = Counter(type(m) for m in composite.values())
    return {k for k, m in composite.items() if counts[type(m)] >= 2}


def _holds_experts(module: nn.Module) -> bool:
    return any(_is_experts(name, child) for name, child in original(module).named_children())


def _is_experts(name: str, module: nn.Module) -> bool:
    return "expert" in name.lower() and isinstance(original(module), _CONTAINERS)


def make_buckets(
    root: nn.Module,
    units: Sequence[Unit],
    optimized: set[int],
    sharding: ShardingPolicy,
    precision: MixedPrecisionPolicy,
    bucket_size: int,
    persistence_numel: int = 0,
    dtypes: Mapping[int, torch.dtype] | None = None,
    whole: Collection[int] = (),
    balanced: Callable[[BucketSpec], bool] = lambda spec: True,
) -> list[BucketSpec]:
    """Makes the specs of the buckets of ``root`` in forward order: those of the root first, then those of each unit.

    Args:
        root: the module tree.
        units: see :func:`find_units`.
        optimized: ids of the parameters that an optimizer may update.
        sharding: neighbouring small units share buckets of parameters that stay unsharded: all at stages 0 to 2, the
            persistent ones at stage 3.
        precision: determines the dtype of each parameter.
        bucket_size: size in bytes up to which units share a bucket.
        persistence_numel: number of elements up to which a parameter stays unsharded at stage 3.
        dtypes: see :func:`partition`.
        whole: ids of the parameters that must each lie entirely in one shard; these have separate buckets.
        balanced: whether the shards of a bucket are about equally full. A bucket of whole parameters takes in further
            units until it is balanced, even beyond ``bucket_size``.

    Raises:
        TypeError: see :func:`check_supported`.
    """
    check_supported(root)
    members = parameters_by_unit(root, units)
    norms = {id(p) for m in root.modules() if is_norm(m) for p in m.parameters(recurse=False)}
    buckets: list[BucketSpec] = []
    open_buckets: dict[tuple[torch.dtype, torch.dtype, bool, bool, str | None], BucketSpec] = {}
    for unit, specs in members.items():
        for spec in specs:
            given = (dtypes or {}).get(id(spec.parameter), spec.parameter.dtype)
            dtype = precision.target_dtype(given, id(spec.parameter) in norms)
            is_optimized = id(spec.parameter) in optimized
            is_whole = id(spec.parameter) in whole
            persistent = sharding.shard_params and 0 < spec.parameter.numel() <= persistence_numel
            alone = sharding.shard_params and not persistent  # freed with its unit: units cannot share the bucket
            key = (given, dtype, is_optimized, is_whole, unit if alone else None)
            bucket = open_buckets.get(key)
            if bucket is None or (
                unit not in bucket.units and bucket.nbytes >= bucket_size and (not bucket.whole or balanced(bucket))
            ):
                bucket = open_buckets[key] = BucketSpec([], given, dtype, is_optimized, persistent, is_whole)
                buckets.append(bucket)
            if unit not in bucket.units:
                bucket.units.append(unit)
            bucket.specs.append(spec)
    return buckets


def check_compiled(root: nn.Module, units: Sequence[Unit]) -> None:
    """Checks that no unit lies inside a compiled module, where it could not gather its parameters.

    Raises:
        ValueError: a unit does; the message names it and the compiled module.
    """
    around = inside_graphs(root)
    for unit in units:
        if (compiled := around.get(id(unit.module))) is not None:
            name = next(name for name, module in named_modules(root) if module is compiled)
            as_unit = advice(Case.COMPILED_AS_A_WHOLE, ", ").format(name=name) if name else ""
            raise ValueError(
                f"{name or type(root).__name__} is compiled as a whole: at stage 3 its graph cannot gather the "
                f"parameters of {unit.name!r} inside it. Compile the units instead, each by `.compile()`{as_unit}"
            )


def check_initialized(buckets: Sequence[BucketSpec]) -> None:
    """Checks that all parameters have values; parameters without values can be planned with, but not trained.

    Raises:
        ValueError: a parameter is on the meta device, or its values are gone.
    """
    for name, parameter in (spec for bucket in buckets for spec in bucket.specs):
        if isinstance(parameter, FreedParameter) and not isinstance(parameter, ShardedParameter):
            raise ValueError(
                f"parameter {name!r} is freed, and its values are gone: an error or an interrupt ended the set-up in "
                "which they were sharded. Make the module again"
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values; before training call "
                f"`to_empty(device=...)` and initialize it{advice(Case.MADE_LATE, '; ')}"
            )


def check_exact(buckets: Sequence[BucketSpec], placement: BucketPlacement) -> None:
    """Checks that no parameter was rounded to a lower precision than its bucket needs (see ``rounded.py``).

    Args:
        buckets: the buckets to be made.
        placement: the placement that they share.

    Raises:
        ValueError: a parameter was rounded; the message names it.
    """
    for spec in buckets:
        needed = spec.placed(placement).master(spec.given, spec.dtype, spec.optimized).dtype
        for name, parameter in spec.specs:
            had = rounded_to(parameter)
            if had is not None and torch.promote_types(had, needed) != had:
                raise lost_digits(name, had, needed)


def check_same(buckets: Sequence[BucketSpec], world: Group) -> None:
    """Checks that all ranks hold the same parameters, without which their collectives would not match. Collective.

    Raises:
        CollectiveError: the parameters differ; raised on all ranks, and names one of them.
    """
    mine = {
        spec.name: f"{tuple(spec.parameter.shape)} {spec.parameter.dtype}{', optimized' if bucket.optimized else ''}"
        f"{', whole' if bucket.whole else ''}"
        for bucket in buckets
        for spec in bucket.specs
    }
    checksums = world.all_gather_object(zlib.crc32(repr(mine).encode()), "compare the modules")
    if len(set(checksums)) > 1:
        first, *others = world.all_gather_object(mine, "compare the modules")
        for rank, other in enumerate(others, start=1):
            for name in [*first, *other]:
                if first.get(name) != other.get(name):
                    raise CollectiveError(
                        f"the ranks hold different modules: parameter {name!r} is {first.get(name, 'missing')} on "
                        f"rank 0 and {other.get(name, 'missing')} on rank {rank}. Build the same module, and give "
                        "the optimizers the same parameters, on all ranks"
                    )
        raise CollectiveError("the ranks hold the same parameters in different orders; build the same module")


def parameters_by_unit(root: nn.Module, units: Sequence[Unit]) -> dict[str, list[ParameterSpec]]:
    """Lists each parameter once, under the name of its unit; the root gets those that several units share."""
    owners: dict[int, set[str]] = {}
    for unit in units:
        for parameter in unit.module.parameters():
            owners.setdefault(id(parameter), set()).add(unit.name)
    inside = {id(p) for unit in units for p in unit.module.parameters()}
    for module in _outside(root, units):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in inside:  # shared by a unit and a module outside every unit
                owners[id(parameter)].add(ROOT)
    members: dict[str, list[ParameterSpec]] = {ROOT: [], **{unit.name: [] for unit in units}}
    for name, parameter in root.named_parameters():
        where = owners.get(id(parameter), {ROOT})
        members[next(iter(where)) if len(where) == 1 else ROOT].append(ParameterSpec(plain_name(name), parameter))
    return members


def _outside(root: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    inside = {id(m) for unit in units for m in unit.module.modules()}
    return [m for m in root.modules() if id(m) not in inside]


def check_supported(root: nn.Module) -> None:
    """Checks that a module can be sharded, before anything is allocated.

    Raises:
        TypeError: a parameter is not real and dense (it is complex, sparse, quantized, nested, a DTensor or lazy), or a
            module has sparse gradients, or is a script of torch.jit.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(
                f"module {name!r} is {module}: sparse gradients cannot be sharded. Use sparse=False"
                f"{advice(Case.CANNOT_BE_SHARDED, ', ')}"
            )
        if isinstance(module, torch.jit.ScriptModule) and _has_parameters(module):
            raise TypeError(
                f"module {name!r} is a script of torch.jit, which takes no hooks, so that its parameters cannot be "
                "gathered. Use the module of which it was made (torch.jit.load: its class, with the script's "
                "`state_dict()`), or, if it is not trained, keep it out of the module tree (`self.frozen = [script]`)"
                f"{advice(Case.CANNOT_BE_SHARDED, ', ')}"
            )
    for name, parameter in root.named_parameters():
        _check_parameter(plain_name(name), parameter)


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if not isinstance(parameter, Parameter) or isinstance(parameter, nn.parameter.UninitializedParameter):
        raise TypeError(
            f"parameter {name!r} is a {type(parameter).__name__}, which has no shape yet; run one forward pass of the "
            f"lazy module before training{advice(Case.MADE_LATE, '; ')}"
        )
    wraps: bool = is_traceable_wrapper_subclass(parameter)
    if wraps or parameter.is_nested or parameter.is_quantized:
        kind = "quantized" if parameter.is_quantized else "nested" if parameter.is_nested else type(parameter).__name__
        raise TypeError(
            f"parameter {name!r} is {parameter.dtype}, {kind}; sharding needs plain tensors. Convert it "
            f"(`dequantize()`, `to_padded_tensor(0.0)`, `full_tensor()`){advice(Case.CANNOT_BE_SHARDED, ', ')}"
        )
    if parameter.is_complex() or parameter.layout is not torch.strided:
        raise TypeError(
            f"parameter {name!r} is {parameter.dtype} with layout {parameter.layout}; sharding needs real, dense "
            f"parameters. Store it as a real tensor with a last dimension of 2{advice(Case.CANNOT_BE_SHARDED, ', ')}"
        )
