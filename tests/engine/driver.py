"""Drives the engine as a strategy does, without Lightning; results have the form of the reference's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import models, place
from helpers.reference import LossFunction, OptimizerFactory, Trained
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from lightning_zero.engine import Engine
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.sharding.exchange import Exchange
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import DeviceStore, DiskStore, Executor, HostStore, TensorStore, make_executor
from lightning_zero.storage.disk_speed import Way
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.update import LossScaler, ShardState, Updater, WholeState, block_of, kept_whole, make_updater
from lightning_zero.update.updaters import NativeOptimizer

CPU = torch.device("cpu")
DISK_BUFFER = 4096 * 16 * 3
IN_FLIGHT = 1 << 16  # bytes of gradients that are reduced beside backward: a step reaches this limit
_RUNS = itertools.count()
UNCHANGED = MixedPrecisionPolicy()


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the engine is configured; `offload` rests the optimizer's state and stage 3's shards on the host."""

    stage: int = 2
    offload: bool = False
    offload_params: bool = True
    native: NativeOptimizer = "off"
    precision: MixedPrecisionPolicy = UNCHANGED
    units: tuple[str, ...] | None = None
    bucket_size_mb: float = 0.0003  # several buckets also at stages 0-2
    shard_size: int | None = None
    persistence_numel: int = 0
    max_live_numel: int | None = None
    prefetch_mb: float = 0.0
    check_steps: int = 0
    detect_data_edits: bool = False
    whole: bool = False  # each parameter lies whole in one shard
    disk: str | None = None  # with `offload`, a folder to rest the optimizer's state in instead
    disk_params: bool = False  # at stage 3 parameters rest there, too
    disk_gradients: bool | None = False  # so do sharded gradients; `None`: where they do not fit the buffer
    overlap: bool = True
    direct: bool = True
    way: Way | None = None  # of transfers


class Meshes:
    """The meshes of one job, each created once."""

    def __init__(self) -> None:
        self._meshes: dict[int | None, Mesh] = {}

    def of(self, setup: Setup) -> Mesh:
        size = 1 if setup.stage == 0 else setup.shard_size
        if size not in self._meshes:
            self._meshes[size] = Mesh.create(size)
        return self._meshes[size]


def limit_waits(mesh: Mesh, seconds: float) -> None:
    """Have collectives fail that wait longer from here on, a place to which all ranks come.

    A mesh that is made with a short limit has it for all that ranks do before, too, where one may be late.
    """
    limit = timedelta(seconds=seconds)

    def hurrying(make: Callable[..., Exchange]) -> Callable[..., Exchange]:
        def new(*args: Any) -> Exchange:
            made = make(*args)
            finish = made._finish
            made._finish = lambda rank, work: finish(rank, Hurried(work, limit))  # type: ignore[method-assign, arg-type]
            return made

        return new

    dist.barrier()
    for group in {mesh.world, mesh.shard, mesh.replica}:
        if group.process_group is not None:
            group.process_group.set_timeout(limit)  # gloo's connections keep theirs
            group._new_exchange = hurrying(group._new_exchange)  # type: ignore[method-assign]


class Hurried(NamedTuple):
    """A work of gloo with a limit of its own."""

    work: dist.Work
    limit: timedelta

    def wait(self) -> None:
        self.work.wait(self.limit)


class Session(NamedTuple):
    """A model on an engine, with an optimizer that the engine drives."""

    model: Any
    engine: Engine
    optimizer: Optimizer
    updater: Updater


def make_placement(setup: Setup, mesh: Mesh | None = None) -> BucketPlacement:
    """`mesh` is a new one by default: a collective call."""
    device, mesh = place.device(), mesh or Meshes().of(setup)
    executor, on_device = make_executor(device, setup.overlap, IN_FLIGHT), DeviceStore(device)
    host: TensorStore = HostStore(pin_for=device) if setup.offload else on_device
    optimizer_store = host if setup.disk is None else make_disk_store(setup, mesh.world.rank, executor)
    shared = setup.stage == 3 and setup.offload_params
    return BucketPlacement(
        mesh,
        ShardingPolicy.from_stage(setup.stage),
        setup.precision,
        device,
        optimizer_store,
        on_device if not shared else optimizer_store if setup.disk_params else host,
        executor,
        whole=setup.whole,
        gradients_rest=setup.disk_gradients,
    )


def make_disk_store(setup: Setup, rank: int, executor: Executor) -> DiskStore:
    """With tiles of 4096 elements, the smallest there are."""
    assert setup.disk is not None
    folder = RunFolder(Path(setup.disk), f"{os.getpid()}-{next(_RUNS)}", rank)
    store = DiskStore.in_folder(
        folder, executor, DISK_BUFFER, direct=setup.direct, way=setup.way, pin_for=place.device()
    )
    assert store.tile == 4096
    return store


def make_engine(
    model: nn.Module,
    setup: Setup,
    mesh: Mesh | None = None,
    *,
    optimizers: Sequence[Optimizer] = (),
    scaler: LossScaler | None = None,
    skip_nonfinite: bool = True,
) -> Engine:
    """An engine, before `attach`; given optimizers, only their parameters are reduced."""
    optimized = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return Engine(
        model,
        make_placement(setup, mesh)._replace(block=block_of(optimizers)),
        optimized=optimized if optimizers else None,
        units=setup.units,
        bucket_size_mb=setup.bucket_size_mb,
        persistence_numel=setup.persistence_numel,
        max_live_numel=setup.max_live_numel,
        prefetch_mb=setup.prefetch_mb,
        check_steps=setup.check_steps,
        detect_data_edits=setup.detect_data_edits,
        scaler=scaler,
        skip_nonfinite=skip_nonfinite,
        whole=kept_whole(optimizers, place.device()),
    )


def start(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    setup: Setup,
    mesh: Mesh | None = None,
    *,
    scaler: LossScaler | None = None,
    skip_nonfinite: bool = True,
) -> Session:
    optimizer = make_optimizer(model)
    engine = make_engine(model, setup, mesh, optimizers=[optimizer], scaler=scaler, skip_nonfinite=skip_nonfinite)
    updater = make_updater(optimizer, engine, setup.native)
    engine.attach([updater])
    return Session(model, engine, optimizer, updater)


def backward(engine: Engine, loss: Tensor, *, last: bool = True) -> None:
    """One micro-batch's backward, of the loss times the engine's scale; `last` if the step follows."""
    with contextlib.nullcontext() if last else engine.no_sync():
        loss = engine.scale_loss(loss)
        engine.begin_backward()
        loss.backward()
        engine.flush()


def run_step(
    session: Session,
    micro: Sequence[Tensor],
    loss_fn: LossFunction = models.next_token_loss,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    settle: bool = False,
) -> float | None:
    """One optimizer step over this rank's micro-batches; returns the norm before clipping, where it is known.

    Without `settle`, the next forward gathers what the step made stale.
    """
    session.optimizer.zero_grad()
    for index, batch in enumerate(micro, start=1):
        with session.engine.forward_context():
            loss = loss_fn(session.model, batch) / len(micro)
        backward(session.engine, loss, last=index == len(micro))
    norm = None
    if clip_norm is not None:
        norm = session.engine.clip_grad_norm_(session.optimizer, clip_norm)
    if clip_value is not None:
        session.engine.clip_grad_value_(session.optimizer, clip_value)
    session.optimizer.step()
    if settle:
        session.engine.settle()
    return norm


@contextlib.contextmanager
def interrupting(owner: Any, name: str, number: int) -> Iterator[None]:
    """Ctrl-C in place of call `number` of a function or method, which ends the code inside."""
    function, calls = getattr(owner, name), itertools.count(1)

    def called(*args: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*args)

    with mock.patch.object(owner, name, called), pytest.raises(KeyboardInterrupt):
        yield


class Piece(NamedTuple):
    """One rank's part of one parameter's optimizer state."""

    name: str
    format: MemoryFormat
    start: int
    elements: dict[str, Tensor]
    scalars: dict[str, Any]


class RankResult(NamedTuple):
    """What training left on one rank."""

    seen: dict[str, Tensor]  # parameters as user code sees them
    weights: dict[str, Tensor]  # at full precision
    pieces: list[Piece]
    norms: list[float]


def train(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    batches: Sequence[Sequence[Tensor]],
    setup: Setup,
    mesh: Mesh | None = None,
    *,
    loss_fn: LossFunction = models.next_token_loss,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    settle: bool = False,
) -> RankResult:
    """Train on this rank's `batches[step][micro-batch]`; the counterpart of `train_reference`."""
    session = start(model, make_optimizer, setup, mesh)
    norms = []
    for micro in batches:
        norm = run_step(session, micro, loss_fn, clip_norm=clip_norm, clip_value=clip_value, settle=settle)
        norms += [] if norm is None else [norm]
    return finish(session, norms)


def finish(session: Session, norms: Sequence[float] = ()) -> RankResult:
    """Take everything out of the engine and release it."""
    engine = session.engine
    engine.settle()
    seen = copy_of_parameters(engine)
    pieces = state_pieces(engine, session.updater)
    engine.release()
    weights = {name: value.detach().to("cpu", copy=True) for name, value in session.model.state_dict().items()}
    return RankResult(seen, weights, pieces, list(norms))


def copy_of_parameters(engine: Engine) -> dict[str, Tensor]:
    """Whole parameters by name, as user code sees them; tied ones under each name."""
    with engine.gathered(engine.module.parameters()):
        return {name: value.detach().to("cpu", copy=True) for name, value in engine.module.state_dict().items()}


def state_pieces(engine: Engine, updater: Updater) -> list[Piece]:
    """This rank's optimizer state; a parameter without any has no piece."""
    pieces = []
    for bucket in engine.buckets:
        state = updater.state_of(bucket)
        for segment in bucket.segments:
            if segment not in state:
                continue
            if isinstance(state, WholeState):
                owned = place.moved(copy.deepcopy(state.get(segment)), "cpu")
                pieces.append(Piece(bucket.names[segment.param], bucket.formats[segment.param], 0, {}, owned))
            else:
                assert isinstance(state, ShardState)
                kept = {name: state.dtypes[name] for name in state.names(segment)}
                read = {k: state.read(k, dtype, segment.start, segment.stop) for k, dtype in kept.items()}
                elements = {k: values.to("cpu", copy=True) for k, values in read.items()}
                scalars = state.scalars(segment)
                name, layout = bucket.names[segment.param], bucket.formats[segment.param]
                pieces.append(Piece(name, layout, segment.param_start, elements, scalars))
    return pieces


def assemble(pieces: Sequence[Piece]) -> dict[str, dict[str, Any]]:
    """Whole optimizer states by parameter name; what no rank holds is NaN."""
    states: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        state = states.setdefault(piece.name, dict(piece.scalars))
        assert equal({k: state[k] for k in piece.scalars}, piece.scalars)
        for key, values in piece.elements.items():
            whole = torch.full([piece.format.shape.numel()], torch.nan, dtype=values.dtype)
            whole = state.setdefault(key, piece.format.view(whole))
            piece.format.flatten(whole)[piece.start : piece.start + values.numel()] = values
    return {name: state for name, state in states.items() if state}


def combine(results: Sequence[RankResult]) -> Trained:
    """One result from all ranks', after a check that they agree."""
    first = results[0]
    for other in results[1:]:
        assert_equal(other.weights, first.weights)
        assert_equal(other.seen, first.seen)
        assert other.norms == first.norms
    return Trained(first.weights, assemble([piece for result in results for piece in result.pieces]), first.norms)


def equal(one: Any, other: Any) -> bool:
    """Whether states have the same values, those of scalars whatever their type."""
    (tensors, scalars), (theirs, others) = split_state(one), split_state(other)
    same = tensors.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in tensors.items())
    return same and scalars == others


def split_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The tensors with several elements of a parameter's state, and its numbers."""
    leaves = {str(path): leaf for path, leaf in tree_flatten_with_path(state)[0] if leaf is not None}
    tensors = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.numel() > 1}
    return tensors, {k: float(v) for k, v in leaves.items() if k not in tensors}


Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    actual, expected = place.moved(dict(actual), "cpu"), place.moved(dict(expected), "cpu")
    wrong = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert {name: (actual[name] - expected[name]).abs().max().item() for name in wrong} == {}


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-9, atol: float = 1e-12
) -> None:
    actual, expected = place.moved(dict(actual), "cpu"), place.moved(dict(expected), "cpu")
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_trained(actual: Trained, expected: Trained, compare: Compare = assert_equal) -> None:
    """Weights and optimizer state agree; scalar state (`step`, ...) is always equal."""
    compare(actual.weights, expected.weights)
    assert actual.optimizer_state.keys() == expected.optimizer_state.keys()
    for name, state in expected.optimizer_state.items():
        got = actual.optimizer_state[name]
        assert got.keys() == state.keys()
        (tensors, scalars), (theirs, others) = split_state(got), split_state(state)
        compare(tensors, theirs)
        assert scalars == pytest.approx(others, rel=0 if compare is assert_equal else 1e-6), name
