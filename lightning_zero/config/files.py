"""Writes YAML files for Hydra that choose options of this package's groups and set values in them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

# The options of a complete configuration for groups that are not given.
_COMPLETE = {
    "strategy": "zero0",
    "precision": "fp32",
    "optimizer": "adamw",
    "scheduler": "none",
    "trainer": "default",
    "logger": "csv",
    "callbacks": "none",
}


def to_yaml(
    remarks: Sequence[str],
    groups: Mapping[str, str],
    settings: Mapping[str, Any],
    notes: Mapping[str, str],
    *,
    experiment: bool = False,
) -> str:
    """Writes groups and settings as YAML.

    Args:
        remarks: lines at the top.
        groups: the option of each group; "": none, but a class with arguments, among the settings.
        settings: values by dotted keys.
        notes: remarks on settings, by their keys.
        experiment: write a file for the group `experiment` of an application, which overrides the application's
            groups; default: a configuration of its own, with every group.
    """
    lines = ["# @package _global_"] if experiment else []
    lines += [*(f"# {remark}" for remark in remarks), "defaults:"]
    for name, option in (groups if experiment else _COMPLETE | dict(groups)).items():
        if experiment:  # without an option, those of the application must not mix with the settings
            lines.append(f"  - override /{name}: {option or 'null'}")
        elif option:
            lines.append(f"  - {name}: {option}")
    lines.append("  - _self_")
    for name, node in _nested(settings).items():
        lines += ["", *_lines(notes, name, name, node, 0)]
    return "\n".join(lines) + "\n"


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def _lines(notes: Mapping[str, str], path: str, name: str, node: Any, depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(node, dict):
        below = (_lines(notes, f"{path}.{key}", key, value, depth + 1) for key, value in node.items())
        return [f"{indent}{name}:", *(line for lines in below for line in lines)]
    note = notes.get(path, "")
    return [f"{indent}{name}: {_scalar(node)}{f' # {note}' if note else ''}"]


def _scalar(value: Any) -> str:
    """Writes a value as YAML, in JSON's form except for infinity."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value)
