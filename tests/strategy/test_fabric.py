"""Training with Fabric: the same bits as with the Trainer, whose reference it shares, and what only Fabric can do."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import driver
from helpers import models, place
from helpers.ranks import RankPool, ranks
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from strategy.fits import (
    NAMES,
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    halving,
    is_native,
    make_trainer,
    reference,
)
from torch import Tensor, nn

from lightning_zero import (
    CheckpointError,
    CollectiveError,
    DynamicLossScaler,
    ZeroFabricStrategy,
    ZeroPrecision,
    full_grad,
    full_param,
    gathered_parameters,
    load_from_checkpoint,
)
from lightning_zero.checkpoint import Save
from lightning_zero.engine import engines_of
from lightning_zero.integration.engines import make_engine
from lightning_zero.integration.fabric.precision import FabricPrecision
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.sharding import FreedParameter, Mesh
from lightning_zero.storage import InlineExecutor
from lightning_zero.tools.consolidate import consolidate
from lightning_zero.tools.contents import describe

CLIP = 0.3


def make_fabric(name: str, **flags: Any) -> Fabric:
    """A Fabric on the pool's ranks; small parameters are sharded too."""
    options = STRATEGIES[name] | ({"persistence_numel": 0} if name.startswith("zero3") else {})
    strategy = ZeroFabricStrategy(**options) if "3" in name else name
    fabric = Fabric(accelerator=place.accelerator(), devices=dist.get_world_size(), strategy=strategy, **flags)
    fabric.launch()
    return fabric


def train(fabric: Fabric, recipe: Recipe, model: Any, optimizer: Any, clip_norm: float | None = None) -> None:
    """A user's loop, with everything that Fabric offers for it."""
    scheduler = halving(optimizer) if recipe.scheduled else None
    for step in recipe.batches(fabric.world_size):
        for number, micro in enumerate(step, start=1):
            with fabric.no_backward_sync(model, enabled=number < len(step)):
                loss = models.next_token_loss(model, micro[fabric.global_rank])
                fabric.backward(loss / recipe.micro)
        if clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def run(
    name: str, recipe: Recipe, path: str, clip_norm: float | None = None, apart: bool = False, **flags: Any
) -> Fitted:
    """Train, save, and show what the checkpoint holds."""
    fabric = make_fabric(name, **flags)
    with fabric.init_module():
        model = recipe.make_model()
    if apart:
        sharded = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(recipe.make_optimizer(model))
    else:
        sharded, optimizer = fabric.setup(model, recipe.make_optimizer(model))
    train(fabric, recipe, sharded, optimizer, clip_norm)
    if not name.startswith("zero3"):  # there it is an error, elsewhere the loop may read right after a step
        seen = [parameter.detach().clone() for parameter in model.parameters()]
        assert all(map(torch.equal, seen, map(full_param, model.parameters())))
    (engine,) = engines_of(model)
    assert not any(engine.gradients_of(bucket).held for bucket in engine.buckets)  # `zero_grad` clears one by one
    fabric.save(path, {"model": sharded, "optimizer": optimizer, "step": 3})
    saved = torch.load(path)
    return Fitted(saved["model"], [saved["optimizer"]["state"]], saved["step"], 0, {}, [])


@ranks(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_as_one_process_would(pool: RankPool, name: str, tmp_path: Path) -> None:
    """With accumulation, clipping and a scheduler; so it equals the Trainer's fits, too."""
    recipe = Recipe(model="optional", micro=2, scheduled=True, flagged=models.only_in_step_1)
    apart = name in ("zero1", "zero3")
    results = pool.run(run, name, recipe, str(tmp_path / "saved.ckpt"), clip_norm=CLIP, apart=apart)
    expected = reference(name, recipe, pool.world_size, clip_norm=CLIP)
    native = is_native(name, recipe)
    assert_same(results[0].weights, expected.weights, native=native)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state, native=native)


def run_penalized(name: str) -> dict[str, Tensor]:
    """Train with a penalty that is computed beside the module."""
    recipe = Recipe(optimizer="momentum")
    fabric = make_fabric(name)
    model = recipe.make_model()
    sharded, optimizer = fabric.setup(model, recipe.make_optimizer(model))
    for ((batches,),) in zip(recipe.batches(fabric.world_size), strict=True):
        loss = models.next_token_loss(sharded, batches[fabric.global_rank])
        with gathered_parameters(model):
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        fabric.backward(loss)
        assert all(isinstance(p, FreedParameter) == name.startswith("zero3") for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return {name: full_param(parameter) for name, parameter in model.named_parameters()}


@ranks(2)
def test_a_penalty_may_be_computed_in_a_context(pool: RankPool) -> None:
    assert_same(*(pool.run(run_penalized, name)[0] for name in ("zero3", "zero2")))


class WithLoss(nn.Module):
    """A module whose output is its loss, computed inside as the Trainer's `training_step` is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return models.next_token_loss(self.model, batch)


def overflowing() -> ZeroPrecision:
    """The first scales are too large; one skip is forgiven."""
    return ZeroPrecision("16-mixed", scaler=DynamicLossScaler(init_scale=2.0**19, window=2, hysteresis=2))


def precisely(name: str, recipe: Recipe, flags: dict[str, Any], path: str) -> tuple[Fitted, dict[str, Any]]:
    """Train with the loss inside; the checkpoint's weights and what it says of the scaler."""
    fabric = make_fabric(name, **flags)
    sharded, optimizer = fabric.setup(model := WithLoss(recipe.make_model()), recipe.make_optimizer(model.model))
    dtypes = []
    for step in recipe.batches(fabric.world_size):
        loss = sharded(step[0][fabric.global_rank])
        dtypes.append(loss.dtype)
        fabric.backward(loss)
        fabric.clip_gradients(sharded, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": sharded})
    saved = torch.load(path)
    weights = {key.removeprefix("model."): value for key, value in saved["model"].items()}
    strategy = fabric.strategy
    assert isinstance(strategy, ZeroFabricStrategy)
    seen = {"dtypes": dtypes, "scale": strategy.loss_scale, "skipped": strategy.skipped_steps} | saved["lightning_zero"]
    return Fitted(weights, [], 0, 0, {}, []), seen


@pytest.mark.parametrize(
    ("name", "precision"),
    [("zero3", "bf16-mixed"), ("zero2_offload", "bf16-true"), ("zero1", "64-true"), ("zero3_offload", "16-mixed")],
)
def test_it_computes_in_the_precision_of_the_trainer(
    pool2: RankPool, name: str, precision: str, tmp_path: Path
) -> None:
    """Bit for bit; a loss scaler skips the same steps, and its state is in the checkpoint."""
    recipe = Recipe(steps=4)
    half = precision == "16-mixed"
    flags: dict[str, Any] = {"plugins": [overflowing()]} if half else {"precision": precision}
    expected = pool2.run(fit, name, recipe, gradient_clip_val=CLIP, **flags)[0]
    actual, seen = pool2.run(precisely, name, recipe, flags, str(tmp_path / "saved.ckpt"))[0]
    assert_same(actual.weights, expected.weights)
    assert set(seen["dtypes"]) == {torch.float64 if precision == "64-true" else torch.float32}
    if half:
        assert seen["skipped"] > 1
        assert seen["scale"] == seen["loss_scaler"]["scale"] < 2.0**19
    else:
        assert (seen["skipped"], seen["scale"], seen["loss_scaler"]) == (0, 1.0, {})


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed"])
def test_tensors_and_modules_begin_in_the_dtype_that_they_need(precision: Any) -> None:
    """Tensors in that of `ddp`; modules in one from which masters can be made."""
    made = {}
    for name in ("ddp", "zero2"):
        fabric = Fabric(accelerator="cpu", devices=1, strategy=name, precision=precision)
        with fabric.init_tensor():
            made[name] = torch.ones(1).dtype
    assert made["zero2"] == made["ddp"]
    with fabric.strategy.module_init_context():
        assert nn.Linear(1, 1).weight.dtype == (torch.float64 if precision == "64-true" else torch.float32)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_outputs_of_16_bits_become_the_default_dtype_however_they_were_asked_for(precision: Any) -> None:
    plugin = FabricPrecision(ZeroPrecision(precision, param_dtype="bfloat16"))
    assert plugin.convert_output(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32


def begin(name: str, recipe: Recipe, path: str) -> None:
    """All but the last step with Fabric."""
    fabric = make_fabric(name)
    sharded, optimizer = fabric.setup(model := WithLoss(recipe.make_model()), recipe.make_optimizer(model.model))
    steps(fabric, recipe, sharded, optimizer, slice(-1))
    fabric.save(path, {"state_dict": sharded, "optimizer_states": [optimizer], "step": recipe.steps - 1})


def begin_with_trainer(name: str, recipe: Recipe, path: str) -> None:
    trainer = make_trainer(name, max_steps=recipe.steps - 1)
    trainer.fit(Lit(recipe))
    trainer.save_checkpoint(path)


def finish(name: str, recipe: Recipe, path: str) -> Fitted:
    """The last step with Fabric, whose weights begin as others."""
    fabric = make_fabric(name)
    model = WithLoss(dataclasses.replace(recipe, seed=7).make_model())
    sharded, optimizer = fabric.setup(model, recipe.make_optimizer(model.model))
    state: dict[str, Any] = {"state_dict": sharded, "optimizer_states": [optimizer]}
    rest = fabric.load(path, state | {"step": 0}, strict=False)
    assert "state_dict" not in rest
    steps(fabric, recipe, sharded, optimizer, slice(-1, None))
    weights = fabric.strategy.get_module_state_dict(sharded)
    optimizer_state = fabric.strategy.get_optimizer_state(optimizer.optimizer)["state"]
    own = {key.removeprefix("model."): value for key, value in optimizer_state.items()}
    return Fitted({key.removeprefix("model."): v for key, v in weights.items()}, [own], 0, 0, {}, [])


def steps(fabric: Fabric, recipe: Recipe, model: Any, optimizer: Any, which: slice) -> None:
    for step in recipe.batches(fabric.world_size)[which]:
        fabric.backward(model(step[0][fabric.global_rank]))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("begin_it", [begin, begin_with_trainer])
def test_a_run_goes_on_from_a_checkpoint_of_fabric_or_trainer(pool2: RankPool, begin_it: Any, tmp_path: Path) -> None:
    """At another stage."""
    recipe = Recipe(optimizer="momentum", steps=3)
    path = str(tmp_path / "saved.ckpt")
    pool2.run(begin_it, "zero2_offload", recipe, path)
    results = pool2.run(finish, "zero3", recipe, path)
    expected = reference("zero2_offload", recipe, 2)
    assert_same(results[0].weights, expected.weights)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state)
    assert not results[1].weights


def one_backward_for_two() -> list[float]:
    """The loss scale after each step of three optimizers of two modules, through which each backward runs."""
    scaler = DynamicLossScaler(init_scale=1024, window=2, hysteresis=1)
    fabric = make_fabric("zero2", plugins=[ZeroPrecision("32-true", scaler=scaler)])
    a, b = Layers(1), Layers(2)
    first, blocks, head = fabric.setup(a, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (a.blocks, a.head)))
    second, all_of_second = fabric.setup(b, torch.optim.SGD(b.parameters(), lr=0.1))
    scales = []
    for factor in (1.0, 1.0, torch.inf, 1.0):
        fabric.backward(first(torch.ones(1, 8)).sum() + second(torch.ones(1, 8)).sum() * factor)
        for optimizer in (blocks, all_of_second, head):
            optimizer.step()
            optimizer.zero_grad()
            scales.append(scaler.scale)
    return scales


def test_one_backward_through_two_modules_counts_once_for_the_loss_scaler(pool2: RankPool) -> None:
    """It grows after two backwards; a clean step neither hides nor undoes the overflow of another module."""
    for scales in pool2.run(one_backward_for_two):
        assert scales == [1024] * 3 + [2048] * 3 + [2048, 1024, 1024] + [1024] * 3


def hand_scale_over(path: str) -> list[float]:
    """The loss scales of a Trainer's run, and of the one under Fabric that goes on with it."""
    recipe = Recipe(steps=2)
    trainer = make_trainer("zero2", plugins=[overflowing()])
    trainer.fit(Lit(recipe))
    trainer.save_checkpoint(path)
    fabric = make_fabric("zero2", plugins=[overflowing()])
    sharded, optimizer = fabric.setup(model := WithLoss(recipe.make_model()), recipe.make_optimizer(model.model))
    fabric.load(path, {"state_dict": sharded, "optimizer_states": [optimizer]})
    return [strategy.loss_scale for strategy in (trainer.strategy, fabric.strategy)]  # type: ignore[attr-defined]


def test_the_loss_scale_of_a_trainer_goes_on_under_fabric(pool2: RankPool, tmp_path: Path) -> None:
    ((trainers, fabrics), _) = pool2.run(hand_scale_over, str(tmp_path / "saved.ckpt"))
    assert trainers == fabrics < 2.0**19


class Layers(nn.Module):
    """Two blocks, and a root with parameters of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
            self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adversaries(name: str, path: str) -> dict[str, Any]:
    """A generator and a discriminator, set up apart, and all that may come between a forward and its backward."""
    world = dist.get_world_size()
    fabric = make_fabric(name) if name != "ddp" else Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    if fabric.global_rank == 1:  # an engine of its own: ranks number theirs differently then
        alone = nn.Linear(2, 2)
        make_engine(alone, Mesh.single(), StrategyOptions(0), ZeroPrecision(), fabric.device, InlineExecutor(), None)
    made = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (Layers(1), Layers(2))]
    (g, g_optimizer), (d, d_optimizer) = (fabric.setup(*each) for each in made)
    noise = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(3):
        inputs, real = torch.randn(2, 4, 8, generator=noise)
        fake = g(inputs)
        with torch.no_grad():
            d(real), g(real)  # their parameters are freed after it, but for those that a backward needs
        fabric.backward(d(fake.detach()).square().mean() - d(real).mean())
        d_optimizer.step()
        d_optimizer.zero_grad(set_to_none=False)
        fabric.backward(-d(fake).mean(), retain_graph=True)
        if world == 1:  # of several ranks ddp averages no second backward
            fabric.backward(0.1 * fake.square().mean())
        g_optimizer.step()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
    keeps = {"g": lambda key, value: value.dim() == 2}
    fabric.save(path, {"g": g, "d": d, "g_optimizer": g_optimizer, "d_optimizer": d_optimizer}, filter=keeps)
    fabric.barrier()
    return torch.load(path)


@ranks(1, 2)
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_several_modules_train_as_with_ddp(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Bit for bit, in weights and optimizer states of one checkpoint."""
    expected = pool.run(adversaries, "ddp", str(tmp_path / "ddp.ckpt"))[0]
    actual = pool.run(adversaries, name, str(tmp_path / "ours.ckpt"))[0]
    assert set(actual["g"]) == set(expected["g"]) < set(expected["d"])
    for module in ("g", "d"):
        assert_same(actual[module], expected[module])
        own, stock = (saved[f"{module}_optimizer"]["state"] for saved in (actual, expected))
        for number, key in enumerate(expected["d"]):
            assert torch.equal(own[key]["momentum_buffer"], stock[number]["momentum_buffer"])


def evaluate_between(name: str) -> Tensor:
    """The outputs of a module with a BatchNorm, twice, after steps in which each rank has batches of its own.

    The second evaluation comes between a forward and its backward, except with ddp, where the backward would fail.
    """
    world = dist.get_world_size()
    fabric = make_fabric(name) if name != "ddp" else Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    noise, outputs = torch.Generator().manual_seed(fabric.global_rank), []

    def evaluate() -> Tensor:
        layers.eval()
        with torch.no_grad():
            output = model(torch.ones(1, 8))
        layers.train()
        return output

    for number in range(5):
        loss = model(torch.randn(4, 8, generator=noise)).square().mean()
        if number == 2 and name != "ddp":
            evaluate()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            outputs += [evaluate(), evaluate()]
    return torch.stack(outputs)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_an_evaluation_has_the_buffers_of_rank_0_as_with_ddp(pool2: RankPool, name: str) -> None:
    expected, _ = pool2.run(evaluate_between, "ddp")
    for outputs in pool2.run(evaluate_between, name):
        assert torch.equal(outputs, expected)


def replace_model(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a model and gather its state, when rank 1 alone still holds an engine of one that was dropped before it."""
    fabric = make_fabric("zero2")
    model = fabric.setup(Layers(1))
    held = engines_of(model.module)
    del model
    if fabric.global_rank == 0:
        del held  # the cyclic garbage collector runs at another time on each rank
        gc.collect()
    model = fabric.setup(Layers(2))
    assert len(fabric.strategy.engines) == 1
    fabric.save(path, {"model": model})
    return torch.load(path)["model"], fabric.strategy.get_module_state_dict(model.module)


def test_a_checkpoint_has_the_new_model_where_a_rank_still_holds_a_dropped_one(pool2: RankPool, tmp_path: Path) -> None:
    for state in pool2.run(replace_model, str(tmp_path / "saved.ckpt"))[0]:
        assert_same(state, Layers(2).state_dict())


class LitLayers(Layers, LightningModule):
    """The weights' names are those of the model that Fabric has saved."""


def go_on(path: Path, form: str, names: list[str]) -> tuple[list[Any], set[str]]:
    """The state that is saved under these names, what takes it over, and the names of all entries."""
    strategy = ZeroFabricStrategy(2, checkpoint_format=form)
    fabric = Fabric(accelerator=place.accelerator(), devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    states = []
    for seed in (1, 2):
        layers = Layers(seed)
        model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9))
        if seed == 1:
            fabric.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
        state = dict(zip(names, (model, optimizer), strict=True))
        fabric.save(path, state) if seed == 1 else fabric.load(path, state)
        optimizer_state = fabric.strategy.get_optimizer_state(optimizer.optimizer)["state"]
        states.append((fabric.strategy.get_module_state_dict(layers), optimizer_state))
    return states, set(fabric.load(path))


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("names", [["model", "optimizer_1"], ["state_dict", "optimizer_states"]])
def test_entries_have_the_names_that_the_user_gives(
    pool2: RankPool, names: list[str], form: str, tmp_path: Path
) -> None:
    """The Trainer's names, too; then it can load the weights."""
    path, own = tmp_path / "saved.ckpt", {*names, "lightning_zero"}
    (saved, loaded), found = pool2.run(go_on, path, form, names)[0]
    assert_same(loaded[0], saved[0])
    assert_same_states(loaded[1], saved[1])
    if "model" in names:
        assert found == own
        assert [tensor.name for tensor in describe(path).tensors] == [*saved[0]]
    else:
        assert found == {*own, "pytorch-lightning_version"}
        assert_same(load_from_checkpoint(LitLayers, path, seed=2).state_dict(), saved[0])


def load_of_fsdp(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    fabric = make_fabric("zero2")
    model, optimizer = fabric.setup(layers := Layers(2), torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9))
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    state = fabric.strategy.get_optimizer_state(optimizer.optimizer)["state"]
    assert all(
        torch.equal(entry["momentum_buffer"], torch.ones_like(entry["momentum_buffer"])) for entry in state.values()
    )
    return fabric.strategy.get_module_state_dict(layers), rest


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_fsdp_under_fabric_loads(pool1: RankPool, tmp_path: Path) -> None:
    """Fabric's FSDP strategy writes the names that the user gives, by DCP itself."""
    path, weights = tmp_path / "folder.ckpt", Layers(1).state_dict()
    group = {**torch.optim.SGD([torch.ones(1)], lr=0.1, momentum=0.9).param_groups[0], "params": [*weights]}
    state = {
        "state": {name: {"momentum_buffer": torch.ones_like(w)} for name, w in weights.items()},
        "param_groups": [group],
    }
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, no_dist=True)
    torch.save({"step": 3}, path / "meta.pt")
    ((loaded, rest),) = pool1.run(load_of_fsdp, path)
    assert_same(loaded, weights)
    assert rest == {"step": 3}
    assert consolidate(path, tmp_path / "one.ckpt", dtype=torch.bfloat16).tensors == len(weights)
    assert_same(torch.load(tmp_path / "one.ckpt")["model"], {name: value.bfloat16() for name, value in weights.items()})


class Counted(Layers):
    """Has a head of another width, a buffer and extra state."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__(seed)
        self.head = nn.Linear(8, width)
        self.extra = seed
        self.register_buffer("count", torch.tensor(float(seed)))

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def misfits(name: str, path: str) -> None:
    """Of two modules the second one does not fit, in the last shape that is compared, or in a name that is missing."""
    fabric = make_fabric(name)
    saved = fabric.setup(Counted(1))
    fabric.save(path, {"a": saved, "b": saved, "layers": fabric.setup(Layers(1))})
    targets = [Counted(2), Counted(3, width=9)]
    a, b = (fabric.setup(target) for target in targets)

    def values() -> list[Tensor]:
        found = [full_param(p).clone() for target in targets for p in target.parameters()]
        return [*found, *(torch.tensor([target.count, target.extra]) for target in targets)]

    before = values()
    for key, message in (("b", r"size mismatch for head\.bias"), ("layers", "Missing key.*count")):
        with pytest.raises(RuntimeError, match=rf"(?s){message}"):
            fabric.load(path, {"a": a, key: b}, strict=key == "layers")
    if fabric.global_rank == 0:
        torch.save(Counted(1).state_dict(), f"{path}.raw")
    fabric.barrier()
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        fabric.load_raw(f"{path}.raw", b)
    assert all(map(torch.equal, before, values()))
    fabric.load(path, {"a": a})
    assert (targets[0].extra, float(targets[0].count)) == (1, 1.0)
    assert torch.equal(full_param(targets[0].head.weight), full_param(saved.module.head.weight))


@pytest.mark.parametrize("name", ["zero2_offload", "zero3"])
def test_nothing_is_loaded_of_what_does_not_fit(pool2: RankPool, name: str, tmp_path: Path) -> None:
    pool2.run(misfits, name, str(tmp_path / "saved.ckpt"))


def fail_alone() -> str:
    """The error of a rank: rank 1 fails in a step for which the other waits."""
    fabric, recipe = make_fabric("zero2"), Recipe(steps=1)
    model = recipe.make_model()
    sharded, optimizer = fabric.setup(model, recipe.make_optimizer(model))
    assert isinstance(fabric.strategy, ZeroFabricStrategy)
    assert fabric.strategy._mesh is not None
    driver.limit_waits(fabric.strategy._mesh, 1.0)
    try:
        if fabric.global_rank == 1:
            raise LookupError("no such token")
        train(fabric, recipe, sharded, optimizer)
    except (LookupError, CollectiveError) as error:
        sys.excepthook(type(error), error, error.__traceback__)  # what Python does where nobody catches it
        return str(error)
    return ""


def test_the_rank_that_waits_for_one_that_failed_repeats_its_error(pool2: RankPool) -> None:
    waited, _ = pool2.run(fail_alone)
    assert waited.endswith("because rank 1 failed: LookupError: no such token")


# By entries of a checkpoint, the names of the objects into which they are to be loaded.
MISTAKEN_ENTRIES = [
    ({"step": "model"}, "an entry of type int where the state of a Layers is to be loaded; give"),
    ({"several": "optimizer"}, "an entry of type list where the state of a SGD"),
    ({"model": "optimizer"}, "without 'state' and 'param_groups' where the state of a SGD"),
    ({"several": "two"}, "1 objects where 2 are to be loaded; give as many"),
    ({"model": "list"}, "no list of objects where 1 are to be loaded"),
]


def misuse(path: str) -> None:
    """What cannot work says what does."""
    strategy = ZeroFabricStrategy(stage=3, persistence_numel=0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(RuntimeError, match="was called before fabric"):
        strategy.setup_module(nn.Linear(2, 2))
    fabric.launch()
    first, second = Layers(1), Layers(2)
    with pytest.raises(ValueError, match="Set up the module first"):
        fabric.setup_optimizers(torch.optim.SGD(first.parameters(), lr=0.1))
    sharded, optimizer = fabric.setup(first, torch.optim.SGD(first.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"Linear shares 'weight' with the Layers .* such as an nn\.ModuleDict"):
        fabric.setup(first.head)
    other = fabric.setup_module(second)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="its own optimizer"):
        fabric.setup_optimizers(both)
    with pytest.raises(ValueError, match=r"needs whole parameters.*`fabric\.setup\(module, optimizer\)`"):
        fabric.setup_optimizers(torch.optim.Adafactor(second.parameters()))
    fabric.setup_optimizers(spare := torch.optim.SGD(second.parameters(), lr=0.1))
    assert [updater.optimizer for updater in strategy.engines[1].updaters] == [spare]
    other, _ = fabric.setup(second, torch.optim.Adafactor(second.parameters()))
    with pytest.raises(ValueError, match="was not set up"):
        fabric.clip_gradients(sharded, both, max_norm=1.0)
    fabric.backward(sharded(torch.full((1, 8), torch.inf)).sum())
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        fabric.clip_gradients(sharded, optimizer, max_norm=1.0)
    optimizer.zero_grad()
    fabric.backward(sharded(torch.ones(1, 8)).sum())
    norms = [fabric.clip_gradients(sharded, optimizer, max_norm=1e9, norm_type=order) for order in (2, torch.inf)]
    full = torch.cat([full_grad(p).flatten() for p in first.parameters()])
    torch.testing.assert_close(norms, [full.norm(), full.abs().max()])
    fabric.clip_gradients(sharded, optimizer, clip_val=0.5)
    assert max(float(full_grad(p).abs().max()) for p in first.parameters()) == 0.5
    fabric.save(path, {"model": sharded, "several": [optimizer], "step": 3})
    with pytest.raises(TypeError, match=r"nothing takes storage_options=.*retries"):
        strategy.save_checkpoint(path, {"model": first}, storage_options={"retries": 3})
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.integration.fabric.checkpointing.rank_zero_warn", warned.append)
        fabric.save(f"{path}.filtered", {"models": [sharded]}, filter={"models": lambda *_: False})
    assert "the filter of 'models' has no effect: the entry is a list" in warned[0]
    with pytest.raises(KeyError, match="has no 'optimizer'; it has 'model'"):
        fabric.load(path, {"model": sharded, "optimizer": optimizer})
    for state, message in MISTAKEN_ENTRIES:
        objects = {"model": sharded, "optimizer": optimizer, "two": [optimizer, optimizer], "list": [optimizer]}
        with pytest.raises(ValueError, match=message):
            fabric.load(path, {name: objects[given] for name, given in state.items()})
    if fabric.global_rank == 0:
        torch.save(nn.Linear(2, 2).state_dict(), f"{path}.raw")
        torch.save([torch.ones(2)], f"{path}.list")
    fabric.barrier()
    with pytest.raises(KeyError, match=r"has no 'model'; it holds the state of one module, which fabric\.load_raw"):
        fabric.load(f"{path}.raw", {"model": sharded})
    with pytest.raises(CheckpointError, match="it holds a list, and a checkpoint is a dictionary"):
        fabric.load(f"{path}.list", {"model": sharded})
    weight = full_param(first.head.weight)
    with gathered_parameters(first, writeback=True), torch.no_grad():
        first.head.weight.zero_()
    strategy.load_module_state_dict(sharded, fabric.load(path)["model"])
    assert torch.equal(full_param(first.head.weight), weight)
    strategy.release(sharded)
    assert torch.equal(first.head.weight, weight)
    assert [engine.module for engine in strategy.engines] == [other.module]


class Derived(TorchCheckpointIO):
    """A user's own."""


def warnings_of_saves(path: str) -> list[str]:
    """Where ranks share no file system, and where a writer of the user's ignores an option."""
    strategy, warned = ZeroFabricStrategy(stage=2, checkpoint_format="sharded"), list[str]()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    state = {"model": fabric.setup_module(nn.Linear(2, 2))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.integration.checkpointing.rank_zero_warn", warned.append)
        patch.setattr(Save, "gathered", True)
        fabric.save(f"{path}.folder", state)
        strategy.checkpoint_io = Derived()
        fabric.save(f"{path}.file", state)
    return warned


def test_saves_that_do_otherwise_than_expected_say_so(pool2: RankPool, tmp_path: Path) -> None:
    nodes, writer = pool2.run(warnings_of_saves, str(tmp_path / "saved"))[0]
    assert f"not all ranks share the file system of {tmp_path}/saved.folder with rank 0" in nodes
    assert f"Derived writes {tmp_path}/saved.file. Therefore rank 0 gathers the whole checkpoint" in writer


def test_what_cannot_work_says_so(pool2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluation_masters=True works with the Trainer"):
        ZeroFabricStrategy(evaluation_masters=True)
    with pytest.raises(ValueError, match="async_save=True works with the Trainer"):
        ZeroFabricStrategy(async_save=True)
    with pytest.raises(TypeError, match="did you mean 'bucket_size_mb'"):
        ZeroFabricStrategy(bucket_size=3)
    with pytest.raises(ValueError, match="zero2_offload"):
        Fabric(accelerator="cpu", strategy="zero2_ofload")
    pool2.run(misuse, str(tmp_path / "saved.ckpt"))
