"""Saves and restores the states of random number generators: torch's (CPU and device), NumPy's and Python's.

So a resumed run draws the random numbers for dropout, shuffling and augmentation that an uninterrupted run would draw.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_zero.sharding import Group
from lightning_zero.storage import RandomState, device_type

ENTRY = "lightning_zero_rng"  # the checkpoint's entry: by generator, [ranks, size of its state]


def gather(world: Group, device: torch.device) -> dict[str, Tensor]:
    """The states on all ranks: by generator, [ranks, size]; uint8, or float64 for NumPy's and Python's. Collective."""
    states = {name: generator.get() for name, generator in _generators(device).items()}
    everyone = world.all_gather_object(states, "gather the states of the random number generators")
    return {name: torch.stack([states[name] for states in everyone]) for name in states}


def restore(saved: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Restore the generator states of a rank.

    If there are more ranks than before, a new rank takes the state of a generator that was equal on all ranks, so that
    random numbers that are equal on all ranks stay equal. Where the states differed, the new rank gets a state of its
    own, derived from the saved ones and its rank. A generator that was not saved keeps its state.

    Args:
        saved: result of :func:`gather`.
        rank: rank of this process.
        device: device of this rank.
    """
    for name, generator in _generators(device).items():
        states = saved.get(name)
        if states is None:
            continue
        if rank < len(states):
            generator.set(states[rank].clone())
        elif bool((states == states[0]).all()):
            generator.set(states[0].clone())
        else:
            state = states[rank % len(states)].contiguous().numpy().tobytes()
            generator.seed(int.from_bytes(hashlib.sha256(state + rank.to_bytes(8)).digest()[:4]))


def note(saved: Mapping[str, Tensor], ranks: int) -> str | None:
    """A message if the number of ranks has changed, otherwise ``None``; ``ranks`` is the number now."""
    before = min(map(len, saved.values()), default=ranks)
    if before == ranks:
        return None
    new = f", and ranks from {before} on derive theirs from these" if before < ranks else ""
    return (
        f"world size {before} -> {ranks}: each rank continues the random numbers that the same rank drew before{new}, "
        "so that dropout and shuffling differ from those of an uninterrupted run"
    )


def _generators(device: torch.device) -> dict[str, RandomState]:
    found = {
        "torch": RandomState(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        "python": RandomState(_get_python, _set_python, random.seed),
    }
    if np.random.get_state(legacy=False)["bit_generator"] == "MT19937":  # NumPy's default generator
        found["numpy"] = RandomState(_get_numpy, _set_numpy, np.random.seed)
    if (own := device_type(device).random_state(device)) is not None:
        found[device.type] = own
    return found


def _get_numpy() -> Tensor:
    state = np.random.get_state(legacy=False)
    words = [*state["state"]["key"].tolist(), state["state"]["pos"]]
    return _packed(words, state["gauss"] if state["has_gauss"] else None)


def _set_numpy(state: Tensor) -> None:
    (*key, position), gauss = _unpacked(state)
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, int(gauss is not None), gauss or 0.0))


def _get_python() -> Tensor:
    _, words, gauss = random.getstate()
    return _packed(words, gauss)


def _set_python(state: Tensor) -> None:
    words, gauss = _unpacked(state)
    random.setstate((3, tuple(words), gauss))


# Both generators are Mersenne Twisters. Their state consists of 32-bit words, which float64 represents exactly, and
# the second number of the last pair of normal numbers, unless it has been drawn.


def _packed(words: Iterable[int], gauss: float | None) -> Tensor:
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64, device="cpu")


def _unpacked(state: Tensor) -> tuple[list[int], float | None]:
    *words, has_gauss, gauss = state.tolist()
    return [int(word) for word in words], gauss if has_gauss else None
