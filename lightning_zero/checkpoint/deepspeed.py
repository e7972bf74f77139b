"""DeepSpeed's ZeRO folders as one ordinary checkpoint file.

A folder holds, below the name that its file `latest` gives:

- stages 1 and 2: `mp_rank_00_model_states.pt`, with the whole 16-bit module, and for every rank
  `[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt`. A parameter group's trainable parameters are one flat vector, in
  the order of `param_shapes` and perhaps with `param_alignment_paddings` after them, cut into equal parts, one a rank.
  Fp32 masters come without the padding at the end of the vector, optimizer state with it.
- stage 3: both kinds of file for every rank. Every parameter is cut into equal parts, its last one padded; a rank's
  parts of a sub-group's parameters make up one flat vector. Frozen parameters lie in `frozen_param_fragments`.

These files are pickles. Here DeepSpeed need not be installed: its objects are read as :class:`Remains`.
"""

from __future__ import annotations

import enum
import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.contents import UNREADABLE, Opaque
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.full import write_alone
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.pieces import Pieces
from lightning_zero.engine.compiled import plain_name
from lightning_zero.version import __version__

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_UNSUPPORTED = {
    r"(layer_\d+_expert_\d+_|expert_\d+_|expp_rank_).*": "holds mixture-of-experts layers, split over expert ranks",
    r"layer_\d+-model_.*": "was written by a pipeline-parallel run",
    r".*mp_rank_(?!00_)\d+.*": "was written by a tensor- or pipeline-parallel run",
    r"offloaded_tensors": "keeps its state in the files of an NVMe offload",
    r"zero": "is a universal checkpoint",
}
# What DeepSpeed writes into a file of model states; everything else is the caller's, such as Lightning's entries.
_OWN = frozenset(
    """buffer_names checkpoint_parallel_dimensions csr_tensor_module_names data_sampler dp_world_size ds_config
    ds_version frozen_param_fragments frozen_param_shapes global_samples global_steps lr_scheduler module mp_world_size
    num_experts optimizer param_shapes random_ltd shared_params skipped_steps sparse_tensor_module_names
    universal_checkpoint_info""".split()
)
_WIDE = (torch.float32, torch.float64)


class Remains(Opaque):
    """What is left of an object of a class that is not there: the arguments it was made with, and its attributes."""

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
        """An entry of a dictionary of such a class, which nobody asks for."""

    def extend(self, values: Any) -> None:
        """Items of a list of such a class, which nobody asks for."""

    append = extend


class _Unpickler(pickle.Unpickler):
    """Imports nothing of DeepSpeed, and stands in for what cannot be imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] != "deepspeed":
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                pass
        return type("Remains", (Remains,), {"name": f"{module}.{name}"})


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted.

    Attributes:
        version: of DeepSpeed, that wrote the folder.
        stage: of ZeRO.
        ranks: how many wrote it.
        tensors: in the `state_dict`.
        bytes: of their elements, without those of tied tensors.
        parameters: that the optimizer updates.
        groups: how many it has.
        state: names of what it keeps for a parameter.
        tied: names of parameters that are another one, with its name.
        left_out: entries that are not kept, with their class.
        lightning: whether Lightning's own entries were there.
    """

    version: str
    stage: int
    ranks: int
    tensors: int
    bytes: int
    parameters: int
    groups: int
    state: list[str]
    tied: dict[str, str]
    left_out: dict[str, str]
    lightning: bool


def convert(folder: Path, out: Path, *, trust: bool = False) -> Converted:
    """Write a checkpoint file with what a ZeRO folder of stage 1, 2 or 3 holds.

    Weights are the fp32 masters, optimizer state has parameter names; 16-bit buffers and frozen parameters become fp32.
    Takes memory for little more than a tile of a tensor: the folder's files are mapped.

    Args:
        folder: that DeepSpeed or Lightning's `DeepSpeedStrategy` wrote, or one tag's folder in it.
        out: the file.
        trust: read the pickles. They can run any program.

    Raises:
        CheckpointError: ``trust`` is missing; there is a file at ``out``; the folder is none of these, is incomplete or
            damaged, or comes from tensor, pipeline or expert parallelism.
        OSError: files cannot be read or written.
    """
    directory = _tag_folder(folder)
    if not trust:
        raise CheckpointError(
            f"{folder} holds pickles, and a pickle can run any program when it is read: was it written by you, or by "
            f"someone you trust? Then type lightning-zero convert-deepspeed {folder} {out} --trust"
        )
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it, or name another file.")
    try:
        run = _read(directory)
        left_out: dict[str, str] = {}
        checkpoint = run.checkpoint(left_out)
    except (AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{directory} is not laid out as DeepSpeed writes it ({error!r}). Save it again with a recent version."
        ) from error
    write_alone(checkpoint, out)
    state, (optimizer,) = checkpoint["state_dict"], checkpoint["optimizer_states"]
    return Converted(
        version=run.version,
        stage=run.stage,
        ranks=len(run.optimizers),
        tensors=sum(isinstance(value, Tensor) for value in state.values()),
        bytes=sum({id(value): value.nbytes for value in state.values() if isinstance(value, Tensor)}.values()),
        parameters=sum(len(group["params"]) for group in optimizer["param_groups"]),
        groups=len(optimizer["param_groups"]),
        state=list(dict.fromkeys(key for entry in optimizer["state"].values() for key in entry)),
        tied={_name(name): _name(kept) for name, kept in run.shared.items()},
        left_out=left_out,
        lightning=run.lightning,
    )


# ---------------------------------------------------------------------------------------------------------- the files


def _tag_folder(folder: Path) -> Path:
    """The folder with the files.

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
        raise CheckpointError(f"{folder} has no folder {directory.name}, which its file 'latest' names.")
    tags = sorted(str(path) for path in folder.iterdir() if any(path.glob("*_states.pt")))
    hint = f"name one of {', '.join(tags)}" if tags else "it has no file 'latest' and no *_states.pt"
    raise CheckpointError(f"{folder} is not a folder of DeepSpeed: {hint}.")


def _load(path: Path) -> dict[str, Any]:
    """One file; its tensors are mapped."""
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
    """Raise where another kind of parallelism, or of checkpoint, has written into the folder."""
    for path in sorted(directory.iterdir()):
        for pattern, what in _UNSUPPORTED.items():
            if re.fullmatch(pattern, path.name):
                raise CheckpointError(
                    f"{directory} {what} ({path.name}), which cannot be converted. Supported are data-parallel runs at "
                    "ZeRO stages 1, 2 and 3 without experts, with state on the device or in host memory."
                )


def _optimizer_files(directory: Path) -> list[Path]:
    """One a rank, in the order of ranks, as far as they are there."""
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


class _Slice(NamedTuple):
    """A run of a rank's flat vector."""

    rank: int
    start: int
    stop: int


class _Place(NamedTuple):
    """Where a parameter's elements are, in order: runs of the vectors of one group (at stage 3: sub-group)."""

    name: str
    shape: torch.Size
    vector: int
    slices: list[_Slice]

    def pieces(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Its elements in the ranks' ``vectors``."""
        return [vectors[rank].detach()[start:stop] for rank, start, stop in self.slices]


@dataclass(frozen=True)
class _Run(ABC):
    """What the ranks wrote.

    Attributes:
        directory: where.
        models: model states by rank; before stage 3 only those of rank 0.
        optimizers: optimizer states by rank.
        stage: of ZeRO.
    """

    directory: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    stage: int

    masters_key: ClassVar[str]
    base_key: ClassVar[str]  # of what the optimizer inside DeepSpeed's gave
    vectors: ClassVar[str]  # what a flat vector is of

    @staticmethod
    @abstractmethod
    def model_files(ranks: int) -> list[str]:
        """Names of the files of model states."""

    @abstractmethod
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[_Place]:
        """Where the parameters of a vector are.

        Args:
            vector: its number.
            shapes: of the parameters.
            sizes: of the ranks' parts of it, without padding at its end.
        """

    @abstractmethod
    def whole(self) -> dict[str, LazyTensor]:
        """Frozen parameters and buffers."""

    def as_given(self, names: list[str]) -> list[str]:
        """A group's parameters in the order in which the user gave them, by which plain torch loads them."""
        return names

    @property
    def model(self) -> dict[str, Any]:
        return self.models[0]

    @property
    def version(self) -> str:
        return str(self.model.get("ds_version", "of an unknown version"))

    @property
    def shared(self) -> dict[str, str]:
        """Names of parameters that are another one, with its name."""
        return dict(self.model.get("shared_params") or {})

    @property
    def lightning(self) -> bool:
        return "pytorch-lightning_version" in self.model

    @property
    def shapes(self) -> list[dict[str, torch.Size]]:
        """Of the trainable parameters of each group (at stage 3: sub-group), in the order of their elements."""
        return [{name: torch.Size(shape) for name, shape in group.items()} for group in self.model["param_shapes"]]

    def base(self, rank: int) -> dict[str, Any]:
        """What the optimizer inside DeepSpeed's gave: torch's format, with a flat vector for each parameter."""
        found = self.optimizers[rank][self.base_key]
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.directory} is an 'elastic_checkpoint', which has no hyperparameters.")
        return found

    def masters(self, vector: int) -> list[Tensor]:
        """The ranks' flat vectors of fp32 weights."""
        return [optimizer[self.masters_key][vector] for optimizer in self.optimizers]

    def places(self) -> list[_Place]:
        """Of all trainable parameters.

        Raises:
            CheckpointError: the vectors are not as long as they must be.
        """
        places: list[_Place] = []
        for vector, shapes in enumerate(self.shapes):
            sizes = [master.numel() for master in self.masters(vector)]
            places += self.cut(vector, shapes, sizes)
        return places

    def _unlike(self, vector: int, needed: int, found: int) -> str:
        return (
            f"{self.directory}: the parameters of {self.vectors} {vector} have {needed} elements in the model's file "
            f"and {found} in the optimizer's; do both come from one save?"
        )

    # ---------------------------------------------------------------------------------------------- the checkpoint

    def checkpoint(self, left_out: dict[str, str]) -> dict[str, Any]:
        """What Lightning would have written; names of entries that cannot be kept go to ``left_out``."""
        places = self.places()
        scaler = _scaler_state(self.optimizers[0].get("loss_scaler"))
        skipped = self.model.get("skipped_steps") or 0
        entries = {key: value for key, value in self.model.items() if key not in _OWN}
        plain = _plain(entries, "", left_out)
        schedulers = [state for state in [self.model.get("lr_scheduler")] if state and "last_epoch" in state]
        return {
            "epoch": 0,
            "global_step": self.model.get("global_steps", 0),
            "pytorch-lightning_version": version("lightning"),
            "lr_schedulers": _plain(schedulers, "lr_scheduler", left_out),
            **plain,
            "state_dict": self._state_dict(places, left_out),
            "optimizer_states": [self._optimizer_state(places, left_out)],
            "ZeroPrecision": {"skipped_steps": skipped, "scaler": scaler},
            "lightning_zero": {
                "version": __version__,
                "converted_from": f"DeepSpeed {self.version}",
                "stage": self.stage,
                "world_size": len(self.optimizers),
            },
        }

    def _state_dict(self, places: list[_Place], left_out: dict[str, str]) -> dict[str, Any]:
        module, shared = self.model["module"], self.shared
        tensors = self.whole()
        tensors |= {p.name: _whole(("weight", p.name), p.pieces(self.masters(p.vector)), p.shape) for p in places}
        state = {}
        for name, value in module.items():
            if isinstance(value, Tensor):
                if (kept := shared.get(name, name)) not in tensors:
                    raise CheckpointError(f"{self.directory}: {name!r} has no values in any rank's files.")
                state[_name(name)] = tensors[kept]
            else:
                state[_name(name)] = _plain(value, f"state_dict.{name}", left_out)  # extra state
        return state

    def _optimizer_state(self, places: list[_Place], left_out: dict[str, str]) -> dict[str, Any]:
        bases = [self.base(rank) for rank in range(len(self.optimizers))]
        groups = []
        for number, group in enumerate(bases[0]["param_groups"]):
            names = [_name(place.name) for vector in group["params"] for place in places if place.vector == vector]
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "step")}
            kept = _plain(settings, f"param_groups[{number}]", left_out)
            groups.append({**kept, "params": self.as_given(names)})
        steps = {vector: group.get("step") for group in bases[0]["param_groups"] for vector in group["params"]}
        state = {}
        for place in places:
            vectors = [base["state"].get(place.vector, {}) for base in bases]
            entry = {key: self._value(place, key, [each[key] for each in vectors]) for key in vectors[0]}
            if steps[place.vector] is not None and entry:  # of optimizers that count once for a group
                entry.setdefault("step", torch.tensor(float(steps[place.vector])))
            if entry:
                state[_name(place.name)] = entry
        return {"state": state, "param_groups": groups}

    def _value(self, place: _Place, key: str, values: list[Any]) -> Any:
        """One parameter's state: its part of the ranks' flat vectors, or what they all have in common."""
        value, sizes = values[0], [master.numel() for master in self.masters(place.vector)]
        if isinstance(value, Tensor) and value.dim():
            if any(each.numel() < size for each, size in zip(values, sizes, strict=True)):
                raise CheckpointError(
                    f"{self.directory}: the optimizer keeps {key!r} for a group as a whole and not for every element, "
                    "which cannot be converted."
                )
            return _whole((key, place.name), place.pieces(values), place.shape)
        # Torch counts in fp32, each parameter for itself.
        return torch.tensor(float(value)) if key == "step" else _copied(value)


class _Flat(_Run):
    """Stages 1 and 2."""

    masters_key: ClassVar[str] = "single_partition_of_fp32_groups"
    base_key: ClassVar[str] = "base_optimizer_state"
    vectors: ClassVar[str] = "group"

    @staticmethod
    @override
    def model_files(ranks: int) -> list[str]:
        return ["mp_rank_00_model_states.pt"]

    @override
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[_Place]:
        all_paddings = self.optimizers[0].get("param_alignment_paddings")
        paddings = all_paddings[vector] if all_paddings else [0] * len(shapes)
        needed = sum(map(math.prod, shapes.values())) + sum(paddings)
        if not 0 <= sum(sizes) - needed < 2 * len(sizes):  # to which the vector is padded
            raise CheckpointError(self._unlike(vector, needed, sum(sizes)))
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            stop = start + math.prod(shape)
            yield _Place(name, shape, vector, list(_overlaps(start, stop, sizes)))
            start = stop + padding

    @override
    def whole(self) -> dict[str, LazyTensor]:
        return _found_whole(self.model["module"], [name for name in self.model["module"] if name not in self.shared])

    @override
    def as_given(self, names: list[str]) -> list[str]:
        settings = self.model.get("ds_config")
        settings = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
        if not isinstance(settings, Mapping) or not settings.get("round_robin_gradients"):
            return names
        ranks = len(self.optimizers)  # first every ranks-th parameter, then those after them, ...
        dealt = [index for rank in range(ranks) for index in range(rank, len(names), ranks)]
        return [name for _, name in sorted(zip(dealt, names, strict=True))]


class _Split(_Run):
    """Stage 3."""

    masters_key: ClassVar[str] = "fp32_flat_groups"
    base_key: ClassVar[str] = "optimizer_state_dict"
    vectors: ClassVar[str] = "sub-group"

    @staticmethod
    @override
    def model_files(ranks: int) -> list[str]:
        return [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]

    @override
    def cut(self, vector: int, shapes: Mapping[str, torch.Size], sizes: list[int]) -> Iterator[_Place]:
        parts = {name: -(-math.prod(shape) // len(sizes)) for name, shape in shapes.items()}
        needed = sum(parts.values())
        if any(size != needed for size in sizes):
            raise CheckpointError(self._unlike(vector, needed, next(size for size in sizes if size != needed)))
        start = 0
        for name, shape in shapes.items():
            lengths = _lengths(math.prod(shape), len(sizes))
            yield _Place(name, shape, vector, [_Slice(rank, start, start + n) for rank, n in enumerate(lengths)])
            start += parts[name]

    @override
    def whole(self) -> dict[str, LazyTensor]:
        module, buffers = self.model["module"], self.model["buffer_names"]
        # Parameters are empty there.
        tensors = _found_whole(module, [n for n in module if n in buffers or n.endswith("_extra_state")])
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            fragments = [model["frozen_param_fragments"][name].detach() for model in self.models]
            lengths = _lengths(math.prod(shape), len(fragments))
            pieces = [part.reshape(-1)[:n] for part, n in zip(fragments, lengths, strict=True)]
            tensors[name] = _whole(("weight", name), pieces, shape)
        return tensors


_LAYOUTS: dict[int, type[_Run]] = {1: _Flat, 2: _Flat, 3: _Split}


def _read(directory: Path) -> _Run:
    """Read all files, without the values of their tensors.

    Raises:
        CheckpointError: one is missing, or of another run or kind.
    """
    _check_kind(directory)
    files = _optimizer_files(directory)
    optimizers = [_load(file)["optimizer_state_dict"] for file in files]
    headers = [(_number(o.get("zero_stage", 1)), o["partition_count"]) for o in optimizers]  # bf16 at 1 has none
    stage, count = headers[0]
    if differing := next((n for n, header in enumerate(headers) if header != headers[0]), None):
        raise CheckpointError(
            f"{directory} holds more than one save: {files[0].name} was written at stage {stage} with {count} "
            f"ranks, {files[differing].name} at stage {headers[differing][0]} with {headers[differing][1]}."
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
        raise CheckpointError(f"{directory}, of stage {stage}, lacks {', '.join(absent)}.")
    run = layout(directory, [_load(directory / name) for name in names], optimizers, stage)
    dimensions = run.model.get("checkpoint_parallel_dimensions") or {}
    if max(run.model.get("mp_world_size") or 1, *dimensions.values(), 1) > 1:
        raise CheckpointError(f"{directory} was written by a tensor- or pipeline-parallel run.")
    if run.model.get("num_experts") or any(group.get("moe") for group in run.base(0)["param_groups"]):
        raise CheckpointError(f"{directory} holds mixture-of-experts layers, which cannot be converted.")
    return run


def _found_whole(module: Mapping[str, Any], names: Iterable[str]) -> dict[str, LazyTensor]:
    """Tensors that one file holds whole; what is none is left out."""
    found = {name: value.detach() for name in names if isinstance(value := module.get(name), Tensor)}
    return {name: _whole(("weight", name), [value.reshape(-1)], value.shape) for name, value in found.items()}


def _overlaps(start: int, stop: int, sizes: list[int]) -> Iterator[_Slice]:
    """``[start, stop)`` of what vectors of these sizes make up, in each of them."""
    for rank, size in enumerate(sizes):
        begin, end = max(start, 0), min(stop, size)
        if begin < end:
            yield _Slice(rank, begin, end)
        start, stop = start - size, stop - size


def _lengths(numel: int, ranks: int) -> list[int]:
    """How many elements of a parameter each rank has, without padding."""
    part = -(-numel // ranks)
    return [max(min(part, numel - rank * part), 0) for rank in range(ranks)]


def _whole(key: tuple[str, str], pieces: list[Tensor], shape: Sequence[int]) -> LazyTensor:
    """A tensor made of ``pieces``; 16-bit numbers become fp32, of which they are copies."""
    narrow = pieces[0].is_floating_point() and pieces[0].dtype not in _WIDE if pieces else False
    dtype = torch.float32 if narrow or not pieces else pieces[0].dtype
    return Pieces(key, pieces, torch.empty(shape, dtype=dtype, device="meta")).tensor()


def _scaler_state(scaler: Any) -> dict[str, float]:
    """The running state of a dynamic loss scaler in ours; of a static one there is none.

    DeepSpeed counts steps since an overflow, the first of them as 0, and the scale grows whenever that is a multiple of
    the window. Ours counts up to the window, after which the scale grows.
    """
    state = scaler.attributes if isinstance(scaler, Remains) else {}
    if not {"cur_iter", "last_overflow_iter", "scale_window"} <= state.keys():
        return {}
    clean = state["cur_iter"] - state["last_overflow_iter"] - 1
    overflows = state.get("delayed_shift", 1) - state.get("cur_hysteresis", 1)
    return {
        "scale": float(state["cur_scale"]),
        "clean_steps": max(clean - 1, 0) % state["scale_window"],
        "overflows": overflows,
    }


# --------------------------------------------------------------------------------------------------------------- values


def _name(name: str) -> str:
    """A parameter's name in the module; Lightning before 2.1 put a wrapper around it."""
    return plain_name(name.removeprefix("_forward_module."))


def _number(stage: Any) -> int:
    """The stage in what is left of an enumeration."""
    return int(stage.args[0] if isinstance(stage, Remains) else stage)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _copied(value: Any) -> Any:
    """A tensor without the rest of the storage in which it lies; others as they are."""
    return value.detach().clone() if isinstance(value, Tensor) else value


_AS_IT_IS = (str, bytes, int, float, bool, type(None), torch.Size, torch.dtype, torch.device)
_CONVERSIONS: list[tuple[type, Callable[[Any], Any]]] = [
    (enum.Enum, lambda value: value.value),
    (np.generic, lambda value: value.item()),
    (PurePath, str),
    (str, str),
    (int, int),
    (float, float),
]


def _plain(value: Any, place: str, left_out: dict[str, str]) -> Any:
    """The value in types that any `torch.load(weights_only=True)` reads; what has none is left out and named."""
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, Tensor):
        return _copied(value)
    if isinstance(value, Mapping):
        inner = {key: (f"{place}.{key}" if place else str(key)) for key in value}
        found = {_plain(key, at, left_out): _plain(value[key], at, left_out) for key, at in inner.items()}
        return {key: each for key, each in found.items() if inner[key] not in left_out}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_plain(each, f"{place}[{number}]", left_out) for number, each in enumerate(value)]
        return parts if isinstance(value, list) else set(parts) if isinstance(value, set | frozenset) else tuple(parts)
    for kind, convert_to in _CONVERSIONS:
        if isinstance(value, kind):
            return _plain(convert_to(value), place, left_out)
    kind = type(value)
    left_out[place] = value.name if isinstance(value, Remains) else f"{kind.__module__}.{kind.__qualname__}"
    return None
