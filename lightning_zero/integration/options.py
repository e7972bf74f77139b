"""The options of the strategy: one dataclass that is the source of all other statements of the options.

The constructor of :class:`~lightning_zero.ZeroStrategy` has a parameter for each field (a test compares them), the
Hydra schema ``StrategyConf`` is made from the fields, checkpoints record some of them, and plans use them. This
module imports only the standard library, so that the schema can be used without torch and Lightning.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, get_args

P = ParamSpec("P")
StoreName = Literal["none", "cpu", "nvme"]
GradientStoreName = Literal["auto", "cpu", "nvme"]
NativeName = Literal["auto", "off"]
LayoutName = Literal["fp32", "split"]
FormatName = Literal["full", "sharded"]
CheckpointStateName = Literal["fp32", "compact"]
PreflightName = Literal["error", "warn", "off"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_STAGES = (0, 1, 2, 3)
NVME_PATH = "LIGHTNING_ZERO_NVME_PATH"  # the environment variable that names the folder if the option does not


@dataclass(frozen=True)
class StrategyOptions:
    """Options of :class:`~lightning_zero.ZeroStrategy`, checked one by one and against each other.

    The strategy's constructor has an argument for each option and describes it.

    Raises:
        ValueError: for a value that is not one of those described there, or a combination that cannot work.
        TypeError: for a value of the wrong kind.
    """

    stage: int = 2
    offload_optimizer: StoreName = "none"
    offload_params: StoreName = "none"
    offload_fraction: float = 1.0
    nvme_path: str | None = None
    nvme_buffer_gb: float = 0.25
    nvme_checksums: bool = True
    offload_gradients: GradientStoreName = "auto"
    accumulate_on_device: bool = False
    shard_size: int | None = None
    bucket_size_mb: float = 25.0
    units: Sequence[str | type] | None = None
    persistence_numel: int = 10_000
    max_live_numel: int | None = None
    prefetch_mb: float = 0.0
    max_in_flight_mb: float = 64.0
    staging_buffer_mb: float = 256.0
    activation_offload: bool = False
    activation_offload_mb: float = 1.0
    check_steps: int = 10
    detect_data_edits: bool = False
    overlap: bool = True
    update_in_backward: bool = False
    native_optimizer: NativeName = "auto"
    master_layout: LayoutName = "fp32"
    preflight: PreflightName = "error"
    skip_nonfinite: bool = True
    max_consecutive_skips: int | None = 25
    checkpoint_format: FormatName = "full"
    checkpoint_state: CheckpointStateName = "fp32"
    async_save: bool = False
    checksums: bool = True
    evaluation_masters: bool = False
    timeout: float = 1800.0
    start_method: StartMethod = "popen"
    process_group_backend: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stage, int) or isinstance(self.stage, bool) or self.stage not in _STAGES:
            stages = ", ".join(map(str, _STAGES))
            raise ValueError(f"stage={self.stage!r} is not a ZeRO stage; expected one of {stages}")
        for name in CHOICES:
            value = getattr(self, name)
            check_choice(name, value)
            # Hydra passes members of an enum, and the safe loader of checkpoints refuses these.
            object.__setattr__(self, name, str(value))
        self._check_stores()
        self._check_fraction()
        self._check_disk()
        self._check_gradients()
        self._check_shard_size()
        _check_positive("bucket_size_mb", self.bucket_size_mb, "a number greater than 0; 25 is a good start")
        _check_positive("timeout", self.timeout, "a number of seconds greater than 0; the default is 1800")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_update_in_backward()
        _check_units(self.units)
        all_sharded = "a number of elements >= 0; 0 shards every parameter"
        _check_count("persistence_numel", self.persistence_numel, all_sharded)
        _check_count("check_steps", self.check_steps, "a number of steps >= 0; the default is 10")
        mib = "a number of MiB >= 0; 0 gathers one unit ahead"
        _check_positive("prefetch_mb", self.prefetch_mb, mib, zero=True)
        last = "a number of MiB >= 0; 0 leaves one bucket under way"
        _check_positive("max_in_flight_mb", self.max_in_flight_mb, last, zero=True)
        _check_positive(
            "staging_buffer_mb", self.staging_buffer_mb, "a number of MiB greater than 0; 256 is a good start"
        )
        least = "a number of MiB >= 0; 0 moves every saved tensor"
        _check_positive("activation_offload_mb", self.activation_offload_mb, least, zero=True)
        if self.max_live_numel is not None:
            _check_count("max_live_numel", self.max_live_numel, "a number of elements >= 0, or None for no limit")
        if self.max_consecutive_skips is not None:
            skips = "a number of steps >= 1, or None for no limit; the default is 25"
            _check_count("max_consecutive_skips", self.max_consecutive_skips, skips, least=1)

    def _check_stores(self) -> None:
        optimizer, params = self.offload_optimizer, self.offload_params
        if self.stage == 0 and (optimizer != "none" or params != "none"):
            raise ValueError(
                f"stage=0 keeps everything replicated on the device; got offload_optimizer={optimizer!r}, "
                f"offload_params={params!r}. Use stage=1 or higher to offload"
            )
        if self.stage < 3 and params != "none":
            raise ValueError(
                f"offload_params={params!r} needs stage=3, where parameters are sharded; got stage={self.stage}. "
                "Use stage=3, or offload_optimizer alone"
            )
        if params == "nvme" and optimizer != "nvme":
            raise ValueError(
                "offload_params='nvme' needs offload_optimizer='nvme', since the optimizer state is larger than the "
                f"parameters; got {optimizer!r}. Keep both on the disk, or the parameters in host memory: "
                "offload_params='cpu'"
            )

    def _check_fraction(self) -> None:
        fraction = self.offload_fraction
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
            raise ValueError(
                f"offload_fraction={fraction!r} must be a number greater than 0 and at most 1; 1 offloads everything, "
                "and offload_optimizer='none' offloads nothing"
            )
        if fraction < 1 and self.offload_optimizer == "none":
            raise ValueError(
                f"offload_fraction={fraction!r} needs offloading, but offload_optimizer='none' offloads nothing; use "
                "offload_optimizer='cpu' with it"
            )

    def _check_update_in_backward(self) -> None:
        if self.update_in_backward and self.skip_nonfinite:
            raise ValueError(
                "update_in_backward=True updates parameters before it is known whether all gradients of the step are "
                f"finite; got skip_nonfinite={self.skip_nonfinite}. Use skip_nonfinite=False, which skips no steps, "
                "or update_in_backward=False"
            )
        if self.update_in_backward and self.uses_disk:
            raise ValueError(
                f"update_in_backward=True needs optimizer state in memory; got offload_optimizer="
                f"{self.offload_optimizer!r}, whose tiles would need the buffer while gradients arrive in it. Use "
                "offload_optimizer='cpu' or 'none', or update_in_backward=False"
            )

    def _check_disk(self) -> None:
        buffer = "a number of GiB of host memory greater than 0; 0.25 is a good start"
        _check_positive("nvme_buffer_gb", self.nvme_buffer_gb, buffer, most=_MOST_GIB)
        if self.nvme_path is not None:
            if not isinstance(self.nvme_path, str | os.PathLike) or not os.fspath(self.nvme_path):
                raise TypeError(f"nvme_path={self.nvme_path!r} must be the path of a folder, such as '/local_nvme'")
            object.__setattr__(self, "nvme_path", _absolute(self.nvme_path))
        elif self.uses_disk:
            if not (path := os.environ.get(NVME_PATH)):
                raise ValueError(
                    f"offload_optimizer='nvme' needs nvme_path, a folder on a local disk of every node, such as "
                    f"nvme_path='/local_nvme'; or set the environment variable {NVME_PATH}, which also works for the "
                    "names that end in _nvme"
                )
            object.__setattr__(self, "nvme_path", _absolute(path))

    def _check_gradients(self) -> None:
        where, optimizer = self.offload_gradients, self.offload_optimizer
        if (where == "nvme" and not self.uses_disk) or (where == "cpu" and optimizer == "none"):
            raise ValueError(
                f"offload_gradients={where!r} needs optimizer state on a disk: elsewhere sharded gradients rest with "
                f"the state; got offload_optimizer={optimizer!r}. Use offload_optimizer='nvme', or "
                "offload_gradients='auto'"
            )

    @property
    def uses_disk(self) -> bool:
        """Whether state rests on a disk."""
        return self.offload_optimizer == "nvme"

    @property
    def gradients_rest(self) -> bool | None:
        """Whether sharded gradients rest on the disk with the state; ``None``: if they do not fit into the buffer."""
        return None if self.offload_gradients == "auto" else self.offload_gradients == "nvme"

    @property
    def disk_path(self) -> str | None:
        """The folder on the disk, if one is named by the option or the environment variable; otherwise ``None``."""
        path = self.nvme_path or os.environ.get(NVME_PATH)
        return _absolute(path) if path else None

    @property
    def in_flight_bytes(self) -> int:
        """``max_in_flight_mb`` in bytes."""
        return int(self.max_in_flight_mb * 2**20)

    @property
    def staging_bytes(self) -> int:
        """``staging_buffer_mb`` in bytes."""
        return max(1, int(self.staging_buffer_mb * 2**20))

    @property
    def nvme_buffer_bytes(self) -> int:
        """``nvme_buffer_gb`` in bytes."""
        return int(self.nvme_buffer_gb * 2**30)

    def _check_shard_size(self) -> None:
        size = self.shard_size
        if size is None:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"shard_size={size!r} must be a number of ranks >= 1, or None for those of a node")
        if self.stage == 0 and size != 1:
            raise ValueError(f"shard_size={size} needs stage=1 or higher: stage=0 shards nothing")

    @property
    def replicates(self) -> bool:
        """Whether every rank holds everything, so that its shard group is the rank alone."""
        return self.stage == 0

    def record(self, version: str, world_size: int, shard_size: int, precision: str) -> dict[str, Any]:
        """The entry of a checkpoint that describes the run that wrote it.

        Args:
            version: of the package.
            world_size: number of ranks.
            shard_size: number of ranks in a shard group of the run; the options may leave it open.
            precision: name of the precision plugin's mode.
        """
        return {
            "version": version,
            "stage": self.stage,
            "world_size": world_size,
            "shard_size": shard_size,
            "offload_optimizer": self.offload_optimizer,
            "offload_params": self.offload_params,
            "precision": precision,
        }


# Options of StrategyOptions that `zero_auto` always chooses, and those that it chooses unless they are given.
CHOSEN = ("stage", "offload_optimizer", "offload_params", "offload_fraction")
FREE = ("shard_size", "bucket_size_mb", "persistence_numel", "max_live_numel", "accumulate_on_device")


_MOST_GIB = float(2**33)  # bytes are counted in 64 bits


@dataclass(frozen=True)
class AutoOptions:
    """Options of :class:`~lightning_zero.ZeroAutoStrategy` beside those of :class:`StrategyOptions`.

    The strategy's constructor has an argument for each option and describes it. Options of ``FREE`` that are ``None``
    are chosen.

    Raises:
        ValueError: for a value that is not one of those described there.
    """

    device_memory_gb: float | None = None
    host_memory_gb: float | None = None
    reserve_gb: float = 0.0
    shard_size: int | None = None
    bucket_size_mb: float | None = None
    persistence_numel: int | None = None
    max_live_numel: int | None = None
    accumulate_on_device: bool | None = None

    def __post_init__(self) -> None:
        for name in ("device_memory_gb", "host_memory_gb"):
            if (value := getattr(self, name)) is not None:
                words = "a number of GiB greater than 0, or None for all available memory"
                _check_positive(name, value, words, most=_MOST_GIB)
        reserve = self.reserve_gb
        if not isinstance(reserve, int | float) or isinstance(reserve, bool) or not 0 <= reserve < _MOST_GIB:
            raise ValueError(f"reserve_gb={reserve!r} must be a number of GiB >= 0")

    @property
    def fixed(self) -> dict[str, Any]:
        """The options of ``FREE`` that were given."""
        return {name: value for name in FREE if (value := getattr(self, name)) is not None}


SWITCHES = tuple(field.name for field in fields(StrategyOptions) if field.type == "bool")
# The valid values of the options that take one of a few words.
CHOICES: dict[str, tuple[str, ...]] = {
    "native_optimizer": get_args(NativeName),
    "master_layout": get_args(LayoutName),
    "start_method": get_args(StartMethod),
    "checkpoint_format": get_args(FormatName),
    "checkpoint_state": get_args(CheckpointStateName),
    "preflight": get_args(PreflightName),
    "offload_optimizer": get_args(StoreName),
    "offload_params": get_args(StoreName),
    "offload_gradients": get_args(GradientStoreName),
}


def check_choice(name: str, value: object) -> None:
    """Raise a :class:`ValueError` if ``value`` is none of the words of an option of ``CHOICES``."""
    if value not in CHOICES[name]:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, CHOICES[name]))}")


def lists_options(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the strategy's constructor: an unknown keyword is an error that lists the known ones."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        check_names("ZeroStrategy", kwargs, known)
        init(*args, **kwargs)

    return checked


def check_names(strategy: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise a :class:`TypeError` that lists the options of ``strategy`` if one of the given names is unknown."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise TypeError(f"{strategy} has no option {name!r}; {hint}The options are: {', '.join(known)}")


def _absolute(path: str | os.PathLike[str]) -> str:
    """The same folder, also after the program has gone to another one.

    YAML files are not read by a shell, which would expand "~". A checkpoint holds no path objects.
    """
    return str(Path(path).expanduser().absolute())


def _check_positive(name: str, value: object, expectation: str, zero: bool = False, most: float = math.inf) -> None:
    least = 0 if zero else math.ulp(0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < most:
        raise ValueError(f"{name}={value!r} must be {expectation}")


def _check_count(name: str, value: object, expectation: str, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be {expectation}")


def _check_units(units: object) -> None:
    if units is None:
        return
    if isinstance(units, str | type) or not isinstance(units, Iterable):
        example = units if isinstance(units, str | type) else "transformer.h.*"
        raise TypeError(f"units={units!r} must be a list of classes, names or patterns, such as units=[{example!r}]")
    for unit in units:
        if not isinstance(unit, str | type):
            raise TypeError(f"units={units!r} must hold classes, their names or patterns of module names; got {unit!r}")
