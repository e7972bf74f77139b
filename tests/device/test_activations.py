"""Activations in host memory: a training with them is, bit for bit, one without, and their memory is given back."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from device import sim
from device.accelerator import SimAccelerator
from device.test_overlap import BF16, Case, Late, bits, left_by, start
from device.where import DevicePool
from engine import driver
from helpers import models
from lightning import Fabric
from strategy.fits import Lit, Recipe, fit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero import ZeroFabricStrategy, ZeroStrategy
from lightning_zero.engine import ActivationLimits
from lightning_zero.engine.activations import ActivationOffload, PinnedCopies
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning.tracing import trace
from lightning_zero.storage import Executor, InlineExecutor, StreamExecutor

# Everything is moved, and one storage at a time on its way; a few are; small ones stay.
LIMITS = [ActivationLimits(0, 0), ActivationLimits(0, 600), ActivationLimits(200, 2000)]
KIB = 1 << 10


class Checkpointed(nn.Module):
    """A transformer whose blocks are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = models.make_model("transformer")
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.first
        x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return model.head(model.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
}
CASES = [
    Case(2, micro=2, precision=BF16),
    Case(3, micro=2, optimizers=2),
    Case(3, precision=BF16, model="checkpointed"),
    Case(2, model="reentrant"),
    Case(1, micro=3, model="optional", host=False),
]


def train(case: Case, executor: Executor, device: torch.device, limits: ActivationLimits | None) -> list[Tensor]:
    """What three steps leave, and what a second backward, by the same graph, has found."""
    model = MODELS.get(case.model, lambda: models.make_model(case.model))()
    session = start(case, executor, device, model, activations=limits)
    if isinstance(executor, StreamExecutor):
        executor.blocked.clear()  # masters were filled
    optimizers = [updater.optimizer for updater in session.engine.updaters]
    seen = []
    for micro in models.make_batches(3, case.micro, 1, flagged=models.by_turns):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, (batch,) in enumerate(micro, start=1):
            with session.engine.forward_context():
                extra = torch.ones(5, 7, device=device, requires_grad=True)
                loss = models.next_token_loss(session.model, batch.to(device)) + busy(extra)
            (again,) = torch.autograd.grad(busy_of(extra, session.engine), extra, retain_graph=True)
            driver.backward(session.engine, loss, last=index == len(micro))
            assert extra.grad is not None
            seen += [again, extra.grad, loss.detach()]
        for optimizer in optimizers:
            optimizer.step()
    return [*(tensor.cpu() for tensor in seen), *left_by(session)]


class Doubled(torch.autograd.Function):
    """Saves its output, and reads it twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = x * 2
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        _, output = ctx.saved_tensors
        return grad * output / x


def busy(x: Tensor) -> Tensor:
    """Saves views of one storage, strided, expanded and of another dtype, tensors twice, and outputs."""
    h = Doubled.apply(x.sin() + 1.5)
    parts = (h @ torch.ones(7, 9, device=x.device)).chunk(3, dim=-1)
    mixed = parts[0] * parts[1].exp() + parts[2].t().square().t().relu_()
    column = mixed[:, :1].expand(-1, 4) * mixed[:, 1:2]
    return (column.tanh() * column).sum() + h[1:4, ::2].sigmoid().prod() + (h * h).mean()


def busy_of(x: Tensor, engine: Any) -> Tensor:
    """The gradient of it, which saves what a second backward reads."""
    with engine.forward_context():
        (grad,) = torch.autograd.grad(busy(x), x, create_graph=True)
        return grad.square().sum()


def assert_unchanged(case: Case, device: torch.device, limits: ActivationLimits, seed: int) -> None:
    expected = train(case, InlineExecutor(), device, None)
    if device.type == sim.DEVICE and seed:
        torch.accelerator.synchronize()
        sim.install().schedule("random", seed)
    executor = (Late if seed % 2 and device.type == sim.DEVICE else StreamExecutor)(device)
    actual = train(case, executor, device, limits)
    assert [bits(tensor) for tensor in actual] == [bits(tensor) for tensor in expected]
    assert not executor.blocked


@pytest.mark.device("lazy")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case}" for case in CASES])
def test_activations_in_host_memory_change_no_bit(device: torch.device, number: int) -> None:
    for seed, limits in enumerate(LIMITS):
        assert_unchanged(CASES[number], device, limits, seed + number)


@pytest.mark.slow
@pytest.mark.device("lazy")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case}" for case in CASES])
def test_they_change_no_bit_in_any_schedule(device: torch.device, number: int) -> None:
    for seed in range(3, 6):  # after those of the fast one
        assert_unchanged(dataclasses.replace(CASES[number], seed=seed), device, LIMITS[seed % len(LIMITS)], seed)


# ------------------------------------------------------------------------------------------------------- the mechanism


class Counted(PinnedCopies):
    """Counts what is moved."""

    def __init__(self, device: torch.device, executor: Executor) -> None:
        super().__init__(device, executor)
        self.saved: list[int] = []  # bytes
        self.fetched: list[int] = []

    def save(self, source: Tensor) -> Any:
        self.saved.append(source.untyped_storage().nbytes())
        return super().save(source)

    def fetch(self, copy: Any) -> Any:
        self.fetched.append(copy.nbytes)
        return super().fetch(copy)


def make_offload(
    device: torch.device, limits: ActivationLimits, stay: Callable[[], list[Tensor]] = list
) -> tuple[ActivationOffload, Counted]:
    copies = Counted(device, StreamExecutor(device))
    return ActivationOffload(device, copies, limits, stay), copies


def held() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def assert_held(expected: int, after: object = None) -> None:
    """Fails unless the device holds so many bytes soon: autograd's thread drops its last node after backward ended."""
    deadline = monotonic() + 60
    while held() != expected and monotonic() < deadline:
        sleep(0.001)
    assert held() == expected, after


class Layers(nn.Module):
    """Eight activations of 256 KiB, each of which two nodes save, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64, bias=False), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.simulated
@pytest.mark.device
def test_the_peak_on_the_device_falls_as_a_trace_says(device: torch.device) -> None:
    def loss_of(module: nn.Module) -> Tensor:
        return module(torch.zeros(1024, 64))

    model = Layers().to(device)
    before, peaks, traces = held(), [], []
    for window in (None, 0, 600 * KIB):
        limits = None if window is None else ActivationLimits(KIB, window)
        offload, copies = make_offload(device, limits or ActivationLimits(1 << 40))
        torch.accelerator.reset_peak_memory_stats()
        with offload.saving():
            loss = model(torch.ones(1024, 64, device=device))
        loss.backward()
        offload.end_backward()
        del loss
        model.zero_grad()
        peaks.append(torch.accelerator.max_memory_allocated() - before)
        traces.append(trace(Layers(), loss_of, activations=limits))
        assert_held(before)
        if limits is not None:
            assert traces[-1].copied == {"d2h": sum(copies.saved), "h2d": sum(copies.fetched)}
            assert traces[-1].on_host == copies.nbytes
            assert copies.saved == [256 * KIB] * 9  # with the batch, each once
    assert peaks[0] - peaks[1] > 1500 * KIB
    for number in (1, 2):
        assert peaks[0] - peaks[number] == pytest.approx(traces[0].peak - traces[number].peak, rel=0.02)


@pytest.mark.device("lazy")
def test_a_forward_that_fails_frees_what_a_backward_may_still_read(device: torch.device) -> None:
    def loss_of(x: Tensor) -> Tensor:
        return x.sin().exp().square().tanh().sum()

    x = torch.rand(64, 64, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(x), x)
    offload, copies = make_offload(device, ActivationLimits(0))
    with contextlib.suppress(InterruptedError), offload.saving():
        loss = loss_of(x)
        before = torch.accelerator.memory_allocated()
        raise InterruptedError
    assert before - torch.accelerator.memory_allocated() == sum(copies.saved)
    others = [torch.full_like(x, 7.0) for _ in copies.saved]  # in the memory that was freed
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.device
def test_parameters_and_what_else_rests_on_the_device_is_not_moved(device: torch.device) -> None:
    layer, frozen = nn.Linear(6, 6).to(device), nn.Linear(6, 6).to(device).requires_grad_(False)
    table = torch.rand(4, 6, device=device)  # a buffer, say
    x = torch.rand(4, 6, device=device, requires_grad=True)
    offload, copies = make_offload(device, ActivationLimits(0), lambda: [table])
    with offload.saving():
        loss = (frozen(layer(x) * table) @ frozen.weight.t()[:, :3] * x[:, 3:].sin()).sum()
    assert copies.saved == [4 * 3 * 4] * 2  # the factors of the last product
    loss.backward()
    data = torch.rand(100, 6, device=device)
    with offload.saving():
        (layer(data[:2])).sum().backward()  # a small part of much
    assert len(copies.saved) == 2


def change_output(y: Tensor) -> None:
    y.add_(1)


def change_view(y: Tensor) -> None:
    y[0].zero_()


def change_alias(y: Tensor) -> None:
    y.detach().mul_(2)


def change_data(y: Tensor) -> None:
    y.data.mul_(2)


def change_nothing(y: Tensor) -> None:
    y.detach().clone().mul_(2)


@pytest.mark.device
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["moved", "stayed"])
def test_a_saved_tensor_that_was_changed_in_place_is_the_error_that_torch_raises(
    device: torch.device, least: int
) -> None:
    offload, _ = make_offload(device, ActivationLimits(least))

    def raises(change: Callable[[Tensor], None], saving: Any) -> bool:
        x = torch.rand(5, device=device, requires_grad=True)
        with saving:
            y = x.exp()  # its backward reads the output
        with torch.no_grad():
            change(y)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return all(words in str(error) for words in ("modified by an inplace operation", "expected version 0"))
        return False

    for change in (change_output, change_view, change_alias, change_data, change_nothing):
        own = raises(change, torch.enable_grad())
        assert raises(change, offload.saving()) is own
        assert own is (change not in (change_data, change_nothing))


@pytest.mark.device("lazy", "eager")
def test_nothing_is_left_on_the_device_once_nobody_can_run_a_backward(device: torch.device) -> None:
    x = torch.rand(300, 100, device=device, requires_grad=True)
    offload, copies = make_offload(device, ActivationLimits(0, 200 * KIB))
    with offload.saving():
        x.sin().exp().sum().backward()  # makes the gradient
    offload.end_backward()
    before, pinned = held(), copies.nbytes

    def fail() -> None:
        with offload.saving():
            x.sin().exp().sum().log()
            raise ValueError("of the user's")

    def forget() -> None:
        with offload.saving():
            x.sin().exp().sum().log()
        with offload.saving():
            pass

    def repeat() -> None:
        with offload.saving():
            loss = x.sin().exp().cos().sum()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            offload.end_backward()

    def stop_halfway() -> None:
        with offload.saving():
            y = x.sin().exp()
            loss = y.cos().tanh().sum()
        torch.autograd.grad(loss, y)
        offload.end_backward()

    for act in (fail, forget, repeat, stop_halfway, fail):
        try:
            act()
        except ValueError:
            assert act is fail
        with offload.saving():
            pass
        assert_held(before, act.__name__)
    x.grad = None
    assert pinned <= copies.nbytes <= 5 * x.nbytes


@pytest.mark.device("lazy")
def test_work_on_a_block_of_host_memory_follows_what_is_under_way(device: torch.device) -> None:
    copies = PinnedCopies(device, StreamExecutor(device))
    first, second = torch.full((50,), 1.0, device=device), torch.full((50,), 2.0, device=device)
    copy, _ = copies.save(first)  # nobody waits for it but who comes after
    fetched, work = copies.fetch(copy)
    work.wait()
    assert torch.equal(fetched.view(torch.float32), first)
    fetched, work = copies.fetch(copy)  # still to be copied when the block is given back, and out again
    del copy
    copies.save(second)[1].synchronize()
    work.wait()
    assert torch.equal(fetched.view(torch.float32), first)
    assert copies.nbytes == 256


@pytest.mark.device
def test_host_memory_is_used_again_whatever_the_lengths(device: torch.device) -> None:
    offload, copies = make_offload(device, ActivationLimits(0, 0))
    for length in (10, 200, 150, 90, 201, 350, 400, 3, 400):
        x = torch.rand(length, 64, device=device, requires_grad=True)
        with offload.saving():
            loss = x.sin().exp().cos().sum()
        loss.backward()
        offload.end_backward()
    assert copies.nbytes <= 2 * 3 * 400 * 64 * 4


# ------------------------------------------------------------------------------------------------------------ Lightning


class Adversarial(Lit):
    """Two optimizers, each after a forward and a backward of its own, inside of the step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        return [torch.optim.AdamW(parameters[::2], lr=1e-2), torch.optim.SGD(parameters[1::2], lr=1e-2)]

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers: Any = self.optimizers()
        for sign, optimizer in zip((1.0, -0.1), optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * models.next_token_loss(self.model, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fits(accelerator: str) -> list[dict[str, Tensor]]:
    """The weights of fits, by pairs: without activations in host memory, and with them."""
    found = []
    for name, module, precision in (("zero2_offload", Adversarial, "32-true"), ("zero3", Lit, "bf16-mixed")):
        for offload in (False, True):
            strategy = ZeroStrategy(**STRATEGIES[name], activation_offload=offload, activation_offload_mb=0.0)
            fitted = fit(strategy, Recipe(steps=3), module, accelerator=accelerator, precision=precision)
            found.append(fitted.weights)
    for offload in (False, True):
        options: dict[str, Any] = {"activation_offload": offload, "activation_offload_mb": 0.0}
        known = SimAccelerator() if accelerator == sim.DEVICE else accelerator  # Fabric has a registry of its own
        fabric = Fabric(accelerator=known, devices=1, strategy=ZeroFabricStrategy(3, **options))
        fabric.launch()
        model = models.make_model("transformer")
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for ((batch,),) in models.make_batches(3, 1, 1):
            optimizer.zero_grad()
            fabric.backward(models.next_token_loss(wrapped, fabric.to_device(batch)))
            optimizer.step()
        with lightning_zero.gathered_parameters(model):
            found.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.device
def test_trainer_and_fabric_train_to_the_same_bits(device_pool1: DevicePool) -> None:
    (found,) = device_pool1.run(fits, device_pool1.where.accelerator)
    for without, offloaded in zip(found[::2], found[1::2], strict=True):
        assert without.keys() == offloaded.keys()
        assert all(torch.equal(without[name], offloaded[name]) for name in without)
