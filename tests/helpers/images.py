"""Writes files in the binary layout of CIFAR-10, with random images."""

from __future__ import annotations

from pathlib import Path

import torch

FILES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


def records(count: int, seed: int) -> bytes:
    """The contents of a file with ``count`` images: for each a byte with the label, then the pixels."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(256, (count, 3073), dtype=torch.uint8, generator=generator)
    content[:, 0] = torch.arange(count) % 10
    return bytes(content.flatten().tolist())


def write_files(folder: Path, count: int = 12) -> Path:
    folder.mkdir()
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(records(count, number))
    return folder
