"""How much of an optimizer's state is offloaded changes no bit: kernels update one part, a device the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device import sim
from device.sim import Schedule
from device.test_overlap import BF16, FP16, LIMITS, Case, Late, bits, start, train
from device.test_training import Digests, digests
from device.where import DevicePool
from engine import driver
from helpers import models
from strategy.fits import Recipe, fit

from lightning_zero import ZeroPrecision
from lightning_zero.storage import InlineExecutor, StreamExecutor

FRACTIONS = (0.25, 0.5)
CASES = [
    Case(1, micro=3, precision=BF16),
    Case(2, precision=BF16),
    Case(2, micro=2, optimizers=2),
    Case(2, micro=2, precision=BF16, split=True, edits=False),  # elsewhere remainders outlive edits
    Case(2, precision=FP16, overflow=True),
    Case(3, micro=2, precision=BF16, prefetch_mb=1.0),
    Case(3, micro=2),
    Case(3, precision=FP16, overflow=True),
]


@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_fraction_gives_the_same_bits(device: torch.device, case: Case) -> None:
    """Weights, masters, state, averages and norms, whatever user code does meanwhile."""
    expected = train(case, InlineExecutor(), device)
    for number, fraction in enumerate(FRACTIONS):
        limits = LIMITS[(number + CASES.index(case)) % len(LIMITS)]
        executor = Late(device, *limits) if device.type == sim.DEVICE else StreamExecutor(device, *limits)
        actual = train(dataclasses.replace(case, fraction=fraction), executor, device)
        assert len(actual) == len(expected)
        differing = [n for n, pair in enumerate(zip(actual, expected, strict=True)) if bits(pair[0]) != bits(pair[1])]
        assert not differing, fraction


@pytest.mark.device("lazy")
def test_the_last_buckets_stay_on_the_device(device: torch.device) -> None:
    session = start(dataclasses.replace(CASES[1], fraction=0.5), StreamExecutor(device), device)
    buckets, total = session.engine.buckets, sum(p.numel() for p in session.model.parameters())
    resident = [bucket.master.device == device for bucket in buckets]
    assert resident == sorted(resident)
    offloaded = sum(sum(bucket.layout.numels) for bucket, here in zip(buckets, resident, strict=True) if not here)
    assert total / 2 <= offloaded < total
    assert {bucket.master.memory for bucket in buckets} == {"host", "device"}


@pytest.mark.device("lazy")
@pytest.mark.parametrize("micro", [1, 2])
def test_the_norm_is_the_same_number(device: torch.device, micro: int) -> None:
    """Its square to the last bit of fp64, known when gradients arrive or read from where they rest."""
    found = []
    for fraction in (1.0, 0.5, 0.1):
        session = start(Case(2, micro, fraction=fraction), StreamExecutor(device), device)
        squares = []
        for step in models.make_batches(8, micro, 1):
            session.optimizer.zero_grad()
            for number, (batch,) in enumerate(step, start=1):
                with session.engine.forward_context():
                    loss = models.next_token_loss(session.model, batch.to(device))
                driver.backward(session.engine, loss, last=number == micro)
            squares.append(session.engine._clipping._squares().item().hex())
        found.append(squares)
    assert found[1:] == found[:1] * 2


def fit_each(accelerator: str, stage: int, precision: str) -> list[tuple[float, bool]]:
    """Fits of fractions in random schedules: whether each leaves the bits of the first."""
    params = {"offload_params": "cpu"} if stage == 3 else {}
    options = {"stage": stage, "offload_optimizer": "cpu", "bucket_size_mb": 0.0003, **params}
    left: list[tuple[float, Digests]] = []
    for seed, fraction in enumerate((1.0, 0.5, 0.25)):
        plugin, recipe = ZeroPrecision(precision), Recipe(steps=3, micro=2)  # type: ignore[arg-type]
        with sim.scheduled(Schedule("random", seed)):
            fitted = fit(
                options | {"offload_fraction": fraction},
                recipe,
                accelerator=accelerator,
                plugins=plugin,
                gradient_clip_val=0.3,
            )
        left.append((fraction, digests(fitted)))
    return [(fraction, found == left[0][1]) for fraction, found in left]


@pytest.mark.simulated
@pytest.mark.device
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (2, "bf16-true"),
        *(
            pytest.param(stage, precision, marks=pytest.mark.slow)
            for stage, precision in [(1, "16-true"), (2, "16-mixed"), (3, "32-true"), (3, "16-true"), (3, "bf16-mixed")]
        ),
    ],
)
def test_fits_on_two_ranks_are_the_same_for_every_fraction(
    device_pool2: DevicePool, stage: int, precision: str
) -> None:
    for found in device_pool2.run(fit_each, device_pool2.where.accelerator, stage, precision):
        assert all(same for _, same in found), found
