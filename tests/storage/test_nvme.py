"""Tensors that rest on a disk, the folders that they rest in, and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import multiprocessing
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.slow_disk import SlowDisk
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage import (
    DiskError,
    DiskStore,
    Executor,
    HostStore,
    InlineExecutor,
    ThreadExecutor,
    nvme,
    run_folder,
)
from lightning_zero.storage.disk_file import ALIGNMENT, DiskFile
from lightning_zero.storage.nvme import DiskTensor, tile_numel
from lightning_zero.storage.rested import changing, keep, pieces
from lightning_zero.storage.run_folder import FileSystem, RunFolder, file_system, remove_stale

TILE = 4096
BUFFER = TILE * 16 * 3


@pytest.fixture(params=["threads", "io_uring"])
def backend(request: pytest.FixtureRequest) -> ops.DiskBackend:
    backend: ops.DiskBackend = request.param
    if backend == "io_uring" and (refusal := ops.io_uring_refusal()):
        pytest.skip(refusal)
    return backend


def make_store(
    path: Path,
    executor: Executor | None = None,
    *,
    direct: bool = True,
    checksums: bool = True,
    backend: ops.DiskBackend = "threads",
) -> DiskStore:
    pool = ops.DiskPool(3, 2 * ALIGNMENT, backend)
    file = DiskFile(path / f"{len([*path.iterdir()])}.bin", pool, direct)
    return DiskStore(file, executor or ThreadExecutor(), BUFFER, checksums=checksums)


def filled(store: DiskStore, numel: int = 3 * TILE + 5) -> tuple[DiskTensor, Tensor]:
    """A tensor and its values."""
    tensor, values = store.rest(numel, torch.float32, "exp_avg of blocks.3"), torch.randn(numel)
    keep(tensor, 0, values)
    return tensor, values


def contents(tensor: DiskTensor) -> Tensor:
    return torch.cat([tensor.read(*piece).clone() for piece in pieces(tensor.tile, 0, tensor.numel)])


# -------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("executor", [InlineExecutor, ThreadExecutor, SlowDisk])
@pytest.mark.parametrize("direct", [True, False])
def test_a_tensor_on_a_disk_is_one_in_memory(
    tmp_path: Path, executor: type[InlineExecutor], direct: bool, backend: ops.DiskBackend
) -> None:
    store, draw = make_store(tmp_path, executor(), direct=direct, checksums=direct, backend=backend), random.Random(0)
    for dtype, numel in (
        (torch.float32, 5 * TILE + 17),
        (torch.bfloat16, 3 * TILE),
        (torch.int8, 7),
    ):
        disk, memory = store.rest(numel, dtype, "values"), HostStore().rest(numel, dtype, "values")
        for turn in range(24):
            start = draw.randrange(numel)
            stop = min(numel, start + draw.choice([1, 40, TILE, 3 * TILE]))
            if turn % 3 == 0:
                for tensor in (disk, memory):
                    tensor.expect(start, stop)
                    tensor.view(start, stop)[:: turn % 4 + 1].add_(turn % 5)
                    assert tensor.holds(start, stop)
                    tensor.view(start, stop)[-1] = turn % 100
                    tensor.commit(start, stop)
            elif turn % 3 == 1:
                values = torch.randint(-100, 100, (stop - start,)).to(dtype)
                for tensor in (disk, memory):
                    keep(tensor, start, values)
            if turn % 4 == 0:  # a fetch that nobody waits for, perhaps under a write
                disk.expect(start, stop)
                disk.drop(start, stop)
            assert torch.equal(disk.read(start, stop), memory.read(start, stop))
        assert torch.equal(contents(disk), memory.read(0, numel))


class Held:
    """Transfers in one direction, each of which begins when one in the other was done, or does not come for a while."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, until: str, seconds: float) -> None:
        self.other, self.came = threading.Event(), list[bool]()
        held, free = getattr(DiskFile, name), getattr(DiskFile, until)

        def late(file: DiskFile, *transfer: Any) -> None:
            self.came.append(self.other.wait(seconds))
            held(file, *transfer)

        def noted(file: DiskFile, *transfer: Any) -> None:
            free(file, *transfer)
            self.other.set()

        patch.setattr(DiskFile, name, late)
        patch.setattr(DiskFile, until, noted)


def test_a_tile_is_fetched_while_another_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    held = Held(monkeypatch, "write", "read", 60.0)
    tensor.view(0, TILE).fill_(1.0)
    held.other.clear()
    tensor.commit(0, TILE)
    assert torch.equal(tensor.view(TILE, 2 * TILE), values[TILE : 2 * TILE])
    assert contents(tensor)[:TILE].eq(1.0).all()
    assert held.came == [True]


def test_a_tile_is_fetched_again_after_its_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    for read in (tensor.read, tensor.view):
        values[: 2 * TILE] += 1.0
        tensor.view(0, 2 * TILE).copy_(values[: 2 * TILE])
        with monkeypatch.context() as patch:
            held = Held(patch, "write", "read", 0.2)
            tensor.commit(0, TILE)
            assert torch.equal(read(0, TILE), values[:TILE])
        assert held.came == [False]


@pytest.mark.parametrize("instead", ["nothing", "blank", "dropped", "opened"])
def test_a_tile_is_written_after_its_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str) -> None:
    """Also where nobody has waited for that to see it, and where other memory is written."""
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    with monkeypatch.context() as patch:
        held = Held(patch, "read", "write", 0.2)
        tensor.expect(0, TILE)
        if instead == "dropped":
            tensor.drop(0, TILE)
        if instead == "opened":
            tensor.open(0, TILE)
        if instead != "nothing":
            values[:TILE] = 1.0
            tensor.open(0, TILE, blank=True)[0].fill_(1.0)
        tensor.commit(0, TILE)
        assert torch.equal(contents(tensor), values)
    assert held.came[0] is False


def test_a_tile_is_written_after_an_earlier_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes may be under way at the same time, but not of one tile."""
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    real_write, others, alone = DiskFile.write, threading.Event(), list[bool]()

    def write(file: DiskFile, memory: Tensor, offset: int, what: str) -> None:
        if offset == tensor.offset_of(0) and not alone:
            alone.append(not others.wait(0.2))
        elif offset == tensor.offset_of(0):
            others.set()
        real_write(file, memory, offset, what)

    monkeypatch.setattr(DiskFile, "write", write)
    for number in (1.0, 2.0):
        tensor.open(0, TILE, blank=True)[0].fill_(number)
        tensor.commit(0, TILE)
    values[:TILE] = 2.0
    assert torch.equal(contents(tensor), values)
    assert alone == [True]


def test_a_tile_is_compared_with_its_checksum_when_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next two are read."""
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    compares, beside, early = threading.Event(), threading.Barrier(3, timeout=20.0), list[bool]()
    real_read, real_sum = DiskFile.read, nvme.crc32

    def read(file: DiskFile, memory: Tensor, offset: int, what: str) -> None:
        if offset == tensor.offset_of(0):
            early.append(compares.wait(0.2))
        else:
            beside.wait()
        real_read(file, memory, offset, what)

    def compared(data: memoryview) -> int:
        if not compares.is_set():
            compares.set()
            beside.wait()
        return real_sum(data)

    monkeypatch.setattr(DiskFile, "read", read)
    monkeypatch.setattr(nvme, "crc32", compared)
    starts = (0, TILE, 2 * TILE)
    for start in starts:
        tensor.expect(start, start + TILE)
    for start in starts:
        assert torch.equal(tensor.view(start, start + TILE), values[start : start + TILE])
    assert early == [False]


def test_two_tiles_are_written_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    both, real_write = threading.Barrier(2, timeout=20.0), DiskFile.write

    def write(file: DiskFile, *transfer: Any) -> None:
        both.wait()
        real_write(file, *transfer)

    monkeypatch.setattr(DiskFile, "write", write)
    for start in (0, TILE):
        tensor.view(start, start + TILE).add_(1.0)
        tensor.commit(start, start + TILE)
    values[: 2 * TILE] += 1.0
    assert torch.equal(contents(tensor), values)


def test_all_is_written_when_a_store_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a read has been asked for that nobody has waited for; a write that fails is an error then."""
    store = make_store(tmp_path)
    tensor, _ = filled(store)
    contents(tensor)

    def fail(file: DiskFile, *transfer: Any) -> None:
        time.sleep(0.1)
        raise DiskError(errno.EIO, "it fails", "here")

    monkeypatch.setattr(DiskFile, "write", fail)
    tensor.view(0, TILE).add_(1.0)
    tensor.commit(0, TILE)
    tensor.expect(0, TILE)
    tensor.drop(0, TILE)
    with pytest.raises(DiskError, match="it fails"):
        store.settle()


def test_memory_that_was_let_go_is_given_out_when_what_was_on_its_way_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    tensor, _ = filled(store)
    contents(tensor)
    while store.staged_bytes < min(BUFFER, store.opened.given):
        store.take(TILE * 4)  # all of it is in use
    real_read, has_come = DiskFile.read, threading.Event()

    def late(file: DiskFile, *transfer: Any) -> None:
        time.sleep(0.2)
        real_read(file, *transfer)
        has_come.set()

    monkeypatch.setattr(DiskFile, "read", late)
    tensor.expect(0, TILE)
    tensor.drop(0, TILE)
    memory = store.take(TILE * 4).tensor.fill_(7)
    assert has_come.wait(60.0)
    assert memory.eq(7).all()


def test_what_was_never_written_is_zeros_and_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    read, transfers = DiskFile.read, list[int]()

    def noted(file: DiskFile, memory: Tensor, offset: int, what: str) -> None:
        transfers.append(memory.nbytes)
        read(file, memory, offset, what)

    monkeypatch.setattr(DiskFile, "read", noted)
    before, values = filled(store)
    del before, values  # its place is given out again
    gc.collect()
    tensor = store.rest(3 * TILE + 5, torch.float32, "values")
    assert not contents(tensor).any()
    with torch.inference_mode():  # of the training thread alone; another one fills in the zeros
        assert not tensor.read(0, TILE).any()
    assert not transfers
    with changing(tensor, TILE, 2 * TILE) as tile:
        tile.fill_(1.0)
    assert contents(tensor).sum() == TILE
    assert transfers == [TILE * 4]


def test_zeros_are_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was there before; a sign, or one number at the end of a tile, is no zero."""
    store, moved = make_store(tmp_path, InlineExecutor()), list[tuple[str, int]]()
    tensor, _ = filled(store, 4 * TILE)
    for name in ("read", "write"):
        do = getattr(DiskFile, name)

        def noted(file: DiskFile, memory: Tensor, offset: int, what: str, do: Any = do, name: str = name) -> None:
            moved.append((name, memory.nbytes // (TILE * 4)))
            do(file, memory, offset, what)

        monkeypatch.setattr(DiskFile, name, noted)
    values = torch.zeros(4 * TILE)
    values[TILE - 1], values[3 * TILE] = 1.0, -0.0
    with changing(tensor, 0, 4 * TILE) as all_of_it:
        moved.clear()
        all_of_it.copy_(values)
    found = contents(tensor)
    assert torch.equal(found, values)
    assert found[3 * TILE].signbit()
    assert moved == [("write", 1), ("write", 1), ("read", 1), ("read", 1)]


def test_a_tile_of_two_ranges_passes_from_one_to_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once and written once, in whichever order their views end; a blank range is not read at all."""
    store, moved = make_store(tmp_path, InlineExecutor()), {"read": 0, "write": 0}
    for name in moved:
        do = getattr(DiskFile, name)

        def noted(file: DiskFile, memory: Tensor, offset: int, what: str, do: Any = do, name: str = name) -> None:
            moved[name] += memory.nbytes // (TILE * 4)
            do(file, memory, offset, what)

        monkeypatch.setattr(DiskFile, name, noted)
    first, second = (10, TILE + 20), (TILE + 20, 4 * TILE - 3)

    def change(tensor: DiskTensor, values: Tensor, part: tuple[int, int]) -> None:
        tensor.view(*part).add_(1.0)
        values[slice(*part)] += 1.0

    for case in ("in order", "blank", "seen early", "all at once", "read", "dropped", "let go"):
        tensor, values = filled(store, 5 * TILE)
        moved.update(read=0, write=0)
        expected = {"read": 4, "write": 4}
        tensor.expect(*first, blank=case == "blank")
        tensor.expect(*second, blank=case == "blank")
        if case == "blank":
            values[: 4 * TILE], expected["read"] = 0.0, 0  # what is between the ranges and around them is padding
        if case == "dropped":
            assert torch.equal(tensor.view(*first), values[slice(*first)])
            tensor.drop(*first)
            assert torch.equal(tensor.view(*second), values[slice(*second)])
            tensor.drop(*second)
            expected["write"] = 0
        elif case == "let go":
            change(tensor, values.clone(), first)
            tensor.drop(0, tensor.numel)
            expected["write"] = 0
        else:
            change(tensor, values, first)
            if case == "read":  # more than the first range has, and less than the second one
                assert torch.equal(tensor.read(4 * TILE, 4 * TILE + 1), values[4 * TILE : 4 * TILE + 1])
                expected["read"] += 1
            if case in ("in order", "blank", "read"):
                tensor.commit(*first)
            if case != "all at once":  # then the second one is written as it has come
                change(tensor, values, second)
            tensor.commit(0, tensor.numel)
        assert moved == expected, case
        assert torch.equal(contents(tensor), values), case


def test_a_tile_passes_on_when_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    tensor, values = filled(store)
    contents(tensor)
    with monkeypatch.context() as patch:
        Held(patch, "read", "write", 0.2)
        tensor.expect(0, TILE + 10)
        tensor.expect(TILE + 10, 3 * TILE)
        tensor.drop(0, TILE + 10)
        assert torch.equal(tensor.view(TILE, 3 * TILE), values[TILE : 3 * TILE])


def test_places_are_given_out_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, InlineExecutor())
    for _ in range(3):
        filled(store)
    assert store.opened.path.stat().st_size == 3 * TILE * 4 + ALIGNMENT


def test_host_memory_in_passing_stays_within_the_buffer(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    tensors = [store.rest(20 * TILE, torch.float32, "values") for _ in range(4)]
    for start in range(0, 20 * TILE, TILE):
        for tensor in tensors:
            tensor.expect(start, start + TILE)
            if start + TILE < tensor.numel:
                tensor.expect(start + TILE, start + 2 * TILE)
        for tensor in tensors:
            tensor.view(start, start + TILE).add_(1.0)
            tensor.commit(start, start + TILE)
    assert 0 < store.staged_bytes <= BUFFER
    assert all(contents(tensor).eq(1.0).all() for tensor in tensors)


def test_tiles_fit_the_buffer() -> None:
    for nbytes in (1, 10**5, 10**6, 10**8, 10**10):
        assert tile_numel(nbytes) * 16 * 3 <= max(nbytes, BUFFER)
    assert tile_numel(10**10) > tile_numel(10**6) > tile_numel(1) == TILE


# --------------------------------------------------------------------------------------------------------------- faults


@contextlib.contextmanager
def replaced(store: DiskStore, path: str, flags: int) -> Iterator[None]:
    """The store's file is another one inside, which the system itself lets fail."""
    descriptor = store.opened.descriptor
    before, other = os.dup(descriptor), os.open(path, flags)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)
        os.close(other)


def commit_and_read(tensor: DiskTensor) -> None:
    tensor.commit(0, TILE)
    tensor.read(0, 1)


@pytest.mark.parametrize("executor", [InlineExecutor, ThreadExecutor])
def test_a_write_that_fails_is_an_error_then_and_ever_after(
    tmp_path: Path, executor: type[InlineExecutor], backend: ops.DiskBackend
) -> None:
    store = make_store(tmp_path, executor(), backend=backend)
    tensor, values = filled(store)
    tensor.view(0, TILE).fill_(1.0)
    with replaced(store, "/dev/full", os.O_WRONLY), pytest.raises(DiskError, match="exp_avg") as caught:
        commit_and_read(tensor)
    assert caught.value.errno == errno.ENOSPC
    # Of tiles that are written side by side, and their blocks, any may be the first that fails.
    said = rf"{store.opened.path} at byte [\d,]+: No space left on device; it needs ([\d,]+) bytes"
    found = re.search(said, str(caught.value))
    assert found is not None
    assert 0 < int(found[1].replace(",", "")) <= 16384
    # At first, so that the lane has ended its job: it adds its name after the store knows of the failure.
    for again in (store.settle, lambda: tensor.read(0, 1), lambda: keep(tensor, 0, values)):
        with pytest.raises(DiskError, match="No space left") as later:
            again()
        assert later.value.filename == caught.value.filename == str(store.opened.path)
        assert "in the lane WRITE" in "".join(later.value.__notes__)


def test_a_read_that_fails_names_what_was_read(tmp_path: Path, backend: ops.DiskBackend) -> None:
    store = make_store(tmp_path, backend=backend)
    tensor, values = filled(store)
    contents(tensor)
    # At an address where nothing is mapped the system answers EIO.
    with (
        replaced(store, "/proc/self/mem", os.O_RDONLY),
        pytest.raises(DiskError, match=r"exp_avg of blocks\.3 could not be read from") as caught,
    ):
        tensor.read(0, TILE)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(store.opened.path)
    assert torch.equal(contents(tensor), values)  # nothing is lost


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_found(tmp_path: Path, checksums: bool, backend: ops.DiskBackend) -> None:
    store = make_store(tmp_path, checksums=checksums, backend=backend)
    tensor, values = filled(store)
    contents(tensor)
    with store.opened.path.open("r+b") as file:
        file.seek(2 * TILE * 4 + 100)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert torch.equal(tensor.read(0, 2 * TILE), values[: 2 * TILE])
    if not checksums:
        assert not torch.equal(tensor.read(2 * TILE, 3 * TILE), values[2 * TILE : 3 * TILE])
        return
    for read in (tensor.read, tensor.view):
        with pytest.raises(DiskError, match=r"exp_avg of blocks\.3 in .*32,768 on, is not what was written") as caught:
            read(2 * TILE, 3 * TILE)
        assert caught.value.errno == errno.EIO


def test_a_truncated_file_is_found(tmp_path: Path, backend: ops.DiskBackend) -> None:
    store = make_store(tmp_path, backend=backend)
    tensor, _ = filled(store)
    contents(tensor)
    os.truncate(store.opened.path, TILE * 4 + 10)
    assert tensor.read(0, TILE).numel() == TILE
    with pytest.raises(DiskError, match="someone has truncated it"):
        tensor.read(TILE, 2 * TILE)


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = os.statvfs(tmp_path).f_bavail
    with pytest.raises(DiskError, match=r"needs [\d,]+ bytes more for .*has [\d,]+ free") as caught:
        store.reserve(1 << 55)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert store.opened.path.stat().st_size <= ALIGNMENT
    assert os.statvfs(tmp_path).f_bavail >= before - 1000
    store.reserve(1 << 20)
    assert store.opened.path.stat().st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_reserve_is_asked_for_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The C library tries it by single bytes, without `O_DIRECT`."""
    flags = list[int]()

    def refuse(file: int, *_: int) -> None:
        flags.append(fcntl.fcntl(file, fcntl.F_GETFL))
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = make_store(tmp_path)
    tensor, values = filled(store)
    assert torch.equal(contents(tensor), values)
    assert flags
    assert not any(flag & os.O_DIRECT for flag in flags)
    with pytest.raises(DiskError, match=r"needs [\d,]+ bytes more for .*has [\d,]+ free.*No space left"):
        store.reserve(1 << 55)
    assert torch.equal(contents(tensor), values)


def test_a_file_is_not_taken_twice(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(DiskError, match="cannot be made"):
        DiskFile(tmp_path / "0.bin", ops.DiskPool())


@pytest.mark.parametrize("refused", ["opening a file", "a transfer"])
def test_a_file_goes_through_the_page_cache_where_the_system_refuses_to_bypass_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and refused == "opening a file":
            raise OSError(errno.EINVAL, "refused")
        if flags & os.O_DIRECT:
            return real(path, os.O_RDONLY | os.O_CLOEXEC)  # whose writes fail
        return real(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        store = make_store(tmp_path)
    code = errno.EINVAL if refused == "opening a file" else errno.EBADF
    assert (store.opened.direct, store.opened.refusal) == (False, f"{refused}: {os.strerror(code)}")
    tensor, values = filled(store)
    assert torch.equal(contents(tensor), values)


def test_a_file_that_cannot_be_tried_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened = os.open, list[int]()

    def noted(path: Path, flags: int, *mode: int) -> int:
        opened.append(real(path, flags & ~os.O_DIRECT, *mode))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(ops.DiskPool, "write", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        DiskFile(tmp_path / "0.bin", ops.DiskPool())
    gc.collect()
    assert len(opened) == 2
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


# -------------------------------------------------------------------------------------------------------------- folders

OWNER = """
import os, sys
from pathlib import Path
from lightning_zero.storage.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), "other", 3)
Path(folder.path, "state.bin").write_bytes(b"1")
print("ready", flush=True)
sys.stdin.read(1)
"""


@contextlib.contextmanager
def other_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has a folder at the path."""
    # -P: in the folder of the sources these would hide an installed package.
    command = [sys.executable, "-P", "-c", textwrap.dedent(OWNER), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=240)


@pytest.mark.launch
def test_a_folder_lives_as_long_as_its_owner(tmp_path: Path) -> None:
    """On a network file system another machine does not remove it: what is locked may be so for one machine alone."""
    with other_run(tmp_path) as process:
        folder = RunFolder(tmp_path, "mine", 0)
        theirs = RunFolder.place(tmp_path, "other", 3)
        assert folder.path == tmp_path / "lightning_zero-mine" / "rank0"
        with pytest.raises(DiskError, match="cannot be made"):
            RunFolder(tmp_path, "other", 3)
        assert not remove_stale(tmp_path)
        assert Path(theirs, "state.bin").exists()
        with Path(theirs, "owner").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a file: the lock of a folder does not reach a server
        process.kill()
        process.wait(timeout=240)
        with mock.patch.object(run_folder, "file_system", return_value=FileSystem("nfs4")):
            with mock.patch("socket.gethostname", return_value="elsewhere"):
                assert not remove_stale(tmp_path)
            assert remove_stale(tmp_path) == [theirs]
    assert [*tmp_path.iterdir()] == [folder.path.parent]
    del folder
    gc.collect()
    assert not [*tmp_path.iterdir()]


def test_the_child_of_a_fork_removes_no_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "mine", 0)
    if (child := os.fork()) == 0:
        folder.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.path.is_dir()


def keep_a_folder(path: Path) -> None:
    """Until the process ends."""
    KEPT.append(RunFolder(path, "mine", 0))


KEPT: list[RunFolder] = []


def test_a_rank_that_was_forked_removes_its_folder(tmp_path: Path) -> None:
    """Processes of `multiprocessing` end by `os._exit`."""
    rank = multiprocessing.get_context("fork").Process(target=keep_a_folder, args=(tmp_path,))
    rank.start()
    rank.join(240)
    assert rank.exitcode == 0
    assert not [*tmp_path.iterdir()]


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="is not a folder that exists") as caught:
        RunFolder(tmp_path / "missing", "mine", 0)
    assert caught.value.errno == errno.ENOENT
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DiskError, match="is not a folder that exists") as caught:
        RunFolder(file, "mine", 0)
    assert caught.value.errno == errno.ENOTDIR
    with pytest.raises(DiskError):
        RunFolder(Path("/proc"), "mine", 0)  # nobody can write there


def test_file_systems_are_known_by_their_names() -> None:
    assert file_system(Path("/proc/self")).kind == "proc"
    memory = file_system(Path("/dev/shm"))
    assert memory.in_memory == (memory.kind == "tmpfs")
    assert not memory.on_network


AT_EXIT = """
import os, sys, torch
from lightning_zero import ops
from lightning_zero.storage import Lane, ThreadExecutor
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_SYNC)
pool, executor, memory = ops.DiskPool(), ThreadExecutor(), torch.zeros(1 << 20, dtype=torch.uint8)
for number in range(8):
    executor.submit(lambda: pool.write(file, memory, number << 20), Lane.WRITE, "a write")
"""


@pytest.mark.slow
def test_a_process_ends_after_what_its_lane_writes(tmp_path: Path) -> None:
    """The interpreter would end the thread inside a compiled function, and the process by an abort with that."""
    subprocess.run([sys.executable, "-P", "-c", AT_EXIT, str(tmp_path / "file")], check=True, cwd=tmp_path)
    assert (tmp_path / "file").stat().st_size == 8 << 20
