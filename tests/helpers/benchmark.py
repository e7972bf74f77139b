"""Imports modules of the folder `benchmarks`, which is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from .pages import ROOT

PACKAGE = "benchmarks"
# For other processes. The repository comes last on their path, so that its sources do not hide the installed package.
START = f"import sys; sys.path.append({str(ROOT)!r}); from {PACKAGE}.{{}} import main; main()"


def load(name: str) -> Any:
    """Imports the benchmark ``name`` without changing ``sys.path``.

    The folder of tests, which is on the path, contains a folder ``benchmarks`` too. An ordinary import could find that
    one and register it as a namespace package.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACKAGE, ROOT / PACKAGE / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}")
