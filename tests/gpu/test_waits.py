"""How often a step makes the host wait for the device, and what it copies through memory that is not pinned."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from device import sim
from engine import driver
from engine.driver import Session
from helpers import models
from strategy.fits import FEW, NAMES, slow_unless

from lightning_zero.engine import Engine
from lightning_zero.sharding import BucketPlacement, Mesh, ShardingPolicy
from lightning_zero.storage import DeviceStore, HostStore
from lightning_zero.update import make_updater

COPIES = "storage/executor.py:submit"  # between the device and state on the host
NORMS = "update/clipping.py:_all_reduce"


def start(name: str, device: torch.device) -> Session:
    stage, on_device = int(name[4]), DeviceStore(device)
    store = HostStore(pin_for=device) if "offload" in name else on_device
    placement = BucketPlacement(
        Mesh.single(),
        ShardingPolicy.from_stage(stage),
        driver.UNCHANGED,
        device,
        store,
        store if stage == 3 else on_device,
    )
    model = models.make_model("transformer")
    optimizer = models.make_optimizer("adamw", model)
    engine = Engine(model, placement, optimized=list(model.parameters()), bucket_size_mb=0.0003, check_steps=0)
    updater = make_updater(optimizer, engine)
    engine.attach([updater])
    return Session(model, engine, optimizer, updater)


def by_site(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (site, _), count in counts.items():
        found[site] += count
    return dict(found)


@pytest.mark.device("eager")
@pytest.mark.parametrize("name", slow_unless(FEW, NAMES))
def test_waits_and_pageable_bytes_of_a_step(device: torch.device, name: str) -> None:
    """Of two micro-batches, clipped, in fp32: what runs through the host is copied while both wait for each other."""
    if device.type != sim.DEVICE:
        pytest.skip("only the simulated device counts them")
    session = start(name, device)
    batch = models.make_batches(1, 1, 1)[0][0][0].to(device)
    driver.run_step(session, [batch, batch], clip_norm=0.3, settle=True)
    with sim.counted() as counts:
        driver.run_step(session, [batch, batch], clip_norm=0.3, settle=True)
    buckets, stage = session.engine.buckets, int(name[4])
    n, units = len(buckets), len(buckets) - 1  # at stage 3 the root's stay gathered between forward and backward
    waits, pageable = {NORMS: 1}, {NORMS: 8 * (2 + 1 + sum(len(b.parameters) for b in buckets) + n)}
    if "offload" in name:
        gradients_out, shards_in = (n if stage == 1 else 2 * n), n
        if stage == 3:  # for every forward and backward, and for a settled module
            shards_in = 2 * (n + units)
        waits[COPIES] = gradients_out + shards_in
        if stage > 1:  # the second micro-batch's gradients arrive beside those of the first, to be added
            pageable[COPIES] = sum(bucket.layout.padded_numel * 4 for bucket in buckets)
    assert by_site(counts.waits) == waits
    assert by_site(counts.pageable) == pageable
