"""`lightning-zero convert-deepspeed`: a ZeRO folder of DeepSpeed as one ordinary checkpoint file.

`--json` prints one object. Within a schema version fields are added, never renamed or removed.

- `schema`: 1
- `out`: the file
- everything else: see `lightning_zero.tools.deepspeed.Converted`
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.cli.text import complain, number, print_json, size
from lightning_zero.tools.deepspeed import convert

SCHEMA = 1


def run(folder: Path, out: Path, *, trust: bool, overwrite: bool, as_json: bool = False) -> int:
    """Converts, and prints what is in the file; returns the exit code."""
    try:
        converted = convert(folder, out, trust=trust, overwrite=overwrite)
    except (CheckpointError, OSError) as error:
        return complain(error)
    if as_json:
        return print_json(SCHEMA, {"out": str(out)} | asdict(converted))
    source = f"DeepSpeed {converted.version}, stage {converted.stage}, {number(converted.ranks, 'rank')}"
    print(f"{out}: {number(converted.tensors, 'tensor')}, {size(converted.bytes)}, from {source}")
    state = ", ".join(converted.state) or "no state"
    updated = f"{number(converted.parameters, 'parameter')} in {number(converted.groups, 'group')}"
    print(f"optimizer: {state} of {updated}")
    for name, kept in converted.tied.items():
        print(f"tied: {name} is {kept}, stored once")
    for place, kind in converted.left_out.items():
        print(f"left out, no plain value: {place}, a {kind}")
    if not converted.lightning:
        print("note: Lightning has not written this folder; epochs and steps of a resumed fit are counted from 0")
    return 0
