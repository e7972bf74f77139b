"""Initialization in shards: the numbers of ordinary initialization, one module at a time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import CONSTRUCTORS
from engine.driver import CPU, Meshes, RankResult, Setup
from helpers import models
from helpers.ranks import RankError, RankPool
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations

from lightning_zero.engine import Engine, gathered_parameters
from lightning_zero.sharding import (
    Group,
    MixedPrecisionPolicy,
    ShardedInit,
    ShardedParameter,
    adoption,
    sharded_init,
    unshard_parameters,
)
from lightning_zero.storage import HostStore


class OwnAndChildren(nn.Module):
    """Parameters of its own before and after its children, which it initializes again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(9))
        self.inner = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
        self.shift = nn.Parameter(torch.zeros(()))  # 0-dim
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale.data.mul_(2)  # through an alias
        with torch.no_grad():
            self.shift += self.inner[0].weight.sum()  # reads one, writes another
            self.inner[2].weight[1].copy_(self.scale[:5])
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "inner" in name:
                nn.init.xavier_uniform_(parameter)
        self.inner[0].bias.requires_grad_(False)


class Tagged(Parameter):
    """A parameter class of a user's, with an attribute."""

    def __new__(cls, data: Tensor, tag: str = "") -> Self:
        made = super().__new__(cls, data, True)
        made.tag = tag
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tagged:
        return memo.setdefault(id(self), Tagged(self.data.clone(), self.tag))


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Tagged(torch.randn(5, 3), "first")
        self.plain = nn.Linear(3, 5)
        self.other = copy.deepcopy(self.weight)
        assert type(self.weight.data) is Tensor
        assert (self.weight.tag, self.other.tag) == ("first", "first")


class Replaced(nn.Module):
    """Parameters that are replaced, made of others, kept in lists, dropped, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.third = nn.Linear(4, 6)
        self.third.weight = nn.Parameter(self.first.weight.t() * 0.5)  # not contiguous
        self.fourth = nn.Linear(4, 4)
        self.fourth.bias = nn.Parameter(self.first.bias)  # shares memory with another
        self.listed = nn.ParameterList([nn.Parameter(torch.rand(n)) for n in (7, 8)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(5, 2))})
        nn.Linear(3, 3)  # dropped
        del self.second.bias
        self.register_parameter("none", None)
        self.part = nn.Parameter(torch.rand(10, 4)[2:5])  # of a larger tensor
        self.integers = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("total", self.first.weight.detach().sum())
        self.half = nn.Linear(3, 5).half()
        self.wide = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


class Aliased(nn.Module):
    """Holds on to the memory of a parameter, by several ways, while it constructs others."""

    def __init__(self) -> None:
        super().__init__()
        data = torch.empty(6, 5)
        self.weight = nn.Parameter(data)
        self.dummy = nn.Linear(5, 6)
        data.normal_()  # after the next module was made
        view = self.dummy.weight.data[1]
        array = self.dummy.bias.detach().numpy()
        self.other = nn.Linear(5, 5)
        view.fill_(0.25)
        array[2] = 7.0
        output = self.other(torch.ones(2, 5)).sum() + self.dummy(torch.ones(1, 5)).sum()  # a graph
        self.last = nn.Linear(2, 2)
        output.backward()
        assert torch.equal(self.other.weight.grad, torch.full((5, 5), 2.0))
        self.zero_grad()


def dummy_forward() -> nn.Module:
    """A size found by running the first layers."""
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    return nn.Sequential(layers, nn.Linear(layers(torch.rand(2, 1, 8, 8)).shape[1], 3))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 7))
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    return model


def loaded() -> nn.Module:
    """Weights that are loaded, by copy and by assignment."""
    source = nn.Linear(5, 4).state_dict()
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(5, 4))
    model[0].load_state_dict(source)
    model[1].load_state_dict({k: v * 2 for k, v in source.items()}, assign=True)
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 5)),
        parametrizations.orthogonal(nn.Linear(5, 5)),
    )


def copied_blocks() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), copy.deepcopy(nn.Linear(3, 3)))


KINDS: dict[str, Callable[[], nn.Module]] = {
    **CONSTRUCTORS,
    "own and children": OwnAndChildren,
    "subclassed": Subclassed,
    "replaced": Replaced,
    "aliased": Aliased,
    "dummy forward": dummy_forward,
    "meta": on_meta,
    "loaded": loaded,
    "parametrized": parametrized,
    "copied blocks": copied_blocks,
    "attention": functools.partial(nn.MultiheadAttention, 12, 3, add_bias_kv=True),
    "lstm": functools.partial(nn.LSTM, 5, 7, num_layers=2, bidirectional=True, proj_size=3),
    "full transformer": functools.partial(nn.Transformer, 12, 2, 2, 2, 20, batch_first=True),
    "orthogonal": lambda: nn.Sequential(nn.Linear(5, 6), nn.RNN(4, 3)).apply(init_orthogonal),
}
WHOLE_LATER = {"aliased", "replaced"}  # where user code still shares memory at the end


def init_orthogonal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.trunc_normal_(module.bias)


def in_shards(mesh: Any, make: Callable[[], nn.Module]) -> tuple[nn.Module, ShardedInit]:
    torch.manual_seed(0)
    with sharded_init(mesh, CPU, HostStore()) as context:
        model = make()
    return model, context


def description(model: nn.Module) -> list[Any]:
    """All that must be as ordinary initialization leaves it, but the values."""
    return [
        (name, type(p) if not isinstance(p, ShardedParameter) else None, p.shape, p.dtype, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def compare(names: Sequence[str]) -> dict[str, str]:
    """What differs from ordinary initialization, by kind."""
    mesh, wrong = Meshes().of(Setup()), {}
    patched = (Parameter.__new__, Parameter.__deepcopy__, nn.Module.__init__)
    for name in names:
        torch.manual_seed(0)
        expected = KINDS[name]()
        state = torch.get_rng_state()
        torch.manual_seed(dist.get_rank())
        model, _ = in_shards(mesh, KINDS[name])
        if not torch.equal(state, torch.get_rng_state()):
            wrong[name] = "other random numbers were drawn"
        whole = [n for n, p in model.named_parameters() if p.numel() and not isinstance(p, ShardedParameter)]
        if whole and name not in WHOLE_LATER:
            wrong[name] = f"whole at the end: {whole}"
        unshard_parameters(model.parameters())
        if description(model) != description(expected):
            wrong[name] = f"{description(model)} is not {description(expected)}"
        for key, value in expected.state_dict().items():
            if not torch.equal(model.state_dict()[key], value):
                wrong[name] = f"{key}: {model.state_dict()[key]} is not {value}"
    assert patched == (Parameter.__new__, Parameter.__deepcopy__, nn.Module.__init__)
    return wrong


FEW = ("transformer", "own and children", "subclassed", "aliased")


@pytest.mark.parametrize(
    ("pool", "names"),
    [(1, FEW), (2, tuple(KINDS)), (4, FEW), pytest.param(4, tuple(KINDS), marks=pytest.mark.slow)],
    indirect=["pool"],
    ids=["1ranks, few", "2ranks, all", "4ranks, few", "4ranks, all"],
)
def test_parameters_are_those_of_ordinary_initialization(pool: RankPool, names: tuple[str, ...]) -> None:
    for wrong in pool.run(compare, names):
        assert wrong == {}


# ---------------------------------------------------------------------------------------------------------- memory


def peak_of(name: str) -> tuple[int, int]:
    """The most bytes of whole parameters, and those of the largest module's own parameters."""
    model, context = in_shards(Meshes().of(Setup()), KINDS[name])
    assert context.unsharded_bytes == 0
    return context.peak_bytes, max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules())


@pytest.mark.parametrize("name", ["transformer", "copied blocks", "full transformer", "attention", "lstm"])
def test_no_more_than_one_module_is_unsharded(name: str, pool2: RankPool) -> None:
    for peak, largest in pool2.run(peak_of, name):
        assert 0 < peak <= largest


def memory_of_shards() -> list[tuple[int, int]]:
    """Bytes of every parameter's storage and shard."""
    model, _ = in_shards(Meshes().of(Setup()), KINDS["transformer"])
    with torch._C.DisableTorchFunctionSubclass():
        return [(p.untyped_storage().nbytes(), p._zero_shard.values.nbytes) for p in model.parameters()]


def test_a_rank_keeps_its_shard_and_nothing_else(pool2: RankPool) -> None:
    sizes = [-(-p.numel() // 2) * 4 for p in KINDS["transformer"]().parameters()]
    for found in pool2.run(memory_of_shards):
        assert found == [(0, size) for size in sizes]


def forms_of_a_device(name: str) -> bool:
    with sharded_init(Meshes().of(Setup()), torch.device(name), HostStore()), torch.device(name):
        layer = nn.Linear(3, 3)
    return isinstance(layer.weight, ShardedParameter)


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_a_device_is_meant_with_and_without_its_index(name: str, pool2: RankPool) -> None:
    assert pool2.run(forms_of_a_device, name) == [True, True]


# -------------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training after initialization in shards, and after an ordinary one."""

    setup: Setup
    model: str = "transformer"
    seeded: bool = True  # all ranks alike


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HALF_SHARD = Setup(stage=3, shard_size=2)
TRIALS = [
    Trial(setup, model, seeded)
    for model in ("transformer", "mlp", "frozen")
    for setup, seeded in (
        (Setup(stage=3), False),
        (Setup(stage=3, offload=True), True),
        (Setup(stage=3, offload=True, offload_params=False), True),
        (Setup(stage=3, precision=BF16), False),
        (Setup(stage=3, offload=True, precision=BF16), True),
        (Setup(stage=2), False),
    )
]


def train_trials(trials: Sequence[Trial], whole: bool) -> list[RankResult]:
    meshes, world, rank = Meshes(), dist.get_world_size(), dist.get_rank()
    batches = [[micro[rank] for micro in step] for step in models.make_batches(3, 2, world)]
    results = []
    for trial in trials:
        mesh = meshes.of(trial.setup)
        torch.manual_seed(0 if trial.seeded or rank == 0 else 1)
        with contextlib.nullcontext() if whole else sharded_init(mesh, CPU, HostStore()):
            model = CONSTRUCTORS[trial.model]()
        results.append(driver.train(model, models.optimizer_factory("adamw"), batches, trial.setup, mesh))
    return results


def check_trials(pool: RankPool, trials: Sequence[Trial]) -> None:
    whole, sharded = (pool.run(train_trials, trials, whole) for whole in (True, False))
    for number, trial in enumerate(trials):
        expected, actual = (driver.combine([rank[number] for rank in results]) for results in (whole, sharded))
        assert all(value.isfinite().all() for value in actual.weights.values())
        try:
            driver.assert_trained(actual, expected)
        except AssertionError as error:
            raise AssertionError(str(trial)) from error


def test_training_is_that_after_ordinary_initialization(pool2: RankPool) -> None:
    check_trials(pool2, [TRIALS[0], TRIALS[4]])


@pytest.mark.slow
def test_training_of_more_models(pool2: RankPool) -> None:
    check_trials(pool2, TRIALS)


def test_replicas_of_shard_groups(pool4: RankPool) -> None:
    check_trials(pool4, [Trial(HALF_SHARD, seeded=False)])


def unsharded_bytes_of_engine() -> tuple[int, int]:
    """The most bytes of whole parameters and buckets while an engine is made, and those of the largest parameter."""
    mesh = Meshes().of(Setup(stage=3))
    model, _ = in_shards(mesh, KINDS["mlp"])
    peak, gather = 0, Group.all_gather_

    def measured(group: Group, flat: Tensor, what: str) -> None:
        nonlocal peak
        peak = max(peak, flat.nbytes)
        gather(group, flat, what)

    with unittest.mock.patch.object(Group, "all_gather_", measured):
        driver.make_engine(model, Setup(stage=3), mesh)
    return peak, max(-(-p.numel() // 2) * 8 for p in model.parameters())


def test_an_engine_gathers_one_parameter_at_a_time(pool2: RankPool) -> None:
    for peak, largest in pool2.run(unsharded_bytes_of_engine):
        assert peak == largest


def interrupt_an_engine() -> None:
    mesh = Meshes().of(Setup(stage=3))
    model, _ = in_shards(mesh, KINDS["mlp"])
    with driver.interrupting(adoption, "_broadcast", 2):
        driver.make_engine(model, Setup(stage=3), mesh)
    with pytest.raises(ValueError, match=r"'layers.0.weight' is freed, and its values are gone"):
        driver.make_engine(model, Setup(stage=3), mesh)


def test_an_engine_that_is_interrupted_leaves_no_values_that_nobody_wrote(pool2: RankPool) -> None:
    pool2.run(interrupt_an_engine)


# ---------------------------------------------------------------------------------------------- outside the context


def refusals() -> dict[str, str]:
    """The messages of what cannot be done with a sharded parameter, and that metadata can be read."""
    mesh = Meshes().of(Setup())
    model, _ = in_shards(mesh, KINDS["transformer"])
    weight = model.tokens.weight
    assert (weight.shape, weight.numel(), weight.requires_grad) == ((models.VOCAB, models.WIDTH), 66, True)
    assert repr(weight) == "ShardedParameter('Linear.weight', shape=(11, 6), dtype=torch.float32)"
    attempts: dict[str, Callable[[], object]] = {
        "data": lambda: weight.data,
        "forward": lambda: model(torch.ones(1, 3, dtype=torch.long)),
        "to": lambda: model.to(torch.float64),
        "copy_": lambda: model.load_state_dict(KINDS["transformer"]().state_dict()),
        "pickle": lambda: pickle.dumps(weight),
    }
    messages = {}
    for name, attempt in attempts.items():
        with pytest.raises(RuntimeError) as raised:
            attempt()
        messages[name] = str(raised.value)
    return messages


def test_use_outside_the_context_is_an_error_by_name(pool2: RankPool) -> None:
    for messages in pool2.run(refusals):
        for message in messages.values():
            assert "initialized in shards" in message
            assert ".weight'" in message
            assert "trainer.strategy.release(module)" in message


def fills() -> list[bool]:
    """Initialization after the context, by the seed of all ranks, is that of a whole module."""
    mesh = Meshes().of(Setup())
    model, _ = in_shards(mesh, KINDS["mlp"])
    found = []
    for module in (model, expected := seeded(KINDS["mlp"])):
        torch.manual_seed(7)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        for bias in (p for p in module.parameters() if p.ndim == 1):
            nn.init.constant_(bias, 2.0)
            with torch.no_grad():
                bias.uniform_()
    found.append(all(isinstance(p, ShardedParameter) for p in model.parameters()))
    with gathered_parameters(model):
        found += [torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True)]
    return found


def test_parameters_are_filled_outside_the_context(pool2: RankPool) -> None:
    for found in pool2.run(fills):
        assert len(found) > 1
        assert all(found)


def edits() -> list[bool]:
    """What is changed in another context, or inside `gathered_parameters`, is kept, as rank 0 has it."""
    mesh, rank = Meshes().of(Setup()), dist.get_rank()
    model, _ = in_shards(mesh, KINDS["mlp"])
    expected = {name: value.clone() for name, value in seeded(KINDS["mlp"]).state_dict().items()}
    with sharded_init(mesh, CPU, HostStore()):
        model.layers[0].weight.data.fill_(rank + 1)
    with gathered_parameters(model.layers[2]):
        model.layers[2].weight.data.mul_(rank + 2)
    duplicate = copy.deepcopy(model)  # local: shards only
    with gathered_parameters(model):
        inside = model.state_dict()
        found = {name: value.clone() for name, value in inside.items()}
        del inside
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    unshard_parameters(duplicate.parameters())
    expected["layers.0.weight"].fill_(1)
    expected["layers.2.weight"].mul_(2)
    return [torch.equal(found[k], v) and torch.equal(duplicate.state_dict()[k], v) for k, v in expected.items()]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_edits_after_initialization_are_kept(pool2: RankPool) -> None:
    for equal in pool2.run(edits):
        assert all(equal)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        raise LookupError("no such thing")


def fail_and_go_on() -> bool:
    mesh = Meshes().of(Setup())
    before = (Parameter.__new__, Parameter.__deepcopy__, nn.Module.__init__)
    with pytest.raises(LookupError, match="no such thing"):
        in_shards(mesh, Failing)
    assert before == (Parameter.__new__, Parameter.__deepcopy__, nn.Module.__init__)
    assert type(nn.Linear(2, 2).weight) is Parameter
    model, _ = in_shards(mesh, KINDS["mlp"])
    unshard_parameters(model.parameters())
    return torch.equal(model.layers[0].weight, seeded(KINDS["mlp"]).layers[0].weight)


def test_an_error_in_a_constructor_leaves_nothing_behind(pool2: RankPool) -> None:
    assert pool2.run(fail_and_go_on) == [True, True]


def bad_models(kind: str) -> Engine:
    mesh = Meshes().of(Setup(stage=3))
    with sharded_init(mesh, CPU, HostStore()):
        if kind == "meta":
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(2, 2))
        else:
            model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    return driver.make_engine(model, Setup(stage=3), mesh)


@pytest.mark.parametrize(
    ("kind", "message"), [("meta", "'0.weight' is on the meta device"), ("lazy", "'1.weight' is a Uninit.* no shape")]
)
def test_parameters_without_values_are_errors(kind: str, message: str, pool2: RankPool) -> None:
    with pytest.raises(RankError, match=message):
        pool2.run(bad_models, kind)


def transformers_models() -> list[str]:
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    small = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, **small)
    t5 = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **small)
    wrong, mesh = [], Meshes().of(Setup())
    for make in (lambda: GPT2LMHeadModel(gpt2), lambda: T5ForConditionalGeneration(t5)):
        expected = seeded(make).state_dict()
        model, context = in_shards(mesh, make)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert all(isinstance(p, ShardedParameter) for p in model.parameters())
        assert context.peak_bytes < 2 * max(p.nbytes for p in model.parameters())
        unshard_parameters(model.parameters())
        wrong += [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    return wrong


@pytest.mark.slow
def test_transformers_models(pool2: RankPool) -> None:
    pytest.importorskip("transformers")
    assert pool2.run(transformers_models) == [[], []]
