"""Models of `transformers` and `peft`, and the usual plain ones, through `Trainer`."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import place
from helpers.ranks import RankPool, slow_unless
from helpers.reference import train_reference
from helpers.third_party import KINDS, VOCAB, Batch, gpt2, make_batches
from strategy.fits import assert_same, make_trainer, optimizer_state, state_of
from strategy.third_party_fits import STEPS, Lit, fits, loss_of, make_optimizer
from torch import Tensor, nn
from torch.nn import functional

from lightning_zero import gathered_parameters
from lightning_zero.sharding import find_units

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
    there = copy.deepcopy(model).eval().to(place.device())
    with torch.no_grad():
        outputs = [there(**place.moved(batch, place.device())) for step in batches for batch in step[0]]
    test_loss = torch.stack([output["loss"] for output in outputs]).double().mean().item()
    predictions = [output["logits"].cpu() for output in outputs]
    _, again = next(runs)
    return Seen(trained.weights, trained.optimizer_state, test_loss, predictions, again.weights)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # Of adapters, whose base is frozen, in the fast tests.
        *(pytest.param(kind, "zero3", marks=[] if kind == "lora" else pytest.mark.slow) for kind in KINDS),
        pytest.param("t5", "zero2", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.slow
def test_some_experts_are_never_chosen() -> None:
    """Or the test above says nothing about them."""
    trainable = dict(KINDS["switch"].make_model().named_parameters()).keys()
    unused = trainable - expected("switch").state.keys()
    assert unused
    assert all(".experts.expert_" in name for name in unused)


@pytest.mark.parametrize(
    ("kind", "name"), [("lora", "zero2_offload"), pytest.param("switch", "zero3_offload", marks=pytest.mark.slow)]
)
def test_offload(pool2: RankPool, kind: str, name: str) -> None:
    """Momentum, whose native kernel rounds as torch does."""
    options = {"steps": 4, "optimizer": "momentum"}
    seen = pool2.run(fit_test_predict_fit, name, kind, **options)
    plain = expected(kind, **options)
    assert_same(seen[0].weights, plain.weights)
    assert seen[0].state.keys() == plain.state.keys()
    assert_same(seen[0].weights_after_both, plain.weights_after_both)


def fit_weights(name: str, lit: Callable[[str], Lit], kind: str, **flags: Any) -> dict[str, Tensor]:
    module = lit(kind)
    trainer = make_trainer(name, **flags)
    trainer.fit(module)
    return state_of(trainer)


@pytest.mark.parametrize("kind", slow_unless(["lora"], ["lora", "llama"]))
def test_bf16_is_the_same_at_every_stage(pool2: RankPool, kind: str) -> None:
    two, three = (pool2.run(fit_weights, n, Lit, kind, precision="bf16-mixed")[0] for n in ("zero2", "zero3"))
    assert_same(three, two)
    # And near to fp32, where it began somewhere else.
    fp32, initial = expected(kind).weights, KINDS[kind].make_model().state_dict()
    moved = [(fp32[n] - initial[n]).norm() for n in fp32 if fp32[n].is_floating_point()]
    apart = [(fp32[n] - two[n]).norm() for n in fp32 if fp32[n].is_floating_point()]
    assert torch.stack(apart).norm() < 0.5 * torch.stack(moved).norm()


class Recomputes(Lit):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.model.gradient_checkpointing_enable()  # type: ignore[operator]


class ReturnsEverything(Lit):
    """Hidden states and the keys and values of earlier positions leave the blocks, too."""

    def training_step(self, batch: Batch, index: int) -> Any:
        return self.model(**batch, output_hidden_states=True, use_cache=True)


@pytest.mark.parametrize("kind", slow_unless(["t5"], ["t5", "mixtral"]))
def test_more_outputs_change_nothing(pool2: RankPool, kind: str) -> None:
    assert_same(pool2.run(fit_weights, "zero3", ReturnsEverything, kind)[0], expected(kind).weights)


class Quantized(Lit):
    """Linear layers whose frozen weights have 4 and 8 bits, made where the strategy shards what is made."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        del self.model

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        from bitsandbytes.nn import Linear8bitLt, LinearNF4

        torch.manual_seed(0)
        layers = LinearNF4(64, 64), Linear8bitLt(64, 64, has_fp16_weights=False)
        self.model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers), nn.Linear(64, VOCAB))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        x = functional.one_hot(batch["input_ids"], 64).float()
        return functional.cross_entropy(self.model(x).flatten(0, 1), batch["labels"].flatten())


def fit_twice(name: str) -> dict[str, Tensor]:
    lit, trainer = Quantized("gpt2"), make_trainer(name)
    trainer.fit(lit)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return state_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_weights_of_4_and_8_bits_are_quantized_as_under_ddp(pool2: RankPool, name: str) -> None:
    pytest.importorskip("bitsandbytes")
    expected, actual = pool2.run(fit_twice, "ddp")[0], pool2.run(fit_twice, name)[0]
    assert_same(actual, expected)
    assert [actual[f"{layer}.0.weight"].dtype for layer in (0, 1)] == [torch.uint8, torch.int8]
    assert actual.keys() >= {"0.0.weight.quant_state.bitsandbytes__nf4", "1.0.SCB"}


def trained(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """The weights of a model that was changed first, after a plain fit."""
    batches = make_batches(KINDS[kind], STEPS, WORLD)
    make = functools.partial(make_optimizer, "adamw")
    return train_reference(model, make, batches, loss_of, reduce_each=True).weights  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", slow_unless(["t5"], ["t5", "mixtral"]))
def test_activation_checkpoints_change_nothing(pool2: RankPool, kind: str) -> None:
    """Where blocks share an input, as T5's biases, they add its gradients in another order: in plain torch as well."""
    model = KINDS[kind].make_model()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_same(pool2.run(fit_weights, "zero3", Recomputes, kind)[0], trained(model, kind))


PROMPT = torch.tensor([[5, 6, 7]])


def generated(model: Any, rank: int) -> Tensor:
    """A longer text on each further rank."""
    length = 4 + 3 * rank
    ids: Tensor = model.generate(PROMPT, max_new_tokens=length, min_new_tokens=length, do_sample=False)
    return ids


class Generates(Lit):
    """A sample after the epoch, whole at stages 0 to 2."""

    def on_train_epoch_end(self) -> None:
        self.model.eval()
        self.ids = generated(self.model, self.global_rank)
        self.model.train()


class GeneratesGathered(Generates):
    def on_train_epoch_end(self) -> None:
        with gathered_parameters(self):
            super().on_train_epoch_end()


def fit_and_generate(name: str, lit: type[Generates], kind: str) -> Tensor:
    module = lit(kind)
    make_trainer(name).fit(module)
    return module.ids


@pytest.mark.parametrize(("name", "lit"), [("zero2", Generates), ("zero3", GeneratesGathered)])
def test_generate_in_a_hook(pool2: RankPool, name: str, lit: type[Generates]) -> None:
    model = KINDS["gpt2"].make_model().eval()
    model.load_state_dict(expected("gpt2").weights)
    results = pool2.run(fit_and_generate, name, lit, "gpt2")
    assert all(torch.equal(ids, generated(model, rank)) for rank, ids in enumerate(results))


class Resized(Lit):
    """New words, where the Trainer asks for the model; its weights come from elsewhere."""

    def configure_model(self) -> None:
        if self.model.get_input_embeddings().num_embeddings == VOCAB:  # type: ignore[operator]
            resize(self.model)


def resize(model: Any) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB:] = 0.125


def test_embeddings_are_resized_before_training(pool2: RankPool) -> None:
    model = KINDS["gpt2"].make_model()
    resize(model)
    weights = pool2.run(fit_weights, "zero3", Resized, "gpt2")[0]
    assert_same(weights, trained(model, "gpt2"))
    assert weights["lm_head.weight"].shape == (VOCAB + 5, 18)


def fit_and_save(kind: str, folder: str) -> dict[str, Any]:
    """The model's own methods on freed parameters, and its own files."""
    lit = Lit(kind)
    make_trainer("zero3").fit(lit)
    model: Any = lit.model
    embedding = model.get_input_embeddings().weight
    with pytest.raises(RuntimeError, match=r"wte.weight.*is freed"):
        embedding.sum()
    with gathered_parameters(lit):
        if lit.global_rank == 0:
            model.save_pretrained(folder)
    counts = (model.num_parameters(), model.num_parameters(only_trainable=True))
    return {"counts": counts, "shape": tuple(embedding.shape)}


def test_save_pretrained_and_metadata_at_stage_3(pool2: RankPool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    results = pool2.run(fit_and_save, "gpt2", str(tmp_path))
    model: Any = KINDS["gpt2"].make_model()
    assert results == [{"counts": (model.num_parameters(),) * 2, "shape": (VOCAB, 18)}] * WORLD
    assert_same(dict(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()), expected("gpt2").weights)


def test_adapters_alone_are_saved(pool2: RankPool, tmp_path: Path) -> None:
    from peft import PeftModel

    pool2.run(fit_and_save, "lora", str(tmp_path))
    assert not list(tmp_path.glob("model*"))
    plain = expected("lora").weights
    base = gpt2(tied=False)
    prefix = "base_model.model."
    frozen = {
        n.removeprefix(prefix).replace(".base_layer.", ".").replace("lm_head.original_module.", "lm_head."): v
        for n, v in plain.items()
        if "lora_" not in n and "modules_to_save" not in n
    }
    base.load_state_dict(frozen)
    assert_same(dict(PeftModel.from_pretrained(base, tmp_path).state_dict()), plain)
