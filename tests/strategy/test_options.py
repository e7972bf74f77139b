"""The options of the strategy are stated once; what repeats them agrees."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.integration import options
from lightning_zero.integration.options import CHOICES, StrategyOptions

# Objects of Lightning, which no configuration file states.
OF_LIGHTNING = ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"]
OTHERS: dict[str, Any] = {
    "stage": 3,
    "offload_optimizer": "cpu",
    "offload_params": "cpu",
    "offload_fraction": 0.5,
    "nvme_path": "/local",
    "nvme_buffer_gb": 0.5,
    "nvme_checksums": False,
    "offload_gradients": "cpu",
    "accumulate_on_device": True,
    "shard_size": 2,
    "bucket_size_mb": 1.5,
    "units": [nn.Linear, "Block"],
    "persistence_numel": 7,
    "max_live_numel": 8,
    "prefetch_mb": 0.5,
    "max_in_flight_mb": 0.75,
    "staging_buffer_mb": 0.25,
    "activation_offload": True,
    "activation_offload_mb": 0.25,
    "check_steps": 9,
    "detect_data_edits": True,
    "overlap": False,
    "update_in_backward": True,
    "native_optimizer": "off",
    "master_layout": "split",
    "preflight": "warn",
    "skip_nonfinite": False,
    "max_consecutive_skips": 6,
    "checkpoint_format": "sharded",
    "checkpoint_state": "compact",
    "async_save": True,
    "checksums": False,
    "evaluation_masters": True,
    "timeout": 10.0,
    "start_method": "spawn",
    "process_group_backend": "gloo",
}


def test_the_constructor_has_a_parameter_for_each_option() -> None:
    parameters = inspect.signature(ZeroStrategy).parameters
    ours = {name: parameter.default for name, parameter in parameters.items() if name not in OF_LIGHTNING}
    defaults = {field.name: field.default for field in dataclasses.fields(StrategyOptions)}
    assert list(ours.items()) == list(defaults.items())
    assert parameters.keys() == {*ours, *OF_LIGHTNING}


def test_the_constructor_has_the_types_of_the_options() -> None:
    init, fields = typing.get_type_hints(ZeroStrategy.__init__), typing.get_type_hints(StrategyOptions)
    differing = {name for name, type_ in fields.items() if init[name] != type_}
    assert differing == {"units"}  # classes of modules, where options know no torch


def test_the_constructor_passes_every_option_on() -> None:
    strategy = ZeroStrategy(**OTHERS)
    assert dataclasses.asdict(strategy.options) == OTHERS
    assert all(getattr(StrategyOptions(), name) != value for name, value in OTHERS.items())


def test_every_word_is_checked() -> None:
    hints = typing.get_type_hints(StrategyOptions)
    assert {n: typing.get_args(t) for n, t in hints.items() if typing.get_origin(t) is typing.Literal} == CHOICES


def test_every_switch_is_true_or_false() -> None:
    switches = [name for name, type_ in typing.get_type_hints(StrategyOptions).items() if type_ is bool]
    for name, value in itertools.product(switches, (1, "no", None)):
        with pytest.raises(TypeError, match=f"{name}={value!r} must be True or False"):
            StrategyOptions(**{name: value})
    assert len(switches) > 5


def test_options_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StrategyOptions().stage = 3  # type: ignore[misc]


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan"), True, "half"])
def test_a_fraction_is_more_than_nothing_and_at_most_everything(fraction: Any) -> None:
    with pytest.raises(ValueError, match=f"offload_fraction={fraction!r} must be a number greater than 0"):
        StrategyOptions(offload_optimizer="cpu", offload_fraction=fraction)


def test_a_fraction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offload_optimizer='none' offloads nothing; use offload_optimizer='cpu'"):
        StrategyOptions(offload_fraction=0.5)


@pytest.mark.parametrize(("where", "optimizer"), [("nvme", "none"), ("nvme", "cpu"), ("cpu", "none")])
def test_a_place_of_gradients_without_state_on_a_disk_is_refused(where: Any, optimizer: Any) -> None:
    """But not that they rest with the state."""
    refusal = rf"offload_gradients='{where}' needs optimizer state on a disk.*got offload_optimizer='{optimizer}'"
    with pytest.raises(ValueError, match=refusal):
        StrategyOptions(offload_optimizer=optimizer, offload_gradients=where)
    StrategyOptions(offload_optimizer="cpu", offload_gradients="cpu")


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads a YAML file."""
    assert StrategyOptions(stage=2, nvme_path="~/disk").nvme_path == str(Path.home() / "disk")
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "~/disk")
    assert StrategyOptions(stage=2).disk_path == str(Path.home() / "disk")
    assert StrategyOptions(stage=2, offload_optimizer="nvme").nvme_path == str(Path.home() / "disk")


def test_what_is_replaced_is_checked() -> None:
    with pytest.raises(ValueError, match="needs stage=3"):
        dataclasses.replace(StrategyOptions(3, offload_params="cpu"), stage=2)


def test_an_option_is_read_from_the_strategy_and_not_assigned() -> None:
    strategy = ZeroStrategy(**OTHERS)
    for name in OTHERS.keys() - {"process_group_backend"}:
        assert getattr(strategy, name) == OTHERS[name], name
        with pytest.raises(AttributeError, match=name):
            setattr(strategy, name, OTHERS[name])


def test_every_option_is_documented_at_the_constructor() -> None:
    doc = inspect.getdoc(ZeroStrategy)
    assert doc is not None
    assert [name for name in OTHERS if f"\n    {name}: " not in doc.partition("Args:")[2]] == []


def test_options_need_the_standard_library_only() -> None:
    code = f"import {options.__name__}, sys; print({{'torch', 'lightning', 'numpy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
