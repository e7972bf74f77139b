"""State dicts of modules and optimizers, unsharded and by parameter name.

They are the same for every stage, store and number of ranks. Weights are the masters. Optimizer state has torch's own
format with parameter names instead of indices, so that plain PyTorch loads it. Before anything is loaded, saved
optimizer state is checked against the state that the loading optimizer needs.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.advice import Case, advice
from lightning_zero.checkpoint.archive_reader import give_back_pages
from lightning_zero.checkpoint.decoding import decoded_lazily
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.shards import CodeValues, Key, OwnedValues, ScaleValues, ShardedValues
from lightning_zero.checkpoint.stand_ins import stand_ins, state_dict_with
from lightning_zero.engine import Engine, Shadow
from lightning_zero.sharding.adoption import load_full
from lightning_zero.sharding.compiled import names_of, plain_name, plain_names
from lightning_zero.sharding.freed import is_metadata
from lightning_zero.sharding.sharded_init import ShardedParameter, load_shard
from lightning_zero.torch_private import load_hooks, pass_versions, tree_leaves, tree_map, version_of
from lightning_zero.update import (
    Blocks,
    BlockShardState,
    OwnedTensor,
    ScaleLayout,
    Updater,
    compacted,
    in_blocks,
    load_own_entries,
    own_entries,
)

StateDict = dict[str, Any]
KIND = "class"  # an optimizer state dict's entry: the name of the optimizer's class; torch's own has none
# "step" is kept by some optimizers only, and those that do not find it begin at 0. "master" and "remainder" are a CPU
# optimizer's copies of the weights, which are loaded with the module.
_NOT_COMPARED = {"step", "master", "remainder"}
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # may need a device that is not available


def module_state_dict(engine: Engine, shadow: Shadow | None = None) -> StateDict:
    """The module's ``state_dict`` with full-precision weights, the same on all ranks. Collective.

    Args:
        engine: the engine of the module.
        shadow: returns its values instead of those of parameters and buffers.

    Returns:
        The state dict. Its parameters are lazy: reading a sharded one gathers it, which is collective (see
        :func:`~lightning_zero.checkpoint.shards.follow_first`), and gives its value at that time.
    """
    engine.in_backward.check_together()
    engine.settle()
    engine.sync_buffers()
    tensors = stand_ins(engine, shadow)
    live = state_dict_with(engine.module, tensors)
    state = OrderedDict((k, tensors[id(v)] if id(v) in tensors else _detached(v)) for k, v in plain_names(live).items())
    pass_versions(live, state, plain_name)
    return state


def _detached(value: Any) -> Any:
    # Extra state may be anything. Lazy tensors require no gradient, and would be fetched.
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def load_module_state_dict(engine: Engine, state: Mapping[str, Any], strict: bool = True) -> None:
    """Overwrite parameters, masters and buffers from unsharded tensors, by the module's own ``load_state_dict``.

    Collective; every rank must have the whole state dict.

    Raises:
        RuntimeError: a key is missing or unexpected (if ``strict``), or a shape differs.
    """
    state = state_for(engine.module, state)
    complete = strict or all(name in state for name, _ in engine.module.named_parameters())
    with engine.in_backward.overwriting(everything=complete):
        engine.settle()
        try:
            with _IntoMasters(engine) as into_masters:
                engine.module.load_state_dict(state, strict=strict)
        finally:
            into_masters.take_over()
            engine.settle()


def check_module_state_dict(module: nn.Module, engine: Engine | None, state: Mapping[str, Any], strict: bool) -> None:
    """Check that a module can load a state dict, without the copies to parameters and buffers. Collective.

    The module's own ``load_state_dict`` runs without them and without setting extra state, so that its hooks see what
    they will see. What hooks write by themselves is not undone. ``None`` as the engine is for a module that has none.

    Raises:
        RuntimeError: a key is missing or unexpected (if ``strict``), or a shape differs.
    """
    with contextlib.ExitStack() as stack:
        if engine is not None:
            into_masters = _IntoMasters(engine)
            stack.callback(into_masters.take_over)
            stack.enter_context(into_masters)
        stack.enter_context(_WithoutCopies(module))
        for each in module.modules():
            if "set_extra_state" not in vars(each):
                vars(each)["set_extra_state"] = lambda state: None
                stack.callback(vars(each).pop, "set_extra_state")
        module.load_state_dict(state_for(module, state), strict=strict)


def state_for(module: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Rename the entries of ``state``, and of the modules' versions that it may have, to the names in ``module``."""
    named = OrderedDict(names_of(module, state))
    own = {plain_name(name): name for name, _ in module.named_modules()}
    pass_versions(state, named, lambda name: own.get(name, name))
    return named


class _IntoMasters(TorchFunctionMode):
    """A mode in which full values copied into a parameter of the engine are loaded into its master.

    If code uses a parameter in another way, its bucket is first unsharded at full precision (collective), and the edits
    are taken over by :meth:`take_over`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shown: set[int] = set()  # ids of the buckets
        self._stack = contextlib.ExitStack()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [] if is_metadata(func) else self._held((args, kwargs))
        if func is Tensor.copy_ and len(held) == 1 and held[0] is args[0] and args[0].shape == args[1].shape:
            bucket = self._engine.bucket_of(args[0])
            assert bucket is not None
            load_full(bucket, bucket.index[id(args[0])], args[1])
            give_back_pages(args[1])
            return args[0]
        for parameter in held:
            self._stack.enter_context(self._engine.gathered([parameter], writeback=True, full_precision=True))
            self._shown.add(id(self._engine.bucket_of(parameter)))
        return func(*args, **kwargs or {})

    def _held(self, arguments: Any) -> list[Parameter]:
        """The parameters of the engine among the arguments that are not unsharded at full precision."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Parameter)]
        buckets = [self._engine.bucket_of(tensor) for tensor in tensors]
        return [
            tensor
            for tensor, bucket in zip(tensors, buckets, strict=True)
            if bucket is not None and id(bucket) not in self._shown
        ]

    def take_over(self) -> None:
        """Take over the edits by user code. Collective if buckets were unsharded."""
        self._stack.close()


class _WithoutCopies(TorchFunctionMode):
    """A mode in which nothing is copied into the parameters and buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.copy_ and id(args[0]) in self._own else func(*args, **kwargs or {})


class FullPrecision(TorchFunctionMode):
    """A mode for loading a module before it has an engine; it remembers values that 16-bit parameters round.

    Masters are later made from these values.
    """

    def __init__(self) -> None:
        self._loaded: list[tuple[Parameter, Tensor, int]] = []  # parameter, full values, version of the parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func is Tensor.copy_ and isinstance(args[0], Parameter) and isinstance(args[1], Tensor)):
            return func(*args, **kwargs or {})
        target, values = args[:2]
        if isinstance(target, ShardedParameter) and target.shape == values.shape:
            load_shard(target, values)
        else:
            func(*args, **kwargs or {})
        give_back_pages(values)
        if target.is_floating_point() and target.dtype.itemsize == 2 < values.dtype.itemsize:
            self._loaded.append((target, values, version_of(target)))
        return target

    def forget_changed(self) -> None:
        """Forget the values of parameters that were changed after loading."""
        self._loaded = [loaded for loaded in self._loaded if version_of(loaded[0]) == loaded[2]]

    def give_to(self, engine: Engine) -> None:
        """Load the remembered full-precision values into the masters of the engine. Collective."""
        for parameter, values, _ in self._loaded:
            bucket = engine.bucket_of(parameter)
            if bucket is not None and parameter.shape == values.shape:
                load_full(bucket, bucket.index[id(parameter)], values)
                give_back_pages(values)
        engine.settle()


def load_shadow_state_dict(engine: Engine, shadow: Shadow, state: Mapping[str, Any], strict: bool = True) -> None:
    """Overwrite the values of a shadow, otherwise like :func:`load_module_state_dict`.

    Not collective, unless the module has its own ``state_dict``, which reads values.
    """
    module = engine.module
    state = names_of(module, state)
    _run_load_hooks(module, state)
    tensors = stand_ins(engine, shadow)
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    own = {name: tensors[id(tensor)] for name, tensor in named if id(tensor) in tensors}
    live = {key: own.get(key, tensors.get(id(v), v)) for key, v in state_dict_with(module, tensors).items()}
    # The messages are torch's own.
    problems = []
    if strict:
        for what, names in ("Missing", live.keys() - state.keys()), ("Unexpected", state.keys() - live.keys()):
            if names:
                listed = ", ".join(f'"{key}"' for key in (*live, *state) if key in names)
                problems.append(f"{what} key(s) in state_dict: {listed}. ")
    problems += [
        f"size mismatch for {key}: copying a param with shape {state[key].shape} from checkpoint, "
        f"the shape in current model is {value.shape}."
        for key, value in live.items()
        if key in state and isinstance(value, Tensor) and value.shape != state[key].shape
    ]
    if problems:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *problems]))
    buffers = {id(buffer) for buffer in shadow.buffers.values()}
    for key, value in live.items():
        if key not in state:
            continue
        if isinstance(value, LazyTensor) and isinstance(value.source, ShardedValues):
            shadow.load(value.source.bucket, value.param, state[key])
            give_back_pages(state[key])
        elif id(value) in buffers:
            value.copy_(state[key])


def _run_load_hooks(module: nn.Module, state: StateDict) -> None:
    """Let the modules' own hooks rename keys in ``state``, as :meth:`torch.nn.Module.load_state_dict` does."""
    for name, child in module.named_modules():
        for hook in load_hooks(child):
            hook(state, f"{name}." if name else "", {}, True, [], [], [])


def optimizer_state_dict(engine: Engine, updater: Updater, compact: bool = False) -> StateDict:
    """The optimizer's ``state_dict`` with parameter names instead of indices, the same on all ranks. Collective.

    Args:
        engine: the engine of the parameters.
        updater: the updater that drives the optimizer.
        compact: keep 8-bit state in the form of :mod:`lightning_zero.update.compact`; otherwise convert it to fp32.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``, the name of the optimizer's class,
        and what the ``state_dict`` of this class adds. State with one value per element has the parameter's shape and
        is lazy; see :func:`module_state_dict`.
    """
    engine.in_backward.check_together()
    names = _parameter_names(engine.module)
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
        for group in updater.optimizer.param_groups
    ]
    mine = {id(p) for group in updater.optimizer.param_groups for p in group["params"]}
    buckets = {n: b for n, b in enumerate(engine.buckets) if any(id(p) in mine for p in b.parameters)}
    optimizer = engine.updaters.index(updater)
    state: StateDict = {}
    for (number, bucket), form in zip(buckets.items(), updater.describe_state([*buckets.values()]), strict=True):
        keys = {name: Key(engine.number, number, dtype, optimizer, name) for name, dtype in form.dtypes.items()}
        blocks = updater.state_of(bucket) if compact else None
        in_compact_form = isinstance(blocks, BlockShardState)
        values = {
            name: _Moments(engine, key, blocks.signed[name])
            if isinstance(blocks, BlockShardState)
            else ShardedValues(engine, key)
            for name, key in keys.items()
        }

        def lazy(leaf: Any, key: Key) -> Any:
            if isinstance(leaf, OwnedTensor):
                return OwnedValues(engine, key._replace(dtype=leaf.dtype, owned=leaf)).tensor(key.param)
            return copy.deepcopy(leaf)

        for index, own in form.own.items():
            tensors = {name: values[name].tensor(index) for name in own.names}
            key = Key(engine.number, number, bucket.dtype, optimizer, param=index)
            rest = tree_map(partial(lazy, key=key), own.rest)
            # Without state, as for plain SGD, torch's format has no entry.
            if (entry := tensors | rest) and id(bucket.parameters[index]) in mine:
                state[names[id(bucket.parameters[index])]] = compacted(entry) if in_compact_form else entry
    added = own_entries(updater.optimizer)
    return {**added, "state": state, "param_groups": groups, KIND: type(updater.optimizer).__name__}


class _Moments(NamedTuple):
    """Makes the compact form of a bucket's 8-bit state in blocks, for one parameter at a time."""

    engine: Engine
    key: Key
    signed: bool

    def tensor(self, param: int) -> dict[str, Any]:
        codes = CodeValues(self.engine, self.key._replace(dtype=torch.int8, part="codes"))
        scales = ScaleValues(self.engine, self.key._replace(dtype=torch.uint8, part="scales"))
        bucket = codes.bucket
        blocks = Blocks(self.signed, bucket.formats[param], ScaleLayout.of(bucket.layout).starts(param))
        return in_blocks(blocks, codes.tensor(param), scales.tensor(param))


def check_optimizer_state_dict(engine: Engine, updater: Updater, saved: Mapping[str, Any]) -> dict[int, Any]:
    """Check that :func:`load_optimizer_state_dict` can load a state dict; nothing is changed.

    Returns:
        By id of the parameter, its key in the saved state.

    Raises:
        ValueError: the parameter groups or the kind of state do not match the optimizer's.
    """
    saved = decoded_lazily(saved)
    optimizer, names = updater.optimizer, _parameter_names(engine.module)
    name = type(optimizer).__name__
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has {len(saved['param_groups'])} parameter groups for {name}, which has "
            f"{len(optimizer.param_groups)}; configure the same groups, {_alone()}"
        )
    numbers = _numbers(engine.module, optimizer, saved)
    keys: dict[int, Any] = {}  # by parameter id: its key in the saved state
    for number, (group, old) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        own = {names[id(p)]: p for p in group["params"]}
        given = {numbers.get(key, key): key for key in old["params"]}
        by_name = all(isinstance(key, str) for key in given)
        # Frozen parameters have no state, and some writers leave them out.
        needed = {key for key, parameter in own.items() if parameter.requires_grad}
        if not (needed <= given.keys() <= own.keys() if by_name else len(given) == len(own)):
            differing = f": {', '.join(sorted(own.keys() ^ given.keys())[:5])}" if by_name else ""
            raise ValueError(
                f"parameter group {number} of {name} has {len(own)} parameters, in the checkpoint "
                f"{len(given)}{differing}; configure the same groups, {_alone()}"
            )
        fitting = given if by_name else own
        keys.update((id(own[key]), saved_as) for key, saved_as in zip(fitting, old["params"], strict=True))
    _check_kind(updater, saved, keys, names)
    return keys


def load_optimizer_state_dict(engine: Engine, updater: Updater, saved: Mapping[str, Any]) -> None:
    """Restore hyperparameters and this rank's shard of the state, from this package's format or plain torch's.

    Every rank must have the full state dict.

    Raises:
        ValueError: see :func:`check_optimizer_state_dict`; nothing is changed then.
    """
    kept, saved = saved, decoded_lazily(saved)
    keys, optimizer = check_optimizer_state_dict(engine, updater, saved), updater.optimizer
    engine.await_updates()  # they write the state that is dropped now
    engine.admit()  # state has the dtype of masters: callbacks may have added parameters
    updater.clear()
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        # Copied as in `load_state_dict`: tensors, such as a learning rate, may lie on the pages of the file.
        group.update(copy.deepcopy({k: v for k, v in old.items() if k not in ("params", "param_names")}))
    # As in `load_state_dict`: the optimizer's class adapts the hyperparameters, such as AdamW those of Adam.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    load_own_entries(optimizer, {k: v for k, v in saved.items() if k not in ("state", "param_groups", KIND)})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            key = keys.get(id(parameter))
            state = saved["state"].get(key)
            bucket = engine.bucket_of(parameter)
            if state is not None and bucket is not None:
                updater.load(bucket, bucket.index[id(parameter)], state)
                for value in tree_leaves(kept["state"][key]):
                    if isinstance(value, Tensor):
                        give_back_pages(value)


def _numbers(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Returns the parameters' names by their numbers in the saved state, if these refer to the module's parameters.

    In torch's own format numbers refer to the parameters of the groups; then the result is empty. In FSDP's format they
    refer to the parameters of the module, in ascending order in each group. If the numbers fit both formats, the shapes
    of the state decide.
    """
    numbers = [key for group in saved["param_groups"] for key in group["params"]]
    if any(isinstance(key, str) for key in numbers):
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    counted = numbers == [*range(len(parameters))]
    if counted and all(_fits(saved["state"].get(n), parameter) for n, parameter in enumerate(parameters)):
        return {}
    in_module, names = list(module.parameters()), _parameter_names(module)
    if not all(n < len(in_module) and _fits(saved["state"].get(n), in_module[n]) for n in numbers):
        return {}
    return {n: names[id(in_module[n])] for n in numbers}


def _fits(state: Mapping[str, Any] | None, parameter: Tensor) -> bool:
    """Whether all tensors, except scalars, in a parameter's saved state have its shape."""
    values = [value for value in (state or {}).values() if isinstance(value, Tensor) and value.dim()]
    return all(value.shape == parameter.shape for value in values)


def _parameter_names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def _check_kind(updater: Updater, saved: Mapping[str, Any], keys: Mapping[int, Any], names: Mapping[int, str]) -> None:
    """Check that an optimizer can continue from a state dict whose groups match its own.

    State of the same class always fits, if shapes do. State of another class, or of an unknown one (in plain torch's
    format), must have the names that this optimizer's state has under the saved hyperparameters. So Adam's state fits
    AdamW and the CPU optimizers.

    Args:
        updater: the updater that drives the optimizer.
        saved: the state dict.
        keys: keys in the saved state, by id of the parameter.
        names: names of the parameters, by id.

    Raises:
        ValueError: the state does not fit; the message says what differs.
    """
    optimizer, kind = updater.optimizer, saved.get(KIND)
    name = type(optimizer).__name__
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        states = [(p, saved["state"][keys[id(p)]]) for p in group["params"] if keys.get(id(p)) in saved["state"]]
        for parameter, state in states:
            _check_shapes(updater.state_shapes(group, parameter), parameter, state, names[id(parameter)])
        if kind == name:
            continue
        writer = kind or "the optimizer that wrote the checkpoint"
        rule = group | {key: value for key, value in old.items() if key not in _IMPLEMENTATION}
        for parameter, state in states:
            needed = updater.state_names(rule, parameter) - _NOT_COMPARED
            found = {key for key, value in state.items() if isinstance(value, Tensor)} - _NOT_COMPARED
            if found != needed:
                raise ValueError(
                    f"{writer} keeps {_listed(found)} of {names[id(parameter)]}, {name} keeps {_listed(needed)}; "
                    f"configure the optimizer that was saved, {_alone()}"
                )
        # Before the first step there is no state, so hyperparameters are compared.
        if kind is not None and (missing := {key for key in _hyperparameters(optimizer.defaults) if key not in old}):
            raise ValueError(
                f"{writer} has no {_listed(missing)}, which {name} needs; configure the optimizer that was saved, "
                f"{_alone()}"
            )


def _check_shapes(needed: Mapping[str, torch.Size], parameter: Parameter, state: Mapping[str, Any], name: str) -> None:
    for key in sorted(needed.keys() & state.keys()):
        value = state[key]
        if isinstance(value, Tensor) and value.shape != needed[key]:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint, the parameter "
                f"{tuple(parameter.shape)}; configure the groups in the order in which they were saved, {_alone()}"
            )


def _hyperparameters(defaults: Mapping[str, Any]) -> list[str]:
    """Names of the hyperparameters of the update rule, without those that choose between implementations."""
    return [
        key for key, value in defaults.items() if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    ]


def _listed(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "no state"


def _alone() -> str:
    """The end of a message about state that does not fit: the remedy."""
    return advice(Case.STATE_DOES_NOT_FIT, default="or load the weights alone")
