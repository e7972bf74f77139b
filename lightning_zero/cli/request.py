"""The request for an estimate: a model, a batch and machines, as given on the command line."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_zero.cgroups import memory_limit
from lightning_zero.cli.imagined import EstimateError, Imagined, from_class, from_sizes, from_transformers
from lightning_zero.cli.text import in_a_line
from lightning_zero.integration.engines import activation_limits
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import PrecisionName, ZeroPrecision
from lightning_zero.planning.calibration import calibrated, read
from lightning_zero.planning.devices import DRAM, NETWORK, Machine, parse_gpu, parse_size
from lightning_zero.planning.machine import this_machine

SOME_FOLDER = "/local_nvme"  # stands for a folder on a disk of which only the size is known
STANDS = f"{SOME_FOLDER} stands for a folder on the disk."
THIS = "this"
_HOST = "64GB"
LEAST = 10**6  # bytes, or bytes per second: what is less lacks a unit


@dataclass(frozen=True, kw_only=True)
class Request:
    """The answers that an estimate needs.

    Attributes:
        model: "package.module:Class".
        config: a file with the arguments of the model's constructor.
        changes: further arguments of the constructor, as "name=value".
        inputs: forms of the tensors of a batch.
        hf: the folder of a model of transformers.
        params: number of parameters of a transformer that is given by its sizes.
        layers: number of its layers.
        hidden: its width.
        vocabulary: size of its vocabulary.
        batch: number of examples in a rank's micro-batch.
        sequence: number of tokens in an example; None: as the model has it.
        accumulate: number of micro-batches in a step.
        precision: flag of the Trainer.
        recompute: whether layers are recomputed in backward.
        activation_offload: whether activations rest in host memory, if there is a GPU.
        gpu: name or memory of a GPU; "this": the GPUs of this machine, with its measured rates.
        gpus: number of GPUs of a machine.
        nodes: number of machines.
        host: host memory of a machine; None: that of this machine with gpu="this", otherwise 64 GB.
        dram: bytes that the host memory moves per second; None: unknown.
        network: bytes that a machine sends per second; None: unknown.
        nvme: folder on a disk for state; None: see ``disk``.
        disk: bytes for state on the disk; None: the free space of the folder, if there is one.
        disk_rate: bytes that the disk reads or writes per second; None: unknown.
    """

    model: str | None = None
    config: Path | None = None
    changes: Sequence[str] = ()
    inputs: Sequence[str] = ()
    hf: Path | None = None
    params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int = 50257
    batch: int = 1
    sequence: int | None = None
    accumulate: int = 1
    precision: PrecisionName = "bf16-mixed"
    recompute: bool = False
    activation_offload: bool = False
    gpu: str = "24GB"
    gpus: int = 1
    nodes: int = 1
    host: str | None = None
    dram: str | None = None
    network: str | None = None
    nvme: Path | None = None
    disk: str | None = None
    disk_rate: str | None = None

    @property
    def nvme_path(self) -> str | None:
        """The folder for state on a disk, or a name that stands for it; None: no disk is used."""
        return str(self.nvme) if self.nvme is not None else None if self.disk is None else SOME_FOLDER

    def machine(self) -> Machine:
        """Describes the machines.

        Raises:
            ValueError: the GPU is unknown, or a size is invalid.
        """
        if self.gpu == THIS:
            made = machine_here(self.gpus, self.nodes)
        else:
            made = Machine(parse_gpu(self.gpu), self.gpus, self.nodes, parse_size(_HOST), DRAM, NETWORK)
        given = {"host": self.host, "dram": self.dram, "network": self.network, "disk_rate": self.disk_rate}
        changes: dict[str, Any] = {name: _size_of(name, text) for name, text in given.items() if text is not None}
        if "disk_rate" in changes:
            changes["disk"] = changes.pop("disk_rate")
        return replace(made, storage=self._storage(), **changes)

    def _storage(self) -> int:
        if self.disk is not None:
            return _size_of("disk", self.disk)
        if self.nvme is None:
            return 0
        if not self.nvme.is_dir():
            raise ValueError(
                f"--nvme {self.nvme} is no folder of this machine; give --disk, the bytes that it may take"
            )
        return shutil.disk_usage(self.nvme).free

    def imagine(self) -> Imagined:
        """Makes the model, without memory.

        Raises:
            EstimateError: the answers do not make a model.
        """
        self._check_sources()
        plugin = ZeroPrecision(self.precision)
        offloads = self.activation_offload and not self.machine().gpu.shares_host
        moved = activation_limits(StrategyOptions(activation_offload=offloads))
        if self.params is not None:
            if self.layers is None or self.hidden is None:
                raise EstimateError("--params needs --layers and --hidden")
            if not 1 <= self.params < math.inf:
                raise EstimateError(f"--params {self.params:g} is no number of parameters; expected one such as 7e9")
            sizes = int(self.params), self.layers, self.hidden, self.vocabulary
            return from_sizes(*sizes, self.batch, self.sequence, plugin, self.recompute, moved)
        if self.hf is not None:
            return from_transformers(self.hf, self.batch, self.sequence, plugin, self.recompute, moved)
        return from_class(self.model, self._arguments(), self.inputs, self.batch, self.sequence, plugin, moved)

    def _check_sources(self) -> None:
        """Refuses two models, and answers that are not used."""
        of_class = "--model" if self.model else "--config" if self.config else None
        named = {"--params": self.params, "--hf": self.hf, of_class: of_class}
        given = [str(flag) for flag, value in named.items() if value is not None]
        if len(given) > 1:
            raise EstimateError(f"{' and '.join(given)} name different models; give one of them")
        if self.params is None and (self.layers or self.hidden):
            raise EstimateError(f"{'--layers' if self.layers else '--hidden'} needs --params")
        if (self.params is not None or self.hf is not None) and (self.inputs or self.changes):
            raise EstimateError(f"{'--input' if self.inputs else '--set'} needs --model")
        if self.recompute and of_class:
            raise EstimateError("--checkpointing needs --params or --hf; a class of --model recomputes by its own code")

    def _arguments(self) -> dict[str, Any]:
        """Reads the arguments of the model's constructor: a YAML or JSON file, and the changes after it."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError  # type: ignore[import-untyped]

        what = "--set" if self.config is None else f"--config {self.config}"
        if self.config is not None and not self.config.is_file():
            raise EstimateError(f"{what} is no file; expected one with the arguments of a constructor, YAML or JSON")
        for change in self.changes:
            if not re.match("[^=]+=", change):
                raise EstimateError(f"--set {change!r} is no argument; expected NAME=VALUE, such as n_layer=12")
        try:
            given = OmegaConf.create() if self.config is None else OmegaConf.load(self.config)
            if not OmegaConf.is_dict(given):
                raise EstimateError(f"{what} holds a list; expected a mapping of names to values")
            merged = OmegaConf.merge(given, OmegaConf.from_dotlist(list(self.changes)))
            made = OmegaConf.to_container(merged, resolve=True)
        except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
            raise EstimateError(f"{what} cannot be read as a mapping of names to values: {in_a_line(error)}") from error
        assert isinstance(made, dict)
        return {str(key): value for key, value in made.items()}


def _size_of(name: str, text: str) -> int:
    try:
        return parse_size(text, LEAST)
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')} {error}") from None


def machine_here(ranks: int, nodes: int) -> Machine:
    """Describes machines like this one, with its measured rates if there are any.

    Args:
        ranks: number of ranks on each.
        nodes: number of machines.

    Raises:
        CalibrationError: the file of rates cannot be read.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if device is None else torch.device(device.type, 0)
    machine, found = this_machine(device, ranks, nodes), read(device)
    limit = memory_limit()
    if isinstance(limit, int):
        machine = replace(machine, host=min(machine.host, limit))
    return machine if found is None else calibrated(machine, found)
