"""Changes that take less memory: those that help where memory has run out, on the device or on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.integration import engines
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import NVME_PATH, StrategyOptions
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.preflight import _what_fits
from lightning_zero.planning import preflight
from lightning_zero.planning.memory import Memory
from lightning_zero.planning.preflight import Claim, Pool

META, CPU = torch.device("meta"), torch.device("cpu")


def memory(device: torch.device, **options: Any) -> Memory:
    """Of a rank of two, with half a billion parameters in bf16."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192)) for _ in range(8)))
    optimizers = [torch.optim.AdamW(module.parameters())]
    chosen, precision = StrategyOptions(**options), ZeroPrecision("bf16-true")
    return engines.describe_memory(module, optimizers, chosen, precision, device, (1, 2, 0), 1, {})


def test_a_setting_is_given_by_name() -> None:
    """Its numbers have one type: two that were swapped would pass unseen."""
    setting = memory(CPU).setting
    with pytest.raises(TypeError, match="positional"):
        type(setting)(*vars(setting).values())
    assert type(setting)(**vars(setting)) == setting


@pytest.mark.parametrize(("store", "on_host_alone"), [("cpu", "=zero2_nvme"), ("nvme", ".offload_gradients=nvme")])
def test_remedies_save_memory_on_the_side_that_has_run_out(store: str, on_host_alone: str) -> None:
    described = memory(META, stage=2, offload_optimizer=store, offload_gradients="cpu", nvme_path="/disk")
    now = described.plan.peak
    for side in ("device", "host"):
        found = described.remedies(side)
        saved = [getattr(now, side) - getattr(remedy.plan.peak, side) for remedy in found]
        assert saved == [getattr(remedy, side) for remedy in found] == sorted(saved, reverse=True)
        assert saved[-1] > 0
    on_host, on_device, either = ({r.override for r in described.remedies(s)} for s in ("host", "device", "either"))
    assert either == on_host | on_device
    assert {f"strategy{on_host_alone}", "strategy.staging_buffer_mb=32"} <= on_host - on_device
    assert "strategy=zero3_offload" in on_device - on_host
    assert "strategy=zero2 strategy.offload_gradients=auto" in {*described.changes}


def test_what_a_strategy_would_refuse_is_changed_with_it() -> None:
    changes = {*memory(META, stage=2, offload_optimizer="cpu", offload_fraction=0.5).changes}
    assert {"strategy=zero1 strategy.offload_fraction=1", "strategy=zero3_offload"} <= changes
    for name in STRATEGIES:
        if f"strategy={name}" in changes:
            assert StrategyOptions(**STRATEGIES[name], offload_fraction=0.5)  # otherwise it would be refused


def test_less_staging_memory_is_offered_where_memory_that_may_be_locked_is_short() -> None:
    described = memory(META, stage=2, offload_optimizer="cpu")
    peak, smaller = described.plan.peak, described.changes["strategy.staging_buffer_mb=32"].peak
    assert peak.pinned - smaller.pinned == peak.host - smaller.host == 224 << 20
    locked = Claim(0, Pool("locked memory", "memory that may be locked", "locked", smaller.pinned), 0, 0)
    assert not preflight.fits([locked], peak, META)
    assert "strategy.staging_buffer_mb=32" in _what_fits(described, [locked])
    # CPU ranks copy nothing, so it changes nothing there.
    assert "strategy.staging_buffer_mb=32" not in memory(CPU, stage=2, offload_optimizer="cpu").changes
    assert "strategy.staging_buffer_mb=32" not in memory(META, stage=2, offload_optimizer="cpu", overlap=False).changes


@pytest.mark.parametrize("store", ["cpu", "nvme"])
def test_a_plan_of_a_device_that_is_not_there_knows_whether_copies_overlap(store: str) -> None:
    """Without overlap each copy has ended when the next begins, and none passes through staging memory."""
    options = {"stage": 2, "offload_optimizer": store, "nvme_path": "/disk", "bucket_size_mb": 1.0}
    overlapped, inline = (memory(META, **options, overlap=overlap).plan for overlap in (True, False))
    assert inline.peak.device < overlapped.peak.device
    buffer = StrategyOptions(**options).nvme_buffer_bytes if store == "nvme" else 0
    assert buffer == inline.staging.host < overlapped.staging.host


def test_a_disk_that_the_environment_names_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NVME_PATH, raising=False)
    for path, offered in ((None, False), ("/disk", True)):
        if path is not None:
            monkeypatch.setenv(NVME_PATH, path)
        assert any("nvme" in typed for typed in memory(META, stage=2).changes) is offered
