"""How the package's parts depend on each other, read from their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.sources import PACKAGE, files, nodes

from lightning_zero.advice import Case, advice
from lightning_zero.integration.options import StrategyOptions

# From the top down: a part imports parts below it (or itself).
ORDER = (
    ("cli",),
    ("callbacks", "config"),
    ("integration", "schedulers"),
    ("migration",),
    ("tools",),
    ("checkpoint",),
    ("planning",),
    ("engine",),
    ("update",),
    ("sharding",),
    ("storage",),
    ("ops",),
    ("advice", "cgroups", "limits", "numa", "torch_private", "version"),
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
# The modules of a part from the top down, "" for its `__init__`: a module imports modules of lower levels.
INSIDE = {
    "checkpoint": (
        ("",),
        ("background", "file", "folder", "remote_file"),
        ("destination", "folder_reader", "state"),
        ("archive_reader", "stand_ins"),
        ("shards",),
        ("archive", "decoding", "safetensors"),
        ("boxes", "commit", "copies", "lazy", "rng"),
        ("remote",),
        ("errors", "tiles"),
    ),
    "integration": (
        ("registration",),
        ("auto",),
        ("fabric", "strategy"),
        ("failures",),
        ("checkpointing", "collectives", "launchers", "steps"),
        ("resuming",),
        ("base", "choices"),
        ("engines",),
        ("deepspeed", "remedies", "saves", "signals", "uneven"),
        ("disk", "in_backward", "loading", "names", "patches", "preflight"),
        ("readers",),
        ("", "advice", "options", "overridden", "precision", "pretrained", "private"),
    ),
    "tools": (("",), ("consolidate", "deepspeed", "export"), ("deepspeed_runs",), ("contents",)),
    "planning": (
        ("",),
        ("choosing",),
        ("estimate", "preflight"),
        ("memory",),
        ("plan",),
        ("recording",),
        ("calibration", "recorded_gradients"),
        ("lanes", "machine", "transformer"),
        ("account", "devices", "examples", "tracing"),
    ),
    "engine": (("",), ("access",), ("runtime",), ("activations", "registry", "shadow")),
    "update": (
        ("",),
        ("choice", "in_backward", "muon", "visible_gradients"),
        ("clipping", "newton_schulz"),
        ("attached", "two_places"),
        ("combined", "cpu_optimizers", "native_updater", "step_updates", "whole"),
        ("cpu", "updaters"),
        ("loading", "sizes"),
        ("outcomes", "rules", "windows"),
        ("block_state", "counted", "gradient_scale", "view"),
        ("compact", "footprint", "loss_scaler", "native", "shell", "state"),
    ),
    "sharding": (
        ("",),
        ("hooks", "prefetch", "reducer", "root"),
        ("bucket_map",),
        ("adoption", "full_precision", "gradients", "refresh"),
        ("bucket",),
        ("forms",),
        ("averaged_gradient", "buffers", "edits", "masters", "partition", "pending", "reduction", "sharded_gradient"),
        ("placement", "sharded_init"),
        ("mesh",),
        ("collectives",),
        ("exchange",),
        ("backend_collectives", "collective_errors", "cross_memory"),
        ("board", "checksum", "compiled", "freed", "gloo_exit", "held", "layout", "left_tensors"),
        ("memory_format", "pieces", "policies", "rounded"),
    ),
    "storage": (
        ("",),
        ("nvme",),
        ("disk_speed", "run_folder", "streams"),
        ("disk_file", "staged", "staging"),
        ("device", "host", "store", "timers"),
        ("rested", "threads", "windowed"),
        ("executor",),
        ("work_log",),
        ("accelerators", "live"),
    ),
}
# Containers do not know each other.
APART = {"checkpoint": [{file, folder} for file in ("file", "remote_file") for folder in ("folder", "folder_reader")]}
FOLDERS = {"fabric"}  # inside a part; their modules may import each other
FACADE = {"config"}  # may import public names from the package itself
LIGHTNING = ("cli", "callbacks", "config", "integration", "schedulers")  # the floors that know Lightning
# What needs no collective: is there a process group, and how large is it?
QUERIES = frozenset("is_available is_initialized get_rank get_world_size is_gloo_available is_nccl_available".split())
STORES = frozenset("PrefixStore Store TCPStore _get_default_store".split())  # values by key, no collective
FORMATS = "torch.distributed.checkpoint."  # files
# Words of a user of Lightning or Hydra, which messages of the floors below take from `lightning_zero.advice`.
ADVICE = re.compile(
    r"\bzero[0-3]|\bTrainer\b|LightningModule|\btrainer\.|\bstrategy\b|\bconfigure_(model|optimizers)\b|\bckpt_path\b"
    r"|\bmanual_backward\b|\bon_before_\w+|\boffload_(optimizer|params)\b|\bprecision[ =]'|\blightning_zero\.gathered_"
)
# An option that is advised, unlike the value that a message begins with. `master_layout` is CPU optimizers' as well.
_NAMES = [field.name for field in fields(StrategyOptions) if field.name != "master_layout"]
OPTIONS = re.compile(rf"\s(({'|'.join(name for name in _NAMES if '_' in name)})\b|({'|'.join(_NAMES)})=)")


class Import(NamedTuple):
    """A module that is imported, or a name from it, anywhere in a file, functions included."""

    name: str
    line: int


def part_of(path: Path) -> str:
    """The first folder or module below the package; "" for the package's own `__init__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(source: str) -> Iterator[Import]:
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def wrong_imports(source: str, part: str) -> list[str]:
    """Imports by a file of ``part`` that run upward in the order, or that the engine may not make."""
    wrong = []
    for name, line in imports(source):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "lightning_zero":
            if target not in LEVEL:
                legal = part in FACADE or not target
            else:
                legal = target == part or LEVEL[target] >= LEVEL[part]
            if not legal:
                wrong.append(f"line {line}: {part} imports {name}")
        elif part not in LIGHTNING and root in ("lightning", "pytorch_lightning", "hydra", "omegaconf"):
            wrong.append(f"line {line}: {part} imports {name}")
    return wrong


def modules() -> dict[str, str]:
    """The sources of all modules by their names, with the compiled one, which is known by its stub."""
    paths = [*files(), *PACKAGE.rglob("*.pyi")]
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def circles(sources: Mapping[str, str]) -> set[str]:
    """Modules that import each other in a circle at run time, or lie between two circles."""
    typing = {name: _lines_for_typing(source) for name, source in sources.items()}
    found = {
        name: {_module(target, sources) for target, line in imports(source) if line not in typing[name]} - {name, ""}
        for name, source in sources.items()
    }
    while ends := {name for name in found if not found[name] or all(name not in to for to in found.values())}:
        found = {name: to - ends for name, to in found.items() if name not in ends}
    return set(found)


def _module(name: str, known: Collection[str]) -> str:
    """The module of ``known`` that an import executes; "" for another package's."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _lines_for_typing(source: str) -> set[int]:
    blocks = [node for node in nodes(source) if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"]
    return {line for block in blocks for line in range(block.lineno, block.body[-1].end_lineno + 1)}  # type: ignore[operator]


def module_of(path: Path) -> str:
    """The first folder or module below a part; "" for the part's own `__init__`, or for a part of one module."""
    below = path.relative_to(PACKAGE).parts[1:]
    first = below[0].removesuffix(".py") if below else ""
    return "" if first == "__init__" else first


def wrong_imports_inside(source: str, part: str, module: str) -> list[str]:
    """Imports of ``module`` that do not go to a lower level of its ``part``, or to one from which it stays apart."""
    level = {name: number for number, names in enumerate(INSIDE[part]) for name in names}
    typing = _lines_for_typing(source)  # a module may name the class of an object that it is given
    wrong = []
    for name, line in imports(source):
        package, other, target, *_ = [*name.split("."), "", "", ""]
        if (package, other) != ("lightning_zero", part) or line in typing:
            continue
        target = target if target in level else ""  # a name in the `__init__`
        inner = target == module and target in FOLDERS
        if (level[target] <= level[module] and not inner) or {module, target} in APART.get(part, []):
            wrong.append(f"line {line}: {module or part} imports {name}")
    return wrong


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def communication(source: str) -> list[str]:
    """Uses of `torch.distributed` other than questions about the process group."""
    tree = ast.parse(source)
    found = [name for name, _ in imports(source) if name.startswith("torch.distributed")]
    found = [name for name in found if name.rpartition(".")[2] not in QUERIES | STORES and not name.startswith(FORMATS)]
    for node in ast.walk(tree):
        name = dotted(node)
        if name.startswith("torch.distributed.") and name.count(".") == 2 and name.rpartition(".")[2] not in QUERIES:
            found.append(f"line {node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


def stages_compared(source: str) -> set[str]:
    """Functions that compare something called `stage`; what depends on the stage is asked of a policy."""
    found = set()
    for function in nodes(source):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                operands += [node.subject] if isinstance(node, ast.Match) else []
                if any(dotted(operand).rpartition(".")[2] == "stage" for operand in operands):
                    found.add(function.name)
    return found


def texts(source: str) -> Iterator[str]:
    """Text in the code, without docstrings; parts of an f-string one by one, parts of an implicit sum together."""
    tree = ast.parse(source)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _starts(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def advice_in(source: str) -> list[str]:
    """Texts that speak to a user of Lightning or Hydra."""
    return [text for text in texts(source) if ADVICE.search(text) or OPTIONS.search(text)]


def _starts(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr)


def test_every_part_has_a_place() -> None:
    assert {part for path in files() if (part := part_of(path)) not in ("", "conf")} == set(LEVEL)


def test_imports_run_downward() -> None:
    parts = {path: part for path in files() if (part := part_of(path))}
    found = {path.name: wrong for path, part in parts.items() if (wrong := wrong_imports(path.read_text(), part))}
    assert found == {}


@pytest.mark.parametrize("part", INSIDE)
def test_imports_inside_a_part_run_downward(part: str) -> None:
    paths = [path for path in files() if part_of(path) == part]
    assert sorted(set(map(module_of, paths))) == sorted(name for names in INSIDE[part] for name in names)
    wrong = {
        module: wrong_imports_inside(path.read_text(), part, module) for path in paths for module in [module_of(path)]
    }
    assert {module: found for module, found in wrong.items() if found} == {}


def test_no_modules_import_each_other() -> None:
    assert circles(modules()) == set()


def test_a_circle_of_imports_is_found() -> None:
    """Also one that a function closes; a type checker's imports are none."""
    two = {"a": "def f():\n    from b import g", "b": "import a", "c": "import a", "d": "import e"}
    assert circles({**two, "e": "if TYPE_CHECKING:\n    import d"}) == {"a", "b"}


def test_only_the_modules_of_collectives_communicate() -> None:
    found = {str(path.relative_to(PACKAGE)): communication(path.read_text()) for path in files()}
    names = ("collectives", "backend_collectives", "exchange", "collective_errors")
    expected = {f"sharding/{name}.py" for name in names}
    assert {name for name, uses in found.items() if uses} == expected


def device_types(source: str) -> list[str]:
    """What the code says of one type of device."""
    if "cuda" not in source.lower():
        return []
    found = [text for text in texts(source) if "cuda" in text.lower()]
    return found + [
        name for node in ast.walk(ast.parse(source)) if re.search(r"\bis_cuda\b|\bcuda\b", name := dotted(node))
    ]


def test_one_module_knows_types_of_devices() -> None:
    """But where it is about the machine, or about names of torch's and of DeepSpeed's."""
    found = {str(path.relative_to(PACKAGE)): device_types(path.read_text()) for path in files()}
    assert {name for name, uses in found.items() if uses} == {
        "storage/accelerators.py",
        *("cli/doctor.py", "cli/software.py"),
        "sharding/freed.py",
        *("migration/deepspeed_keys.py", "migration/deepspeed_training.py"),
    }


@pytest.mark.parametrize("source", ["torch.cuda.synchronize()", "x = t.is_cuda", "device = 'cuda'"])
def test_a_type_of_device_is_found(source: str) -> None:
    assert device_types(source)


_THREADS = r"\b(Thread|Timer|ThreadPool|ThreadPoolExecutor|LaneThreads|start_new_thread)\b"
# The files outside of storage that may make threads, each with the reason why these are no lanes of an executor.
THREADS = {
    # A save waits for the disk and for other ranks, and work of the training in a lane would wait behind it.
    "checkpoint/background.py": {"ThreadPoolExecutor"},
    # It asks a store that may never answer, to say why a collective has failed, also where no executor is left.
    "sharding/board.py": {"Thread"},
    # A group's exchange goes on while its rank waits for another one; it moves messages of ranks, and has no executor.
    "sharding/collectives.py": {"LaneThreads"},
}


def threads_made(source: str) -> set[str]:
    """The names by which a file makes threads; it may use them in annotations."""
    if not re.search(_THREADS, source):
        return set()
    calls = [node.func for node in nodes(source) if isinstance(node, ast.Call)]
    bases = [base for node in nodes(source) if isinstance(node, ast.ClassDef) for base in node.bases]
    return set(re.findall(_THREADS, " ".join(map(dotted, calls + bases))))


def test_threads_belong_to_executors() -> None:
    outside = [path for path in files() if part_of(path) != "storage"]
    found = {str(path.relative_to(PACKAGE)): threads_made(path.read_text()) for path in outside}
    assert {name: made for name, made in found.items() if made} == THREADS


@pytest.mark.parametrize(
    "source", ["threading.Thread(target=f)", "with ThreadPoolExecutor(2) as pool: pass", "class Mine(Thread): pass"]
)
def test_threads_are_found(source: str) -> None:
    assert threads_made(source)
    assert not threads_made("lane: LaneThreads | None = None\nisinstance(thread, threading.Thread)")


def test_no_stage_is_compared_outside_the_policies() -> None:
    """But where the options of the strategy are checked."""
    found = {str(path.relative_to(PACKAGE)): stages_compared(path.read_text()) for path in files()}
    assert {name: functions for name, functions in found.items() if functions} == {
        "sharding/policies.py": {"from_stage"},
        "integration/options.py": {"__post_init__", "_check_shard_size", "_check_stores", "replicates"},
    }


def test_messages_below_integration_leave_advice_to_it() -> None:
    below = [path for path in files() if LEVEL.get(part_of(path), 0) > LEVEL["tools"]]
    assert [text for path in below for text in advice_in(path.read_text())] == []


def test_every_case_has_advice() -> None:
    assert all(advice(case) for case in Case)


def test_advice_in_a_message_is_found() -> None:
    source = 'def f():\n    """A strategy=..."""\n    raise ValueError(f\'{x} is wrong; use strategy=zero2\')'
    assert advice_in(source) == [" is wrong; use strategy=zero2"]
    assert advice_in("f'units={x} match nothing', 'use units=[...]', 'a larger shard_size'") == [
        "use units=[...]",
        "a larger shard_size",
    ]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("engine", "import lightning.pytorch as pl"),
        ("engine", "def f():\n    from lightning_zero.planning import plan"),
        ("engine", "from lightning_zero import planning"),
        ("storage", "import lightning_zero.integration.strategy"),
        ("ops", "from lightning_zero.sharding import Bucket"),
        ("update", "if TYPE_CHECKING:\n    from lightning_zero.checkpoint import state"),
        ("sharding", "from lightning_zero.update import make_updater"),
        ("checkpoint", "from lightning_zero.tools import export"),
        ("integration", "from lightning_zero.callbacks import GradientMonitor"),
        ("engine", "from lightning_zero import gathered_parameters"),
    ],
)
def test_upward_imports_are_found(part: str, source: str) -> None:
    assert wrong_imports(source, part)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("folder", "from lightning_zero.checkpoint.file import FileSave"),
        ("file", "from lightning_zero.checkpoint import archive, folder_reader"),
        ("tiles", "import lightning_zero.checkpoint.lazy"),
        ("state", "def f():\n    from lightning_zero.checkpoint import CheckpointError"),
        ("errors", "from lightning_zero.checkpoint import rng"),
        ("remedies", "from lightning_zero.integration.engines import make_engine"),
        ("fabric", "from lightning_zero.integration.strategy import ZeroStrategy"),
        ("executor", "from lightning_zero.storage.streams import StreamExecutor"),
        ("placement", "from lightning_zero.sharding.bucket import Bucket"),
        ("updaters", "from lightning_zero.update import GradientClipping"),
        ("account", "from lightning_zero.planning.plan import Plan"),
        ("shadow", "def f():\n    from lightning_zero.engine.runtime import Engine"),
    ],
)
def test_upward_imports_inside_a_part_are_found(module: str, source: str) -> None:
    part = source.partition("lightning_zero.")[2].split()[0].split(".")[0]
    assert wrong_imports_inside(source, part, module)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "torch.distributed.barrier()",
    ],
)
def test_communication_is_found(source: str) -> None:
    assert communication(source)


@pytest.mark.parametrize("test", ["stage == 3", "self.stage >= 2", "3 == policy.stage"])
def test_compared_stages_are_found(test: str) -> None:
    assert stages_compared(f"def f():\n    return {test}") == {"f"}
