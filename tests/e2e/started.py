"""Scripts of this folder, started as users start theirs: a process that starts the other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.ranks import server_environment

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """That of the rank pools' server, in which scripts find `helpers` and what the tests find."""
    path = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return server_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def reports_of(script: str, folder: Path, *, limit: float, **options: Any) -> list[dict[str, Any]]:
    """Run a script with these options on two ranks; what each writes into `folder`, in rank order."""
    subprocess.run(
        [sys.executable, str(HERE / script), json.dumps({"out": str(folder), **options})],
        cwd=folder,
        env=environment(),
        check=True,
        timeout=limit,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
