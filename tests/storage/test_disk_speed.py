"""What a disk is measured to do, and the way of transfers that is chosen by it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_zero.storage import disk_speed
from lightning_zero.storage.disk_file import ALIGNMENT, DiskFile
from lightning_zero.storage.disk_speed import WAYS, DiskSpeed, Way, choose_way, measure

TILE = 2 * ALIGNMENT
LIMIT = 8 * TILE


@pytest.mark.parametrize("direct", [True, False])
def test_a_measurement_moves_tiles_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    moved: Counter[str] = Counter()
    for name in ("read", "write"):
        real = getattr(DiskFile, name)

        def noted(file: DiskFile, memory: Tensor, offset: int, what: str, name: str = name, real: Any = real) -> None:
            assert memory.nbytes == TILE
            assert offset + TILE <= LIMIT
            moved[name] += 1
            real(file, memory, offset, what)

        monkeypatch.setattr(DiskFile, name, noted)
    file = DiskFile(tmp_path / "measured", Way(2, ALIGNMENT).pool(), direct)
    speed = measure(file, TILE, 0.01, LIMIT)
    assert all(0 < rate < math.inf for rate in speed)
    assert min(moved["read"], moved["write"]) >= 8
    assert file.nbytes == LIMIT


@pytest.mark.parametrize(("gain", "chosen"), [(1.05, WAYS[0]), (1.2, WAYS[3])])
def test_another_way_is_chosen_where_it_is_clearly_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: float, chosen: Way
) -> None:
    rates = dict.fromkeys(WAYS, 1.0) | {WAYS[3]: gain}
    file = DiskFile(tmp_path / "measured", Way().pool())
    monkeypatch.setattr(Way, "pool", lambda way: way)
    monkeypatch.setattr(disk_speed._Region, "rate", lambda region, *_: rates[region.file.pool])
    assert choose_way(file, TILE, LIMIT) == chosen == file.pool


def test_a_choice_is_made_by_real_transfers(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "measured", Way().pool())
    assert choose_way(file, TILE, LIMIT, seconds=0.01) in WAYS


def test_the_time_of_a_step() -> None:
    speed = DiskSpeed(read=4.0, write=2.0, mixed=3.0)
    assert speed.seconds(12, 12) == 8.0
    assert speed.seconds(12, 6) == 4.0 + 1.5
    assert speed.seconds(6, 12) == 4.0 + 3.0
