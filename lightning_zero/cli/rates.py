"""The rates of `lightning-zero doctor --measure`: memory, matrix products, copies, and sending between two ranks.

They are measured with the operations of the engine, each for about half a second: the update of host memory by the
native AdamW, copies from and to pinned memory, an all-gather by the package's own groups. Each rate is the best of its
repetitions. The rate of a disk comes from `disk.py`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lightning_zero.version import __version__

if TYPE_CHECKING:
    import torch

    from lightning_zero.planning.calibration import Calibration

_BYTES = 1 << 28  # of an array; caches hold less
_SECONDS = 0.5
_FEWEST = 3  # repetitions
_TIMEOUT = 300.0  # seconds for two processes, which import torch and Lightning


class MeasureError(RuntimeError):
    """Two ranks could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured rates, and the file in which they are stored.

    Attributes:
        path: path of the file.
        calibration: the rates that were added to it.
        failure: why ranks were not measured; "" if they were, or if there is nothing to measure.
    """

    path: str
    calibration: Calibration
    failure: str


def measure_all(disk: float | None, seconds: float = _SECONDS, nbytes: int = _BYTES) -> Measured:
    """Measures this machine with its first accelerator, or its processors, and adds the rates to the user's file.

    Args:
        disk: bytes per second of a disk, which is measured elsewhere.
        seconds: for each measurement.
        nbytes: of arrays.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    from lightning_zero.planning.calibration import Calibration, Rates, identify, write
    from lightning_zero.storage import device_type

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if device is None else torch.device(device.type, 0)
    gather, failure = None, ""
    if device_type(device).shares_host_memory or torch.accelerator.device_count() > 1:
        try:
            gather = measure_gather(device.type, seconds, nbytes)
        except MeasureError as error:
            failure = str(error)
    rates = Rates(
        dram=measure_triad(seconds, nbytes),
        update=measure_update(seconds, nbytes),
        matmul_32=measure_matmul(device, torch.float32, seconds),
        matmul_16=measure_matmul(device, torch.bfloat16, seconds),
        gather=gather,
        disk=disk,
        **({} if device_type(device).shares_host_memory else measure_copies(device, seconds, nbytes)),
    )
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    versions = {"lightning-zero": __version__, "torch": torch.__version__}
    calibration = Calibration(identify(device), date, versions, rates)
    return Measured(str(write(calibration)), calibration, failure)


def best(act: Callable[[], object], seconds: float) -> float:
    """Returns the least seconds that ``act`` takes, when it is repeated for about ``seconds``."""
    act()  # the first call touches pages, starts threads and loads kernels
    least, end, count = float("inf"), time.perf_counter() + seconds, 0
    while count < _FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        act()
        least = min(least, time.perf_counter() - start)
        count += 1
    return least


def measure_triad(seconds: float, nbytes: int) -> float:
    """Bytes per second of host memory: `a = b + 3 c` reads two arrays and writes one (STREAM's triad)."""
    import torch

    a, b, c = (torch.ones(nbytes // 12) for _ in range(3))
    return 3 * a.nbytes / best(lambda: torch.add(b, c, alpha=3.0, out=a), seconds)


def measure_update(seconds: float, nbytes: int) -> float:
    """Bytes per second of host memory in an update by AdamW: it reads four arrays and writes three of them."""
    import torch

    from lightning_zero import ops

    param, first, second, grad = (torch.full((nbytes // 16,), 0.5) for _ in range(4))

    def update() -> None:
        ops.adamw_(param, first, second, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=1)

    return 7 * param.nbytes / best(update, seconds)


def measure_matmul(device: torch.device, dtype: torch.dtype, seconds: float, size: int = 128) -> float:
    """Operations per second of a product of square matrices, which grow until one takes a tenth of the time."""
    import torch

    from lightning_zero.storage import device_type

    kind = device_type(device)
    while True:
        left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            torch.mm(left, right)
            kind.synchronize(device)

        least = best(multiply, 0.0)
        if least > seconds / 10 or size >= 1 << 14:
            return 2 * size**3 / min(least, best(multiply, seconds))
        size *= 2


def measure_copies(device: torch.device, seconds: float, nbytes: int) -> dict[str, float]:
    """Bytes per second inside an accelerator's memory, read and written, and from and to pinned host memory."""
    import torch

    from lightning_zero.storage import HostStore, device_type

    kind = device_type(device)
    host = HostStore(pin_for=device).zeros(nbytes, torch.uint8)
    here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def copying(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            kind.synchronize(device)

        return nbytes / best(copy, seconds)

    return {
        "device_memory": 2 * copying(there, here),
        "to_device": copying(here, host),
        "to_host": copying(host, here),
    }


def measure_gather(kind: str, seconds: float, nbytes: int) -> float:
    """Bytes per second that each of two ranks sends in an all-gather.

    Args:
        kind: of their devices.
        seconds: for which they repeat it, at least thrice.
        nbytes: that are gathered.

    Raises:
        MeasureError: the processes fail, or take too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command += ["lightning_zero.cli.gather_rank", kind, str(seconds), str(nbytes)]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # a source folder must not hide the installed package
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, env=environment)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"two ranks took more than {_TIMEOUT:g} s") from error
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            return float(json.loads(line)["bytes_per_second"])
    said = ended.stderr.strip().splitlines() or ["nothing"]
    raise MeasureError(f"two ranks ended with code {ended.returncode}: {said[-1]}")


def judge_rates(measured: Measured) -> list[tuple[str, str]]:
    """Returns what could be better, each with a remedy."""
    found = [(measured.failure, "Estimates assume a rate.")] if measured.failure else []
    rates, device = measured.calibration.rates, measured.calibration.machine.device
    if rates.matmul_16 < rates.matmul_32 / 2:
        longer = f"matrix products in bf16 take {rates.matmul_32 / rates.matmul_16:.3g} times as long as in fp32"
        remedy = "Train in fp32 (precision=32-true); GPUs without bf16 may be fast in fp16 (precision=16-mixed)."
        found.append((f"{longer} on {device}, with this torch", remedy))
    return found


def describe_rates(measured: Measured) -> dict[str, str]:
    """The facts as text, by their names."""
    found = measured.calibration
    unit = {"matmul_32": (1e12, "TFLOPS"), "matmul_16": (1e12, "TFLOPS")}
    facts = {
        name.replace("_", " "): f"{rate / scale:.3g} {word}"
        for name, rate in asdict(found.rates).items()
        if rate is not None
        for scale, word in [unit.get(name, (1e9, "GB/s"))]
    }
    machine = found.machine
    return {"device": f"{machine.device}, {machine.cores} cores of {machine.cpu}", **facts, "written to": measured.path}
