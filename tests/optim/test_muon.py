"""Muon for matrices and AdamW for the rest, as one optimizer, against torch's two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine import driver
from engine.cases import Case, make_model, run_cases
from engine.driver import Setup, assert_close, assert_equal, run_step, start
from helpers import models
from helpers.ranks import RankPool, ranks
from helpers.reference import Trained, state_by_name, train_reference
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import CPUAdamW, Muon
from lightning_zero.sharding import Mesh
from lightning_zero.update import ShardState, WholeState, newton_schulz, shell
from lightning_zero.update.sizes import Passing, sizes_of


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    for (((batch,),),) in ([step] for step in models.make_batches(4, 1, 1)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models.next_token_loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def test_it_is_torchs_muon_and_torchs_adamw() -> None:
    model = models.make_model("transformer")
    plain, resumed = copy.deepcopy(model), copy.deepcopy(model)
    muon, adamw = (
        {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    )
    hidden, rest = (group["params"] for group in Muon.groups_of(plain))
    assert [name for name, p in plain.named_parameters() if any(p is q for q in rest) and p.dim() == 2] == [
        "tokens.weight",
        "positions.weight",
    ]
    expected = train(plain, torch.optim.Muon(hidden, **muon), torch.optim.AdamW(rest, **adamw))
    one = Muon(Muon.groups_of(model), lr=0.02)
    actual = train(model, one)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    again = Muon(Muon.groups_of(resumed), lr=0.5)
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    resumed.load_state_dict(actual)
    assert again.param_groups[0]["lr"] == 0.02
    first, second = train(model, one), train(resumed, again)
    assert all(torch.equal(first[key], value) for key, value in second.items())


def test_groups_are_divided_by_dimensions_unless_they_say_otherwise() -> None:
    model = models.make_model("mlp")
    optimizer = Muon(model.parameters())
    assert [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [(True, 3), (False, 2)]
    assert [group["use_muon"] for group in Muon([{"params": model.parameters(), "use_muon": False}]).param_groups] == [
        False
    ]
    with pytest.raises(ValueError, match=r"use_muon=True needs matrices.*\(7,\)\. .*use_muon=False"):
        Muon([{"params": model.parameters(), "use_muon": True}])
    with pytest.raises(ValueError, match="momentum"):
        Muon(model.parameters(), momentum=-1.0)
    with pytest.raises(ValueError, match="beta"):
        Muon(model.parameters(), betas=(0.9, 1.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matrices_of_equal_shape_are_updated_together_with_the_bits_of_torchs_muon(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the large ones a batch on the host has two; torch updates what remains of a shape, is alone, or tiny."""
    torch.manual_seed(0)
    batches: list[tuple[int, ...]] = []
    iterate = newton_schulz.orthogonalized

    def counted(matrices: Tensor, *rest: Any) -> Tensor:
        batches.append(tuple(matrices.shape))
        return iterate(matrices, *rest)

    monkeypatch.setattr(newton_schulz, "orthogonalized", counted)
    small, large = [*[(20, 40), (40, 20), (16, 16)] * 2, (20, 40), (7, 5)], [*[(256, 200)] * 3, *[(3300, 20)] * 2]
    for batched, options in (
        (None, {"nesterov": False}),
        (True, {"lr": torch.tensor(0.1), "adjust_lr_fn": "original"}),
        (False, {}),
    ):
        shapes = small if batched is False else small + large
        ours = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        theirs = copy.deepcopy(ours)
        mine = Muon(ours, **options, batched=batched)
        torchs = torch.optim.Muon(theirs, **({"adjust_lr_fn": "match_rms_adamw"} | options))
        for step in range(2):
            for one, other in zip(ours, theirs, strict=True):
                other.grad = torch.randn(one.shape).to(dtype)
                one.grad = other.grad.clone() if step or one.shape[0] != 7 else None
                other.grad = other.grad if one.grad is not None else None
            batches.clear()
            for optimizer in (mine, torchs):
                optimizer.step()
            unlike = batched is False or (dtype == torch.bfloat16 and options.get("nesterov") is False)
            assert batches == ([] if unlike else [(3, 20, 40), (2, 40, 20), (2, 256, 200)])
        assert all(map(torch.equal, ours, theirs))
        mine_state, torchs_state = mine.state_dict()["state"], torchs.state_dict()["state"]
        assert_equal(state_of(mine_state), state_of(torchs_state))


def test_a_plan_knows_what_a_batch_takes_in_passing() -> None:
    """From a trial without values; more than one matrix takes, and less than as many apart would."""
    optimizer = newton_schulz.BatchedMuon([torch.zeros(64, 96)])
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} | {"batched": None}
    assert [optimizer.at_once(group, torch.Size(shape), torch.device("cpu")) for shape in ((64, 96), (400, 400))] == [
        21,
        1,
    ]
    parameters = [torch.ones(64, 96) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.ones(64, 96)
    state: dict[Tensor, dict[str, Any]] = {p: {"momentum_buffer": torch.zeros(64, 96)} for p in parameters}
    known = [t for p in parameters for t in (p, p.grad, state[p]["momentum_buffer"]) if t is not None]
    with Passing(known) as passing:
        shell.run_step(optimizer, [shell.ShellGroup(parameters, group)], state)
    one, five = (sizes_of(optimizer, group, torch.Size((64, 96)), torch.float32, count) for count in (1, 5))
    assert five.passing == passing.most
    assert one.passing < five.passing < 5 * one.passing
    assert one.state == five.state == 4 * 64 * 96


@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_iterates_on_its_matrices_of_equal_shape_together(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, ...]] = []
    iterate = newton_schulz.orthogonalized
    monkeypatch.setattr(
        newton_schulz,
        "orthogonalized",
        lambda given, *rest: (batches.append(tuple(given.shape)), iterate(given, *rest))[1],
    )
    for stage in range(4):
        setup = Setup(stage, offload=offload, bucket_size_mb=25.0)
        session = start(make_model("alike"), lambda m: Muon(Muon.groups_of(m)), setup, Mesh.single())
        batches.clear()
        run_step(session, models.make_batches(1, 1, 1)[0][0], settle=True)
        assert batches == ([(6, 20, 20)] if stage < 3 else [(2, 20, 20)] * 3)  # of a bucket, of a unit


def state_of(state: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    return {f"{index}.{name}": value for index, own in state.items() for name, value in own.items()}


# ------------------------------------------------------------------------------------------------------- over shards


class Both(Optimizer):
    """torch's Muon and `CPUAdamW`, each alone, with the hyperparameters of "muon_and_adamw"."""

    def __init__(self, model: nn.Module) -> None:
        hidden, rest = (group["params"] for group in Muon.groups_of(model))
        options: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
        muon = torch.optim.Muon(hidden, **options, adjust_lr_fn="match_rms_adamw")
        self.parts = [muon, CPUAdamW(rest, **options, betas=(0.9, 0.95))]
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


@ranks(2, slow=(1, 4))
def test_on_the_host_its_adamw_has_the_bits_of_cpu_adamw(pool: RankPool) -> None:
    cases = [
        Case(
            Setup(stage, offload=True, native="auto"),
            "muon_and_adamw",
            model=("transformer", "optional")[stage % 2],
            accumulate=(3, 1, 1, 3)[stage],
            flagged=models.by_turns,
        )
        for stage in range(4)
    ]
    cases += [Case(Setup(stage, offload=True, native="auto"), "muon_and_adamw", model="alike") for stage in range(4)]
    for case, trained in zip(cases, run_cases(pool, cases), strict=True):
        batches, reduce_each = case.batches(pool.world_size), case.setup.stage >= 2
        expected = train_reference(make_model(case.model), Both, batches, case.loss_fn, reduce_each=reduce_each)
        driver.assert_trained(trained, expected)


@pytest.mark.parametrize("native", ["off", "auto"])
def test_what_joins_a_bucket_with_another_rule_leaves_its_state(native: driver.NativeOptimizer) -> None:
    """Vectors first, which one rule updates; then matrices of the same bucket."""
    model, plain = models.make_model("transformer"), models.make_model("transformer")
    setup = Setup(2, offload=True, native=native, bucket_size_mb=25.0)
    session = start(model, lambda m: Muon([m.blocks[0].up.weight], lr=2e-2), setup, Mesh.single())
    reference = Muon([plain.blocks[0].up.weight], lr=2e-2)
    bucket = session.engine.bucket_of(model.norm.weight)
    assert bucket is not None
    kinds = []
    for step, ((batch,),) in enumerate(models.make_batches(5, 1, 1)):
        if step in (1, 3):
            for own, optimizer in ((model, session.optimizer), (plain, reference)):
                parts = [own.norm, own.blocks[1].norm1] if step == 1 else [own.blocks[1].up, own.blocks[1].down]
                optimizer.add_param_group({"params": [p for part in parts for p in part.parameters()]})
        run_step(session, [batch], settle=True)
        kinds.append(type(session.updater.state_of(bucket)))
        reference.zero_grad()
        models.next_token_loss(plain, batch).backward()
        reference.step()
    assert kinds[1:3] == [ShardState] * 2
    assert kinds[3:] == [WholeState] * 2
    expected = Trained(plain.state_dict(), state_by_name(plain, reference), [])
    compare = assert_equal if native == "off" else lambda a, e: assert_close(a, e, rtol=1e-4, atol=1e-6)
    driver.assert_trained(driver.combine([driver.finish(session)]), expected, compare)
