"""Weights written as safetensors equal the checkpoint's, and are there whole or not at all."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import save_at_end
from helpers.ranks import RankPool, ranks, slow_unless
from helpers.third_party import KINDS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategy.fits import DDP, Recipe, make_trainer
from strategy.third_party_fits import Lit
from torch import Tensor

from lightning_zero.checkpoint import CheckpointError
from lightning_zero.tools import export as module
from lightning_zero.tools.export import export


def write(path: Path, state: dict[str, Any], **more: Any) -> Path:
    torch.save({"state_dict": state} | more, path)
    return path


def files_of(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """All tensors of all files; each is in one."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            assert reader.metadata() == {"format": "pt"}
        loaded = load_file(file)
        assert not found.keys() & loaded.keys()
        found |= loaded
    return found


def assert_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape)
        assert torch.equal(bits(actual[name]), bits(value)), name


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def state_in(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"weight": torch.ones(1000)})
    data = path.read_bytes().replace(b"\x00\x00\x80\x3f" * 500, b"\x00\x00\x80\x3f" * 499 + b"\x01\x00\x80\x3f", 1)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a.ckpt is damaged: the checksum of \['state_dict'\]\['weight'\]"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@ranks(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("zero3", torch.float16),
        pytest.param("zero1", None, marks=pytest.mark.slow),
        pytest.param(DDP, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_export_of_a_fit_is_its_state_dict(
    pool: RankPool, name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, name, Recipe(options={"lr": 0.05}), str(path))
    exported = export(path, tmp_path / "out", dtype=dtype, strip_prefix="model")
    assert files_of(tmp_path / "out") == {"model.safetensors"}
    assert exported.tied == {"head.weight": "tokens.weight"}
    state = {key.removeprefix("model."): value for key, value in state_in(path).items()}
    del state["head.weight"]
    assert_bits(tensors_in(tmp_path / "out"), {key: value.to(dtype or value.dtype) for key, value in state.items()})
    assert exported.tensors == len(state)
    assert exported.bytes == sum(value.numel() * (dtype or value.dtype).itemsize for value in state.values())


class WithConfig(Lit):
    """Keeps the model's configuration in the checkpoint."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, steps=2)
        self.save_hyperparameters({"config": self.model.config.to_dict()})


def fit_and_save(name: str, kind: str, path: str) -> None:
    trainer = make_trainer(name)
    trainer.fit(WithConfig(kind))
    trainer.save_checkpoint(path)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [("zero3", None), pytest.param(DDP, torch.bfloat16, marks=pytest.mark.slow)]
)
def test_transformers_loads_an_export(
    pool: RankPool, name: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2LMHeadModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "a.ckpt"
    pool.run(fit_and_save, name, "gpt2", str(path))
    export(path, tmp_path / "out", "hf", dtype=dtype, strip_prefix="auto", max_shard_bytes=20_000)
    assert {"config.json", "model.safetensors.index.json"} < files_of(tmp_path / "out")
    model, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = {key.removeprefix("model."): value for key, value in state_in(path).items()}
    assert_bits(model.state_dict(), {key: value.to(dtype or value.dtype) for key, value in expected.items()})
    assert model.lm_head.weight is model.transformer.wte.weight
    trained = Lit("gpt2").model.state_dict()
    assert not torch.equal(model.state_dict()["lm_head.weight"].float(), trained["lm_head.weight"])  # not the initial


@pytest.mark.parametrize("kind", slow_unless(("t5",), ("t5", "llama", "mixtral", "hf_vit")))
def test_transformers_loads_an_export_with_a_configuration_from_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = KINDS[kind].make_model()
    path = write(tmp_path / "a.ckpt", {f"net.{key}": value for key, value in source.state_dict().items()})
    source.config.save_pretrained(tmp_path / "config")
    for number, config in enumerate((tmp_path / "config", tmp_path / "config" / "config.json")):
        directory = tmp_path / f"out{number}"
        export(path, directory, "hf", strip_prefix="net.", config=config)
        model, info = type(source).from_pretrained(directory, output_loading_info=True)
        assert not any(info.values())
        assert_bits(model.state_dict(), source.state_dict())


def test_tensors_of_every_form(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True, False, True]),
        "image": torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
        "transposed": base.T,
        "rows": base[2:4],
        "base": base,
        "half": torch.randn(7, generator=generator).half(),
        "bfloat": torch.randn(7, generator=generator).bfloat16(),
        "double": torch.randn(3, generator=generator).double(),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "größe": torch.ones(1),
    }
    path = write(tmp_path / "a.ckpt", state)
    exported = export(path, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert_bits(found, {name: value.detach().contiguous() for name, value in state.items()})
    assert exported.tied == {}
    export(path, tmp_path / "bf16", dtype=torch.bfloat16)
    assert_bits(
        tensors_in(tmp_path / "bf16"),
        {n: (v.detach().bfloat16() if v.is_floating_point() else v).contiguous() for n, v in state.items()},
    )


def test_a_file_is_what_the_library_writes(tmp_path: Path) -> None:
    """Byte for byte: header, padding and order."""
    state = {"b": torch.randn(3, 5), "a": torch.randn(7), "h": torch.randn(3).half(), "n": torch.tensor(2)}
    export(write(tmp_path / "a.ckpt", state), tmp_path / "out")
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_large_tensors_are_converted_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE", 7)
    state = {"a": torch.randn(10, 9), "b": torch.randn(9, 10).T, "c": torch.randn(14)}
    export(write(tmp_path / "a.ckpt", state), tmp_path / "out", dtype=torch.bfloat16)
    assert_bits(tensors_in(tmp_path / "out"), {name: value.bfloat16().contiguous() for name, value in state.items()})


def test_shards_with_an_index(tmp_path: Path) -> None:
    state = {name: torch.randn(size) for name, size in zip("abcdef", (10, 10, 30, 5, 5, 1), strict=True)}
    exported = export(write(tmp_path / "a.ckpt", state), tmp_path / "out", max_shard_bytes=80)
    expected = ["ab", "c", "def"]  # a tensor above the limit has a file of its own
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert exported.files == names
    assert files_of(tmp_path / "out") == {*names, "model.safetensors.index.json"}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 61 * 4
    assert index["weight_map"] == {key: file for file, keys in zip(names, expected, strict=True) for key in keys}
    for file, keys in zip(names, expected, strict=True):
        assert sorted(load_file(tmp_path / "out" / file)) == list(keys)
    assert_bits(tensors_in(tmp_path / "out"), state)


def test_names_by_prefix(tmp_path: Path) -> None:
    weight = torch.ones(2)
    state = {"net.a.w": weight, "net.a.v": torch.ones(3), "net.b.w": weight, "netto.w": torch.ones(4), "w": weight}
    path = write(tmp_path / "a.ckpt", state | {"net._extra_state": {"any": "thing"}})

    def names(directory: str, prefix: str) -> set[str]:
        export(path, tmp_path / directory, strip_prefix=prefix)
        return set(tensors_in(tmp_path / directory))

    assert names("none", "") == {"net.a.w", "net.a.v", "netto.w"}
    assert names("net", "net") == names("dot", "net.") == {"a.w", "a.v"}
    assert names("deep", "net.b.") == {"w"}
    exported = export(path, tmp_path / "report", strip_prefix="net")
    assert exported.tied == {"b.w": "a.w"}
    assert exported.outside == ["netto.w", "w"]
    assert exported.extra == ["net._extra_state"]
    assert export(path, tmp_path / "rest", strip_prefix="net.a").common_prefix == ""
    with pytest.raises(CheckpointError, match=r"No name begins with 'model\.'; prefixes are net\., netto\.$"):
        export(path, tmp_path / "wrong", strip_prefix="model")
    with pytest.raises(CheckpointError, match=r"names have no prefix in common; prefixes are net\., netto\.$"):
        export(path, tmp_path / "wrong", strip_prefix="auto")
    write(path, {"net.a.w": torch.ones(2), "net.a.v": torch.ones(2)})
    assert names("all", "auto") == {"w", "v"}
    assert export(path, tmp_path / "prefix", strip_prefix="auto").prefix == "net.a."
    assert export(path, tmp_path / "kept").common_prefix == "net.a."


def test_names_are_those_of_the_uncompiled_module(tmp_path: Path) -> None:
    """A compiled module's state dict under another strategy has names of its wrapper."""
    block, whole = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential()
    whole.append(torch.compile(block))
    state = torch.compile(whole).state_dict()
    assert list(state) == ["_orig_mod.0._orig_mod.0.weight", "_orig_mod.0._orig_mod.0.bias"]
    export(write(tmp_path / "a.ckpt", state), tmp_path / "out")
    assert_bits(tensors_in(tmp_path / "out"), torch.nn.Sequential(block).state_dict())


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({}, {}, "has no tensors"),
        ({"w": torch.eye(3).to_sparse()}, {}, "'w' is a tensor of kind sparse_coo, which safetensors does not store"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {}, "'w' is a tensor of kind complex128"),
        ({"w": torch.ones(2), "p": Path("a")}, {}, "'p' is a <pathlib.*Path>, which cannot be read"),
        ({"w": torch.tensor([1e5])}, {"dtype": torch.float16}, "'w' has numbers that are infinite in float16"),
        ({"w": torch.ones(2)}, {"layout": "hf"}, "hyperparameters have no model configuration with a 'model_type'"),
        ({"w": torch.ones(2)}, {"layout": "hf", "config": Path(__file__)}, "is not JSON"),
    ],
    ids=["none", "sparse", "complex", "class", "range", "no config", "config"],
)
def test_what_cannot_be_exported(state: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", state)
    with pytest.raises(CheckpointError, match=message):
        export(path, tmp_path / "out", **options)
    assert files_of(tmp_path) == {"a.ckpt"}


def test_infinities_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"w": torch.tensor([float("-inf"), 1.0])})
    export(path, tmp_path / "out", dtype=torch.float16)
    assert tensors_in(tmp_path / "out")["w"].tolist() == [float("-inf"), 1.0]


def test_a_folder_with_files_is_only_overwritten_when_asked(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    one, two = ({name: torch.randn(8) for name in names} for names in ("abc", "xy"))
    config = {"config": {"model_type": "gpt2", "torch_dtype": "float16"}}
    export(write(tmp_path / "1.ckpt", one, hyper_parameters=config), directory, "hf", max_shard_bytes=32)
    (directory / "tokenizer.json").write_text("mine")
    before = files_of(directory)
    with pytest.raises(CheckpointError, match=r"is not empty.*--overwrite"):
        export(write(tmp_path / "2.ckpt", two), directory)
    assert files_of(directory) == before
    assert_bits(tensors_in(directory), one)
    export(tmp_path / "2.ckpt", directory, overwrite=True)
    assert files_of(directory) == {"model.safetensors", "tokenizer.json", "config.json"}
    assert_bits(tensors_in(directory), two)
    assert (directory / "tokenizer.json").read_text() == "mine"
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "gpt2", "dtype": "float32"}
    with pytest.raises(CheckpointError, match="is a file"):
        export(tmp_path / "2.ckpt", directory / "tokenizer.json")


def test_what_a_killed_export_left_is_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / "out" / ".partial"
    left.mkdir(parents=True)
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    export(write(tmp_path / "a.ckpt", {"w": torch.ones(2)}), tmp_path / "out")
    assert files_of(tmp_path / "out") == {"model.safetensors"}


def spoil(write_shard: Any, place: int) -> Any:
    def written_wrong(file: Path, entries: Iterable[Any]) -> None:
        write_shard(file, entries)
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return written_wrong


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        (-1, r"'w' in model\.safetensors reads back otherwise"),
        (-16, r"'w' in model\.safetensors reads back otherwise"),
        (8, r"model\.safetensors cannot be read back"),
    ],
)
def test_nothing_is_kept_of_files_that_read_back_otherwise(
    place: int, message: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.ckpt", {"w": torch.ones(4)})
    directory = tmp_path / "out"
    if exists:
        export(path, directory)
        before = (directory / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "_write_shard", spoil(module._write_shard, place))
    with pytest.raises(CheckpointError, match=message):
        export(path, directory, overwrite=True)
    if exists:
        assert files_of(directory) == {"model.safetensors"}
        assert (directory / "model.safetensors").read_bytes() == before
    else:
        assert not directory.exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"v": torch.ones(4), "w": torch.ones(4096)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export(path, tmp_path / "out", max_shard_bytes=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(tmp_path) == {"a.ckpt"}


def test_a_configuration_of_foreign_objects_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "args": Namespace(a=1)}
    path = write(tmp_path / "a.ckpt", {"w": torch.ones(2)}, hyper_parameters={"config": config})
    with pytest.raises(CheckpointError, match=r"config\.json cannot be written: .*Opaque.*; give --config FOLDER"):
        export(path, tmp_path / "out", "hf")
    assert files_of(tmp_path) == {"a.ckpt"}


MEMORY = """
import sys
from pathlib import Path
import torch
from lightning_zero.tools.export import export

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

class Peak:
    # looks at every tile that is written or compared
    def __init__(self): self.bytes = 0
    def __call__(self, original):
        def tiles(entry):
            for tile in original(entry):
                self.bytes = max(self.bytes, resident())
                yield tile
        return tiles

from lightning_zero.tools import export as module
torch.set_num_threads(1)
torch.ones(1 << 20).bfloat16()  # what torch itself takes once
peak = Peak()
module.Entry.tiles = peak(module.Entry.tiles)
before = resident()
exported = export(Path(sys.argv[1]), Path(sys.argv[2]), dtype=torch.bfloat16, max_shard_bytes=40 << 20)
print(peak.bytes - before, exported.bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("contiguous", [True, False])
def test_memory_is_that_of_the_largest_tensor(contiguous: bool, tmp_path: Path) -> None:
    rows = [2048, *[1024] * 22]  # 16 MiB and 22 times 8 MiB
    values = [torch.randn(count, 2048) if contiguous else torch.randn(2048, count).T for count in rows]
    state = {f"w{index}": value for index, value in enumerate(values)}
    path = write(tmp_path / "a.ckpt", state)
    assert path.stat().st_size > 190 << 20
    command = [sys.executable, "-P", "-c", MEMORY, str(path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    growth, written = map(int, result.stdout.split())
    assert written == sum(value.numel() * 2 for value in values)
    assert growth < (16 << 20) + (32 << 20), f"{growth / 2**20:.1f} MiB"
    print(f"grew by {growth / 2**20:.1f} MiB")
