"""The file that all ranks write: what anybody's tools say of it, what user code may do with it, and faults."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.resuming import Resumable, save_after_fit, save_at_end
from helpers import place
from helpers.ranks import RankPool, ranks
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from strategy.fits import Lit, Recipe, assert_same, make_trainer, state_of
from torch import Tensor, nn
from torch.optim import SGD

from lightning_zero import CheckpointError, ZeroFabricStrategy
from lightning_zero.checkpoint import archive, begin, load, locate, rng, shards, tiles
from lightning_zero.checkpoint import file as file_container
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import Group

RECIPE = Recipe(optimizer="adamw", steps=2, options={"lr": 0.05})
ALONE = Group()


def save(tree: Any, path: Path, checksums: bool = True) -> None:
    saving = begin("full", tree, path, None, ALONE, checksums)
    saving.write(ALONE)


def is_intact(path: Path) -> bool:
    """What `unzip -t` says: the archive is complete, and every checksum right."""
    with zipfile.ZipFile(path) as file:
        return file.testzip() is None and any(info.file_size and info.CRC for info in file.infolist())


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------ one process, any tree


class Holder:
    """Something that only pickle knows to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def make_tree() -> dict[str, Any]:
    matrix = torch.randn(30, 40)
    return {
        "plain": matrix,
        "tied": matrix,
        "view": matrix[3:5, ::2],
        "transposed": matrix.t(),
        "many tiles": torch.randn(tiles.TILE // 4 * 2 + 3),
        "bf16": torch.randn(7).bfloat16(),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "number": torch.tensor(5),
        "nothing": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(3)),
        "storage": torch.tensor([1, 2, 3], dtype=torch.uint8).untyped_storage(),
        "inside": [Holder(torch.full((4,), 2.5)), ({"deep": torch.tensor([1.5])},)],
        "text": "x" * 1000,
    }


def test_any_tree_is_what_torch_saves(tmp_path: Path) -> None:
    tree, path = make_tree(), tmp_path / "deep" / "a.ckpt"
    save(tree, path)
    assert is_intact(path)
    for mapped in (True, False):
        found = torch.load(path, weights_only=False, mmap=mapped)
        assert found.keys() == tree.keys()
        for key, value in tree.items():
            if isinstance(value, Tensor):
                assert torch.equal(found[key], value)
                assert (found[key].dtype, found[key].stride()) == (value.dtype, value.stride())
                assert type(found[key]) is type(value)
        assert found["tied"] is found["plain"]
        assert found["view"].untyped_storage().data_ptr() == found["plain"].untyped_storage().data_ptr()
        assert torch.empty(0, dtype=torch.uint8).set_(found["storage"]).tolist() == [1, 2, 3]
        assert torch.equal(found["inside"][0].tensor, torch.full((4,), 2.5))
        assert found["inside"][1][0]["deep"].item() == 1.5
    assert files_in(path.parent) == {"a.ckpt"}


def test_a_file_without_checksums_loads(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save({"w": torch.ones(5)}, path, checksums=False)
    assert torch.equal(load(path, ALONE)["w"], torch.ones(5))


def test_files_of_torch_itself_load(tmp_path: Path) -> None:
    for name, options in (("new", {}), ("old", {"_use_new_zipfile_serialization": False})):
        torch.save({"w": torch.ones(5)}, tmp_path / name, **options)
        assert torch.equal(load(tmp_path / name, ALONE)["w"], torch.ones(5))
    with torch_without_checksums():
        torch.save({"w": torch.ones(5)}, tmp_path / "unchecked")
    assert torch.equal(load(tmp_path / "unchecked", ALONE)["w"], torch.ones(5))


@contextlib.contextmanager
def torch_without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# ----------------------------------------------------------------------------------------------------- damaged on disk


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def records_of(path: Path) -> list[archive.Record]:
    with path.open("rb") as file:
        return archive.read_records(file)


def record(path: Path, name: str) -> archive.Record:
    return next(r for r in records_of(path) if r.name == name)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path, tree = tmp_path / "a.ckpt", {"state_dict": {"a.weight": torch.zeros(3), "b.weight": torch.randn(1000, 10)}}
    save(tree, path)
    flip(path, record(path, "data/1").start + 20_001)
    with pytest.raises(CheckpointError, match=r"a.ckpt is damaged: the checksum of \['state_dict'\]\['b.weight'\]"):
        load(path, ALONE)
    assert load(path, ALONE, checksums=False)["state_dict"]["b.weight"].shape == (1000, 10)


def test_a_flipped_bit_outside_of_tensors_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save({"state_dict": {"weight": torch.zeros(3)}, "note": "abcdefg"}, path)
    flip(path, path.read_bytes().index(b"abcdefg") + 3)
    with pytest.raises(CheckpointError, match=r"the checksum of data.pkl"):
        load(path, ALONE)


LONG = bytes(torch.randint(256, (2 * tiles._CACHED + 1000,), dtype=torch.uint8).tolist())


@given(st.lists(st.integers(0, len(LONG)), min_size=2, max_size=4).map(sorted))
def test_checksums_of_parts_make_up_zlibs(edges: list[int]) -> None:
    with os.fdopen(os.memfd_create("long"), "w+b", buffering=0) as written:
        written.write(LONG)
        file = tiles.OpenFile(f"/proc/self/fd/{written.fileno()}")
        parts = [
            archive.Checksum("part", start, stop - start, tiles.checksum_of(file, start, stop))
            for start, stop in itertools.pairwise(edges)
        ]
        assert archive.combined(reversed(parts)) == zlib.crc32(LONG[edges[0] : edges[-1]])
        with pytest.raises(EOFError, match=rf"the file ends at {len(LONG)}, before {len(LONG) + 1}"):
            tiles.checksum_of(file, edges[0], len(LONG) + 1)


def test_a_flipped_bit_far_into_a_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save({"state_dict": {"weight": torch.randn(tiles._CACHED)}}, path)
    assert load(path, ALONE)["state_dict"]["weight"].shape == (tiles._CACHED,)
    flip(path, record(path, "data/0").stop - 1)
    with pytest.raises(CheckpointError, match=r"the checksum of \['state_dict'\]\['weight'\]"):
        load(path, ALONE)


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save({"state_dict": {"weight": torch.zeros(30_000)}}, path)
    size = path.stat().st_size
    for kept in (int(0.99 * size), int(0.3 * size), 8, 0):
        os.truncate(path, kept)
        for checksums in (True, False):
            with pytest.raises(CheckpointError, match=r"a.ckpt is truncated or damaged"):
                load(path, ALONE, checksums=checksums)


def test_what_is_no_dictionary_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save([torch.ones(2)], path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: it holds a list, .* Give the path"):
        load(path, ALONE)


def test_what_was_never_completed_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / ".0123.incomplete"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match="never completed"):
        load(path, ALONE)


def load_damaged(name: str, path: str) -> str:
    try:
        make_trainer(name).fit(Resumable(RECIPE), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@ranks(2)
@pytest.mark.parametrize("part", [0.4, 0.9], ids=["of rank 0", "of rank 1"])
def test_all_ranks_refuse_a_damaged_file(pool: RankPool, part: float, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, "zero2", RECIPE, str(path))
    data = [r for r in records_of(path) if r.name.startswith("data/") and r.nbytes > 200]
    damaged = data[int(len(data) * part)]
    flip(path, damaged.start + damaged.nbytes // 2)
    messages = pool.run(load_damaged, "zero2", str(path))
    assert "is damaged: the checksum of [" in messages[0]
    assert messages[0] == messages[1]


# ----------------------------------------------------------------------------------------------- written by all ranks


def save_counted(strategy: Any, path: str, **flags: Any) -> tuple[int, int]:
    """The bytes that this rank wrote, and the largest piece it had in its hands."""
    trainer = make_trainer(strategy, **flags)
    trainer.fit(Resumable(RECIPE))
    sizes: list[int] = []
    write_at, gather = tiles.write_at, rng.gather

    def counted(file: int, data: memoryview, offset: int) -> None:
        sizes.append(data.nbytes)
        write_at(file, data, offset)

    tiles.write_at, file_container.TILE, shards.TILE = counted, 1 << 10, 1 << 10
    rng.gather = lambda *_: {}  # rank 0 writes them all, which for so small a model is most of the file
    try:
        trainer.save_checkpoint(path)
    finally:
        tiles.write_at, file_container.TILE, shards.TILE, rng.gather = write_at, tiles.TILE, tiles.TILE, gather
    return sum(sizes), max(sizes)


@ranks(2, slow=(4,))
def test_ranks_write_equal_shares_a_tile_at_a_time(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    written = pool.run(save_counted, "zero3", str(path), precision="bf16-mixed")
    assert is_intact(path)
    total = sum(r.nbytes for r in records_of(path) if r.name.startswith("data/"))
    assert sum(size for size, _ in written) == total
    # Padding is spread unevenly, and steps are on rank 0.
    assert max(size for size, _ in written) < 1.5 * total / pool.world_size
    assert max(largest for _, largest in written) <= 1 << 10
    assert files_in(tmp_path) == {"a.ckpt"}


@ranks(4)
def test_replicas_share_the_work(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    written = pool.run(save_counted, {"stage": 2, "shard_size": 2}, str(path))
    total = sum(r.nbytes for r in records_of(path) if r.name.startswith("data/"))
    assert sum(size for size, _ in written) == total
    assert max(size for size, _ in written) < 1.15 * total / 4
    assert is_intact(path)


@contextlib.contextmanager
def seen_by_one() -> Iterator[list[str]]:
    """As if rank 0 had a file system of its own; collects the warnings."""
    exists, warned = Path.exists, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", lambda self: dist.get_rank() == 0 and exists(self))
        patch.setattr("lightning_zero.integration.checkpointing.rank_zero_warn", warned.append)
        yield warned


def save_seen_by_one(strategy: Any, path: str) -> list[str]:
    trainer = make_trainer(strategy)
    trainer.fit(Resumable(RECIPE))
    with seen_by_one() as warned:
        trainer.save_checkpoint(path)
    fabric = Fabric(accelerator=place.accelerator(), devices=2, strategy=ZeroFabricStrategy(2))
    fabric.launch()
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = layer.weight.detach().clone()
    with seen_by_one() as more:
        fabric.save(f"{path}.fabric", {"layer": fabric.setup(layer)})
    assert torch.equal(torch.load(f"{path}.fabric", weights_only=True)["layer"]["weight"], weight)
    return warned + more


@ranks(2)
def test_without_a_shared_file_system_rank_0_writes_everything(pool: RankPool, tmp_path: Path) -> None:
    path, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    strategy = {**STRATEGIES["zero3"], "checksums": False, "persistence_numel": 0}
    messages = pool.run(save_seen_by_one, strategy, str(path))
    assert ["not all ranks share" in message for message in messages[0]] == [True, True]  # of Trainer and Fabric
    pool.run(save_at_end, strategy, RECIPE, str(other))
    assert_same_files(path, other)
    assert not any(record.crc for record in records_of(path) if record.name.startswith("data/"))
    assert is_intact(tmp_path / "a.ckpt.fabric")
    assert files_in(tmp_path) == {"a.ckpt", "a.ckpt.fabric", "b.ckpt"}


def save_with_options(path: str) -> None:
    trainer = make_trainer("zero2")
    trainer.fit(Resumable(RECIPE))
    with pytest.raises(TypeError, match=r"nothing takes storage_options=.*retries"):
        trainer.save_checkpoint(path, storage_options={"retries": 3})


@ranks(2)
def test_storage_options_that_nothing_takes_are_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run_within(30, save_with_options, str(tmp_path / "a.ckpt"))
    assert not files_in(tmp_path)


def assert_same_files(first: Path, second: Path) -> None:
    one, two = (torch.load(path, weights_only=True, map_location="cpu") for path in (first, second))
    assert_same(one["state_dict"], two["state_dict"])
    for ours, theirs in zip(one["optimizer_states"], two["optimizer_states"], strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        for name, state in ours["state"].items():
            assert_same(state, theirs["state"][name])


def save_through(name: str, io: type[Any], path: str) -> None:
    plugin = AsyncCheckpointIO(TorchCheckpointIO()) if io is AsyncCheckpointIO else io()
    trainer = make_trainer(name, plugins=[plugin])
    trainer.fit(Resumable(RECIPE))
    trainer.save_checkpoint(path)
    plugin.teardown()


class Derived(TorchCheckpointIO):
    """A user's own."""


@ranks(2)
def test_other_writers_get_everything_on_rank_0(pool: RankPool, tmp_path: Path) -> None:
    """Writers of users, and Lightning's."""
    name = "zero3"
    ours, derived, background = (tmp_path / f"{letter}.ckpt" for letter in "abc")
    pool.run(save_at_end, name, RECIPE, f"file://{ours}")
    pool.run(save_through, name, Derived, str(derived))
    pool.run(save_through, name, AsyncCheckpointIO, str(background))
    for path in (derived, background):
        assert_same_files(path, ours)


class Remembers(SGD):
    """Element-wise, with state that is neither a number nor one value per element."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["recent"] = torch.tensor([1.0, 2.0, 3.0])
        return loss


class Remembering(Resumable):
    def configure_optimizers(self) -> Any:
        return Remembers(self.parameters(), lr=0.1)


@ranks(2)
def test_optimizer_state_of_any_shape(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, "zero2", RECIPE, str(path), module=Remembering)
    (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
    assert len(saved["state"]) == len(list(Lit(RECIPE).parameters()))
    assert all(state["recent"].tolist() == [1.0, 2.0, 3.0] for state in saved["state"].values())


def save_at_home(name: str, home: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        trainer = make_trainer(name)
        trainer.fit(Resumable(RECIPE))
        trainer.save_checkpoint("~/a.ckpt")
        make_trainer(name, max_epochs=2).fit(Resumable(RECIPE), ckpt_path="~/a.ckpt")


@ranks(2)
def test_a_tilde_is_the_home_folder(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_at_home, "zero2", str(tmp_path))
    assert files_in(tmp_path) == {"a.ckpt"}


def resume_and_say(strategy: Any, path: str) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.integration.checkpointing.rank_zero_info", said.append)
        make_trainer(strategy, max_epochs=2).fit(Resumable(RECIPE), ckpt_path=path)
    return said


def test_resuming_in_another_world_says_so(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    pool2.run(save_at_end, "zero3", RECIPE, path)
    written_by = torch.load(path, weights_only=True)["lightning_zero"]
    assert {key: written_by[key] for key in ("stage", "world_size", "shard_size")} == {
        "stage": 3,
        "world_size": 2,
        "shard_size": 2,
    }
    assert pool2.run(resume_and_say, "zero3", path)[0] == []
    message, _ = pool1.run(resume_and_say, "zero2", path)[0]
    assert message.endswith("world size 2 -> 1, shard size 2 -> 1, stage 3 -> 2")


# ------------------------------------------------------------------------------------------------------ hooks of users


class Hooked(Resumable):
    """Runs a function on the checkpoint before it is saved."""

    use: Callable[[int, dict[str, Any]], None]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        type(self).use(self.global_rank, checkpoint)


def reads_on_rank_0(rank: int, checkpoint: dict[str, Any]) -> None:
    if rank == 0:
        checkpoint["norms"] = {k: float(v.norm()) for k, v in checkpoint["state_dict"].items()}
        moments = next(iter(checkpoint["optimizer_states"][0]["state"].values()))
        checkpoint["moment"] = moments["exp_avg"].clone()


def reads_everywhere(rank: int, checkpoint: dict[str, Any]) -> None:
    checkpoint["norms"] = {k: float(v.norm()) for k, v in checkpoint["state_dict"].items()}
    moments = next(iter(checkpoint["optimizer_states"][0]["state"].values()))
    checkpoint["moment"] = moments["exp_avg"].clone()


def reads_more_on_rank_1(rank: int, checkpoint: dict[str, Any]) -> None:
    if rank == 1:
        float(next(iter(checkpoint["optimizer_states"][0]["state"].values()))["exp_avg"].norm())


def edits(rank: int, checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    name = next(iter(state))
    state["doubled"] = state[name] * 2
    state["half"] = state[name].half()
    state["renamed"] = state.pop(name)
    del checkpoint["optimizer_states"]


def edits_on_rank_0(rank: int, checkpoint: dict[str, Any]) -> None:
    if rank == 0:
        edits(rank, checkpoint)


def save_hooked(name: str, path: str, use: Callable[[int, dict[str, Any]], None]) -> str:
    Hooked.use = use
    return save_after_fit(name, RECIPE, Hooked, path)


@ranks(2)
@pytest.mark.parametrize("use", [reads_on_rank_0, reads_everywhere])
def test_hooks_read_values(pool: RankPool, use: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert pool.run_within(20, save_hooked, "zero3", str(path), use) == ["saved", "saved"]
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["norms"] == {k: float(v.norm()) for k, v in checkpoint["state_dict"].items()}
    state = next(iter(checkpoint["optimizer_states"][0]["state"].values()))
    assert torch.equal(checkpoint["moment"], state["exp_avg"])
    assert is_intact(path)
    # What was read is not written twice, nor with the bucket that it lies in.
    parts = [state for states in checkpoint["optimizer_states"][0]["state"].values() for state in states.values()]
    tensors = [*checkpoint["state_dict"].values(), *parts, checkpoint["moment"], *checkpoint[rng.ENTRY].values()]
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    data = sum(r.nbytes for r in records_of(path) if r.name.startswith("data/"))
    assert data == sum(unique.values())


@ranks(2)
@pytest.mark.parametrize("use", [edits, edits_on_rank_0])
def test_hooks_change_what_is_saved(pool: RankPool, use: Any, tmp_path: Path) -> None:
    name = "zero3"
    path, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    pool.run_within(20, save_hooked, name, str(path), use)
    pool.run(save_at_end, name, RECIPE, str(other))
    saved = torch.load(path, weights_only=True)
    expected = torch.load(other, weights_only=True)["state_dict"]
    first = next(iter(expected))
    assert first not in saved["state_dict"]
    assert "optimizer_states" not in saved
    assert torch.equal(saved["state_dict"]["renamed"], expected[first])
    assert torch.equal(saved["state_dict"]["doubled"], expected[first] * 2)
    assert torch.equal(saved["state_dict"]["half"], expected[first].half())


@ranks(2)
def test_values_that_only_another_rank_reads_are_an_error_on_all(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    messages = pool.run_within(20, save_hooked, "zero2", str(path), reads_more_on_rank_1)
    assert all("rank 1 reads sharded values of the checkpoint" in message for message in messages)
    assert not files_in(tmp_path)


# --------------------------------------------------------------------------------------------------------------- faults


def save_twice(name: str, path: str, spoil: Callable[[Path], contextlib.AbstractContextManager[None]]) -> Any:
    """A file, and an attempt to replace it after another step that cannot succeed; the error, and the first weights."""
    trainer = make_trainer(name)
    lit = Resumable(RECIPE)
    trainer.fit(lit)
    trainer.save_checkpoint(path)
    weights = state_of(trainer)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    try:
        with spoil(Path(path)):
            trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error), weights
    return "saved", weights


@contextlib.contextmanager
def full_disk_on_rank_1(path: Path) -> Iterator[None]:
    """Files cannot grow beyond where rank 1 has to write; Python ignores the signal, so that writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_disk_on_rank_0(path: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def failing_sync(path: Path, victim: int = 1) -> Iterator[None]:
    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == victim:
            patch.setattr(os, "fsync", fsync)
        yield


@contextlib.contextmanager
def failing_sync_of_the_only_writer(path: Path) -> Iterator[None]:
    with seen_by_one(), failing_sync(path, victim=0):
        yield


@ranks(2)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (full_disk_on_rank_1, "rank 1: OSError: [Errno 27] File too large"),
        (full_disk_on_rank_0, "rank 0: "),
        (failing_sync, "rank 1: OSError: [Errno 5]"),
        (failing_sync_of_the_only_writer, "rank 0: OSError: [Errno 5]"),
    ],
)
def test_a_failed_save_is_an_error_on_all_ranks_and_changes_nothing(
    pool: RankPool, spoil: Any, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    results = pool.run_within(30, save_twice, "zero3", str(path), spoil)
    assert all(said in message and str(path) in message for message, _ in results), results[0][0]
    assert files_in(tmp_path) == {"a.ckpt"}
    assert is_intact(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_same({key.removeprefix("model."): value for key, value in saved.items()}, results[0][1])


@ranks(2)
def test_where_nothing_can_be_written_all_ranks_say_so(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.ckpt").mkdir()
    for path in (tmp_path / "file" / "a.ckpt", tmp_path / "folder.ckpt"):
        messages = pool.run(save_after_fit, "zero2", RECIPE, Resumable, str(path))
        assert messages[0] == messages[1]
        assert messages[0].startswith(f"could not begin the checkpoint {path}. rank 0: ")


def test_leftovers_go_with_the_next_save_but_nothing_else(tmp_path: Path) -> None:
    dead, running, dead_folder, running_folder = (
        tmp_path / f".0123456789abcde{n}.0a1b2c3d.incomplete" for n in range(4)
    )
    mine, hidden, folder = (tmp_path / f"{name}.incomplete" for name in ("mine", ".mine", ".f"))
    for path in (dead_folder, running_folder, folder):
        path.mkdir()
    for path in (dead, running, dead_folder / "lock", running_folder / "lock", mine, hidden):
        path.write_bytes(b"x")
    with running.open("rb") as file, (running_folder / "lock").open("rb") as other:
        for descriptor in (file, other):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        save({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    kept = (running, running_folder, mine, hidden, folder)
    assert files_in(tmp_path) == {"a.ckpt", *(path.name for path in kept)}


class Fickle:
    """Another tensor at each pickling."""

    def __reduce__(self) -> Any:
        return list, ([torch.ones(3) for _ in range(next(COUNTER))],)


COUNTER = itertools.count(1)


def test_an_object_that_pickles_other_tensors_each_time_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was pickled twice and gave different tensors"):
        save({"fickle": Fickle()}, tmp_path / "a.ckpt")
    assert not files_in(tmp_path)


@pytest.mark.parametrize("container", ["full", "sharded"])
def test_a_relative_path_is_that_of_the_call(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a save in the background ends later, when user code may have changed to another folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = begin(container, {"a": torch.ones(3)}, locate("a.ckpt"), (), ALONE)
    monkeypatch.chdir("elsewhere")
    saving.write(ALONE)
    assert files_in(tmp_path) == {"a.ckpt", "elsewhere"}
    assert torch.equal(load(tmp_path / "a.ckpt", ALONE)["a"], torch.ones(3))


def test_where_a_draft_cannot_be_removed_the_error_of_the_save_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is unlocked, so that the next save removes it."""

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    saving = begin("full", {"a": torch.ones(3)}, tmp_path / "a.ckpt", (), ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        patch.setattr(file_container.FileSave, "_write", lambda *_: 1 / 0)
        assert isinstance(saving, file_container.FileSave)
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):
            saving.write(ALONE)
    assert len(files_in(tmp_path)) == 1
    save({}, tmp_path / "b.ckpt")
    assert files_in(tmp_path) == {"b.ckpt"}


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 120 + ".ckpt")
    save({"w": torch.ones(2)}, path)
    assert files_in(tmp_path) == {path.name}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.ckpt"):
        load(tmp_path / "none.ckpt", ALONE)
