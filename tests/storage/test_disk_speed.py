"""What a disk is measured to do, and the way of transfers that is chosen by it."""

from __future__ import annotations

import errno
import math
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage import disk_speed
from lightning_zero.storage.disk_file import ALIGNMENT, DiskFile
from lightning_zero.storage.disk_speed import RINGS, THREADS, DiskSpeed, Way, choose_way, measure, ways

TILE = 2 * ALIGNMENT
LIMIT = 8 * TILE


@pytest.mark.parametrize("direct", [True, False])
def test_a_measurement_moves_tiles_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    moved: Counter[str] = Counter()
    since: Counter[tuple[str, int]] = Counter()  # the page cache was emptied
    last: dict[str, deque[int]] = {name: deque(maxlen=8) for name in ("read", "write")}
    for name in ("read", "write"):
        real = getattr(DiskFile, name)

        def noted(file: DiskFile, memory: Tensor, offset: int, what: str, name: str = name, real: Any = real) -> None:
            assert memory.nbytes == TILE
            assert offset + TILE <= LIMIT
            moved[name] += 1
            since[name, offset] += 1
            assert direct or since[name, offset] == 1
            last[name].append(memory.data_ptr())
            real(file, memory, offset, what)

        monkeypatch.setattr(DiskFile, name, noted)
    real_settle = DiskFile.settle

    def settle(file: DiskFile) -> None:
        real_settle(file)
        since.clear()

    monkeypatch.setattr(DiskFile, "settle", settle)
    file = DiskFile(tmp_path / "measured", Way(2, ALIGNMENT).pool(), direct)
    speed = measure(file, TILE, 0.01, LIMIT)
    assert all(0 < rate < math.inf for rate in speed)
    assert min(moved["read"], moved["write"]) >= 8
    assert file.nbytes == LIMIT
    for name, memory in last.items():
        assert len(set(memory)) >= 6, f"each {name} has the memory of the last one, which the processor's caches hold"


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({THREADS[3]: 1.05, RINGS[0]: 0.9}, THREADS[0]),
        ({THREADS[3]: 1.2, RINGS[0]: 1.1}, THREADS[3]),
        ({RINGS[0]: 1.02, RINGS[1]: 1.05}, RINGS[0]),
        ({THREADS[3]: 1.2, RINGS[0]: 1.0, RINGS[1]: 1.3}, RINGS[1]),
    ],
)
def test_another_way_is_chosen_where_it_is_clearly_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[Way, float], chosen: Way
) -> None:
    """Than the usual one of its backend; of the backends the faster one is taken."""
    rates = dict.fromkeys((*THREADS, *RINGS), 1.0) | rates
    file = DiskFile(tmp_path / "measured", Way().pool())
    monkeypatch.setattr(Way, "pool", lambda way: way)
    monkeypatch.setattr(disk_speed._Region, "rate", lambda region, *_: rates[region.file.pool])
    assert choose_way(file, TILE, LIMIT, among=[*rates]) == chosen == file.pool


def test_a_choice_is_made_by_real_transfers(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "measured", Way().pool())
    assert choose_way(file, TILE, LIMIT, seconds=0.01) in ways()


def test_rings_are_left_out_where_the_system_or_the_user_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_IO_URING", "off")
    assert ops.io_uring_refusal() == "LIGHTNING_ZERO_IO_URING=off"
    assert ways() == THREADS
    assert RINGS[0].pool().backend == "threads"
    monkeypatch.setenv("LIGHTNING_ZERO_IO_URING", "0")
    with pytest.raises(ValueError, match="'0' must be 'off', or unset"):
        ways()
    monkeypatch.delenv("LIGHTNING_ZERO_IO_URING")
    monkeypatch.setattr(ops.disk._C, "io_uring_refusal", lambda: "io_uring_setup: Operation not permitted")
    assert ways() == THREADS
    monkeypatch.setattr(ops.disk._C, "io_uring_refusal", lambda: "")
    assert ways() == (*THREADS, *RINGS)


def test_threads_do_the_work_where_the_system_has_no_ring_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: int) -> None:
        raise OSError(errno.EMFILE, "io_uring_setup: Too many open files")

    monkeypatch.setattr(ops.disk._C, "io_uring_refusal", lambda: "")
    monkeypatch.setitem(ops.disk._BACKENDS, "io_uring", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        ops.DiskPool(backend="io_uring")
    assert RINGS[0].pool().backend == "threads"


def test_the_time_of_a_step() -> None:
    speed = DiskSpeed(read=4.0, write=2.0, mixed=3.0)
    assert speed.seconds(12, 12) == 8.0
    assert speed.seconds(12, 6) == 4.0 + 1.5
    assert speed.seconds(6, 12) == 4.0 + 3.0
