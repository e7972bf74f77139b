"""Reads DeepSpeed's ZeRO folders without the values of their tensors.

A folder contains, in the inner folder that its file `latest` names:

- Stages 1 and 2: `mp_rank_00_model_states.pt`, with the full 16-bit module, and for each rank
  `[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt`. The trainable parameters of a group form one flat vector, in the
  order of `param_shapes`, possibly each followed by its padding of `param_alignment_paddings`. The vector is cut into
  equal shards, one per rank. Fp32 masters lack the padding at the end of the vector, optimizer state has it.
- Stage 3: both kinds of files for each rank. Each parameter is cut into equal shards, of which the last one is padded.
  A rank's shards of the parameters of a sub-group form one flat vector. Frozen parameters are in
  `frozen_param_fragments`.

These files are pickles. DeepSpeed need not be installed: its objects are read as :class:`Remains`.
"""

from __future__ import annotations

import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint import CheckpointError
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.tools.contents import UNREADABLE, Opaque

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_UNSUPPORTED = {
    r"(layer_\d+_expert_\d+_|expert_\d+_|expp_rank_).*": "holds mixture-of-experts layers, split over expert ranks",
    r"layer_\d+-model_.*": "was written by a pipeline-parallel run",
    r".*mp_rank_(?!00_)\d+.*": "was written by a tensor- or pipeline-parallel run",
    r"offloaded_tensors": "keeps its state in the files of an NVMe offload",
    r"zero": "is a universal checkpoint",
}
_WIDE = (torch.float32, torch.float64)


class Remains(Opaque):
    """A placeholder for an object of a class that is not installed, with its constructor arguments and attributes."""

    def __new__(cls, *args: Any, **_: Any) -> Self:
        remains = super().__new__(cls)
        remains.args = args
        remains.attributes = {}
        return remains

    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignores an entry, if the class is a dictionary."""

    def extend(self, values: Any) -> None:
        """Ignores items, if the class is a list."""

    append = extend


class _Unpickler(pickle.Unpickler):
    """Imports nothing from DeepSpeed, and replaces classes that cannot be imported by :class:`Remains`."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] != "deepspeed":
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                pass
        return type("Remains", (Remains,), {"name": f"{module}.{name}"})


# ---------------------------------------------------------------------------------------------------------- the files


def tag_folder(folder: Path) -> Path:
    """Find the folder with the files: ``folder`` itself, or the one that its file `latest` names.

    Raises:
        CheckpointError: there is none.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {problem}; DeepSpeed writes folders.")
    if any(folder.glob("*_states.pt")):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        directory = folder / latest.read_text(encoding="utf-8").strip()
        if directory.is_dir():
            return directory
        raise CheckpointError(f"{folder} has no folder {directory.name}, although its file 'latest' names it.")
    tags = sorted(str(path) for path in folder.iterdir() if any(path.glob("*_states.pt")))
    hint = f"name one of {', '.join(tags)}" if tags else "it has no file 'latest' and no *_states.pt"
    raise CheckpointError(f"{folder} is not a folder of DeepSpeed: {hint}.")


def load(path: Path) -> dict[str, Any]:
    """Load one file, with its tensors mapped.

    Raises:
        CheckpointError: the file is damaged or has other contents than DeepSpeed writes.
    """
    try:
        loaded = torch.load(
            path,
            map_location="cpu",
            mmap=True,
            weights_only=False,
            pickle_module=SimpleNamespace(__name__=__name__, Unpickler=_Unpickler),
        )
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read, it may be damaged ({type(error).__name__}: {error}).") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}; DeepSpeed writes dictionaries.")
    return loaded


def _check_kind(directory: Path) -> None:
    """Raise if a file name shows another kind of parallelism or of checkpoint."""
    for path in sorted(directory.iterdir()):
        for pattern, what in _UNSUPPORTED.items():
            if re.fullmatch(pattern, path.name):
                raise CheckpointError(
                    f"{directory} {what} ({path.name}), which cannot be converted. Supported are data-parallel runs at "
                    "ZeRO stages 1, 2 and 3 without experts, with state on the device or in host memory."
                )


def _optimizer_files(directory: Path) -> list[Path]:
    """The existing files of optimizer states, one per rank, in rank order."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        if match := _OPTIMIZER.fullmatch(path.name):
            other = found.setdefault(int(match[1]), path)
            if other is not path:
                raise CheckpointError(f"{directory} holds two saves, {other.name} and {path.name}: remove one of them.")
    if not found:
        raise CheckpointError(
            f"{directory} has no *_optim_states.pt of ZeRO stage 1, 2 or 3. At stage 0 nothing is sharded: "
            "torch.load reads weights and optimizer state from mp_rank_00_model_states.pt."
        )
    return [found[rank] for rank in sorted(found)]


# --------------------------------------------------------------------------------------------------------- the layouts


class Slice(NamedTuple):
    """A range of a rank's flat vector."""

    rank: int
    start: int
    stop: int


class Place(NamedTuple):
    """The position of a parameter's elements: slices of the vectors of one group (at stage 3: sub-group), in order."""

    name: str
    shape: torch.Size
    vector: int
    slices: list[Slice]

    def values(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The parameter's slices of ``vectors``, one vector per rank."""
        return [vectors[rank].detach()[start:stop] for rank, start, stop in self.slices]


@dataclass(frozen=True)
class Run(ABC):
    """The contents of a folder.

    Attributes:
        directory: the folder of the files.
        models: model states by rank; at stages 1 and 2 only those of rank 0.
        optimizers: optimizer states by rank.
        stage: ZeRO stage.
    """

    directory: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    stage: int

    masters_key: ClassVar[str]
    base_key: ClassVar[str]  # key of the state dict of the optimizer that DeepSpeed wraps
    vectors: ClassVar[str]  # DeepSpeed's word for the parameters in one flat vector, for messages

    @staticmethod
    @abstractmethod
    def model_files(ranks: int) -> list[str]:
        """Names of the files of model states."""

    @abstractmethod
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[Place]:
        """Compute the positions of the parameters in a vector.

        Args:
            vector: number of the vector.
            shapes: shapes of its parameters, in order.
            sizes: number of elements in each rank's shard, without the padding at the end of the vector.

        Raises:
            CheckpointError: sizes and shapes do not match.
        """

    @abstractmethod
    def unsharded(self) -> dict[str, LazyTensor]:
        """Frozen parameters and buffers."""

    def as_given(self, names: list[str]) -> list[str]:
        """Sort a group's parameters into the order in which the user passed them, which plain torch relies on."""
        return names

    @property
    def model(self) -> dict[str, Any]:
        return self.models[0]

    @property
    def version(self) -> str:
        return str(self.model.get("ds_version", "of an unknown version"))

    @property
    def shared(self) -> dict[str, str]:
        """Maps each further name of a tied parameter to the name under which it is stored."""
        return dict(self.model.get("shared_params") or {})

    @property
    def lightning(self) -> bool:
        return "pytorch-lightning_version" in self.model

    @property
    def shapes(self) -> list[dict[str, torch.Size]]:
        """Shapes of the trainable parameters of each group (at stage 3: sub-group), in the order of their elements."""
        return [{name: torch.Size(shape) for name, shape in group.items()} for group in self.model["param_shapes"]]

    def base(self, rank: int) -> dict[str, Any]:
        """The state dict of the wrapped optimizer: torch's format, with flat vectors in the place of parameters."""
        found = self.optimizers[rank][self.base_key]
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.directory} is an 'elastic_checkpoint', which has no hyperparameters.")
        return found

    def masters(self, vector: int) -> list[Tensor]:
        """The flat vectors of fp32 weights, by rank."""
        return [optimizer[self.masters_key][vector] for optimizer in self.optimizers]

    def places(self) -> list[Place]:
        """The positions of all trainable parameters.

        Raises:
            CheckpointError: the lengths of the vectors do not match the shapes.
        """
        places: list[Place] = []
        for vector, shapes in enumerate(self.shapes):
            sizes = [master.numel() for master in self.masters(vector)]
            places += self.cut(vector, shapes, sizes)
        return places

    def _unlike(self, vector: int, needed: int, found: int) -> str:
        return (
            f"{self.directory}: the parameters of {self.vectors} {vector} have {needed} elements in the model's file "
            f"and {found} in the optimizer's; do both come from one save?"
        )


class _Flat(Run):
    """A run at stage 1 or 2: a group's parameters are one vector, cut into shards."""

    masters_key: ClassVar[str] = "single_partition_of_fp32_groups"
    base_key: ClassVar[str] = "base_optimizer_state"
    vectors: ClassVar[str] = "group"

    @staticmethod
    @override
    def model_files(ranks: int) -> list[str]:
        return ["mp_rank_00_model_states.pt"]

    @override
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[Place]:
        all_paddings = self.optimizers[0].get("param_alignment_paddings")
        paddings = all_paddings[vector] if all_paddings else [0] * len(shapes)
        needed = sum(map(math.prod, shapes.values())) + sum(paddings)
        if not 0 <= sum(sizes) - needed < 2 * len(sizes):  # the vector is padded to a multiple of this
            raise CheckpointError(self._unlike(vector, needed, sum(sizes)))
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            stop = start + math.prod(shape)
            yield Place(name, shape, vector, list(_overlaps(start, stop, sizes)))
            start = stop + padding

    @override
    def unsharded(self) -> dict[str, LazyTensor]:
        return _unsharded(self.model["module"], [name for name in self.model["module"] if name not in self.shared])

    @override
    def as_given(self, names: list[str]) -> list[str]:
        settings = self.model.get("ds_config")
        settings = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
        if not isinstance(settings, Mapping) or not settings.get("round_robin_gradients"):
            return names
        ranks = len(self.optimizers)  # the vector has parameters 0, ranks, 2 * ranks, ..., then 1, ranks + 1, ...
        dealt = [index for rank in range(ranks) for index in range(rank, len(names), ranks)]
        return [name for _, name in sorted(zip(dealt, names, strict=True))]


class _Split(Run):
    """A run at stage 3: each parameter is cut into shards."""

    masters_key: ClassVar[str] = "fp32_flat_groups"
    base_key: ClassVar[str] = "optimizer_state_dict"
    vectors: ClassVar[str] = "sub-group"

    @staticmethod
    @override
    def model_files(ranks: int) -> list[str]:
        return [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]

    @override
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[Place]:
        shards = {name: -(-math.prod(shape) // len(sizes)) for name, shape in shapes.items()}
        needed = sum(shards.values())
        if any(size != needed for size in sizes):
            raise CheckpointError(self._unlike(vector, needed, next(size for size in sizes if size != needed)))
        start = 0
        for name, shape in shapes.items():
            lengths = _lengths(math.prod(shape), len(sizes))
            yield Place(name, shape, vector, [Slice(rank, start, start + n) for rank, n in enumerate(lengths)])
            start += shards[name]

    @override
    def unsharded(self) -> dict[str, LazyTensor]:
        module, buffers = self.model["module"], self.model["buffer_names"]
        # Only buffers and extra state, since the parameters in `module` are empty.
        tensors = _unsharded(module, [n for n in module if n in buffers or n.endswith("_extra_state")])
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            fragments = [model["frozen_param_fragments"][name].detach() for model in self.models]
            lengths = _lengths(math.prod(shape), len(fragments))
            slices = [fragment.reshape(-1)[:n] for fragment, n in zip(fragments, lengths, strict=True)]
            tensors[name] = join(("weight", name), slices, shape)
        return tensors


_LAYOUTS: dict[int, type[Run]] = {1: _Flat, 2: _Flat, 3: _Split}


def read(directory: Path) -> Run:
    """Read all files of a folder, without the values of their tensors.

    Raises:
        CheckpointError: a file is missing, or belongs to another save or to an unsupported kind of run.
    """
    _check_kind(directory)
    files = _optimizer_files(directory)
    optimizers = [load(file)["optimizer_state_dict"] for file in files]
    headers = [(_number(o.get("zero_stage", 1)), o["partition_count"]) for o in optimizers]  # no stage: bf16 at stage 1
    stage, count = headers[0]
    if differing := next((n for n, header in enumerate(headers) if header != headers[0]), None):
        raise CheckpointError(
            f"{directory} holds more than one save: {files[0].name} was written at stage {stage} with {count} "
            f"ranks, {files[differing].name} at stage {headers[differing][0]} with {headers[differing][1]}: remove the "
            "files of the other save."
        )
    counts = count if isinstance(count, list) else [count]
    if len(set(counts)) > 1:
        raise CheckpointError(f"{directory} holds mixture-of-experts groups, which cannot be converted.")
    ranks = {int(_OPTIMIZER.fullmatch(file.name)[1]) for file in files}  # type: ignore[index]
    if missing := sorted(set(range(counts[0])) - ranks):
        raise CheckpointError(
            f"{directory} was written by {counts[0]} ranks; the *_optim_states.pt of {_listed(missing)} are "
            "missing. Copy them from the nodes that these ranks ran on."
        )
    if extra := sorted(ranks - set(range(counts[0]))):
        raise CheckpointError(
            f"{directory} was written by {counts[0]} ranks; the *_optim_states.pt of {_listed(extra)} are left "
            "from another save: remove them."
        )
    layout = _LAYOUTS[stage]
    names = layout.model_files(counts[0])
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise CheckpointError(
            f"{directory}, of stage {stage}, lacks {', '.join(absent)}. Copy them from the nodes that wrote them."
        )
    run = layout(directory, [load(directory / name) for name in names], optimizers, stage)
    dimensions = run.model.get("checkpoint_parallel_dimensions") or {}
    if max(run.model.get("mp_world_size") or 1, *dimensions.values(), 1) > 1:
        raise CheckpointError(f"{directory} was written by a tensor- or pipeline-parallel run.")
    if run.model.get("num_experts") or any(group.get("moe") for group in run.base(0)["param_groups"]):
        raise CheckpointError(f"{directory} holds mixture-of-experts layers, which cannot be converted.")
    return run


def _unsharded(module: Mapping[str, Any], names: Iterable[str]) -> dict[str, LazyTensor]:
    """The tensors among ``names`` that ``module`` holds unsharded, as lazy tensors."""
    found = {name: value.detach() for name in names if isinstance(value := module.get(name), Tensor)}
    return {name: join(("weight", name), [value.reshape(-1)], value.shape) for name, value in found.items()}


def _overlaps(start: int, stop: int, sizes: list[int]) -> Iterator[Slice]:
    """The slices that make up ``[start, stop)`` of the concatenation of vectors of these sizes."""
    for rank, size in enumerate(sizes):
        begin, end = max(start, 0), min(stop, size)
        if begin < end:
            yield Slice(rank, begin, end)
        start, stop = start - size, stop - size


def _lengths(numel: int, ranks: int) -> list[int]:
    """The number of elements of a parameter on each rank, without padding."""
    most = -(-numel // ranks)
    return [max(min(most, numel - rank * most), 0) for rank in range(ranks)]


def join(key: tuple[str, str], slices: list[Tensor], shape: Sequence[int]) -> LazyTensor:
    """A lazy tensor that joins ``slices``; 16-bit numbers become fp32, since they are copies of fp32 values."""
    narrow = slices[0].is_floating_point() and slices[0].dtype not in _WIDE if slices else False
    dtype = torch.float32 if narrow or not slices else slices[0].dtype
    return SlicedSource(key, slices, torch.empty(shape, dtype=dtype, device="meta")).tensor()


@dataclass(frozen=True, eq=False)
class SlicedSource:
    """The source of one lazy tensor whose elements lie in slices of other tensors.

    Attributes:
        key: identifies the tensor in the checkpoint.
        slices: 1-D tensors of any dtype, in the order of the elements.
        form: a contiguous tensor on the meta device with the shape and dtype of the joined tensor.
    """

    key: Hashable
    slices: Sequence[Tensor]
    form: Tensor
    live: ClassVar[bool] = False

    def tensor(self) -> StoredTensor:
        """The joined tensor, lazy."""
        return StoredTensor(self, 0, self.form)

    def fetch(self, param: int) -> Tensor:
        """Join the slices: a contiguous tensor on the CPU."""
        full = torch.empty(self.form.shape, dtype=self.form.dtype, device="cpu")
        self._read(0, full.view(-1))
        return full

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        if form == MemoryFormat.of(self.form):
            self._read(start, into)
        else:
            form.read(self.fetch(param), start, into)

    def _read(self, start: int, into: Tensor) -> None:
        stop, offset = start + into.numel(), 0
        for values in self.slices:
            low, high = max(start, offset), min(stop, offset + values.numel())
            if low < high:
                into[low - start : high - start].copy_(values[low - offset : high - offset])
            offset += values.numel()


def _number(stage: Any) -> int:
    """The ZeRO stage, from a number or from the placeholder of an enumeration's member."""
    return int(stage.args[0] if isinstance(stage, Remains) else stage)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
