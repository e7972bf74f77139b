"""Modules of the folder of benchmarks, which is no part of what is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from .pages import ROOT

PACKAGE = "benchmarks"
# For processes of their own. The repository comes last on their path, so that no source hides an installed package.
START = f"import sys; sys.path.append({str(ROOT)!r}); from {PACKAGE}.{{}} import main; main()"


def load(name: str) -> Any:
    """Imports the benchmark ``name`` without a change of ``sys.path``.

    The folder of tests, which is on the path, has a folder ``benchmarks`` too: an import by the path alone could find
    that one, as a namespace package that then stays.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACKAGE, ROOT / PACKAGE / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}")
