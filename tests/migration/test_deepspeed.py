"""DeepSpeed configurations: every key is classified, contradictions are refused, and what is taken over trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from hydra import compose, initialize_config_dir
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.config import build_optimizers, build_trainer
from lightning_zero.config.deepspeed import to_yaml
from lightning_zero.migration import MigrationError, Row, Status, import_deepspeed
from lightning_zero.migration import keys as kinds
from lightning_zero.migration.classify import nearest
from lightning_zero.migration.deepspeed_keys import DEVICE, KEYS, POWER, STAGE
from lightning_zero.migration.deepspeed_training import OPTIMIZERS, SCHEDULERS, TORCH_CLASSES

# As people write them who train with the Trainer of Hugging Face.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2, "auto_cast": False},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def rows_of(config: dict[str, Any] | Path, **options: Any) -> dict[str, Row]:
    return {row.key: row for row in import_deepspeed(config, **options).rows}


# -- the table ----------------------------------------------------------------------------------------------------

EXAMPLES: dict[kinds.Kind, Any] = {
    kinds.BOOL: True,
    kinds.COUNT: 3,
    kinds.WHOLE: 3,
    kinds.NUMBER: 3,
    kinds.FRACTION: 0.5,
    kinds.AMOUNT: 0.5,
    kinds.TEXT: "word",
    kinds.LIST: ["word"],
    kinds.BETAS: [0.9, 0.99],
    kinds.OBJECT: {"enabled": True},
    kinds.ANY: 1,
    kinds.DTYPE: "bf16",
    STAGE: 3,
    POWER: 12,
    DEVICE: "cpu",
}


def example(key: kinds.Key) -> Any:
    words = key.kind.words.removeprefix("one of ").split(", ")
    return EXAMPLES.get(key.kind, words[0] if key.kind.fits(words[0]) else {})


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def test_every_key_says_one_thing_and_is_never_unknown() -> None:
    for path, key in KEYS.items():
        assert sum(map(bool, (key.here, key.moot, key.remedy))) == 1, path
        for value in (example(key), "auto", None):
            imported = import_deepspeed(nested(path, value))
            assert not [row for row in imported.of(Status.unknown) if row.key == path], path
            if not (isinstance(value, dict) and key.computed):  # a section, whose keys have rows
                row = {row.key: row for row in imported.rows}[path]
                assert row.here or row.note, path


def test_every_value_of_a_wrong_type_is_refused() -> None:
    for path, key in KEYS.items():
        wrong = {True, 3, "word", 10**309} if key.kind is not kinds.ANY else set()
        for value in [value for value in wrong if not key.kind.fits(value)] or []:
            with pytest.raises(MigrationError, match=f"{path}={value!r} must be "):
                import_deepspeed(nested(path, value))


def test_every_optimizer_and_scheduler_is_written() -> None:
    for section, known in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for name, target in known.items():
            imported = import_deepspeed(
                {section: {"type": name}, "zero_optimization": {"stage": 1, "cpu_offload": True}}
            )
            assert imported.groups[section] == target.group
            row = imported.rows[0]
            assert (row.status is Status.unsupported) == bool(target.remedy), name


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("gradient_clip", "gradient_clipping"),
        ("cpu_offload", "zero_optimization.cpu_offload"),
        ("zero_optimization.stge", "zero_optimization.stage"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("optimizer.weight_decay", "optimizer.params.weight_decay"),
        ("fp16.loss_scale_windows", "fp16.loss_scale_window"),
        ("weight-decay", "optimizer.params.weight_decay"),
        ("wholly_other", ""),
    ],
)
def test_an_unknown_key_has_the_nearest_known_one(path: str, near: str) -> None:
    assert nearest(path) == near
    row = rows_of(nested(path, 1))[path]
    assert row.status is Status.unknown
    assert (f"did you mean {near}?" in row.note) == bool(near)


def test_keys_inside_a_block_are_checked_too_and_comments_are_left_alone() -> None:
    rows = rows_of({"wandb": {"enabled": True, "projekt": "x"}, "_comment": 1, "comments": "x", "aio": {"//": "x"}})
    assert rows["wandb"].status is Status.unsupported
    assert "did you mean wandb.project?" in rows["wandb.projekt"].note
    assert {rows[key].status for key in ("_comment", "comments", "aio.//", "aio")} == {Status.no_meaning}


def test_names_with_dots_are_unknown(tmp_path: Path) -> None:
    """DeepSpeed does not take them for objects in one another."""
    config = {"zero_optimization": {"stage": 2, "offload_optimizer.device": "cpu"}, "zero_optimization.stage": 3}
    rows = rows_of(config | {"wandb": {"my.project": "x"}, "_a.b": 1})
    assert rows["zero_optimization.stage"].value == 2
    for path, near in (
        ('"zero_optimization.stage"', "zero_optimization.stage"),
        ('zero_optimization."offload_optimizer.device"', "zero_optimization.offload_optimizer.device"),
        ('wandb."my.project"', "wandb.project"),
    ):
        assert rows[path].status is Status.unknown
        assert f"did you mean {near}? DeepSpeed reads a dot in a name as a part of it" in rows[path].note
    assert rows['"_a.b"'].status is Status.no_meaning
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": false},\n "fp16.enabled": true}')
    row = rows_of(path)['"fp16.enabled"']
    assert (row.line, row.column) == (2, 18)


def test_what_is_off_needs_nothing() -> None:
    off = {
        "comms_logger": {"enabled": False, "verbose": True},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "zero_optimization": {"stage": 2, "zero_quantized_weights": False, "zero_hpz_partition_size": 1},
        "activation_checkpointing": {"partition_activations": False},
        "amp": {"enabled": False},
        "memory_breakdown": False,
    }
    imported = import_deepspeed(off)
    assert {row.status for row in imported.rows if row.line or row.value is not None} == {Status.kept}
    both = rows_of({"zero_optimization": {"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}})
    assert (both["zero_optimization.cpu_offload"].here, both["zero_optimization.cpu_offload"].note) == ("", "not used")
    on = rows_of({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}})
    assert on["compression_training"].status is Status.unsupported


# -- what depends on several keys -----------------------------------------------------------------------------------


def test_a_file_of_hugging_face() -> None:
    imported = import_deepspeed(HUGGING_FACE)
    assert imported.groups == {"strategy": "zero3", "optimizer": "adamw", "scheduler": "warmup_decay"}
    assert imported.settings == {
        "strategy.offload_optimizer": "cpu",
        "strategy.max_live_numel": 10**9,
        "scheduler.warmup_steps": 1,
    }
    assert {row.key for row in imported.of(Status.open)} == {
        *(f"fp16.{name}" for name in ("enabled", "initial_scale_power", "hysteresis")),
        "bf16.enabled",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        "scheduler.params.warmup_num_steps",
        "zero_optimization.stage3_param_persistence_threshold",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    }
    assert imported.of(Status.unsupported, Status.unknown) == []
    rows = {row.key: row for row in imported.rows}
    assert "precision=fp16_true: precision.scaler.init_scale=4096.0" in rows["fp16.initial_scale_power"].note
    assert (rows["fp16.loss_scale"].status, rows["fp16.loss_scale"].note) == (
        Status.kept,
        "0: it changes while training",
    )
    assert rows["scheduler.params.warmup_max_lr"].note == "null, the optimizer's lr"
    assert rows["zero_optimization.reduce_bucket_size"].note == "it is not for stage 3"


def test_a_fixed_loss_scale_of_an_open_precision_says_what_sets_it() -> None:
    rows = rows_of({"fp16": {"enabled": "auto", "loss_scale": 128, "hysteresis": 3}})
    said = "with precision=fp16_static: precision.precision=16-true precision.scaler.scale=128.0"
    assert (rows["fp16.loss_scale"].status, rows["fp16.loss_scale"].note) == (Status.open, said)
    assert (rows["fp16.hysteresis"].status, rows["fp16.hysteresis"].note) == (
        Status.no_meaning,
        "fp16.loss_scale is fixed",
    )


@pytest.mark.parametrize(
    ("zero", "group", "settings"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "zero2_offload", {}),
        ({"stage": 1, "cpu_offload": True}, "zero1_offload", {}),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "zero3", {"strategy.offload_params": "cpu"}),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, "zero3_offload", {}),
        ({"stage": 3, "mics_shard_size": 4}, "zero3", {"strategy.shard_size": 4}),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
            "zero2_offload",
            {"strategy.offload_fraction": 0.3},
        ),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1}}, "zero2_offload", {}),
        ({"stage": 3, "param_persistence_threshold": 1e4}, "zero3", {"strategy.persistence_numel": 10_000}),
        ({"stage": 2, "reduce_bucket_size": 5e8}, "zero2", {"strategy.bucket_size_mb": 1907.35}),
        ({"stage": 2, "allgather_bucket_size": 2**20}, "zero2", {"strategy.bucket_size_mb": 4.0}),
        (True, "zero1", {}),
        (False, "zero0", {}),
        ({}, "zero0", {}),
    ],
)
def test_stage_and_stores(zero: Any, group: str, settings: dict[str, Any]) -> None:
    imported = import_deepspeed({"zero_optimization": zero, "gradient_clipping": 0})
    assert imported.groups["strategy"] == group
    assert {path: value for path, value in imported.settings.items() if path.startswith("strategy")} == settings


@pytest.mark.parametrize(
    ("stage", "stores", "group", "settings"),
    [
        (2, {"optimizer": {"device": "nvme", "nvme_path": "/x"}}, "zero2_nvme", {"nvme_path": "/x"}),
        (2, {"optimizer": {"device": "nvme"}}, "zero2_nvme", {}),
        (2, {"optimizer": {"device": "cpu", "nvme_path": "/x"}}, "zero2_offload", {}),
        (
            3,
            {"optimizer": {"device": "nvme", "nvme_path": "/x"}},
            "zero3",
            {"offload_optimizer": "nvme", "nvme_path": "/x"},
        ),
        (
            3,
            {"optimizer": {"device": "nvme", "nvme_path": "/x"}, "param": {"device": "nvme", "nvme_path": "/y"}},
            "zero3_nvme",
            {"nvme_path": "/x"},
        ),
        (3, {"optimizer": {"device": "cpu"}, "param": {"device": "nvme", "nvme_path": "/y"}}, "zero3_offload", {}),
        (
            3,
            {"optimizer": {"device": "nvme"}, "param": {"device": "nvme", "nvme_path": "/y"}},
            "zero3_nvme",
            {"nvme_path": "/y"},
        ),
        (
            3,
            {"optimizer": {"device": "nvme"}, "param": {"device": "cpu"}},
            "zero3",
            {"offload_optimizer": "nvme", "offload_params": "cpu"},
        ),
    ],
)
def test_nvme_is_a_disk_for_state_and_for_parameters_beside_it(
    stage: int, stores: dict[str, Any], group: str, settings: dict[str, Any]
) -> None:
    zero = {"stage": stage, **{f"offload_{name}": store for name, store in stores.items()}}
    imported = import_deepspeed({"zero_optimization": zero})
    assert imported.groups["strategy"] == group
    assert imported.below("strategy") == settings
    rows = {row.key.removeprefix("zero_optimization.offload_"): row for row in imported.rows}
    for name, store in stores.items():
        supported = (name, store["device"]) != ("param", "nvme") or stores["optimizer"]["device"] == "nvme"
        assert rows[f"{name}.device"].status is (Status.kept if supported else Status.unsupported)
    path = rows.get("optimizer.nvme_path")
    if stores["optimizer"]["device"] == "nvme":
        named = "nvme_path" in stores["optimizer"]
        if "nvme_path" in settings:
            assert rows["optimizer.nvme_path" if named else "param.nvme_path"].status is Status.kept
        else:
            assert path is not None
            assert path.status is Status.open
    elif path is not None:
        assert path.status is Status.no_meaning


def test_options_of_another_stage_say_so() -> None:
    zero = {"stage": 2, "stage3_max_live_parameters": 1e9, "offload_param": {"device": "cpu", "pin_memory": True}}
    rows = rows_of({"zero_optimization": zero})
    live = rows["zero_optimization.stage3_max_live_parameters"]
    assert (live.status, live.note) == (Status.no_meaning, "it is for stage 3; this file has stage 2")
    store = rows["zero_optimization.offload_param.device"]
    assert (store.status, store.here) == (Status.unsupported, "")
    assert "at stage 2 parameters are unsharded on all ranks: use stage 3, or leave it out" in store.note


@pytest.mark.parametrize(
    ("config", "group", "settings"),
    [
        ({"fp16": {"enabled": True}}, "fp16_true", {}),
        (
            {"bfloat16": {"enabled": True, "check_grad_overflow": False}},
            "bf16_true",
            {"strategy.skip_nonfinite": False},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}},
            "fp16_static",
            {"precision.precision": "16-true", "precision.scaler.scale": 128.0},
        ),
        (
            {
                "fp16": {
                    "enabled": True,
                    "initial_scale_power": 8,
                    "min_loss_scale": 0,
                    "fp16_master_weights_and_grads": True,
                }
            },
            "fp16_true",
            {"precision.scaler.init_scale": 256.0, "precision.master_weights": False},
        ),
        ({"torch_autocast": {"enabled": True}}, "bf16", {"precision.param_dtype": "float32"}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16", {"precision.param_dtype": "float32"}),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "fp16", {}),
        (
            {"fp16": {"enabled": False, "hysteresis": 3}, "communication_data_type": "bf16"},
            "fp32",
            {"precision.reduce_dtype": "bfloat16"},
        ),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "fp32", {"precision.grad_dtype": "float32"}),
    ],
)
def test_precision(config: dict[str, Any], group: str, settings: dict[str, Any]) -> None:
    imported = import_deepspeed(config | {"gradient_clipping": 1})
    assert imported.groups["precision"] == group
    assert imported.settings == settings | {"trainer.gradient_clip_val": 1}


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            None,
            (64, 4, 2, 8),
        ),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, (64, 4, 4, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, None, (64, 4, 16, None)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, (64, 8, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, (32, 4, 2, 4)),
        ({"train_batch_size": 64}, 4, (64, 16, 1, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (8, 4, 1, 2)),
        ({"gradient_accumulation_steps": 2}, None, (None, None, 2, None)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, None, (None, None, None, None)),
    ],
)
def test_batch(config: dict[str, int], ranks: int | None, expected: tuple[int | None, ...]) -> None:
    imported = import_deepspeed(config, ranks=ranks)
    accumulate = imported.settings.get("trainer.accumulate_grad_batches")
    found = (imported.settings.get("data.batch_size"), imported.micro_batch, accumulate, imported.ranks)
    assert found == expected


def test_what_the_file_leaves_out_is_written_where_the_defaults_differ() -> None:
    imported = import_deepspeed({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}})
    assert imported.groups["optimizer"] == "adamw"  # adam_w_mode is true by default
    assert imported.settings == {
        "trainer.gradient_clip_val": 1.0,
        "optimizer.weight_decay": 0.0,
        "scheduler.max_lr": 0.001,
        "scheduler.warmup_steps": 1000,
    }
    assert not import_deepspeed({"scheduler": {"type": "WarmupLR"}}).below("scheduler")  # the optimizer's rate in both
    assert {row.line for row in imported.rows} == {None}
    plain = import_deepspeed({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "max_grad_norm": 0.5}}})
    assert plain.groups["optimizer"] == "adam"
    assert plain.settings["trainer.gradient_clip_val"] == 0.5


def test_parameters_of_another_optimizer_are_left_out() -> None:
    imported = import_deepspeed({"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "ns_method": "gram"}}})
    assert [row.key for row in imported.of(Status.unsupported)] == [
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.ns_method",
    ]
    assert not imported.below("optimizer")
    rows = rows_of({"optimizer": {"type": "SGD", "params": {"lr": 1, "betas": [0.9, 0.9]}}})
    assert rows["optimizer.params.betas"].note == "optimizer=sgd has no 'betas'"
    assert "AdamW is written" in rows_of({"optimizer": {"type": "Lion"}})["optimizer.type"].note
    assert "did you mean adamw?" in rows_of({"optimizer": {"type": "AdmW"}})["optimizer.type"].note


@pytest.mark.parametrize(("name", "status"), [("Lamb", Status.kept), ("OneBitLamb", Status.unsupported)])
def test_lamb_is_lamb(name: str, status: Status) -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 0.3, "bias_correction": True, "eps_inside_sqrt": False}
    imported = import_deepspeed({"optimizer": {"type": name, "params": params}})
    assert imported.groups["optimizer"] == "lamb"
    assert imported.below("optimizer") == {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    rows = {row.key.rpartition(".")[2]: row.status for row in imported.rows}
    assert rows["type"] == status
    assert [rows[key] for key in ("max_coeff", "bias_correction")] == [Status.unsupported] * 2
    assert rows["eps_inside_sqrt"] == Status.kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"fp16": {"enabled": true},\n "bf16": {"enabled": true}}',
            "2:22: bf16.enabled=true and fp16.enabled=true exclude",
        ),
        (
            '{"train_batch_size": 32,\n "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}',
            (
                "1:22: train_batch_size=32 is no multiple of train_micro_batch_size_per_gpu=4 x "
                "gradient_accumulation_steps=3: use 24, or leave one of them out"
            ),
        ),
        (
            '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
            (
                "1:22: train_batch_size=32 is not train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=2 x "
                "2 ranks = 16: use 4 ranks, or leave one of the three out"
            ),
        ),
        ('{"train_batch_size": 7}', "1:22: train_batch_size=7 cannot be split over 2 ranks: use a multiple of 2"),
        ('{"gradient_accumulation_steps": 0}', "1:33: gradient_accumulation_steps=0 must be at least 1"),
        (
            '{"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}',
            "1:39: zero_optimization.cpu_offload is an old name of zero_optimization.offload_optimizer",
        ),
        (
            '{"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}}',
            "1:92: zero_optimization.stage3_max_live_parameters=2 contradicts zero_optimization.max_live_parameters=1",
        ),
        (
            '{"zero_optimization": {"stage": [1, 2]}}',
            "1:33: zero_optimization.stage=[1, 2] must be 0, 1, 2 or 3. A list",
        ),
        ('{"zero_optimization": {"stage": "2"}}', "1:33: zero_optimization.stage='2' must be 0, 1, 2 or 3"),
        ('{"fp16": true}', "1:10: fp16=True must be an object"),
        (
            '{"torch_autocast": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}',
            "1:69: data_types.param_dtype=bf16 contradicts torch_autocast.enabled=True: keep one of them",
        ),
        (
            '{"fp16": {"enabled": true, "initial_scale_power": 1024}}',
            "1:51: fp16.initial_scale_power=1024 must be a number from -1022 to 1023",
        ),
        (
            f'{{"gradient_clipping": -1{"0" * 309}}}',
            f"1:23: gradient_clipping=-1{'0' * 309} must be a number >= 0. It is beyond the numbers of 64 bits",
        ),
        (
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1, "warmup_max_lr": 0.1}}}',
            "1:64: scheduler.params.warmup_min_lr=1 is above warmup_max_lr=0.1",
        ),
        (
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9, "total_num_steps": 5}}}',
            "1:72: scheduler.params.warmup_num_steps=9 must be less than total_num_steps=5",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(MigrationError) as raised:
        import_deepspeed(path, ranks=2)
    assert str(raised.value).startswith(f"{path}:{message}")


# -- training -------------------------------------------------------------------------------------------------------

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
FOLDER = "the folder of the test"
TRAINED: list[dict[str, Any]] = [
    HUGGING_FACE,
    {},
    BATCH
    | {"optimizer": ADAMW, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}},
    BATCH
    | {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "bias_correction": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1, "cpu_offload": True},
        "wall_clock_breakdown": True,
    },
    {"fp16": {"enabled": True, "loss_scale": 8}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.1},
    {"torch_autocast": {"enabled": True}, "optimizer": {"type": "NAdam", "params": {"lr": 1e-3}}},
    {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": FOLDER},
            "offload_param": {"device": "nvme"},
        },
    },
    {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-2}},
        "csv_monitor": {"enabled": True, "output_path": "", "job_name": "ours"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
    },
]


class Model(LightningModule):
    """Two blocks; its optimizer and schedule are those of the configuration."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def configure_optimizers(self) -> Any:
        return build_optimizers(self.cfg.optimizer, self.cfg.scheduler, self.parameters(), total_steps=100)

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch).tanh()
        loss = batch.float().square().mean()
        self.log("val_loss", loss)
        return loss


def train(folder: str, names: list[str]) -> list[tuple[int, bool]]:
    """In a rank: the steps that each configuration trains, and whether `from_deepspeed` makes the same strategy."""
    found = []
    for name in names:
        flags = [f"enable_{what}=false" for what in ("progress_bar", "checkpointing", "model_summary")]
        overrides = ["accelerator=cpu", "devices=2", "max_steps=2", *flags]
        with initialize_config_dir(folder, version_base="1.3"):
            cfg = compose(name, [*(f"trainer.{override}" for override in overrides), f"+run_dir={folder}"])
        trainer = build_trainer(cfg)
        in_code = ZeroStrategy.from_deepspeed(json.loads(Path(folder, f"{name}.json").read_text()))
        plugin, other = trainer.strategy.precision_plugin, in_code.precision_plugin
        same = trainer.strategy.options == in_code.options  # type: ignore[attr-defined]
        same = same and plugin.policy == other.policy and repr(plugin.scaler) == repr(other.scaler)  # type: ignore[attr-defined]
        samples = cfg.data.batch_size // 4 if "data" in cfg else 2
        trainer.fit(Model(cfg), DataLoader(torch.randn(32, 4), batch_size=samples))
        found.append((trainer.global_step, same))
    return found


@pytest.mark.slow
def test_what_is_taken_over_trains_and_is_the_same_in_code(pool2: RankPool, tmp_path: Path) -> None:
    names = [f"ds_{index}" for index in range(len(TRAINED))]
    for name, config in zip(names, TRAINED, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(config).replace(FOLDER, str(tmp_path)))
        (tmp_path / f"{name}.yaml").write_text(to_yaml(import_deepspeed(tmp_path / f"{name}.json")))
    for found in pool2.run(train, str(tmp_path), names):
        assert found == [(2, True)] * len(names)


def test_the_yaml_of_an_experiment_overrides_only_what_the_file_says(tmp_path: Path) -> None:
    imported = import_deepspeed({"bf16": {"enabled": True}, "gradient_clipping": 0.5})
    text = to_yaml(imported, experiment=True)
    assert text.startswith("# @package _global_\n")
    assert "\n  - override /strategy: zero0\n  - override /precision: bf16_true\n  - _self_\n" in text
    assert "trainer:\n  gradient_clip_val: 0.5 # gradient_clipping\n" in text


def test_an_optimizer_without_an_option_replaces_that_of_the_application(tmp_path: Path) -> None:
    """None of the application's own options stays, such as the betas of AdamW."""
    (tmp_path / "experiment").mkdir()
    conf = Path(__file__).resolve().parents[2] / "examples" / "gpt2" / "conf"
    for name in TORCH_CLASSES.values():
        imported = import_deepspeed({"optimizer": {"type": name, "params": {"lr": 0.25}}})
        (tmp_path / "experiment" / "mine.yaml").write_text(to_yaml(imported, experiment=True))
        with initialize_config_dir(str(conf), version_base="1.3"):
            overrides = [f"hydra.searchpath=['file://{tmp_path}']", "experiment=mine", "scheduler=none"]
            cfg = compose("train", overrides=overrides)
        assert cfg.optimizer == {"_target_": f"torch.optim.{name}", "lr": 0.25}
        built = build_optimizers(cfg.optimizer, cfg.scheduler, nn.Linear(1, 1).parameters(), 10)["optimizer"]
        assert (type(built).__name__, built.param_groups[0]["lr"]) == (name, 0.25)


def test_in_code_the_rest_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = BATCH | {"zenflow": {}, "optimizer": ADAMW, "zero_optimization": {"stage": 1, "super_offload": False}}
    with pytest.warns(UserWarning, match="are not taken over: zenflow: did you mean zero_optimization.zenflow"):
        strategy = ZeroStrategy.from_deepspeed(config, stage=2, timeout=5.0)
    assert (strategy.stage, strategy.timeout) == (2, 5.0)
    said = " ".join(caplog.messages)
    for part in ("accumulate_grad_batches=2", "gradient_clip_val=1.0", "DataLoader(batch_size=2)", "betas=[0.9, 0.95]"):
        assert part in said
    with pytest.raises(TypeError, match="no option 'stge'"):
        ZeroStrategy.from_deepspeed({}, stge=1)


def test_a_file_without_a_precision_leaves_it_to_the_trainer() -> None:
    for config, expected in (({}, "bf16-mixed"), ({"bf16": {"enabled": True}}, "bf16-true")):
        strategy = ZeroStrategy.from_deepspeed({"zero_optimization": {"stage": 2}} | config)
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-mixed", logger=False)
        assert trainer.precision_plugin.precision == expected


def test_what_belongs_to_a_precision_that_is_open_is_not_applied(recwarn: pytest.WarningsRecorder) -> None:
    left_open = {"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}
    strategy = ZeroStrategy.from_deepspeed(left_open, precision_plugin=ZeroPrecision("bf16-true"))
    assert strategy.precision_plugin.precision == "bf16-true"
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"not applied: data_types.grad_accum_dtype.*\(\.\.\., grad_dtype='float32'\)"):
        strategy = ZeroStrategy.from_deepspeed(left_open)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-mixed", logger=False)
    assert trainer.precision_plugin.precision == "bf16-mixed"
