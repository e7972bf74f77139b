"""Buffers through which copies pass: which one is used again, and what they take together."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.storage.executor import DONE
from lightning_zero.storage.staging import Staging, staged_size

CPU = torch.device("cpu")
SIZES = (100, 64, 200)


def of_size(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_what_passes_in_a_step_takes_what_its_sizes_add_up_to() -> None:
    """However late it has passed; the plan counts on it."""
    pool = Staging(CPU, 1 << 20)
    for nbytes in SIZES:  # each has passed before the next one comes
        pool.give(pool.take(of_size(nbytes)), DONE)
    held = [pool.take(of_size(nbytes)) for nbytes in SIZES]
    assert pool.nbytes == sum(map(staged_size, SIZES))
    for staged in held:
        pool.give(staged, DONE)
    assert {len(pool.take(of_size(nbytes)).buffer) for nbytes in SIZES} == set(map(staged_size, SIZES))


class UnderWay:
    """A ticket of work that does not end."""

    def done(self) -> bool:
        return False

    def wait(self) -> None: ...

    def synchronize(self) -> None:
        raise AssertionError("nobody needs to wait for it")


def test_without_room_a_larger_buffer_that_is_free_is_used() -> None:
    pool = Staging(CPU, 2 * staged_size(200))
    busy, free = pool.take(of_size(200)), pool.take(of_size(200))
    pool.give(busy, UnderWay())
    pool.give(free, DONE)
    assert pool.take(of_size(64)).buffer is free.buffer
    assert pool.nbytes == 2 * staged_size(200)
