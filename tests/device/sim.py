"""The simulated device `sim` in Python: `install()` registers it, as `import torch` registers CUDA.

An installed device is for the life of a process, and is the accelerator of whatever asks torch for one: tests have it
in rank pools of their own (fixtures `device`, `device_pool1`, `device_pool2`), never in pytest's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from device import build

import lightning_zero

DEVICE = "sim"
BACKEND = "simccl"
NAME = build.NAME
EVERY_DEVICE_BYTES = 4 << 30
TORCH, LIGHTNING, PACKAGE = (Path(module.__file__).parent for module in (torch, lightning, lightning_zero))
# Of the package: what moves tensors for others, who are asked why.
MOVERS = ("sharding/placement.py", "storage/accelerators.py", "storage/executor.py")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When tasks run: `eager` at once, `lazy` when somebody waits for them, `random` as the seed draws."""

    mode: str = "lazy"
    seed: int = 0

    def __str__(self) -> str:
        return f"random{self.seed}" if self.mode == "random" else self.mode

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """ "eager", "lazy" or "random3"; anything else is a `ValueError`."""
        if text.startswith("random") and text[6:].isdecimal():
            return cls("random", int(text[6:]))
        if text not in ("eager", "lazy"):
            raise ValueError(f"the schedule {text!r} is none of 'eager', 'lazy' and 'random' with a seed, as 'random3'")
        return cls(text)


LAZY = Schedule()


@functools.cache
def install() -> Any:
    """The compiled part; registers the device with torch, once per process."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    spec = importlib.util.spec_from_file_location(NAME, build.library())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch._register_device_module(DEVICE, device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, make_group, devices=[DEVICE])
    return extension


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Collectives with NCCL's semantics; gloo moves their data."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout=timeout)
    return install().make_simccl(gloo)


def reset() -> None:
    """As after `install()`: eager, nothing broken, nothing counted. What is still to run is dropped with its errors."""
    c = install()
    c.clear_faults()
    with contextlib.suppress(RuntimeError):  # of the test before, which has failed for it
        c.schedule("eager", 0)
    for defect in defects():
        setattr(c.defects(), defect, False)
    c.draws_as_host(False)
    c.pageable_is_error(False)
    c.hang_limit(60.0)
    c.reset_counters()
    c.trace(False)
    c.clocked(False)
    c.reset_clock()
    c.reset_streams()
    c.set_device(0)
    for device in range(c.devices):
        c.set_limit(device, EVERY_DEVICE_BYTES)


def defects() -> list[str]:
    """Properties that can be broken on purpose: attributes of `install().defects()`."""
    return [name for name in dir(install().defects()) if name.startswith("no_")]


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[Any]:
    """Within, tasks run by this schedule; at the end all have run."""
    c = install()
    reset()
    c.schedule(schedule.mode, schedule.seed)
    try:
        yield c
        torch.accelerator.synchronize()
    finally:
        reset()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts host waits and bytes through pageable memory by call site; see `call_site`."""
    c, counts = install(), Counts()

    def observe(kind: str, why: str, nbytes: int) -> None:
        site = call_site()
        if kind == "wait":
            beside = threading.current_thread().name.startswith("lane ")
            (counts.beside if beside else counts.waits)[site, why] += 1
        else:
            counts.pageable[site, why] += nbytes

    c.observe(observe)
    try:
        yield counts
    finally:
        c.observe(None)


@dataclasses.dataclass
class Counts:
    """By call site and reason: host waits for the device, and bytes that went through pageable memory.

    Waits of threads that work beside the training are counted apart.
    """

    waits: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    beside: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    pageable: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)


def call_site() -> str:
    """The function that asked for it: `folder/file.py:name` of the package, or whose it is."""
    frame: types.FrameType | None = sys._getframe(2)  # of whoever made the device's observer speak
    while frame is not None:
        code = Path(frame.f_code.co_filename)
        if code.is_relative_to(PACKAGE):
            if (file := code.relative_to(PACKAGE).as_posix()) not in MOVERS:
                return f"{file}:{frame.f_code.co_name}"
        elif not code.is_relative_to(TORCH):
            return f"{'lightning' if code.is_relative_to(LIGHTNING) else 'tests'}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def write_trace(path: Path) -> None:
    """The tasks in virtual time, for chrome://tracing or Perfetto: a process per device, a thread per stream."""
    events = [
        {"name": name, "ph": "X", "pid": device, "tid": stream, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for name, device, stream, _, start, end in install().spans()
    ]
    path.write_text(json.dumps({"traceEvents": events}))


class _Device:
    """As `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def index_of(device: Any) -> int:
    """Of a device, its name or its index; that of the current one where it says none."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return int(torch.accelerator.current_device_index() if index is None else index)


def device_module(extension: Any) -> types.ModuleType:
    """`torch.sim`, as `torch.cuda` is."""
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.device, module.Event, module.Stream = _Device, torch.Event, torch.Stream
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: extension.devices
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index_of(device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.host_register, module.host_unregister = extension.register_host, extension.unregister_host
    for name in (
        *("synchronize", "current_stream", "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated"),
        *("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"),
    ):
        setattr(module, name, getattr(torch.accelerator, name))
    add_generators(module, tuple(map(extension.default_generator, range(extension.devices))))
    sys.modules[module.__name__] = module
    return module


def add_generators(module: Any, generators: tuple[torch.Generator, ...]) -> None:
    def manual_seed(seed: int) -> None:
        generators[index_of(None)].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
