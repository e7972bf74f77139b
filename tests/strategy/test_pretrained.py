"""`from_pretrained` of transformers where a model is sharded while it is made: read in slices, with the same values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import RankError, RankPool
from helpers.third_party import KINDS, VOCAB, gpt2
from lightning import LightningModule, seed_everything
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import gathered_parameters
from lightning_zero.checkpoint import safetensors
from lightning_zero.sharding import ShardedParameter

pytest.importorskip("transformers")


class Pretrained(LightningModule):
    def __init__(self, path: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.path, self.options = path, options
        self.info: Any = None

    def configure_model(self) -> None:
        if self.info is None:
            self.model, self.info = load(self.path, **self.options)

    def predict_step(self, batch: Tensor, index: int) -> None:
        return None


def load(path: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and what transformers says about its keys."""
    import transformers

    transformers.logging.set_verbosity_error()
    cls = transformers.AutoModelForSeq2SeqLM if "t5" in path else transformers.AutoModelForCausalLM
    seed_everything(0, verbose=False)
    model, info = cls.from_pretrained(path, output_loading_info=True, **options)
    return model, {name: sorted(map(str, keys)) for name, keys in info.items()}


@dataclasses.dataclass
class Loaded:
    state: dict[str, Tensor]
    info: dict[str, Any]
    sharded: bool
    read: int  # bytes
    tied: bool


def load_sharded(path: str, options: dict[str, Any], configured: bool, **flags: Any) -> Loaded:
    """Made in `configure_model`, or under `init_module`."""
    trainer, module, read_at, read = make_trainer("zero3", **flags), Pretrained(path, options), safetensors.read_at, 0
    sharded = configured  # a whole parameter would show in what was read

    def counted(file: Any, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += buffer.nbytes
        read_at(file, buffer, offset)

    with mock.patch.object(safetensors, "read_at", counted):
        if configured:
            trainer.predict(module, DataLoader(range(2)))  # type: ignore[arg-type]
        else:
            with trainer.init_module():
                module.configure_model()
            sharded = all(isinstance(parameter, ShardedParameter) for parameter in module.parameters())
    with gathered_parameters(module):
        state = {name: value.to("cpu", copy=True) for name, value in module.model.state_dict().items()}
    first, last = module.model.get_input_embeddings(), module.model.get_output_embeddings()
    return Loaded(state, module.info, sharded, read, first.weight is last.weight)


def save(folder: Path, kind: str, **options: Any) -> str:
    """A pretrained model on the disk; in several files by default."""
    path = folder / kind
    KINDS[kind].make_model().save_pretrained(path, **{"max_shard_size": "6KB"} | options)  # type: ignore[operator]
    return str(path)


def assert_as_plain(pool: RankPool, path: str, configured: bool, **options: Any) -> list[Loaded]:
    model, info = load(path, **options)
    state = model.state_dict()
    results = pool.run(load_sharded, path, options, configured)
    for loaded in results:
        assert loaded.info == info
        assert loaded.state.keys() == state.keys()
        assert {name for name, value in state.items() if not torch.equal(value, loaded.state[name])} == set()
        assert {name for name, value in state.items() if value.dtype != loaded.state[name].dtype} == set()
        assert loaded.tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)  # type: ignore[operator]
    return results


@pytest.mark.parametrize(
    ("kind", "configured", "options"),
    [
        ("gpt2", True, {}),  # tied, several files
        pytest.param("t5", False, {"dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("llama", False, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", False, {}, marks=pytest.mark.slow),  # transformers merges its experts' weights
    ],
)
def test_weights_are_those_of_transformers(
    pool2: RankPool, tmp_path: Path, kind: str, configured: bool, options: dict[str, Any]
) -> None:
    path = save(tmp_path, kind)
    files = list(Path(path).glob("*.safetensors"))
    assert len(files) > 1
    total = sum(file.stat().st_size for file in files)
    for loaded in assert_as_plain(pool2, path, configured, **options):
        assert loaded.sharded
        assert loaded.read < (0.6 if kind != "mixtral" else 1) * total


def test_missing_and_unexpected_keys_are_reported(pool2: RankPool, tmp_path: Path) -> None:
    """What the file lacks is initialized, with the numbers of a plain load; the output embedding is its own here."""
    from safetensors.torch import load_file, save_file

    model = gpt2(tied=False)
    path = tmp_path / "gpt2"
    model.save_pretrained(path)  # type: ignore[operator]
    file = path / "model.safetensors"
    state = load_file(file)
    del state["lm_head.weight"], state["transformer.h.1.mlp.c_fc.bias"]
    state["transformer.h.9.extra"] = torch.ones(VOCAB)
    save_file(state, file, metadata={"format": "pt"})
    (first, *_) = assert_as_plain(pool2, str(path), configured=False)
    assert "lm_head.weight" in str(first.info["missing_keys"])
    assert "transformer.h.9.extra" in str(first.info["unexpected_keys"])


def load_own(paths: list[str]) -> None:
    trainer = make_trainer("zero3")
    with trainer.init_module():
        load(paths[trainer.global_rank])


@pytest.mark.slow
def test_ranks_with_other_files_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    paths = [save(tmp_path, kind, max_shard_size="1GB") for kind in ("gpt2", "llama")]
    with pytest.raises(RankError, match="on rank 1 differs from that on rank 0"):
        pool2.run(load_own, paths)
