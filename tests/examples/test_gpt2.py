"""The GPT-2 example: the model, the data, and short runs of its main function."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import io
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, ranks, server_environment
from helpers.scripts import overridden
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import Trainer
from omegaconf import DictConfig, OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt2"
MODULES = tuple("data fabric generate hf model options prepare report throughput tokenizer train".split())
NANO = {"n_layer": 2, "n_head": 2, "n_embd": 16, "context": 8}
TEXT = bytes(i * i % 251 for i in range(3000))


@contextlib.contextmanager
def example_modules() -> Iterator[SimpleNamespace]:
    """The example's modules by name; other examples have modules of the same names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def gpt2() -> Iterator[SimpleNamespace]:
    with example_modules() as modules:
        yield modules


def composed(*overrides: str, run_dir: str = "run") -> DictConfig:
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        return compose("train", overrides=[f"run_dir={run_dir}", "strategy_name=test", *overrides])


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    """The configuration without overrides."""
    return composed()


# -- configuration --


@pytest.mark.parametrize("group", ["model", "data", "experiment", "optimizer", "callbacks"])
def test_every_option_composes_and_resolves(group: str) -> None:
    paths = list((EXAMPLE / "conf" / group).glob("*.yaml"))
    assert paths
    for path in paths:
        OmegaConf.resolve(
            composed(f"{group}={path.stem}", "data.path=x" if path.stem in ("text", "tokens") else "seed=1")
        )


def test_the_experiment_is_nanogpts_setting() -> None:
    cfg = composed("experiment=shakespeare_cpu", "data=text", "data.path=input.txt", "strategy=zero3")
    assert (cfg.model.n_layer, cfg.model.n_head, cfg.model.n_embd, cfg.model.context) == (4, 4, 128, 64)
    assert (cfg.data.batch_size, cfg.data.val_windows, cfg.trainer.max_steps) == (12, None, 2000)
    assert (cfg.optimizer.lr, cfg.optimizer.betas, cfg.optimizer.weight_decay) == (1e-3, [0.9, 0.99], 0.1)
    assert (cfg.scheduler.warmup_steps, cfg.scheduler.min_lr_ratio) == (None, 0.1)  # 100 of 2000 steps
    assert (cfg.model.dropout, cfg.trainer.gradient_clip_val) == (0.0, 1.0)
    assert cfg.strategy.stage == 3


def test_an_experiment_wins_over_the_primary_values(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "short.yaml").write_text("# @package _global_\ntrainer:\n  max_steps: 7\n")
    cfg = composed(f"hydra.searchpath=['file://{tmp_path}']", "experiment=short")
    assert (cfg.trainer.max_steps, cfg.trainer.val_check_interval) == (7, 250)


def test_the_primary_configuration_lists_every_option() -> None:
    package = Path(str(resources.files("lightning_zero.conf")))
    text = (EXAMPLE / "conf" / "train.yaml").read_text()
    listed = re.findall(r"^  - (\w+): \w+ # (?:.*: )?([\w ]+)$", text, re.MULTILINE)
    assert len(listed) == 10
    for group, names in listed:
        files = [path for conf in (package, EXAMPLE / "conf") for path in (conf / group).glob("*.yaml")]
        assert sorted(names.split()) == sorted(path.stem for path in files), group


# -- model --


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("nano", 834_304),
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
        ("gpt2_10b", 10_279_047_168),
    ],
)
def test_sizes_have_the_published_parameter_counts(gpt2: SimpleNamespace, size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = instantiate(composed(f"model={size}").model)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["n_layer", "n_head", "n_embd", "context", "vocab_size"])
@pytest.mark.parametrize("target", ["model.GPT", "hf.HFGPT2"])
def test_a_size_below_one_is_refused(gpt2: SimpleNamespace, target: str, name: str) -> None:
    module, cls = target.split(".")
    with pytest.raises(ValueError, match=rf"model\.{name}=0 must be at least 1: set model\.{name} to a positive"):
        getattr(getattr(gpt2, module), cls)(**{**NANO, name: 0})


@pytest.mark.parametrize("target", ["model.GPT", "hf.HFGPT2"])
def test_a_width_that_heads_do_not_divide_is_refused(gpt2: SimpleNamespace, target: str) -> None:
    module, cls = target.split(".")
    with pytest.raises(ValueError, match=r"model\.n_embd=16 must be a multiple of model\.n_head=3: change one"):
        getattr(getattr(gpt2, module), cls)(**{**NANO, "n_head": 3})


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
@pytest.mark.parametrize("target", ["model.GPT", "hf.HFGPT2"])
def test_a_dropout_that_is_no_probability_is_refused(gpt2: SimpleNamespace, target: str, dropout: float) -> None:
    module, cls = target.split(".")
    with pytest.raises(ValueError, match=rf"model\.dropout={dropout} must be at least 0 and below 1, such as 0\.1"):
        getattr(getattr(gpt2, module), cls)(**NANO, dropout=dropout)


def test_output_and_input_embedding_are_one_parameter(gpt2: SimpleNamespace) -> None:
    model = gpt2.model.GPT(**NANO)
    assert model.lm_head.weight is model.wte.weight
    assert len([p for p in model.parameters() if p is model.wte.weight]) == 1


def test_initialization_follows_gpt2(gpt2: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = gpt2.model.GPT(n_layer=8, n_head=2, n_embd=128, context=64)
    std = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    residual = 0.02 / math.sqrt(2 * 8)
    for name, value in std.items():
        if name.endswith("proj.weight"):
            assert value == pytest.approx(residual, rel=0.05)
        elif name.endswith("weight") and ".ln_" not in name and name != "ln_f.weight":
            assert value == pytest.approx(0.02, rel=0.05)
        else:
            assert value == 0


def test_a_new_model_predicts_every_byte_alike(gpt2: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = gpt2.model.GPT(**NANO)
    batch = torch.randint(256, (4, 8)), torch.randint(256, (4, 8))
    assert model._loss(batch, "mean").item() == pytest.approx(math.log(256), rel=0.01)


def test_attention_does_not_look_ahead(gpt2: SimpleNamespace) -> None:
    model = gpt2.model.GPT(**NANO).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    same = (model(tokens) == model(changed % 256)).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_checkpointing_changes_neither_loss_nor_gradients(gpt2: SimpleNamespace) -> None:
    torch.manual_seed(0)
    plain = gpt2.model.GPT(**NANO)
    recomputing = gpt2.model.GPT(**NANO, activation_checkpointing=True)
    recomputing.load_state_dict(plain.state_dict())
    batch = torch.randint(256, (4, 8)), torch.randint(256, (4, 8))
    losses = [model._loss(batch, "mean") for model in (plain, recomputing)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for p, q in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_offloaded_activations_are_the_inputs_of_the_blocks(
    gpt2: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Size] = []

    class Recording(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert not pin_memory  # not a GPU
            super().__init__(lambda x: kept.append(x.shape) or x.clone(), lambda x: x)

    monkeypatch.setattr(gpt2.model, "save_on_cpu", Recording)
    torch.manual_seed(0)
    plain = gpt2.model.GPT(**NANO)
    offloading = gpt2.model.GPT(**NANO, activation_checkpointing=True, activation_offload=True)
    offloading.load_state_dict(plain.state_dict())
    batch = torch.randint(256, (4, 8)), torch.randint(256, (4, 8))
    for model in (plain, offloading):
        model._loss(batch, "mean").backward()
    assert kept == [(4, 8, 16)] * 2
    for p, q in zip(plain.parameters(), offloading.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_offload_without_checkpointing_is_refused(gpt2: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"activation_offload=true needs model\.activation_checkpointing=true"):
        gpt2.model.GPT(**NANO, activation_offload=True)


# Ours by the names of transformers, whose matrices are stored transposed.
HF_NAMES = {"attention.qkv": "attn.c_attn", "attention.proj": "attn.c_proj", "fc": "c_fc", "mlp.proj": "mlp.c_proj"}


def copy_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    targets = theirs.state_dict()
    for name, value in ours.state_dict().items():
        transposed = name.startswith("blocks") and value.ndim == 2
        name = name.replace("blocks", "h")
        for a, b in HF_NAMES.items():
            name = name.replace(f"{a}.", f"{b}.")
        name = name if name.startswith("lm_head") else f"transformer.{name}"
        targets.pop(name).copy_(value.T if transposed else value)
    assert not targets


@pytest.mark.parametrize("recompute", [False, True])
def test_the_model_of_transformers_equals_ours_for_two_steps(gpt2: SimpleNamespace, recompute: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (
        kind(**NANO, optimizer=composed().optimizer, **options)
        for kind, options in ((gpt2.model.GPT, {}), (gpt2.hf.HFGPT2, {"activation_checkpointing": recompute}))
    )
    copy_weights(ours, theirs.model)
    batches = torch.randint(256, (2, 4, 9))
    losses = []
    for model in (ours, theirs):
        trainer = Trainer(
            accelerator="cpu",
            max_steps=2,
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader([(tokens[:, :-1], tokens[:, 1:]) for tokens in batches], batch_size=None))
        losses.append(model._loss((batches[0, :, :-1], batches[0, :, 1:]), "mean").item())
    start = [p.detach().clone() for p in theirs.parameters()]
    copy_weights(ours, theirs.model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    for p, q in zip(start, theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("passes", [1, 3])
def test_flops_are_those_that_torch_counts(gpt2: SimpleNamespace, passes: int) -> None:
    with torch.device("meta"):
        model = gpt2.model.GPT(n_layer=3, n_head=2, n_embd=16, context=8, vocab_size=40)
        tokens = torch.zeros(5, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        scores = model(tokens)
        if passes == 3:
            scores.sum().backward()
    assert counter.get_total_flops() == passes * model.flops_per_token() * tokens.numel()


def test_dropout_acts_in_training_only(gpt2: SimpleNamespace) -> None:
    model = gpt2.model.GPT(**NANO, dropout=0.5)
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_weight_decay_acts_on_matrices(gpt2: SimpleNamespace) -> None:
    model = gpt2.model.GPT(**NANO)
    decayed, others = model.parameter_groups()
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert others["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_samples_depend_on_the_seed_alone(gpt2: SimpleNamespace) -> None:
    model = gpt2.model.GPT(**NANO, vocab_size=300)
    sample = model.generate([1], 40, vocab_size=256, seed=3)
    torch.manual_seed(99)
    assert sample == model.generate([1], 40, vocab_size=256, seed=3)
    assert sample != model.generate([1], 40, vocab_size=256, seed=4)
    assert len(sample) == 40
    assert max(sample) < 256


def test_top_k_leaves_the_likeliest(gpt2: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = gpt2.model.GPT(**NANO).eval()
    greedy = model.generate([1], 10, top_k=1, seed=3)
    tokens = [1, *greedy]
    assert greedy == [int(model(torch.tensor([tokens[max(0, n - 8) : n]]))[0, -1].argmax()) for n in range(1, 11)]
    everything = model.generate([1], 10, seed=3)
    assert everything == model.generate([1], 10, top_k=1000, seed=3) != greedy


@pytest.mark.parametrize("options", [{}, {"top_k": 3}])
def test_the_smallest_temperature_takes_the_likeliest(gpt2: SimpleNamespace, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = gpt2.model.GPT(**NANO).eval()
    greedy = model.generate([1], 10, top_k=1)
    assert model.generate([1], 10, temperature=1e-40, **options) == greedy
    assert model.generate([1], 10, temperature=1e-320, **options) == greedy


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_is_not_sampled(gpt2: SimpleNamespace, value: float) -> None:
    model = gpt2.model.GPT(**NANO).eval()
    torch.nn.init.constant_(model.ln_f.bias, value)
    with pytest.raises(ValueError, match="scores are infinite or not a number: it has diverged"):
        model.generate([1], 1)


def test_the_model_loads_from_its_checkpoint(gpt2: SimpleNamespace, tmp_path: Path) -> None:
    model = gpt2.model.GPT(**NANO, optimizer=composed().optimizer)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = gpt2.model.GPT.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))


# -- data --


def windows(gpt2: SimpleNamespace, **options: Any) -> Any:
    tokens = gpt2.tokenizer.Bytes().encode(TEXT)
    return gpt2.data.RandomWindows(tokens, **{"context": 8, "batch_size": 12, "steps": 5, "seed": 1, **options})


def test_training_windows_are_pieces_of_the_text(gpt2: SimpleNamespace) -> None:
    for inputs, targets in windows(gpt2):
        assert inputs.shape == targets.shape == (12, 8)
        for row, target in zip(inputs, targets, strict=True):
            assert bytes(row.tolist() + target[-1:].tolist()) in TEXT
            assert torch.equal(row[1:], target[:-1])


def test_training_windows_depend_on_seed_and_step(gpt2: SimpleNamespace) -> None:
    first, again, other = (
        [x for x, _ in windows(gpt2, seed=seed)] for seed in (1, 1, 2)
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_a_step_sees_the_same_bytes_however_it_is_split(
    gpt2: SimpleNamespace, world_size: int, accumulate: int
) -> None:
    whole = torch.cat([x for x, _ in windows(gpt2)])
    by_rank = [
        list(windows(gpt2, rank=rank, world_size=world_size, accumulate=accumulate)) for rank in range(world_size)
    ]
    steps = [
        torch.cat([x for part in by_rank for x, _ in part[step * accumulate : (step + 1) * accumulate]])
        for step in range(5)
    ]
    assert torch.equal(torch.cat(steps), whole)


def test_the_loader_goes_on_where_its_state_was_taken(gpt2: SimpleNamespace) -> None:
    whole = windows(gpt2, accumulate=2)
    everything = [x for _ in range(2) for x, _ in whole]  # two epochs
    loader = windows(gpt2, accumulate=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state == {"step": 1, "micro_batch": 1}
    resumed = windows(gpt2, accumulate=2)
    resumed.load_state_dict(state)
    rest = [x for x, _ in resumed]
    assert len(rest) == len(resumed)  # Lightning counts what an epoch still needs
    assert all(torch.equal(a, b) for a, b in zip(rest, everything[3:], strict=False))


@pytest.mark.parametrize("length", [17, 100, 3000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_covers_every_held_out_byte_once(gpt2: SimpleNamespace, length: int, world_size: int) -> None:
    tokens = gpt2.tokenizer.Bytes().encode(TEXT[:length])
    batches = []
    for rank in range(world_size):
        loader = gpt2.data.HeldOutWindows(tokens, 8, 4, rank=rank, world_size=world_size)
        batches.append(list(loader))
        assert len(batches[-1]) == len(loader)
    assert len({len(mine) for mine in batches}) == 1  # as many forwards on every rank
    targets = torch.cat([y.flatten() for mine in zip(*batches, strict=True) for _, y in mine])
    assert bytes(targets[targets >= 0].tolist()) == TEXT[1:length]


def test_a_limit_spreads_the_windows(gpt2: SimpleNamespace) -> None:
    tokens = gpt2.tokenizer.Bytes().encode(TEXT)
    assert gpt2.data.HeldOutWindows(tokens, 10, 4, limit=3).starts == [0, 1000, 2000]


@pytest.mark.parametrize(("context", "sequences"), [(64, 64), (1024, 4), (5000, 1)])
def test_a_validation_batch_of_long_sequences_has_fewer(
    gpt2: SimpleNamespace, tmp_path: Path, context: int, sequences: int
) -> None:
    (tmp_path / "text").write_bytes(TEXT * 20)
    data = gpt2.data.TextData(str(tmp_path / "text"), context=context, batch_size=4, epoch_steps=2)
    assert data.val_batch_size == sequences


@pytest.mark.slow
def test_the_standard_library_is_split_by_path(gpt2: SimpleNamespace) -> None:
    data = gpt2.data.StdlibData(context=64, batch_size=12, epoch_steps=10)
    share = len(data.held_out) / (len(data.held_out) + len(data.train))
    assert 0.05 < share < 0.2
    assert len(data.train) > 2_000_000
    again = gpt2.data.StdlibData(context=64, batch_size=12, epoch_steps=10)
    assert torch.equal(data.held_out, again.held_out)


def test_a_text_may_be_a_file_or_a_folder(gpt2: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_bytes(TEXT[1000:])
    (tmp_path / "a.txt").write_bytes(TEXT[:1000])
    (tmp_path / "whole").write_bytes(TEXT)
    options = {"context": 8, "batch_size": 4, "epoch_steps": 2}
    folder = gpt2.data.TextData(str(tmp_path), **options)
    assert bytes(folder.train.tolist()).startswith(TEXT[:2700])
    file = gpt2.data.TextData(str(tmp_path / "whole"), **options)
    assert bytes(file.train.tolist()) == TEXT[:2700]
    assert bytes(file.held_out.tolist()) == TEXT[2700:]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {}, "does not exist: expected a file or a folder"),
        ({}, {}, r"has no \* files: expected at least one"),
        (b"", {}, "is empty: expected a text"),
        (b"short", {}, "has 4 tokens, but a window needs 9: use a longer text"),
        (TEXT[:50], {}, "held-out part of the text has 5 tokens"),
        (TEXT, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (TEXT, {"val_windows": 0}, "val_windows=0 must be at least 1"),
        (TEXT, {"val_batch_size": 0}, "val_batch_size=0 must be at least 1"),
        (TEXT, {"epoch_steps": -1}, r"epoch_steps=-1 must be at least 1: set trainer\.max_steps to a positive"),
        (TEXT, {"context": 0}, r"context=0 must be at least 1: set model\.context to a positive"),
    ],
)
def test_unusable_data_is_refused(
    gpt2: SimpleNamespace, tmp_path: Path, content: Any, options: dict[str, int], message: str
) -> None:
    path = tmp_path / "text"
    if content == {}:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gpt2.data.TextData(str(path), **{"context": 8, "batch_size": 4, "epoch_steps": 2, **options})


def test_an_uneven_split_of_the_batch_is_refused(gpt2: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"batch_size=10 cannot be split evenly over 3 ranks x 1 micro-batches"):
        windows(gpt2, batch_size=10, world_size=3)


PROSE = "It's the year 2026:  Éva\n\n\tdoesn't count_all, isn't it? \r\n — 中文 <|endoftext|>\n".encode() * 7


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small vocabulary of GPT-2's kind."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([PROSE.decode()], vocab_size=300, show_progress=False)
    folder = tmp_path_factory.mktemp("vocab")
    bpe.save_model(str(folder))
    return str(folder)


@pytest.mark.parametrize("block", [1, 7, 50, 1 << 20])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(gpt2: SimpleNamespace, vocab: str, block: int) -> None:
    bpe = gpt2.tokenizer.load_tokenizer("gpt2", vocab)
    pieces = list(gpt2.tokenizer.encode_blocks(bpe, io.BytesIO(PROSE), block))
    assert torch.equal(torch.cat([tokens for _, tokens in pieces]), bpe.encode(PROSE))
    assert sum(size for size, _ in pieces) == len(PROSE)
    assert len(pieces) > 10 or block > 50


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("中文很长。\n" * 40, 16 + 64),
        ("d41d8cd98f00b204e9800998ecf8427e" * 40, 8 + 64),
        ("了\u3000\n  x1's2\u2003 \u00a0\n\n\u2028\nÀ\n\t !' 's\x85 \n" * 20, 40 + 64),
    ],
    ids=["chinese", "hexadecimal", "spaces"],
)
def test_pieces_stay_short_without_a_blank_after_a_letter(
    gpt2: SimpleNamespace, vocab: str, text: str, longest: int, block: int
) -> None:
    bpe = gpt2.tokenizer.load_tokenizer("gpt2", vocab)
    pieces = list(gpt2.tokenizer.encode_blocks(bpe, io.BytesIO(text.encode()), block))
    assert torch.equal(torch.cat([tokens for _, tokens in pieces]), bpe.encode(text.encode()))
    assert max(size for size, _ in pieces) <= longest


def test_damaged_characters_are_the_same_in_pieces(gpt2: SimpleNamespace, vocab: str) -> None:
    bpe = gpt2.tokenizer.load_tokenizer("gpt2", vocab)
    draw = random.Random(0)
    parts = "中\u3000\u00a0é".encode()
    text = bytes(draw.choice(parts + b" \n\ta1's") for _ in range(2000))
    pieces = [tokens for _, tokens in gpt2.tokenizer.encode_blocks(bpe, io.BytesIO(text), 16)]
    assert len(pieces) > 50
    assert torch.equal(torch.cat(pieces), bpe.encode(text))


def test_bytes_are_encoded_block_by_block(gpt2: SimpleNamespace) -> None:
    blocks = gpt2.tokenizer.encode_blocks(gpt2.tokenizer.Bytes(), io.BytesIO(TEXT), 1000)
    assert [size for size, _ in blocks] == [1000, 1000, 1000, 0]


def test_byte_pairs_are_those_of_transformers_and_decode_to_the_text(gpt2: SimpleNamespace, vocab: str) -> None:
    from transformers import GPT2Tokenizer

    bpe = gpt2.tokenizer.load_tokenizer("gpt2", vocab)
    tokens = bpe.encode(PROSE).tolist()
    theirs = GPT2Tokenizer.from_pretrained(vocab, unk_token=None, bos_token=None, eos_token=None)
    assert tokens == theirs(PROSE.decode())["input_ids"]
    assert bpe.decode(tokens) == PROSE.decode()
    assert len(tokens) < len(PROSE) * 0.7
    assert max(tokens) < bpe.vocab_size == 300


def test_the_vocabulary_may_have_openais_names(gpt2: SimpleNamespace, vocab: str, tmp_path: Path) -> None:
    for ours, theirs in zip(*gpt2.tokenizer.FILES, strict=True):
        (tmp_path / theirs).write_bytes((Path(vocab) / ours).read_bytes())
    assert torch.equal(gpt2.tokenizer.GPT2(str(tmp_path)).encode(PROSE), gpt2.tokenizer.GPT2(vocab).encode(PROSE))


def test_a_missing_vocabulary_is_an_error_that_says_what_to_do(
    gpt2: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"has no vocabulary: expected a folder with vocab\.json and merges\.txt or"):
        gpt2.tokenizer.load_tokenizer("gpt2", str(tmp_path))
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be downloaded .*: put its vocab\.json and merges\.txt into a folder"):
        gpt2.tokenizer.load_tokenizer("gpt2")
    with pytest.raises(ValueError, match="tokenizer='gpt3' must be bytes or gpt2"):
        gpt2.tokenizer.load_tokenizer("gpt3")


def test_a_vocabulary_beyond_uint16_is_refused(gpt2: SimpleNamespace, vocab: str, tmp_path: Path) -> None:
    entries = json.loads((Path(vocab) / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**entries, "unlikely": 65_536}))
    (tmp_path / "merges.txt").write_bytes((Path(vocab) / "merges.txt").read_bytes())
    with pytest.raises(ValueError, match=r"vocab\.json has the token 65536, but uint16 ends at 65535: use a smaller"):
        gpt2.tokenizer.GPT2(str(tmp_path))


def test_a_tilde_is_the_home_folder(gpt2: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text").write_bytes(TEXT)
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        gpt2.prepare.main.__wrapped__(compose("prepare", ["text='~/text'", "folder='~/tokens'"]))
    options = {"context": 8, "batch_size": 4, "epoch_steps": 2}
    text, tokens = gpt2.data.TextData("~/text", **options), gpt2.data.TokenData("~/tokens", **options)
    assert torch.equal(text.train.int(), tokens.train.int())
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="does not name a model and a tokenizer"):
        generated(gpt2, "'~/other.ckpt'")


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_prepared_tokens_are_those_of_the_text(
    gpt2: SimpleNamespace, vocab: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    (tmp_path / "text").write_bytes(PROSE)
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        files = [f"text={tmp_path}/text", f"folder={tmp_path}/new/tokens"]
        gpt2.prepare.main.__wrapped__(compose("prepare", [*files, f"tokenizer={tokenizer}", f"vocab={vocab}"]))
    options = {"context": 8, "batch_size": 4, "epoch_steps": 2, "tokenizer": tokenizer, "vocab": vocab}
    text = gpt2.data.TextData(str(tmp_path / "text"), **options)
    tokens = gpt2.data.TokenData(str(tmp_path / "new" / "tokens"), **options)
    assert tokens.train.dtype == tokens.held_out.dtype == torch.uint16
    assert torch.equal(text.train.int(), tokens.train.int())
    assert torch.equal(text.held_out.int(), tokens.held_out.int())
    printed = capsys.readouterr()
    assert f"train.bin: {len(text.train):,} tokens\n" in printed.out
    assert "100%" in printed.err
    assert {path.name for path in tmp_path.glob("new/tokens/*")} == {"train.bin", "val.bin"}


def test_a_memory_map_is_nanogpts_format_and_may_be_read_only(gpt2: SimpleNamespace, tmp_path: Path) -> None:
    import numpy as np

    ids = np.array([0, 50256, 65535, 7], dtype=np.uint16)
    ids.tofile(tmp_path / "train.bin")
    (tmp_path / "train.bin").chmod(0o444)
    assert gpt2.data.memory_map(tmp_path / "train.bin").tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"train\.bin does not exist: check data\.path, or write the file by examples/gpt2/prepare\.py"),
        (b"", r"train\.bin has 0 bytes: expected uint16 tokens"),
        (b"\1\2\3", r"train\.bin has 3 bytes: expected uint16 tokens"),
        (b"\1\1" * 20, r"train\.bin has the token 257, but the tokenizer has 256: set data\.tokenizer"),
        (b"\1\0" * 20, r"val\.bin has the token 257, but the tokenizer has 256: set data\.tokenizer"),
    ],
)
def test_unusable_token_files_are_refused(
    gpt2: SimpleNamespace, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "train.bin").write_bytes(content)
        (tmp_path / "val.bin").write_bytes(b"\1\1" * 20)
    with pytest.raises(ValueError, match=message):
        gpt2.data.TokenData(str(tmp_path), context=8, batch_size=4, epoch_steps=2)


# -- options --


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=null", "seed=None must be an integer from 0 to 4294967295, such as 1337: change seed"),
        ("seed=-1", "seed=-1 must be an integer from 0"),
        ("seed=0.5", "seed=0.5 must be an integer from 0"),
        ("sample.prompt=", "sample.prompt='' must be a text of at least one character, such as"),
        ("sample.prompt=null", "sample.prompt=None must be a text"),
        ("sample.prompt=42", "sample.prompt=42 must be a text"),
        ("sample.length=-1", "sample.length=-1 must be an integer of at least 0, such as 400: change sample.length"),
        ("sample.length=2.5", "sample.length=2.5 must be an integer of at least 0"),
        ("sample.temperature=0", "sample.temperature=0 must be a number > 0, such as 0.8: change sample.temperature"),
        ("sample.temperature=-1", "sample.temperature=-1 must be a number > 0"),
        ("sample.temperature=nan", "sample.temperature=nan must be a number > 0"),
        ("sample.temperature=null", "sample.temperature=None must be a number > 0"),
        ("sample.top_k=0", "sample.top_k=0 must be an integer of at least 1, or null for all: change"),
        ("ckpt_path=/nope.ckpt", "ckpt_path='/nope.ckpt' must be an existing file or sharded folder, or null to"),
        ("ckpt_path=", "ckpt_path='' must be an existing file"),
        ("ckpt_path=/", "ckpt_path='/' must be an existing file"),
        ("strategy.start_method=fork", r"start_method='fork' must be popen \(or start the ranks by torchrun\): the"),
    ],
)
def test_unusable_options_are_refused_at_once(
    gpt2: SimpleNamespace, plain: DictConfig, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr(gpt2.train, "instantiate", None)  # nothing is read or built before
    with pytest.raises(ValueError, match=message):
        gpt2.train.main.__wrapped__(overridden(plain, override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=-1", "max_steps=-1 must be an integer of at least 1, such as 2000: change"),
        ("trainer.gradient_clip_algorithm=clip", "gradient_clip_algorithm='clip' must be norm or value"),
        ("trainer.val_check_interval=0", "val_check_interval=0 must be an integer of at least 1, which counts micro"),
        ("trainer.val_check_interval=0.25", "val_check_interval=0.25 must be .* this loop has no epochs"),
        ("trainer.check_val_every_n_epoch=1", "check_val_every_n_epoch=1 must be null: this loop has no epochs"),
    ],
)
def test_values_that_the_loop_of_fabric_does_not_know_are_refused(
    gpt2: SimpleNamespace, plain: DictConfig, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr(gpt2.fabric, "build_fabric", None)
    with pytest.raises(ValueError, match=message):
        gpt2.fabric.main.__wrapped__(overridden(plain, override))


@pytest.mark.parametrize("name", ["last", "hpc"])
def test_names_of_checkpoints_are_for_the_trainer(
    gpt2: SimpleNamespace, plain: DictConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gpt2.fabric, "build_fabric", None)
    with pytest.raises(ValueError, match=f"ckpt_path='{name}' is a name that only the Trainer knows: give the path"):
        gpt2.fabric.main.__wrapped__(overridden(plain, f"ckpt_path={name}"))


@pytest.mark.parametrize(
    "override",
    [
        "seed=0",
        "sample.prompt=' '",
        "sample.length=0",
        "sample.temperature=1",
        "sample.top_k=1",
        "ckpt_path=last",
        "ckpt_path=hpc",
        "ckpt_path=s3://bucket/last.ckpt",
        f"ckpt_path='{__file__}'",
    ],
)
def test_usable_options_pass(gpt2: SimpleNamespace, plain: DictConfig, override: str) -> None:
    gpt2.options.check_options(overridden(plain, override), *gpt2.train.CHECKED)


def test_a_model_without_the_tokenizers_vocabulary_is_refused(
    gpt2: SimpleNamespace, vocab: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(PROSE)
    options = "data=text", f"data.path={tmp_path}/text", "data.tokenizer=gpt2", f"data.vocab={vocab}"
    options += ("model.context=8",)
    with pytest.raises(ValueError, match=r"model\.vocab_size=256 is less than the 300 tokens of the tokenizer: use"):
        gpt2.train.main.__wrapped__(composed(*options))


# -- short runs --

SHORT = (
    "strategy=ddp",
    "trainer=cpu",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "scheduler.warmup_steps=1",
    "model.n_layer=1",
    "model.n_embd=16",
    "model.context=8",
    "sample.length=5",
    "data=text",
)


def train_briefly(folder: str, devices: int, *overrides: str, program: str = "train") -> None:
    """The main function of one of the example's programs on this rank."""
    Path(folder).mkdir(exist_ok=True)
    text = f"data.path={Path(folder).parent}/text"
    cfg = composed(*SHORT, text, f"trainer.devices={devices}", *overrides, run_dir=folder)
    with example_modules() as modules:
        vars(modules)[program].main.__wrapped__(cfg)


EXPERIMENTS = sorted(path.stem for path in (EXAMPLE / "conf" / "experiment").glob("*.yaml"))
TWO_STEPS = [override for override in SHORT if not override.startswith(("model.", "trainer.max_steps"))]


def run_experiment(experiment: str, folder: str) -> int:
    """Two steps of the example with the experiment's own model; returns how many losses were logged."""
    text = f"data.path={Path(folder).parent}/text"
    cfg = composed(f"experiment={experiment}", *TWO_STEPS, text, "trainer.max_steps=2", run_dir=folder)
    with example_modules() as modules:
        modules.train.main.__wrapped__(cfg)
    return len(results(Path(folder))[1])


def results(folder: Path) -> tuple[dict[str, Any], list[float]]:
    """The summary and the logged training losses."""
    with (folder / "csv" / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return json.loads((folder / "summary.json").read_text()), losses


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(TEXT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_two_steps(pool1: RankPool, runs: Path, experiment: str) -> None:
    lines = (EXAMPLE / "conf" / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert re.fullmatch(rf"# python examples/gpt2/train.py .*experiment={experiment}\b.*", lines[1])
    (runs / "run").mkdir()
    assert pool1.run(run_experiment, experiment, str(runs / "run")) == [2]


@ranks(2)
def test_a_run_leaves_its_results(pool: RankPool, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(train_briefly, str(runs / "run"), pool.world_size)
    summary, losses = results(runs / "run")
    assert list(summary) == [
        "val_loss",
        "train_loss",
        "steps",
        "tokens_per_second",
        "strategy",
        "world_size",
        "peak_memory_bytes",
    ]
    assert (summary["steps"], summary["strategy"], summary["world_size"]) == (4, "test", pool.world_size)
    assert summary["train_loss"] == pytest.approx(sum(losses) / 4)
    assert 1e7 < summary["peak_memory_bytes"] < 1e11
    assert summary["tokens_per_second"] > 0
    assert (runs / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "run" / "sample.txt").read_text().startswith("\n")
    assert {p.name for p in (runs / "run" / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    printed = capsys.readouterr().out
    assert printed.rstrip().count(str(runs / "run")) == 1  # by rank 0 only
    assert "--- output of rank 1 ---" not in printed or "summary.json" not in printed.split("rank 1 ---")[1]


def test_a_run_on_tokens_samples_text(gpt2: SimpleNamespace, pool1: RankPool, runs: Path, vocab: str) -> None:
    bpe = gpt2.tokenizer.GPT2(vocab)
    (runs / "prose").write_bytes(PROSE)
    for name in ("train.bin", "val.bin"):
        gpt2.prepare.write_tokens(bpe, runs / "prose", runs / name)
    overrides = "data=tokens", f"data.path={runs}", "data.tokenizer=gpt2", f"data.vocab={vocab}", "model.vocab_size=304"
    pool1.run(train_briefly, str(runs / "run"), 1, *overrides, "sample.prompt=year")
    summary, losses = results(runs / "run")
    assert len(losses) == 4
    assert losses[0] == pytest.approx(math.log(304), rel=0.02)
    assert (runs / "run" / "sample.txt").read_text().startswith("year")
    assert summary["val_loss"] < losses[0]


@pytest.mark.slow
def test_throughput_and_memory_are_logged(pool2: RankPool, runs: Path) -> None:
    options = "callbacks=throughput", "callbacks.throughput.window_size=2", "callbacks.throughput.peak_flops=1e9"
    pool2.run(train_briefly, str(runs / "run"), 2, *options)
    with (runs / "run" / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    speeds = [{key: float(value) for key, value in row.items() if value} for row in rows]
    speeds = [row for row in speeds if "train/device/mfu" in row]
    assert len(speeds) == 3  # of four steps, the first closes no window
    flops = 1 * (24 * 16**2 + 4 * 8 * 16) + 2 * 16 * 256
    for row in speeds:
        tokens = row["train/device/items_per_sec"]
        assert tokens == pytest.approx(8 * row["train/device/samples_per_sec"])
        assert tokens == pytest.approx(6 * 8 * row["train/device/batches_per_sec"])
        assert row["train/items_per_sec"] == pytest.approx(2 * tokens)
        assert row["train/device/flops_per_sec"] == pytest.approx(3 * flops * tokens)
        assert row["train/device/mfu"] == pytest.approx(3 * flops * tokens / 1e9)
    memory = [float(row["train/device/peak_memory_bytes"]) for row in rows if row["train/device/peak_memory_bytes"]]
    assert len(memory) == 4
    assert all(1e7 < value < 1e11 for value in memory)


def test_losses_do_not_depend_on_world_size_and_accumulation(pool1: RankPool, pool2: RankPool, runs: Path) -> None:
    pool1.run(train_briefly, str(runs / "one"), 1)
    pool2.run(train_briefly, str(runs / "two"), 2)
    pool1.run(train_briefly, str(runs / "accumulated"), 1, "trainer.accumulate_grad_batches=3")
    one, two, accumulated = (results(runs / name)[0] for name in ("one", "two", "accumulated"))
    for loss in ("val_loss", "train_loss"):
        assert two[loss] == pytest.approx(one[loss], rel=1e-5)
        assert accumulated[loss] == pytest.approx(one[loss], rel=1e-5)


ZERO = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
FAST = ("zero2_offload", "zero3")


@pytest.fixture(scope="module")
def ddp_run(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run under ddp, with the text beside it."""
    folder = tmp_path_factory.mktemp("runs") / "ddp"
    (folder.parent / "text").write_bytes(TEXT)
    pool2.run(train_briefly, str(folder), 2)
    return folder


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ZERO]
)
def test_every_strategy_trains_and_samples_as_ddp_does(
    pool2: RankPool, runs: Path, ddp_run: Path, strategy: str
) -> None:
    pool2.run(train_briefly, str(runs / strategy), 2, f"strategy={strategy}")
    ddp, ours = results(ddp_run), results(runs / strategy)
    assert ours[1] == pytest.approx(ddp[1], rel=1e-5)
    assert ours[0]["val_loss"] == pytest.approx(ddp[0]["val_loss"], rel=1e-5)
    assert (runs / strategy / "sample.txt").read_text() == (ddp_run / "sample.txt").read_text()


@pytest.mark.slow
def test_a_disk_trains_to_the_loss_of_device_memory(pool2: RankPool, runs: Path) -> None:
    """Bit for bit in fp32, with torch's kernels in both places."""
    disk = ("strategy=zero3_nvme", f"strategy.nvme_path={runs}", "strategy.native_optimizer='off'")
    pool2.run(train_briefly, str(runs / "disk"), 2, *disk)
    pool2.run(train_briefly, str(runs / "device"), 2, "strategy=zero3")
    found, expected = results(runs / "disk"), results(runs / "device")
    assert (found[0]["val_loss"], found[1]) == (expected[0]["val_loss"], expected[1])


def train_and_note(*args: Any, program: str) -> str:
    """Train as `train_briefly` does; returns a `b` for each micro-batch and a `v` for each validation."""
    seen: list[str] = []

    def noting(mark: str, method: Any) -> Any:
        return functools.wraps(method)(lambda *given: seen.append(mark) or method(*given))

    with example_modules() as modules, pytest.MonkeyPatch.context() as patch:
        model = modules.model.LanguageModel
        for mark, name in (("b", "training_step"), ("v", "on_validation_epoch_start")):
            patch.setattr(model, name, noting(mark, getattr(model, name)))
        train_briefly(*args, program=program)
    return "".join(seen)


def validated_after(order: str) -> set[int]:
    """After how many micro-batches validations ran."""
    return {order[:index].count("b") for index, mark in enumerate(order) if mark == "v"}


# The first loss scale is too large, so that steps are skipped; validations come between the micro-batches of a step.
EVERYTHING = (
    "precision=fp16",
    "precision.scaler.init_scale=1073741824",
    "precision.scaler.hysteresis=1",
    "precision.scaler.backoff_factor=0.0001220703125",
    "trainer.accumulate_grad_batches=3",
    "trainer.gradient_clip_algorithm=value",
    "trainer.gradient_clip_val=0.01",
    "trainer.val_check_interval=4",
)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [pytest.param(("trainer.val_check_interval=null",), 1, marks=pytest.mark.slow), (EVERYTHING, 3)],
)
def test_the_loop_of_fabric_ends_with_the_weights_of_the_trainer(
    pool2: RankPool, runs: Path, options: tuple[str, ...], accumulate: int
) -> None:
    """Bit for bit, in three parts; each goes on from the checkpoint of the one before, and ends with a validation."""
    options += ("strategy=zero3", "strategy.persistence_numel=0", "scheduler.total_steps=4")
    options += ("trainer.num_sanity_val_steps=0",)
    (whole, _) = pool2.run(train_and_note, str(runs / "trainer"), 2, *options, program="train")
    parts, checkpoint = "", "null"
    for steps in (ends := (1, 2, 4)):
        part = f"trainer.max_steps={steps}", f"ckpt_path={checkpoint}"
        parts += pool2.run(train_and_note, str(runs / "fabric"), 2, *options, *part, program="fabric")[0]
        checkpoint = str(runs / "fabric" / "last.ckpt")
    assert parts.count("b") == whole.count("b") == 4 * accumulate
    assert validated_after(parts) == validated_after(whole) | {end * accumulate for end in ends}
    with (runs / "fabric" / "csv" / "metrics.csv").open() as file:  # of the last part
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == [3, 4]
    assert int(next(row["step"] for row in reversed(rows) if row["val_loss"])) == 4
    paths = (runs / "trainer" / "checkpoints" / "last.ckpt", runs / "fabric" / "last.ckpt")
    trainer, fabric = (torch.load(path, weights_only=False)["state_dict"] for path in paths)
    assert trainer.keys() == fabric.keys()
    assert all(torch.equal(trainer[name], fabric[name]) for name in trainer)


def generated(gpt2: SimpleNamespace, checkpoint: Path | str, *overrides: str) -> None:
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        cfg = compose("generate", [f"checkpoint={checkpoint}", "length=5", *overrides])
    gpt2.generate.main.__wrapped__(cfg)


@pytest.mark.parametrize(
    ("container", "overrides"),
    [
        pytest.param("full", (), marks=pytest.mark.slow),
        ("sharded", ("callbacks=ema", "callbacks.ema.decay=0.9", "optimizer.lr=1")),
        pytest.param("sharded", ("model=hf_gpt2",), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_stage_3_generates_the_sample_of_its_run(
    gpt2: SimpleNamespace,
    pool2: RankPool,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    container: str,
    overrides: tuple[str, ...],
) -> None:
    options = (
        "strategy=zero3",
        f"strategy.checkpoint_format={container}",
        "sample.top_k=50",
        "trainer.max_steps=2",
        *overrides,
    )
    pool2.run(train_briefly, str(runs / "run"), 2, *options)
    checkpoint = runs / "run" / "checkpoints" / "last.ckpt"
    assert checkpoint.is_dir() == (container == "sharded")
    capsys.readouterr()
    generated(gpt2, checkpoint, "top_k=50")
    sample = (runs / "run" / "sample.txt").read_text()
    assert capsys.readouterr().out == sample + "\n"
    generated(gpt2, checkpoint, "top_k=50", "seed=7", "prompt=class")
    assert capsys.readouterr().out.startswith("class")


def test_generating_from_another_programs_checkpoint_is_refused(gpt2: SimpleNamespace, tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt does not name a model and a tokenizer"):
        generated(gpt2, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"none\.ckpt' must be an existing file or sharded folder: change"):
        generated(gpt2, tmp_path / "none.ckpt")


@pytest.mark.slow
def test_sixteen_bits_end_close_to_fp32(pool2: RankPool, runs: Path) -> None:
    for precision in ("fp32", "bf16", "bf16_true", "fp16"):
        pool2.run(train_briefly, str(runs / precision), 2, "strategy=zero3", f"precision={precision}")
        assert results(runs / precision)[0]["val_loss"] == pytest.approx(
            results(runs / "fp32")[0]["val_loss"], abs=0.01
        )


def test_resuming_within_an_epoch_equals_the_whole_run(pool1: RankPool, runs: Path) -> None:
    keep = ("callbacks.checkpoint.filename='{step}'", "callbacks.checkpoint.save_top_k=-1")
    pool1.run(train_briefly, str(runs / "whole"), 1, *keep)
    checkpoint = runs / "whole" / "checkpoints" / "2.ckpt"
    pool1.run(train_briefly, str(runs / "resumed"), 1, f"ckpt_path={checkpoint}")
    whole, resumed = results(runs / "whole"), results(runs / "resumed")
    assert resumed[1] == whole[1][2:]
    assert resumed[0]["val_loss"] == whole[0]["val_loss"]
    ends = [torch.load(runs / name / "checkpoints" / "last.ckpt") for name in ("whole", "resumed")]
    for key, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][key])


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_train_and_can_be_extended(pool2: RankPool, runs: Path) -> None:
    """Seven steps are no multiple of the validation interval: the last one is trained and validated too."""
    options = 2, "strategy=zero3"
    pool2.run(train_briefly, str(runs / "whole"), *options)
    last = f"ckpt_path={runs}/whole/checkpoints/last.ckpt"
    pool2.run(train_briefly, str(runs / "longer"), *options, last, "trainer.max_steps=7")
    assert (results(runs / "longer")[0]["steps"], len(results(runs / "longer")[1])) == (7, 3)
    pool2.run(train_briefly, str(runs / "again"), *options, last, "logger=none")
    summary = json.loads((runs / "again" / "summary.json").read_text())
    assert summary["val_loss"] == results(runs / "whole")[0]["val_loss"]
    assert summary["train_loss"] is None
    assert 1e7 < summary["peak_memory_bytes"] < 1e11
    assert (runs / "again" / "sample.txt").read_text() == (runs / "whole" / "sample.txt").read_text() != ""


def test_a_run_without_validation_reports_the_rest(pool1: RankPool, runs: Path) -> None:
    pool1.run(train_briefly, str(runs / "run"), 1, "trainer.limit_val_batches=0")
    summary, losses = results(runs / "run")
    assert summary["val_loss"] is None
    assert summary["train_loss"] == pytest.approx(sum(losses) / 4)
    assert (runs / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


@ranks(2)
def test_a_diverged_run_leaves_everything_but_the_sample(pool: RankPool, runs: Path) -> None:
    options = "strategy=zero3", "optimizer.lr=1e30", "trainer.max_steps=2"
    pool.run(train_briefly, str(runs / "run"), pool.world_size, *options)
    assert results(runs / "run")[0]["steps"] == 2
    assert (runs / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "run" / "sample.txt").read_text().startswith("No sample. The model's scores")
    assert (runs / "run" / "checkpoints" / "last.ckpt").is_file()


# -- launchers --


def launched(runs: Path, *command: str, overrides: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and errors of `command` running the example briefly on two ranks."""
    arguments = [*command, str(EXAMPLE / "train.py"), *SHORT, f"data.path={runs}/text", "trainer.devices=2", *overrides]
    process = subprocess.Popen(
        arguments,
        cwd=runs,
        env=server_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: the launcher must end its ranks first
        process.communicate()
        raise
    return process.returncode, printed, errors


@pytest.mark.slow
@pytest.mark.launch
def test_launched_ranks_share_a_run_folder_and_rank_0_reports(runs: Path) -> None:
    """As the README's first command starts them."""
    code, printed, errors = launched(runs, sys.executable)
    assert code == 0, errors
    (folder,) = (runs / "outputs" / "gpt2").iterdir()
    assert printed.rstrip().splitlines()[-1] == str(folder)
    assert printed.count("summary.json") == 1
    assert results(folder)[0]["world_size"] == 2
    assert {path.name for path in folder.iterdir()} == {
        ".hydra",
        "checkpoints",
        "csv",
        "loss.png",
        "sample.txt",
        "summary.json",
    }


@pytest.mark.slow
@pytest.mark.launch
def test_every_launched_rank_ends_with_the_message(runs: Path) -> None:
    code, _, errors = launched(runs, sys.executable, overrides=("scheduler.warmup_steps=100",))
    assert code == 1
    assert "Traceback" not in errors
    assert "\nwarmup_steps=100 must be at least 0 and less than total_steps=4: shorten the warm-up" in errors
