"""Pretrained weights on a device: each rank reads its own part of the files, wherever tensors are moved to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device.where import DevicePool
from strategy.test_pretrained import load, load_sharded, save

from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.checkpoint.safetensors import SafetensorsFile
from lightning_zero.sharding.memory_format import MemoryFormat


@pytest.mark.simulated
@pytest.mark.device
@pytest.mark.parametrize("configured", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_rank_reads_its_own_part(device_pool2: DevicePool, tmp_path: Path, configured: bool) -> None:
    """Lightning makes models in the context of the device."""
    path = save(tmp_path, "gpt2")
    total, state = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")), load(path)[0].state_dict()
    for loaded in device_pool2.run(load_sharded, path, {}, configured, accelerator=device_pool2.where.accelerator):
        assert loaded.sharded
        assert loaded.read < 0.6 * total
        assert loaded.state.keys() == state.keys()
        assert [name for name, value in state.items() if not torch.equal(value, loaded.state[name])] == []


@pytest.mark.device
def test_a_tensor_of_a_file_is_moved_without_being_read(device: torch.device, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = torch.arange(6.0, device="cpu").view(2, 3)
    save_file({"w": values}, tmp_path / "file")
    whole = SafetensorsFile(tmp_path / "file").tensor("w")
    assert whole is not None
    half = torch.float16
    with device:  # scratch memory is the host's all the same
        for moved in (
            whole.to(device),
            whole.to(device=device, dtype=half),
            whole.to(device, half),
            whole.to(half).to(device, non_blocking=True),
            whole.to(device).to(half).to("cpu").to(device),
        ):
            assert isinstance(moved, StoredTensor)
            assert (moved.device, moved.fetched) == (device, None)
            part = torch.empty(3, dtype=moved.dtype, device=device)
            moved.read_slice(MemoryFormat(moved.shape, moved.stride()), 2, part)
            assert torch.equal(part.cpu(), values.view(-1)[2:5].to(moved.dtype))
            assert moved.fetched is None
            assert torch.equal((moved * 2).cpu(), (values * 2).to(moved.dtype))
            assert moved.to(device, copy=True).device == device
        assert whole.to("cpu") is whole
        assert [tile.device.type for tile in whole.tiles(16)] == ["cpu", "cpu"]
    assert whole.fetched is None
