"""An imported DeepSpeed configuration as a YAML file of Hydra's."""

import json
import math
from typing import Any

from lightning_zero.migration import Import, Status

# What a complete configuration has where the file decides nothing.
_COMPLETE = {
    "strategy": "zero0",
    "precision": "fp32",
    "optimizer": "adamw",
    "scheduler": "none",
    "trainer": "default",
    "logger": "csv",
    "callbacks": "none",
}
_REMARKS = {"data.batch_size": "samples of an optimizer step, over all ranks and micro-batches"}


def to_yaml(imported: Import, *, experiment: bool = False) -> str:
    """Writes the groups and settings of an import as YAML.

    Args:
        imported: the import.
        experiment: write a file for the group `experiment` of an application, which overrides the application's
            groups; default: a configuration of its own, with every group.
    """
    title = f"{imported.name or 'A DeepSpeed configuration'} in terms of lightning_zero."
    lines = ["# @package _global_", f"# {title}"] if experiment else [f"# {title}"]
    lines += _remarks(imported)
    groups = imported.groups if experiment else _COMPLETE | imported.groups
    lines.append("defaults:")
    for name, option in groups.items():
        if option:  # the others are a class with arguments, below
            lines.append(f"  - {'override /' if experiment else ''}{name}: {option}")
    lines.append("  - _self_")
    for name, node in _nested(imported.settings).items():
        lines += ["", *_lines(imported, name, name, node, 0)]
    return "\n".join(lines) + "\n"


def _remarks(imported: Import) -> list[str]:
    """Lists what the file leaves to its reader."""
    remarks = []
    for status, title in (
        (Status.open, 'Left open, "auto" in the file'),
        (Status.unsupported, "Not supported"),
        (Status.unknown, "Unknown to DeepSpeed"),
    ):
        if rows := imported.of(status):
            remarks += [f"# {title}:", *(f"#   {row.key}: {row.note}" for row in rows)]
    if imported.micro_batch is not None:
        remarks.append(f"# The DataLoader of a rank takes {imported.micro_batch} samples at once.")
    return remarks


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def _lines(imported: Import, path: str, name: str, node: Any, depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(node, dict):
        below = (_lines(imported, f"{path}.{key}", key, value, depth + 1) for key, value in node.items())
        return [f"{indent}{name}:", *(line for lines in below for line in lines)]
    remark = imported.sources.get(path) or _REMARKS.get(path, "")
    return [f"{indent}{name}: {_scalar(node)}{f' # {remark}' if remark else ''}"]


def _scalar(value: Any) -> str:
    """Writes a value as YAML: JSON's form, but for infinity."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value)
