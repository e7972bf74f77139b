"""torch.compile of the module, of a part of it and of units: values are those of the uncompiled run, and graphs few."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankError, RankPool, slow_unless
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_same,
    assert_same_states,
    fit,
    make_trainer,
    observe,
    reference,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zero.sharding import find_units

WORLD = 2
RECIPE = Recipe(steps=3)
MOMENTUM = Recipe(optimizer="momentum", steps=3)
WHOLE = {"backend": "aot_eager", "fullgraph": True}  # inductor's compiler takes too long here
QUICK = {"backend": "eager", "fullgraph": True}  # torch's own kernels: traced, and nothing else


def wrapped(module: nn.Module, options: dict[str, Any] = WHOLE) -> Any:
    return torch.compile(module, **options)


class CompiledModel(Lit):
    """The network behind a wrapper."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = wrapped(self.model, QUICK)


class ModelCompiledInPlace(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.compile(**QUICK)


class CompiledBlocks(Lit):
    """Each block behind a wrapper that takes its place."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        blocks: Any = self.model.blocks
        for i, block in enumerate(blocks):
            blocks[i] = wrapped(block)


class BlocksCompiledInPlace(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(**WHOLE)


class CompiledLater(Lit):
    """As `BlocksCompiledInPlace`, where the Trainer asks for it."""

    def configure_model(self) -> None:
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(**WHOLE)


class CompiledParts(Lit):
    """Parts of blocks, and a part outside of them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        blocks: Any = self.model.blocks
        for block in blocks:
            block.down = wrapped(block.down)
            block.norm2 = wrapped(block.norm2)
        self.model.norm = wrapped(self.model.norm)


class CompiledRecomputed(Lit):
    """Activation checkpoints around compiled blocks; the units are what is compiled."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        blocks: Any = self.model.blocks
        for i, block in enumerate(blocks):
            blocks[i] = models.Recomputed(wrapped(block))


class Straight(models.TinyTransformer):
    """Without a look at the tokens, which a graph around all of it could not have."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class BlocksCompiledEagerly(Lit):
    """AOT autograd would round bf16 at other places than torch's own kernels."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(**QUICK)


def graphs() -> int:
    """How many graphs were compiled in this run."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def fit_counting(strategy: StrategyArgument, module: Any, recipe: Recipe, **flags: Any) -> tuple[Fitted, int]:
    forget_graphs()
    return fit(strategy, recipe, module, **flags), graphs()


@pytest.fixture(autouse=True, scope="module")
def warm(pool2: RankPool) -> None:
    """The first compilation in a process imports a lot."""
    pool2.run(fit_counting, "zero2", CompiledBlocks, Recipe(steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (CompiledBlocks, "zero3"),
        (BlocksCompiledInPlace, "zero3"),
        (BlocksCompiledInPlace, "zero1"),
        (CompiledBlocks, "zero2_offload"),
    ],
)
def test_compiled_units(pool2: RankPool, module: type[Lit], name: str) -> None:
    results = pool2.run(fit_counting, name, module, MOMENTUM)
    expected = reference(name, MOMENTUM, WORLD)
    assert_same(results[0][0].weights, expected.weights)
    assert_same_states(results[0][0].optimizer_states[0], expected.optimizer_state)
    assert [count for _, count in results] == [1] * WORLD  # for all blocks, and all steps


@pytest.mark.parametrize(
    ("module", "name"), [(CompiledModel, "zero2"), pytest.param(ModelCompiledInPlace, "zero0", marks=pytest.mark.slow)]
)
def test_compiled_networks(pool2: RankPool, module: type[Lit], name: str) -> None:
    results = pool2.run(fit_counting, name, module, RECIPE)
    assert_same(results[0][0].weights, reference(name, RECIPE, WORLD).weights)
    assert [count for _, count in results] == [1] * WORLD


@pytest.mark.parametrize(
    ("module", "units", "count"),
    [
        (CompiledParts, None, 2),
        pytest.param(CompiledLater, None, 1, marks=pytest.mark.slow),
        (CompiledRecomputed, ["Block"], 1),
        pytest.param(CompiledModel, ["model"], 1, marks=pytest.mark.slow),
        pytest.param(ModelCompiledInPlace, [models.TinyTransformer], 1, marks=pytest.mark.slow),
    ],
)
def test_compiled_at_stage_3(pool2: RankPool, module: type[Lit], units: list[str], count: int) -> None:
    results = pool2.run(fit_counting, {"stage": 3, "units": units}, module, RECIPE)
    weights = {name.replace(".block.", "."): value for name, value in results[0][0].weights.items()}
    assert_same(weights, reference("zero3", RECIPE, WORLD).weights)
    assert [graphs for _, graphs in results] == [count] * WORLD


def fit_refused(kind: type[Lit]) -> Fitted:
    """A fit that is refused, and then one of the same module that is not."""
    lit, trainer = kind(RECIPE), make_trainer("zero2")
    with pytest.raises(ValueError, match=r"^model is compiled as a whole.*'model.blocks.0'.*units=\['model'\]"):
        make_trainer("zero3").fit(lit)
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(lit)
    return observe(trainer, lit)


@pytest.mark.parametrize("module", [CompiledModel, ModelCompiledInPlace])
def test_a_graph_around_units_is_refused_at_stage_3(pool2: RankPool, module: type[Lit]) -> None:
    """The module is as it was before."""
    assert_same(pool2.run(fit_refused, module)[0].weights, reference("zero2", RECIPE, WORLD).weights)


def fit_compiled_module(name: str, recipe: Recipe) -> tuple[Fitted, list[Tensor], int]:
    """The LightningModule itself, as Lightning's documentation has it."""
    forget_graphs()
    lit = Lit(recipe)
    lit.model = Straight()
    lit.model.load_state_dict(recipe.make_model().state_dict())
    trainer = make_trainer(name)
    whole = wrapped(lit, QUICK)
    trainer.fit(whole)
    count = graphs()
    predictions: Any = trainer.predict(whole)
    return observe(trainer, lit), predictions, count


def test_compiled_lightning_module(pool2: RankPool) -> None:
    name = "zero2"
    results = pool2.run(fit_compiled_module, name, RECIPE)
    expected = reference(name, RECIPE, WORLD)
    assert_same(results[0][0].weights, expected.weights)
    model = RECIPE.make_model()
    model.load_state_dict(expected.weights)
    for rank, (_, predictions, count) in enumerate(results):
        batches = models.rank_batches(RECIPE.batches(WORLD), rank)
        assert all(map(torch.equal, predictions, [model(batch[:, :-1]) for batch in batches]))
        assert count == 1


def test_a_compiled_lightning_module_is_refused_at_stage_3(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"torch.compile\(Lit\) at stage 3.*Compile the blocks instead"):
        pool2.run(fit_compiled_module, "zero3", RECIPE)


def train_and_resume(folder: str, name: str, first: Any, second: Any, recipe: Recipe) -> tuple[list[str], Fitted]:
    """Save after one module's epoch, go on with another one."""
    path = str(Path(folder, "saved.ckpt"))
    trainer = make_trainer(name)
    trainer.fit(first(recipe))
    trainer.save_checkpoint(path)
    keys = list(torch.load(path, weights_only=True)["state_dict"])
    return keys, fit(name, recipe, second, ckpt_path=path, max_epochs=2)


@pytest.mark.parametrize(
    ("first", "second"), [(CompiledBlocks, Lit), pytest.param(Lit, CompiledBlocks, marks=pytest.mark.slow)]
)
def test_checkpoints_know_no_wrapper(pool2: RankPool, tmp_path: Path, first: Any, second: Any) -> None:
    results = pool2.run(train_and_resume, str(tmp_path), "zero3", first, second, MOMENTUM)
    keys, resumed = results[0]
    assert keys == [f"model.{name}" for name in MOMENTUM.make_model().state_dict()]
    batches = MOMENTUM.batches(WORLD)
    expected = reference("zero3", MOMENTUM, WORLD, batches=batches + batches)
    assert_same(resumed.weights, expected.weights)
    assert_same_states(resumed.optimizer_states[0], expected.optimizer_state)


def release_compiled(module: type[Lit], recipe: Recipe) -> list[Tensor]:
    """What the module's blocks compute for themselves, and its copy, once nothing is sharded any more."""
    forget_graphs()
    lit = module(recipe)
    blocks: Any = lit.model.blocks
    calls = [vars(block).get("_compiled_call_impl") for block in blocks]
    trainer = make_trainer("zero3")
    trainer.fit(lit)
    assert [vars(block).get("_compiled_call_impl") for block in blocks] != calls or module is CompiledBlocks
    trainer.strategy.release()  # type: ignore[attr-defined]
    assert [vars(block).get("_compiled_call_impl") for block in blocks] == calls
    batch = next(iter(lit.loader())).to(lit.device)
    with torch.no_grad():
        return [lit.model(batch[:, :-1]), copy.deepcopy(lit).model(batch[:, :-1])]


@pytest.mark.parametrize("module", slow_unless([BlocksCompiledInPlace], [CompiledBlocks, BlocksCompiledInPlace]))
def test_released_blocks_are_compiled_as_before(pool2: RankPool, module: type[Lit]) -> None:
    model = MOMENTUM.make_model()
    model.load_state_dict(reference("zero3", MOMENTUM, WORLD).weights)
    for rank, outputs in enumerate(pool2.run(release_compiled, module, MOMENTUM)):
        batch = models.rank_batches(MOMENTUM.batches(WORLD), rank)[0]
        assert all(torch.equal(output, model(batch[:, :-1])) for output in outputs)


class ClearsByWrapper(CompiledModel):
    """Two backward passes, the first of which counts for nothing."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(5 * models.next_token_loss(self.model, batch))
        self.model.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        optimizer.step()
        self.model.zero_grad()


def test_zero_grad_of_a_wrapper_clears_what_is_reduced(pool2: RankPool) -> None:
    results = pool2.run(fit, "zero2", RECIPE, ClearsByWrapper)
    assert_same(results[0].weights, reference("zero2", RECIPE, WORLD).weights)


def test_compiled_units_in_bf16(pool2: RankPool) -> None:
    plain = pool2.run(fit_counting, "zero3", Lit, RECIPE, precision="bf16-mixed")
    results = pool2.run(fit_counting, "zero3", BlocksCompiledEagerly, RECIPE, precision="bf16-mixed")
    assert_same(results[0][0].weights, plain[0][0].weights)
    assert results[0][1] == 1


@pytest.mark.slow
def test_inductor(pool1: RankPool) -> None:
    """The compiler that is torch's default; it fuses, and rounds otherwise."""
    recipe = Recipe(optimizer="momentum", dtype=torch.float64)
    results = pool1.run_within(300, fit_inductor, "zero3", recipe)
    expected = reference("zero3", recipe, 1)
    torch.testing.assert_close(results[0].weights, expected.weights, rtol=1e-9, atol=1e-12)


class ByInductor(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile()


def fit_inductor(name: str, recipe: Recipe) -> Fitted:
    forget_graphs()
    return fit(name, recipe, ByInductor)


def test_units_are_found_behind_wrappers() -> None:
    blocks, model = CompiledBlocks(RECIPE), CompiledModel(RECIPE)
    names = ["model.blocks.0", "model.blocks.1"]
    for patterns in (None, ["Block"], [models.Block], ["model.blocks.*"]):
        units = find_units(blocks, patterns)
        assert [unit.name for unit in units] == names
        # The wrapper, whose hooks are around the graph.
        assert [unit.module for unit in units] == list(blocks.model.blocks)  # type: ignore[union-attr]
    assert [unit.name for unit in find_units(model)] == names
    assert [unit.module for unit in find_units(model, ["TinyTransformer"])] == [model.model]
    with pytest.raises(ValueError, match=r"class names \(here: Block, Embedding"):
        find_units(blocks, ["Blocks"])


def test_single_compiled_layers_are_no_blocks() -> None:
    assert find_units(nn.Sequential(wrapped(nn.Linear(2, 2)), wrapped(nn.Linear(2, 2)))) == []
