"""Private names of other packages live in one file for each; an upgrade that takes one away is told by name.

To give another package such a file, add a row to `HOMES`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers.sources import PACKAGE, files, nodes
from torch.optim import Optimizer

from lightning_zero import torch_private
from lightning_zero.integration import private
from lightning_zero.integration.private import INHERITED

# By the package that has the names: the only file of ours that may use them.
HOMES = {
    "lightning": "integration/private.py",
    "pytorch_lightning": "integration/private.py",
    "torch": "torch_private.py",
}
OTHERS = {
    "_replace": "of named tuples, documented",
    "_get_full_key": "of OmegaConf's nodes",
    "_target_": "Hydra's key, documented",
}
# Floors whose classes extend Lightning's, and whose objects are Lightning's.
LIGHTNING = ("integration", "callbacks")
GET = ("getattr", "setattr", "hasattr", "delattr")


class Use(NamedTuple):
    """A private name that a file uses of something else than `self`, `cls` or `super()`."""

    name: str
    line: int


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own(node: ast.expr) -> bool:
    """Whether an object is the one that a method belongs to."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("super", "type")
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def uses(source: str) -> Iterator[Use]:
    """Attributes of other objects, also by their names as text, and entries of dictionaries such as a state dict."""
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not own(node.value):
            whole = ast.unparse(node)
            yield Use(whole if whole.startswith(("torch.", "nn.")) else node.attr, node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GET:
            texts = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from (Use(text, node.lineno) for text in texts if isinstance(text, str) and is_private(text))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key = node.slice.value
            yield from [Use(key, node.lineno)] if isinstance(key, str) and is_private(key) else []


def private_imports(source: str, package: str) -> Iterator[Use]:
    for node in nodes(source):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == package and any(map(is_private, name.split("."))):
                yield Use(name, node.lineno)


@cache
def ours() -> frozenset[str]:
    """Private names that this package defines: of functions, classes, variables, fields and attributes."""
    found = set()
    for path in files():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(filter(is_private, found))


def declared(package: str) -> set[str]:
    """Private names of a package in the file that may use them."""
    source = (PACKAGE / HOMES[package]).read_text()
    imported = {use.name.rpartition(".")[2] for use in private_imports(source, package)}
    return imported | {use.name for use in uses(source)}


@pytest.mark.parametrize("package", HOMES)
def test_private_names_are_imported_in_one_file(package: str) -> None:
    found = {relative(path): list(private_imports(path.read_text(), package)) for path in files()}
    assert {name for name, uses in found.items() if uses} <= {HOMES[package]}, found


def test_lightning_is_reached_into_in_one_file() -> None:
    """Any private name of another object that is not ours is taken for Lightning's, and so is one that it shares."""
    theirs = declared("lightning")
    for path in files():
        if relative(path).startswith(LIGHTNING) and relative(path) != HOMES["lightning"]:
            found = [use for use in uses(path.read_text()) if use.name not in ours() or use.name in theirs]
            assert not found, path


def test_torch_is_reached_into_in_one_file() -> None:
    """Below integration, any private name of another object that is not ours is taken for torch's."""
    for path in files():
        if not relative(path).startswith(LIGHTNING) and relative(path) != HOMES["torch"]:
            found = [use for use in uses(path.read_text()) if use.name not in ours() | OTHERS.keys()]
            assert not found, path


@pytest.mark.parametrize("package", ["lightning", "torch"])
def test_no_other_floor_knows_these_names(package: str) -> None:
    theirs = declared(package) - ours()
    for path in files():
        if relative(path) != HOMES[package]:
            assert not [use for use in uses(path.read_text()) if use.name in theirs], path


def test_names_of_torch_are_no_names_of_ours() -> None:
    """Else a use of torch's could be taken for a use of ours."""
    assert not {use.name for use in uses((PACKAGE / HOMES["torch"]).read_text())} & ours()


# ------------------------------------------------------------------------------------------------------- inheritance


def classes() -> list[type]:
    """Classes of ours that extend one of Lightning's."""
    found = []
    for path in files():
        if relative(path).startswith(LIGHTNING):
            module = importlib.import_module(f"lightning_zero.{relative(path)[:-3].replace('/', '.')}")
            found += [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    return [c for c in found if lightning_bases(c)]


def lightning_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "lightning"]


def private_of(cls: type) -> set[str]:
    """Private names that a class's source gives to itself and to its objects, or uses of them."""
    found = set()
    for node in nodes(inspect.getsource(cls)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return set(filter(is_private, found))


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_names_shared_with_a_base_of_lightning_are_listed(cls: type) -> None:
    """Also those that we happened to choose, and that a base has or gets: two meanings of one attribute."""
    theirs = {name for base in lightning_bases(cls) for name in private_of(base)}
    shared = private_of(cls) & theirs
    listed = INHERITED.get(cls.__name__, {})
    assert shared <= listed.keys(), f"{cls.__name__} shares {sorted(shared - listed.keys())} with Lightning's class"
    gone = listed.keys() - theirs
    assert not gone, f"Lightning's base of {cls.__name__} has no {sorted(gone)} any more; it was: {listed}"
    assert listed.keys() <= shared


def test_every_entry_speaks_of_a_class() -> None:
    assert INHERITED.keys() <= {cls.__name__ for cls in classes()}


# ---------------------------------------------------------------------------------------------------------- upgrades


def imported() -> list[tuple[str, str, str]]:
    """Package, module and name of each private import."""
    found = []
    for package in ("lightning", "torch"):
        for use in private_imports((PACKAGE / HOMES[package]).read_text(), package):
            module, _, name = use.name.rpartition(".")
            found.append((package, module, name))
    return found


@pytest.mark.parametrize(("package", "module", "name"), imported())
def test_an_imported_name_is_still_there(package: str, module: str, name: str) -> None:
    assert importlib.util.find_spec(module), f"{package} has no module {module} any more; see {HOMES[package]}"
    there = hasattr(importlib.import_module(module), name)
    assert there, f"{package}'s {module} has no {name} any more; see {HOMES[package]} for what it was for"


# Attributes that functions of the file read: the class that has them, and how it gets them.
ATTRIBUTES = {
    "_link_checkpoint": ("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint"),
    "_select_ckpt_path": ("lightning.pytorch.trainer.connectors.checkpoint_connector", "_CheckpointConnector"),
    "_average_model": ("lightning.pytorch.callbacks.weight_averaging", "WeightAveraging"),
    "_throughputs": ("lightning.pytorch.callbacks.throughput_monitor", "ThroughputMonitor"),
    "_accelerator_connector": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "_checkpoint_connector": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "_signal_connector": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "_teardown": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "_slurm_sigusr_handler_fn": ("lightning.pytorch.trainer.connectors.signal_connector", "_SignalConnector"),
    "_broadcast_sigterm_tensor": ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop"),
    "_precision_flag": ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    "_active_loop": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "_combined_loader": ("lightning.pytorch.loops.prediction_loop", "_PredictionLoop"),
    "_data_fetcher": ("lightning.pytorch.loops.prediction_loop", "_PredictionLoop"),
    "_resuming_from_checkpoint": ("lightning.pytorch.loops.loop", "_Loop"),
    "_mode": ("lightning.pytorch.utilities.combined_loader", "CombinedLoader"),
    "_log_graph": ("lightning.pytorch.loggers.tensorboard", "TensorBoardLogger"),
    "_compiler_ctx": ("lightning.pytorch.core.module", "LightningModule"),
    "_start_method": ("lightning.pytorch.strategies.ddp", "DDPStrategy"),
}

# Methods that are replaced and not called.
REPLACED = {
    private.FIND_LAST: ("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint"),
    private.TERMINATE: ("lightning.pytorch.trainer.connectors.signal_connector", "_SignalConnector"),
}


def test_every_attribute_is_known() -> None:
    source = (PACKAGE / HOMES["lightning"]).read_text()
    assert {use.name for use in uses(source)} == ATTRIBUTES.keys()


@pytest.mark.parametrize("name", ATTRIBUTES | REPLACED)
def test_an_attribute_is_still_there(name: str) -> None:
    module, cls = (ATTRIBUTES | REPLACED)[name]
    owner = getattr(importlib.import_module(module), cls, None)
    assert owner is not None, f"Lightning's {module} has no {cls} any more, which had {name}"
    names = {name for base in lightning_bases(owner) for name in private_of(base)}
    assert name in names, f"Lightning's {cls} has no {name} any more; see integration/private.py for what it was for"


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def stepped() -> Optimizer:
    """An optimizer that has a scheduler and has stepped."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    return optimizer


def one_cycle() -> object:
    return torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD([parameter()], lr=0.1, momentum=0.9), 1.0, 10)


def typed_storage() -> object:
    return torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(8), dtype=torch.float32, _internal=True)


# By the private name that the file uses: an object of torch that has it.
OWNERS: dict[str, Callable[[], object]] = {
    "nn.Module._apply": lambda: torch.nn.Module,
    "nn.RNNBase._apply": lambda: torch.nn.RNNBase,
    "torch._C": lambda: torch,
    "torch._C._autograd": lambda: torch._C,
    "torch._C._autograd._unsafe_set_version_counter": lambda: torch._C._autograd,
    "torch._C._current_graph_task_id": lambda: torch._C,
    "torch._C._disabled_torch_function_impl": lambda: torch._C,
    "torch._C._storage_Use_Count": lambda: torch._C,
    "torch._foreach_copy_": lambda: torch,
    "torch._foreach_norm": lambda: torch,
    "torch._utils": lambda: torch,
    "torch.autograd.profiler._is_profiler_enabled": lambda: torch.autograd.profiler,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": lambda: torch.ops.aten,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda: torch.ops.aten,
    "torch._utils._rebuild_parameter": lambda: torch._utils,
    "torch._utils._rebuild_parameter_with_state": lambda: torch._utils,
    "torch._utils._rebuild_tensor_v2": lambda: torch._utils,
    "torch.ops.aten._local_scalar_dense": lambda: torch.ops.aten,
    "torch.ops.aten._to_copy": lambda: torch.ops.aten,
    "_base": parameter,
    "_cdata": lambda: torch.UntypedStorage(1),
    "_checkpoint_offset": lambda: torch.UntypedStorage,
    "_compiled_call_impl": lambda: torch.nn.Linear(1, 1),
    "_fake_device": lambda: torch.storage.TypedStorage,
    "_is_view": parameter,
    "_load_state_dict_pre_hooks": lambda: torch.nn.Linear(1, 1),
    "_make_subclass": lambda: torch.Tensor,
    "_make_wrapper_subclass": lambda: torch.Tensor,
    "_metadata": lambda: torch.nn.Linear(1, 1).state_dict(),
    "_modules": lambda: torch.nn.Linear(1, 1),
    "_opt_called": stepped,
    "_optimizer_step_post_hooks": stepped,
    "_optimizer_step_pre_hooks": stepped,
    "_post_accumulate_grad_hooks": parameter,
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_sequence_nr": lambda: (parameter() * 2).grad_fn,
    "_untyped_storage": typed_storage,
    "_use_count": parameter,
    "_version": parameter,
    "_wrapped_by_lr_sched": lambda: stepped().step,
}
# The same of names that stand there as text, and of public names of a private module.
OWNERS_OF_TEXTS: dict[str, Callable[[], object]] = {
    "DisableTorchFunction": lambda: torch._C,
    "DisableTorchFunctionSubclass": lambda: torch._C,
    torch_private.CLEAN_STEPS: lambda: SimpleNamespace(**torch.amp.GradScaler("cpu").state_dict()),
    torch_private.ORIGINAL: lambda: torch.compile(torch.nn.Linear(1, 1)),
    **dict.fromkeys(sorted(torch_private.PRIVATE_METADATA), parameter),
    **dict.fromkeys(torch_private.OPTIMIZER_HOOKS, stepped),
    **dict.fromkeys(torch_private.SCHEDULE_OF_ONE_CYCLE, one_cycle),
}


def test_every_name_of_torch_is_known() -> None:
    assert {use.name for use in uses((PACKAGE / HOMES["torch"]).read_text())} == OWNERS.keys()


@pytest.mark.parametrize(("name", "owner"), [*OWNERS.items(), *OWNERS_OF_TEXTS.items()])
def test_a_name_of_torch_is_still_there(name: str, owner: Callable[[], object]) -> None:
    found = owner()
    there = hasattr(found, name.rpartition(".")[2])
    assert there, f"torch {torch.__version__} has no {name} of {found!r} any more; see {HOMES['torch']}"


# ------------------------------------------------------------------------------------------------- the tests' own tests


@pytest.mark.parametrize(
    "source",
    [
        "torch._C.f",
        "nn._x",
        "trainer._data_connector",
        "strategy.model._x",
        "getattr(trainer, '_loggers', None)",
        "a[0]._b.c",
        "state['_growth_tracker']",
    ],
)
def test_reaching_in_is_found(source: str) -> None:
    assert list(uses(source))


@pytest.mark.parametrize("source", ["self._data", "super()._swap()", "a.__class__", "a.b", "getattr(a, 'b')", "a['b']"])
def test_public_and_own_names_are_left_alone(source: str) -> None:
    assert not list(uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "from lightning.pytorch.core.optimizer import _MockOptimizer",
        "import lightning._private",
        "def f():\n    from lightning._private import thing",
    ],
)
def test_private_imports_are_found(source: str) -> None:
    assert list(private_imports(source, "lightning"))
