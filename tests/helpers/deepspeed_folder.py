"""Makes folders in the layout of DeepSpeed 0.19 from an ordinary checkpoint; `train_deepspeed.py` makes real ones."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@dataclass(frozen=True)
class Folder:
    """The configuration of a DeepSpeed run."""

    stage: int
    ranks: int = 2
    half: torch.dtype | None = None  # dtype of the module
    round_robin: bool = False
    alignment: int = 1  # elements, of each parameter in a flat vector
    sub_group: int = 10**9  # elements on a rank
    scaler: Mapping[str, Any] = field(default_factory=lambda: {"cur_scale": 1.0, "dynamic": False})
    more: Mapping[str, Any] = field(default_factory=dict)  # entries of the model states


def write_folder(path: Path, checkpoint: Mapping[str, Any], frozen: set[str], buffers: set[str], how: Folder) -> None:
    """Writes the folder that DeepSpeed would save for the state in a checkpoint with parameter names.

    Args:
        path: the folder.
        checkpoint: the checkpoint, with the state of all ranks.
        frozen: names of parameters without optimizer state.
        buffers: names of buffers.
        how: the configuration.
    """
    weights = checkpoint["state_dict"]
    first: dict[int, str] = {}
    shared = {n: f for n, v in weights.items() if (f := first.setdefault(v.data_ptr(), n)) != n}
    (optimizer,) = checkpoint["optimizer_states"]
    groups = [[name for name in group["params"] if name not in frozen] for group in optimizer["param_groups"]]
    if how.stage == 3:
        vectors, owners = _sub_groups(groups, weights, how)
    else:
        vectors, owners = [_dealt(group, how) for group in groups], [[number] for number in range(len(groups))]
    flat = _split if how.stage == 3 else _flat
    values: dict[str, Mapping[str, Tensor]] = {"weight": weights}
    for key in ("exp_avg", "exp_avg_sq"):
        values[key] = {name: entry[key] for name, entry in optimizer["state"].items()}
    parts = {key: [flat([of[name] for name in names], how) for names in vectors] for key, of in values.items()}
    steps = [optimizer["state"][names[0]]["step"] for names in vectors]

    folder = path / "checkpoint"
    folder.mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    for rank in range(how.ranks):
        state = {
            number: {"step": step.clone(), **{key: parts[key][number][rank] for key in ("exp_avg", "exp_avg_sq")}}
            for number, step in enumerate(steps)
        }
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
        base = {"state": state, "param_groups": [s | {"params": o} for s, o in zip(settings, owners, strict=True)]}
        states = {"loss_scaler": _Scaler(dict(how.scaler)), "dynamic_loss_scale": how.scaler["dynamic"]}
        states |= {"overflow": False}
        masters = [vector[rank] for vector in parts["weight"]]
        if how.stage == 3:
            states |= {"zero_stage": _Stage(3), "partition_count": how.ranks}
            states |= {"optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            states |= {"clip_grad": 0.0, "base_optimizer_state": base, "zero_stage": _Stage(how.stage)}
            paddings = [_paddings([weights[name] for name in names], how) for names in vectors]
            lengths = [
                sum(weights[name].numel() for name in names) + sum(padding)
                for names, padding in zip(vectors, paddings, strict=True)
            ]
            lean = [_lean(master, rank, length) for master, length in zip(masters, lengths, strict=True)]
            states |= {
                "single_partition_of_fp32_groups": lean,
                "group_paddings": [m.numel() - part.numel() for m, part in zip(masters, lean, strict=True)],
                "param_alignment_paddings": paddings,
                "partition_count": [how.ranks] * len(vectors),
                "ds_version": "0.19.8",
                "param_slice_mappings": [OrderedDict() for _ in vectors],
            }
        prefix = "bf16_" if how.half is torch.bfloat16 else ""
        config = {"zero_optimization": {"stage": how.stage, "round_robin_gradients": how.round_robin}}
        saved = {"optimizer_state_dict": states, "ds_config": config, "ds_version": "0.19.8"}
        _save(saved, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if how.stage == 3 or rank == 0:
            model = _model_states(weights, vectors, frozen, buffers, shared if rank == 0 else {}, rank, how)
            own = {key: v for key, v in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
            name = f"zero_pp_rank_{rank}_mp_rank_00" if how.stage == 3 else "mp_rank_00"
            _save(model | {"ds_config": config} | own | how.more, folder / f"{name}_model_states.pt")


def _model_states(
    weights: Mapping[str, Tensor],
    vectors: list[list[str]],
    frozen: set[str],
    buffers: set[str],
    shared: Mapping[str, str],
    rank: int,
    how: Folder,
) -> dict[str, Any]:
    half = {n: v.to(how.half) if how.half and n not in buffers else v for n, v in weights.items()}
    module: dict[str, Tensor] = OrderedDict()
    for name, value in half.items():
        module[name] = value if how.stage < 3 or name in buffers else torch.empty(0, dtype=value.dtype)
    fragments = {n: _split([half[n]], how)[rank] if how.stage == 3 else half[n] for n in weights if n in frozen}
    return {
        "module": module,
        "buffer_names": [name for name in weights if name in buffers],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, weights[name].shape) for name in names) for names in vectors],
        "frozen_param_shapes": OrderedDict((n, weights[n].shape) for n in fragments) if how.stage > 1 else None,
        "shared_params": dict(shared),
        "frozen_param_fragments": OrderedDict(fragments) if how.stage > 1 else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 6,
        "dp_world_size": how.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": "0.19.8",
    }


def _dealt(names: list[str], how: Folder) -> list[str]:
    """Sorts parameters into the order of a flat vector; with round robin the parameters of each rank lie together."""
    return [n for rank in range(how.ranks) for n in names[rank :: how.ranks]] if how.round_robin else names


def _sub_groups(
    groups: list[list[str]], weights: Mapping[str, Tensor], how: Folder
) -> tuple[list[list[str]], list[list[int]]]:
    """Cuts groups into sub-groups of a maximum number of elements on a rank; also returns each group's sub-groups."""
    vectors: list[list[str]] = []
    owners = []
    for group in groups:
        before, numel = len(vectors), how.sub_group
        for name in group:
            if numel >= how.sub_group:
                vectors.append([])
                numel = 0
            vectors[-1].append(name)
            numel += -(-weights[name].numel() // how.ranks)
        owners.append([*range(before, len(vectors))])
    return vectors, owners


def _paddings(tensors: list[Tensor], how: Folder) -> list[int]:
    """The padding after each parameter, up to the next multiple of the alignment; none after the last one."""
    return [*(-tensor.numel() % how.alignment for tensor in tensors[:-1]), 0]


def _flat(tensors: list[Tensor], how: Folder) -> list[Tensor]:
    """One vector, padded to a multiple of twice the number of ranks, in equal parts; padding must not be read."""
    pieces = []
    for tensor, padding in zip(tensors, _paddings(tensors, how), strict=True):
        pieces += [tensor.flatten(), torch.full([padding], torch.nan)]
    whole = torch.cat(pieces)
    whole = torch.cat([whole, torch.full([-whole.numel() % (2 * how.ranks)], torch.nan)])
    return [part.clone() for part in whole.chunk(how.ranks)]


def _split(tensors: list[Tensor], how: Folder) -> list[Tensor]:
    """Cuts every tensor into equal parts, one per rank, and joins the parts of each rank to one vector."""
    parts: list[list[Tensor]] = [[] for _ in range(how.ranks)]
    for tensor in tensors:
        padding = torch.full([-tensor.numel() % how.ranks], torch.nan, dtype=tensor.dtype)
        for rank, part in enumerate(torch.cat([tensor.flatten(), padding]).chunk(how.ranks)):
            parts[rank].append(part)
    return [torch.cat(of_rank) for of_rank in parts]


def _lean(part: Tensor, rank: int, length: int) -> Tensor:
    """A rank's part of a vector of ``length`` elements, without the padding at the vector's end."""
    return part[: min(max(length - rank * part.numel(), 0), part.numel())].clone()


class _Stage(int, enum.Enum):
    __qualname__, __module__ = "ZeroStageEnum", "deepspeed.runtime.zero.config"
    optimizer_states = 1
    gradients = 2
    weights = 3


class _Scaler:
    def __init__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state


_Scaler.__qualname__, _Scaler.__module__ = "DynamicLossScaler", "deepspeed.runtime.fp16.loss_scaler"


@contextlib.contextmanager
def classes() -> Iterator[None]:
    """A context in which DeepSpeed's classes can be pickled, even if it is not installed."""
    modules = {}
    for found in (_Stage, _Scaler):
        modules[found.__module__] = ModuleType(found.__module__)
        setattr(modules[found.__module__], found.__qualname__, found)
    packages = {name.rpartition(".")[0] for name in modules} | {"deepspeed", "deepspeed.runtime"}
    with mock.patch.dict(sys.modules, {name: ModuleType(name) for name in packages} | modules):
        yield


def _save(value: Any, path: Path) -> None:
    with classes():
        torch.save(value, path)
