"""The table of keys against DeepSpeed itself, where it is installed: no field of its models is unclassified."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_zero.migration.deepspeed_keys import KEYS

pytest.importorskip("deepspeed", exc_type=ImportError)


def fields_of(model: Any, above: str) -> Iterator[str]:
    """The paths of a pydantic model's fields, by the names that a file may have; those of models inside, too."""
    for name, field in model.model_fields.items():
        for spelled in {name, field.alias or name}:
            path = f"{above}.{spelled}" if above else spelled
            yield path
            for kind in (field.annotation, *typing.get_args(field.annotation)):
                if hasattr(kind, "model_fields"):
                    yield from fields_of(kind, path)


def is_classified(path: str) -> bool:
    if path in KEYS:
        return True
    above = path.rpartition(".")[0]
    while above:
        if above in KEYS:
            inside = KEYS[above].inside
            return inside is None or path.removeprefix(f"{above}.").partition(".")[0] in inside
        above = above.rpartition(".")[0]
    return False


def models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import get_timers_config

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "": DeepSpeedMonitorConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": type(get_timers_config({})),
    }


class Asked(dict[str, Any]):
    """A configuration that remembers which keys DeepSpeed asks for."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return self


def test_every_field_of_its_models_is_classified() -> None:
    paths = {path for above, model in models().items() for path in fields_of(model, above)}
    assert len(paths) > 150
    assert sorted(path for path in paths if not is_classified(path)) == []


def test_every_key_that_it_asks_for_is_classified() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    sections = {name: Asked() for name in ("activation_checkpointing", "aio", "data_types", "flops_profiler")}
    config = Asked(train_batch_size=1, **sections)
    DeepSpeedConfig(config)
    assert len(config.seen) > 50
    asked = config.seen | {f"{name}.{key}" for name, section in sections.items() for key in section.seen}
    assert len(asked) > len(config.seen) + 20
    assert sorted(key for key in asked if not is_classified(key)) == []
