"""Converts DeepSpeed's ZeRO folders into one ordinary checkpoint file."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_zero.checkpoint import CheckpointError
from lightning_zero.checkpoint.file import write_alone
from lightning_zero.sharding.compiled import plain_name
from lightning_zero.tools.deepspeed_runs import Place, Remains, Run, join, read, tag_folder
from lightning_zero.version import __version__

# The keys that DeepSpeed itself writes into a file of model states; others come from its caller, such as Lightning.
_OWN = frozenset(
    """buffer_names checkpoint_parallel_dimensions csr_tensor_module_names data_sampler dp_world_size ds_config
    ds_version frozen_param_fragments frozen_param_shapes global_samples global_steps lr_scheduler module mp_world_size
    num_experts optimizer param_shapes random_ltd shared_params skipped_steps sparse_tensor_module_names
    universal_checkpoint_info""".split()
)
_POSITIONS = frozenset({"last_epoch", "last_batch_iteration"})  # of schedules of torch and of DeepSpeed
_AS_IT_IS = (str, bytes, int, float, bool, type(None), torch.Size, torch.dtype, torch.device)
_CONVERSIONS: list[tuple[type, Callable[[Any], Any]]] = [
    (enum.Enum, lambda value: value.value),
    (np.generic, lambda value: value.item()),
    (PurePath, str),
    (str, str),
    (int, int),
    (float, float),
]


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        version: version of DeepSpeed that wrote the folder.
        stage: ZeRO stage.
        ranks: number of ranks that wrote it.
        tensors: number of tensors in the `state_dict`.
        bytes: size of their elements; tied tensors count once.
        parameters: number of parameters that the optimizer updates.
        groups: number of its parameter groups.
        state: names of the state that it keeps for a parameter.
        tied: maps each further name of a tied parameter to the name under which it is kept.
        left_out: entries that were not converted, with their class.
        lightning: whether the folder contained Lightning's own entries.
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


def convert(folder: Path, out: Path, *, trust: bool = False, overwrite: bool = False) -> Converted:
    """Write a checkpoint file with the contents of a ZeRO folder of stage 1, 2 or 3.

    Weights are the fp32 masters; optimizer state is stored by parameter name; 16-bit buffers and frozen parameters
    become fp32. The folder's files are mapped, so that little more than a tile of a tensor is in memory.

    Args:
        folder: a folder that DeepSpeed or Lightning's `DeepSpeedStrategy` wrote, or the folder of one tag in it.
        out: path of the new file.
        trust: allow reading pickles, which can run any program.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: ``trust`` is False; or ``out`` exists; or the folder is none of these, is incomplete or
            damaged, or comes from tensor, pipeline or expert parallelism.
        OSError: files cannot be read or written.
    """
    directory = tag_folder(folder)
    if not trust:
        raise CheckpointError(
            f"{folder} holds pickles, and a pickle can run any program when it is read. If you trust its author, type "
            f"lightning-zero convert-deepspeed {folder} {out} --trust"
        )
    if out.exists() and not overwrite:
        raise CheckpointError(f"{out} already exists; name another file, or replace it by --overwrite.")
    try:
        run = read(directory)
        conversion = _Conversion(run)
        checkpoint = conversion.checkpoint()
    except (AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{directory} does not have DeepSpeed's layout ({error!r}). Save it again with a recent DeepSpeed."
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
        left_out=conversion.left_out,
        lightning=run.lightning,
    )


class _Conversion:
    """Makes a checkpoint from the contents of a DeepSpeed folder.

    Attributes:
        left_out: entries that cannot be converted, with their class.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.left_out: dict[str, str] = {}
        self._places = run.places()

    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint in the form that Lightning writes."""
        run = self.run
        scaler = _scaler_state(run.optimizers[0].get("loss_scaler"))
        skipped = run.model.get("skipped_steps") or 0
        plain = self._plain({key: value for key, value in run.model.items() if key not in _OWN}, "")
        schedulers = [state for state in [run.model.get("lr_scheduler")] if state and _POSITIONS & state.keys()]
        return {
            "epoch": 0,
            "global_step": run.model.get("global_steps", 0),
            "pytorch-lightning_version": version("lightning"),
            **plain,
            "lr_schedulers": [*map(_at_step, plain.get("lr_schedulers") or self._plain(schedulers, "lr_scheduler"))],
            "state_dict": self._state_dict(),
            "optimizer_states": [self._optimizer_state()],
            "ZeroPrecision": {"skipped_steps": skipped, "scaler": scaler},
            "lightning_zero": {
                "version": __version__,
                "converted_from": f"DeepSpeed {run.version}",
                "stage": run.stage,
                "world_size": len(run.optimizers),
            },
        }

    def _state_dict(self) -> dict[str, Any]:
        run, shared = self.run, self.run.shared
        tensors = run.unsharded()
        tensors |= {p.name: join(("weight", p.name), p.values(run.masters(p.vector)), p.shape) for p in self._places}
        state = {}
        for name, value in run.model["module"].items():
            if isinstance(value, Tensor):
                if (kept := shared.get(name, name)) not in tensors:
                    raise CheckpointError(f"{run.directory}: {name!r} has no values in any rank's files.")
                state[_name(name)] = tensors[kept]
            else:
                state[_name(name)] = self._plain(value, f"state_dict.{name}")  # extra state
        return state

    def _optimizer_state(self) -> dict[str, Any]:
        bases = [self.run.base(rank) for rank in range(len(self.run.optimizers))]
        groups = []
        for number, group in enumerate(bases[0]["param_groups"]):
            names = [_name(p.name) for vector in group["params"] for p in self._places if p.vector == vector]
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "step")}
            kept = self._plain(settings, f"param_groups[{number}]")
            groups.append({**kept, "params": self.run.as_given(names)})
        steps = {vector: group.get("step") for group in bases[0]["param_groups"] for vector in group["params"]}
        state = {}
        for place in self._places:
            vectors = [base["state"].get(place.vector, {}) for base in bases]
            entry = {key: self._value(place, key, [each[key] for each in vectors]) for key in vectors[0]}
            if steps[place.vector] is not None and entry:  # some optimizers count steps per group
                entry.setdefault("step", torch.tensor(float(steps[place.vector]), dtype=torch.float32, device="cpu"))
            if entry:
                state[_name(place.name)] = entry
        return {"state": state, "param_groups": groups}

    def _value(self, place: Place, key: str, values: list[Any]) -> Any:
        """One parameter's state: its slices of the ranks' flat vectors joined, or the value that all ranks share."""
        value, sizes = values[0], [master.numel() for master in self.run.masters(place.vector)]
        if isinstance(value, Tensor) and value.dim():
            if any(each.numel() < size for each, size in zip(values, sizes, strict=True)):
                raise CheckpointError(
                    f"{self.run.directory}: the optimizer keeps {key!r} for a whole group and not for each element, "
                    "which cannot be converted."
                )
            return join((key, place.name), place.values(values), place.shape)
        # torch counts steps for each parameter, in an fp32 tensor.
        return torch.tensor(float(value), dtype=torch.float32, device="cpu") if key == "step" else _copied(value)

    def _plain(self, value: Any, place: str) -> Any:
        """Convert a value to types that `torch.load(weights_only=True)` reads; values of other types are left out."""
        if type(value) in _AS_IT_IS:
            return value
        if isinstance(value, Tensor):
            return _copied(value)
        if isinstance(value, Mapping):
            inner = [(f"{place}.{key}" if place else str(key), key, each) for key, each in value.items()]
            found = [(at, self._plain(key, at), self._plain(each, at)) for at, key, each in inner]
            return {key: each for at, key, each in found if at not in self.left_out}
        if isinstance(value, list | tuple | set | frozenset):
            kept = [self._plain(each, f"{place}[{number}]") for number, each in enumerate(value)]
            return kept if isinstance(value, list) else set(kept) if isinstance(value, set | frozenset) else tuple(kept)
        for kind, convert_to in _CONVERSIONS:
            if isinstance(value, kind):
                return self._plain(convert_to(value), place)
        kind = type(value)
        self.left_out[place] = value.name if isinstance(value, Remains) else f"{kind.__module__}.{kind.__qualname__}"
        return None


def _scaler_state(scaler: Any) -> dict[str, float]:
    """Convert the state of DeepSpeed's dynamic loss scaler to this package's; a static one has no state.

    DeepSpeed counts the steps since an overflow, beginning with 0, and raises the scale whenever the count is a
    multiple of the window. This package counts up to the window and raises the scale then.
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


def _name(name: str) -> str:
    """A parameter's name in the module, without the prefix of the wrapper that Lightning before 2.1 used."""
    return plain_name(name.removeprefix("_forward_module."))


def _at_step(scheduler: dict[str, Any]) -> dict[str, Any]:
    """The state of one of DeepSpeed's schedulers as torch's; the state of others is returned unchanged.

    DeepSpeed counts from -1 before the first step, and its schedules lag one step behind their count.
    """
    if "last_batch_iteration" not in scheduler:
        return scheduler
    steps = scheduler["last_batch_iteration"] + 1
    return {"last_epoch": steps, "_step_count": steps + 1}


def _copied(value: Any) -> Any:
    """A copy of a tensor, which does not keep the rest of its storage alive; other values are returned unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value
