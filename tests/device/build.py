"""Builds the simulated device: once per state of its sources, by whichever process comes first; the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).resolve().parent / "cpp"
CACHE = SOURCES.parents[2] / "build" / "device"  # left out of git and of the package
NAME = "simdevice"
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")


def library() -> Path:
    """The compiled device; compiles it where that has not been done."""
    sources = sorted(SOURCES.glob("*.cpp"))
    built = CACHE / key(sources) / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        with lock(CACHE / "lock"):
            if not built.exists():  # nobody else has built it meanwhile
                link(compile_all(sources), built)
    return built


def key(sources: Sequence[Path]) -> str:
    """Names what compiling these sources gives."""
    digest = hashlib.sha256("\0".join([torch.__version__, sys.version, compiler(), *FLAGS]).encode())
    read: list[Path] = list(sources)
    for path in read:  # which grows: with what a file includes
        text = path.read_text()
        digest.update(text.encode())
        included = [SOURCES / name for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE)]
        read += [header for header in included if header not in read]
    return digest.hexdigest()[:16]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One process at a time; the system ends it with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_all(sources: Sequence[Path]) -> list[Path]:
    """Their objects, compiled side by side, the longest first; those that are there are kept."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = {path: pool.submit(compile_one, path) for path in sorted(sources, key=size_of, reverse=True)}
    return [made[path].result() for path in sources]


def size_of(source: Path) -> int:
    return source.stat().st_size


def compile_one(source: Path) -> Path:
    built = CACHE / "objects" / f"{source.stem}-{key([source])}.o"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    if not built.exists():
        command = [compiler(), *FLAGS, *(f"-isystem{path}" for path in includes), "-c", str(source), "-o"]
        run(command, built)
    return built


def link(objects: Sequence[Path], built: Path) -> None:
    paths = cpp_extension.library_paths()
    found = [*(f"-L{path}" for path in paths), *(f"-Wl,-rpath,{path}" for path in paths)]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    run([compiler(), "-shared", *map(str, objects), *found, *libraries, "-o"], built)


def run(command: list[str], built: Path) -> None:
    """Runs a command whose last argument is to be its result, which appears complete or not at all."""
    built.parent.mkdir(parents=True, exist_ok=True)
    unfinished = built.with_suffix(".unfinished")
    done = subprocess.run([*command, str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile: {' '.join(command)}\n{done.stderr}")
    unfinished.rename(built)


if __name__ == "__main__":
    library()
