"""`zero_auto` chooses within the memory, the same on all ranks, and then is what it chose, bit for bit."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, RankPool, ranks
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from planning.test_preflight import MIB, Blocks, machine, write_machine
from strategy.fits import Fitted, Lit, Recipe, assert_same, assert_same_states, fit, make_trainer
from torch import Tensor, nn

from lightning_zero import DoesNotFitError, ZeroAutoStrategy, ZeroStrategy
from lightning_zero.integration.auto import Chosen
from lightning_zero.integration.choices import Way
from lightning_zero.integration.options import CHOSEN, FREE
from lightning_zero.planning import preflight
from lightning_zero.planning.devices import Machine
from lightning_zero.planning.machine import this_machine

GIB = 2**30
TINY = 16 * 2**10  # bytes for a rank: what the tiny model takes at stage 3, and at no other


class Assumed(ZeroAutoStrategy):
    """It uses no rates that somebody has measured on this machine."""

    def _machine(self) -> Machine:
        return this_machine(self.root_device, self.num_processes, self.num_nodes)


def options_of(strategy: ZeroStrategy) -> dict[str, Any]:
    return {name: getattr(strategy.options, name) for name in (*CHOSEN, *FREE)}


def choose_and_fit(path: Path, recipe: Recipe, **options: Any) -> tuple[Fitted, Fitted, dict[str, Any], dict[str, Any]]:
    """A fit, and another with what was chosen; what was chosen, and what the logger was told."""
    strategy, logger = Assumed(**options), CSVLogger(path)
    found = fit(strategy, recipe, logger=logger)
    again = fit(ZeroStrategy(**options_of(strategy)), recipe)
    return found, again, options_of(strategy), logger.experiment.hparams if dist.get_rank() == 0 else {}


@ranks(2)
def test_it_is_what_it_chose(pool: RankPool, tmp_path: Path) -> None:
    for memory, stages in ((None, (0, 1)), (TINY / GIB, (3,))):
        recipe = Recipe(optimizer="adamw", steps=2)
        results = pool.run(choose_and_fit, tmp_path, recipe, device_memory_gb=memory)
        for found, again, options, _ in results:
            assert options == results[0][2]
            assert_same(found.weights, again.weights)
            assert_same_states(found.optimizer_states[0], again.optimizer_states[0])
        told = results[0][3]["zero_auto"]
        assert {name: options[name] for name in CHOSEN} == {name: told[name] for name in CHOSEN}
        assert told["step_seconds"] > 0
        assert results[0][2]["stage"] in stages


class Stack(Blocks):
    """As much in fewer blocks, which are planned in less time."""

    def __init__(self) -> None:
        super().__init__(512)
        self.blocks = self.blocks[:6]


def fit_with(root: Path, *options: dict[str, Any]) -> tuple[str, int, str]:
    """What was chosen where each rank has options of its own, the steps of the fit, and what it said."""
    strategy = Assumed(**options[dist.get_rank() % len(options)])
    trainer = make_trainer(strategy, limit_train_batches=1)
    with machine(root):
        try:
            trainer.fit(Stack())
        except DoesNotFitError as error:
            return "", trainer.global_step, str(error)
    assert strategy.chosen is not None
    return strategy.chosen.way.python, trainer.global_step, str(strategy.chosen)


@ranks(2)
def test_ranks_with_different_memory_choose_the_same(pool: RankPool, tmp_path: Path) -> None:
    root = write_machine(tmp_path, 4096 * MIB, None)
    ample, little, choices = {"device_memory_gb": 1.0}, {"device_memory_gb": 16.5 * MIB / GIB}, set[str]()
    for first, second in ((ample, ample), (ample, little)):
        results = pool.run(fit_with, root, first, second)
        (chosen, steps, _), (other, *_) = results
        assert chosen == other
        assert steps == 1
        choices.add(chosen)
    assert len(choices) == 2


@ranks(2)
def test_a_container_gets_what_fits_into_it(pool: RankPool, tmp_path: Path) -> None:
    """The less there is, the less the plan takes; where nothing fits, nothing begins, on any rank."""
    for name, limit in (('"zero1"', 400), ('"zero3"', 35), ("", 20)):
        root = write_machine(tmp_path / str(limit), 4096 * MIB, limit * MIB)
        results = pool.run(fit_with, root, {})
        (chosen, steps, said), (other, others, _) = results
        assert (chosen, steps) == (other, others)
        assert name in chosen
        assert steps == (1 if name else 0)
        if not name:
            assert "none of which fits" in said
            assert "the control group (container) has" in said


def test_the_reasons_are_told_where_no_setting_can_run_or_none_that_can_fits(pool1: RankPool, tmp_path: Path) -> None:
    root = write_machine(tmp_path, 4096 * MIB, 10 * MIB)
    with pytest.raises(RankError, match=r"no candidate can run.*\n.*\"zero0\" is refused: units=\['Gone'\] match no"):
        pool1.run(fit_with, root, {"units": ["Gone"]})
    ((_, steps, said),) = pool1.run(fit_with, root, {"master_layout": "split"})
    assert steps == 0
    assert "the control group (container) has" in said
    assert '- "zero0" is refused: AdamW would be updated by torch\'s operations, which need fp32 masters' in said


def fit_in_address_space(room: int) -> str:
    """What was chosen where the kernel gives the process no more memory than that."""
    make_trainer("zero1").fit(Blocks())  # the threads of process groups have room of their own from now on
    strategy, model = Assumed(), Blocks(1024)  # 96 MiB of parameters
    size = preflight.limits.process_memory()["VmSize"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + room, hard))
    try:
        make_trainer(strategy).fit(model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert strategy.chosen is not None
    return strategy.chosen.way.python


@pytest.mark.slow
@ranks(2)
def test_a_run_under_a_limit_of_the_kernel_takes_the_smaller_plan(pool: RankPool) -> None:
    for room, stage in ((4096, "zero1"), (380, "zero3")):
        chosen, other = pool.run(fit_in_address_space, room * MIB)
        assert chosen == other
        assert stage in chosen or stage.replace("zero", "stage=") in chosen


class Example(Stack):
    """It says what a micro-batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2048, self.width)  # 4 MiB after each of the blocks

    def forward(self, batch: Tensor) -> Tensor:
        return nn.Sequential(*self.blocks)(batch)


def choose_with(module: type[Stack], memory: int, reserve: int) -> Chosen:
    """What a fit chooses, with so much memory and reserve in MiB."""
    strategy = Assumed(device_memory_gb=memory / 1024, reserve_gb=reserve / 1024)
    make_trainer(strategy, limit_train_batches=1).fit(module())
    assert strategy.chosen is not None
    return strategy.chosen


@pytest.mark.slow
@ranks(2)
def test_activations_count_where_an_example_or_the_user_tells_them(pool: RankPool) -> None:
    plain, reserved, known = (
        pool.run(choose_with, *arguments)[0] for arguments in ((Stack, 29, 0), (Stack, 29, 8), (Example, 64, 0))
    )
    assert (plain.way.python, plain.timed) == ('"zero1"', False)
    assert (reserved.way.name, reserved.way.changed) == ("zero1", {"bucket_size_mb": 1.0})
    assert known.timed
    assert known.pick.need.peak.total > plain.pick.need.peak.total + 8 * MIB


class Broken(Example):
    """Its forward runs on nothing."""

    def forward(self, batch: Tensor) -> Tensor:
        raise KeyError("gone")


class Scales(Example):
    """Its forward multiplies no matrices, so that it counts as no operations."""

    def forward(self, batch: Tensor) -> Tensor:
        return batch * self.blocks[0][0].bias  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:zero_auto does not know activations")
def test_an_example_that_fails_is_no_obstacle_and_one_without_matrix_products_is_known(pool1: RankPool) -> None:
    for module, known in ((Broken, False), (Scales, True)):
        (chosen,) = pool1.run(choose_with, module, 64, 0)
        assert chosen.timed == known
        assert ("not counting activations" in str(chosen)) == (not known)


class Told(CSVLogger):
    """Keeps what it is told, as MLflow does, which refuses to be told a hyperparameter again with another value."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.told: list[int] = []

    def log_hyperparams(self, params: Any = None) -> None:
        if "zero_auto" in params:
            self.told.append(params["zero_auto"]["device_bytes"])


def evaluate_and_fit(path: Path, **options: Any) -> tuple[list[Any], list[int]]:
    """What an evaluation, the fit after it and another fit chose, and the device's memory that a logger was told of."""
    strategy, recipe, logger = Assumed(**options), Recipe(steps=2), Told(path)
    trainer, module = make_trainer(strategy, logger=logger), Lit(recipe)
    chosen = []
    for run in (trainer.validate, trainer.fit, trainer.fit):
        run(module)
        chosen.append(strategy.chosen)
    return chosen, logger.told


def test_a_fit_chooses_again_after_an_evaluation(pool1: RankPool, tmp_path: Path) -> None:
    """Optimizer state counts then, and loggers are told once, what the fit runs with."""
    for options in ({}, {"evaluation_masters": True}):
        (((evaluated, first, second), told),) = pool1.run(evaluate_and_fit, tmp_path, **options)
        assert evaluated.pick.need.peak.total < first.pick.need.peak.total
        assert first == second
        assert told == [first.pick.need.peak.device]


class InConfigureModel(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = self.recipe.make_model()


def fit_configured(budget: float | None) -> tuple[Fitted, Fitted, int]:
    strategy, recipe = Assumed(device_memory_gb=budget), Recipe()
    found = fit(strategy, recipe, InConfigureModel)
    return found, fit(ZeroStrategy(**options_of(strategy)), recipe), strategy.stage


@ranks(2)
def test_layers_of_configure_model_go_where_the_choice_says(pool: RankPool) -> None:
    for budget, stage in ((None, 0), (TINY / GIB, 3)):
        for found, expected, chosen in pool.run(fit_configured, budget):
            assert chosen == stage
            assert_same(found.weights, expected.weights)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stage": 2}, TypeError, "zero_auto chooses this option"),
        ({"bucket_size": 1}, TypeError, "did you mean 'bucket_size_mb'"),
        ({"device_memory_gb": 0}, ValueError, "device_memory_gb=0 must be"),
        ({"device_memory_gb": 1e300}, ValueError, r"device_memory_gb=1e\+300 must be"),
        ({"nvme_buffer_gb": 1e300}, ValueError, r"nvme_buffer_gb=1e\+300 must be"),
        ({"reserve_gb": -1}, ValueError, "reserve_gb=-1 must be"),
        ({"shard_size": 0}, ValueError, "shard_size=0 must be"),
        ({"offload_gradients": "disk"}, ValueError, "offload_gradients='disk' is not one of"),
    ],
)
def test_what_it_does_not_take_is_an_error(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroAutoStrategy(**options)


def test_what_is_proposed_can_be_typed() -> None:
    """Neither with the name nor with the group can an option be set that is always chosen."""
    strategy = ZeroAutoStrategy()
    for option, cls in (("stage", "ZeroStrategy"), ("bucket_size_mb", "ZeroAutoStrategy")):
        with pytest.raises(AttributeError, match=rf"use {cls}\({option}=1\)"):
            setattr(strategy, option, 1)
    trainer = make_trainer(strategy)
    strategy._options = dataclasses.replace(strategy.options, offload_optimizer="none", offload_params="none")
    typed = [typed for typed, _ in strategy._describe_memory(Lit(Recipe()), None, trainer).candidates]
    assert {"strategy=zero3_offload", "strategy.persistence_numel=0"} <= {*typed}
    assert "strategy.offload_optimizer=cpu" not in typed


@ranks(2)
def test_a_disk_is_not_chosen_where_state_must_be_in_memory_or_a_rank_knows_no_disk(
    pool: RankPool, tmp_path: Path
) -> None:
    """These would be two errors, of the options and of ranks that consider different ways, not two fits.

    The disk is known before its folder is made.
    """
    root, known = write_machine(tmp_path, 4096 * MIB, None), {"nvme_path": str(tmp_path / "made" / "later")}
    in_memory = {"update_in_backward": True, "skip_nonfinite": False}
    considered = []
    for options in ([known | in_memory], [in_memory], [known, {}], [{}], [known]):
        (chosen, *_), (other, steps, said) = pool.run(fit_with, root, *options)
        assert chosen == other
        assert steps == 1
        considered.append(said.partition(" considered")[0].rpartition(" ")[2])
    assert considered[0] == considered[1]
    assert considered[2] == considered[3]
    assert int(considered[4]) > int(considered[3])


def test_the_place_of_gradients_holds_where_a_disk_is_chosen(tmp_path: Path) -> None:
    strategy = ZeroAutoStrategy(nvme_path=str(tmp_path), offload_gradients="nvme")
    assert strategy._options_of(Way("zero2_nvme", {})).offload_gradients == "nvme"
    assert strategy._options_of(Way("zero2_offload", {})).offload_gradients == "auto"


def test_fabric_says_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match="lightning-zero estimate"):
        Fabric(accelerator="cpu", devices=1, strategy="zero_auto")
    assert isinstance(L.Trainer(accelerator="cpu", strategy="zero_auto", logger=False).strategy, ZeroAutoStrategy)
