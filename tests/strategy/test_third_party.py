"""Models of `transformers` and `peft`, and the usual plain ones, through `Trainer`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from helpers.third_party import KINDS, make_batches
from strategy.fits import assert_same, make_trainer, optimizer_state, state_of
from strategy.third_party_fits import STEPS, Lit, fits
from torch import Tensor

from lightning_zero.engine import find_units

WORLD = 2


def import_libraries() -> None:
    import peft  # noqa: F401
    import transformers

    for name in KINDS:  # their modules are loaded when a class is first used
        KINDS[name].make_model()
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="module")
def imported(pool2: RankPool) -> None:
    """Importing takes seconds, in the tests' process and in each rank once."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    import_libraries()
    pool2.run(import_libraries)


@pytest.mark.parametrize("kind", KINDS)
def test_units_are_the_blocks(kind: str) -> None:
    units = find_units(KINDS[kind].make_model())
    assert tuple(unit.name for unit in units) == KINDS[kind].units


@dataclasses.dataclass
class Seen:
    """What a rank saw around a fit; `weights` and `states` are whole on rank 0."""

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    test_loss: float
    predictions: list[Tensor]
    weights_after_both: dict[str, Tensor]


def fit_test_predict_fit(name: str, kind: str, **options: Any) -> Seen:
    lit = Lit(kind, **options)
    trainer = make_trainer(name)
    trainer.fit(lit)
    weights, state = state_of(trainer), optimizer_state(trainer, trainer.optimizers[0])
    test_loss = trainer.test(lit, verbose=False)[0]["test_loss"]
    predictions: Any = trainer.predict(lit)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return Seen(weights, state, test_loss, predictions, state_of(trainer))


@functools.cache
def expected(kind: str, **options: Any) -> Seen:
    """The same in one plain process, with all ranks' predictions."""
    runs = fits(kind, WORLD, **options)
    model, trained = next(runs)
    batches = make_batches(KINDS[kind], options.get("steps", STEPS), WORLD, options.get("dtype", torch.float32))
    with torch.no_grad():
        outputs = [model.eval()(**batch) for step in batches for batch in step[0]]
    model.train()
    test_loss = torch.stack([output["loss"] for output in outputs]).double().mean().item()
    predictions = [output["logits"] for output in outputs]
    _, again = next(runs)
    return Seen(trained.weights, trained.optimizer_state, test_loss, predictions, again.weights)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_fit_test_predict_fit(pool2: RankPool, kind: str, name: str) -> None:
    seen = pool2.run(fit_test_predict_fit, name, kind)
    plain = expected(kind)
    assert_same(seen[0].weights, plain.weights)
    # Frozen parameters and experts that no token chose keep no state.
    assert seen[0].state.keys() == plain.state.keys()
    assert [rank.test_loss for rank in seen] == [pytest.approx(plain.test_loss, rel=1e-5)] * WORLD
    for rank, result in enumerate(seen):
        assert all(map(torch.equal, result.predictions, plain.predictions[rank::WORLD]))
    assert_same(seen[0].weights_after_both, plain.weights_after_both)


def test_some_experts_are_never_chosen() -> None:
    """Or the test above says nothing about them."""
    trainable = dict(KINDS["switch"].make_model().named_parameters()).keys()
    unused = trainable - expected("switch").state.keys()
    assert unused
    assert all(".experts.expert_" in name for name in unused)
