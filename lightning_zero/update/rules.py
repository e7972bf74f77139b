"""Trials of optimizers, which find out whether the update of an element depends on that element alone.

If it does, the rule is *element-wise* and can update the parts of parameters that shards have. Any other rule gets
whole parameters (see :class:`~lightning_zero.sharding.WholeLayout`), provided that it updates each parameter
independently of the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import is_communication_error
from lightning_zero.torch_private import tree_leaves
from lightning_zero.update.counted import KeptOutsideError, Written, attributes_of, check_alone
from lightning_zero.update.shell import ShellGroup, StepCall, run_step, snapshot, takes_closure

# These update an element from the parameter, gradient and state of that element only.
ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)

# Torch's classes that make tensors in fp32, or in fp64 if that is the default dtype; ASGD makes some in any other, too.
DTYPES_STATED = (ELEMENT_WISE - {torch.optim.ASGD}) | {torch.optim.Muon}

# The keys are names of classes, so that the same rule in another library is recognized, too.
REFUSED = {
    "LBFGS": "it keeps one history over all parameters and evaluates the loss several times in a step",
    "SparseAdam": "it needs sparse gradients",
}
_STEPS = 3
_RATE = 0.05  # of trials
_STRONG = 100.0  # a factor of gradients, by which their norm exceeds thresholds
_MATRIX = (4, 6)
_SHAPES = ((), (24,), _MATRIX, (2, 3, 4))  # by number of dimensions
_LARGE = ((8192,), (64, 128))
# The errors that a rule may raise if it cannot update the given tensors.
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


@dataclass(frozen=True)
class Traits:
    """The results of trials of an optimizer.

    Attributes:
        whole: for each group, whether the update needs whole parameters.
        per_element: names of the state with one value per element.
        own_dtype: names of the floating-point state whose dtype is not the parameter's.
        counts: whether a step writes to the groups or to attributes. The values do not depend on what it updates.
    """

    whole: tuple[bool, ...]
    per_element: frozenset[str]
    own_dtype: frozenset[str] = frozenset()
    counts: bool = False


class _Example(NamedTuple):
    """A parameter for a trial of a rule, and its gradient in each step."""

    initial: Tensor
    gradients: list[Tensor]

    @classmethod
    def of(cls, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> _Example:
        generator = torch.Generator().manual_seed(len(shape))
        made = [
            torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
            for _ in range(_STEPS + 1)
        ]
        return cls(made[0], made[1:])

    def strong(self) -> _Example:
        """The example with large gradients."""
        return self._replace(gradients=[gradient * _STRONG for gradient in self.gradients])

    def part(self, part: slice) -> _Example:
        """A 1-D part of the example. Its initial values have memory of their own."""
        return _Example(self.initial.reshape(-1)[part].clone(), [g.reshape(-1)[part] for g in self.gradients])


class _Outcome(NamedTuple):
    """The values and the state of parameters after the steps of a trial, and what each step wrote outside of them."""

    values: list[Tensor]
    states: list[dict[str, Any]]
    written: list[Written]


def examine(optimizer: Optimizer, device: torch.device) -> Traits:
    """Find out by trial what the updates of an optimizer need.

    torch's element-wise classes are known. They are tried on the host, so that this works even if a device is out of
    memory. An optimizer of any other class makes three steps on small parameters, with the numbers of dimensions that
    occur in each group, both whole and split in two as shards split them. If the values or the state differ, if a step
    fails on parts, or if the steps change no value, which proves nothing, the optimizer needs whole parameters. Then
    the result for each parameter must have the same bits alone and together with others. Both are tried with large
    gradients, too, and the former with large parameters. Values that a step writes to its group and to attributes (a
    count of steps) must not depend on what it updates.

    Args:
        optimizer: as the user configured it; it is not changed.
        device: where its shards will be updated. For the meta device the trial is made on the host.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: the optimizer can update neither parts of parameters nor single whole parameters; or it keeps more
            than a count outside of ``state``; or its state has tensors of a class other than torch's plain one, or is
            paged; or it evaluates the loss more than once; or it wraps another optimizer; or a parameter has settings
            that shards would lose.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{optimizer!r} is not a torch.optim.Optimizer; {_remedy()}")
    name = type(optimizer).__name__
    if name in REFUSED:
        raise ValueError(f"{name} cannot run over shards: {REFUSED[name]}; {_remedy()}")
    if wrapped := _wrapped(optimizer):
        raise ValueError(
            f"{name} cannot run over shards: it has another optimizer of its parameters, {type(wrapped[0]).__name__}, "
            f"whose step would update them as a whole; {_remedy()}"
        )
    if getattr(optimizer, "is_paged", False):  # the public attribute of optimizers of bitsandbytes
        raise ValueError(
            f"{name} cannot run over shards: it allocates its state in unified memory (is_paged=True), and not "
            "where the state of shards rests. Use it without paging, such as bnb.optim.AdamW8bit"
            f"{advice(Case.NOT_ON_HOST, '; if its state does not fit the device, ')}"
            f"{advice(Case.CANNOT_BE_SHARDED, ', ')}"
        )
    _check_overrides(optimizer)
    whole, per_element, own_dtype, counts = [], set[str](), set[str](), False
    with torch.random.fork_rng(devices=[]):
        # Groups may differ in the state that they keep (momentum, amsgrad), and in their rule.
        for group in optimizer.param_groups:
            trial = _Trial(optimizer, *_place(optimizer, group, device))
            known = type(optimizer) in ELEMENT_WISE
            dims = {2} if known else {parameter.dim() for parameter in group["params"]} or {2}
            small = [_Example.of(_shape(_SHAPES, n), trial.device) for n in sorted(dims)]
            outcome = trial.run_each(small)
            whole.append(not known and trial.needs_whole(sorted(dims), small, outcome))
            counts = counts or (not known and any(outcome.written))
            for example, state in zip(small, outcome.states, strict=True):
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == example.initial.shape:
                        per_element.add(key)
                    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
                        own_dtype.add(key)
    return Traits(tuple(whole), frozenset(per_element), frozenset(own_dtype), counts)


def _wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of the same parameters that an optimizer has in its attributes."""
    attributes = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    others = [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, Optimizer) and leaf is not optimizer]
    return [other for other in others if not _ids(optimizer).isdisjoint(_ids(other))]


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _check_overrides(optimizer: Optimizer) -> None:
    """Refuse an optimizer of bitsandbytes whose ``GlobalOptimManager`` has other settings for one of its parameters.

    The manager finds a parameter by its id or its place in a group, and shards have neither.

    Raises:
        ValueError: it has settings that are not the optimizer's own.
    """
    manager, own = getattr(optimizer, "mng", None), getattr(optimizer, "args", None)
    overrides: dict[int, dict[str, Any]] = dict(getattr(manager, "pid2config", {}))
    for module, name, settings in getattr(manager, "module_weight_config_triple", ()):
        overrides[id(getattr(module, name, None))] = settings
    for group in optimizer.param_groups if overrides else ():
        for parameter in group["params"]:
            settings = overrides.get(id(parameter), {})
            if any(getattr(own, key, None) != value for key, value in settings.items()):
                raise ValueError(
                    f"{type(optimizer).__name__}: the GlobalOptimManager of bitsandbytes overrides {settings} for a "
                    f"parameter of shape {tuple(parameter.shape)}, as bnb.nn.Embedding and StableEmbedding have it do, "
                    "and it would not find the parameter's shards. Give the parameter to a second optimizer with these "
                    "arguments, such as bnb.optim.AdamW(optim_bits=32), set lr and the like in a parameter group, or "
                    f"use torch.nn.Embedding{advice(Case.CANNOT_BE_SHARDED, ', ')}"
                )


def _shape(shapes: Sequence[tuple[int, ...]], number: int) -> tuple[int, ...]:
    """The shape with a number; numbers beyond the last shape add as many dimensions to it."""
    return (*shapes[min(number, len(shapes) - 1)], *(2,) * (number - len(shapes) + 1))


@dataclass(frozen=True)
class _Trial:
    """Trials of an optimizer with the hyperparameters of a group, on a device."""

    optimizer: Optimizer
    group: dict[str, Any]
    device: torch.device

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    def run_each(self, examples: Sequence[_Example]) -> _Outcome:
        """Update each example alone.

        Raises:
            ValueError: the optimizer fails.
        """
        outcome = _Outcome([], [], [])
        for example in examples:
            try:
                values, states, written = self._run([example])
            except _FAILURES as error:
                _raise_if_of_others(error)
                raise ValueError(
                    f"{self.name} could not update a parameter of shape {tuple(example.initial.shape)}: {error}; "
                    f"{_remedy()}"
                ) from error
            check_plain(self.name, states[0])
            outcome.values.extend(values)
            outcome.states.extend(states)
            outcome.written.extend(written)
            if any(written) and type(self.optimizer) not in ELEMENT_WISE:  # torch's only change flags without effect
                self._check_counts(written)
        return outcome

    def _check_counts(self, written: Sequence[Written]) -> None:
        """Refuse writes of a step to its group or to attributes that depend on the parameters.

        A step on two groups without parameters must write the same values.

        Raises:
            ValueError: it writes other values, or fails.
        """
        try:
            alone = self._run([], groups=2).written
        except _FAILURES as error:
            _raise_if_of_others(error)
            alone = []
        check_alone(self.name, written, alone)

    def needs_whole(self, dims: Sequence[int], small: Sequence[_Example], outcome: _Outcome) -> bool:
        """Tell whether the optimizer needs whole parameters.

        Args:
            dims: the numbers of dimensions of the parameters.
            small: an example of each.
            outcome: what the optimizer made of each example alone.

        Raises:
            ValueError: not even these are enough; see :meth:`check_independent`.
        """
        element_wise = self.is_element_wise(small, outcome)
        # Some optimizers quantize the state of large parameters only, or clip large gradients only. Where parameters
        # are known to be needed whole, they stay small: the matrices of a preconditioner could be huge.
        large = [_Example.of(_shape(_LARGE, n - 1), self.device) for n in dims if n] if element_wise else small
        strong = [example.strong() for example in large]
        of_strong = self.run_each(strong)
        if element_wise and self.is_element_wise(strong, of_strong):
            return False
        self.check_independent(small, outcome)
        self.check_independent(strong, of_strong)
        return True

    def is_element_wise(self, examples: Sequence[_Example], whole: _Outcome) -> bool:
        """Tell whether parts of the examples are updated in the same way as the whole examples, given by ``whole``."""
        for example, value, state in zip(examples, whole.values, whole.states, strict=True):
            cut = example.initial.numel() // 2 - 1  # inside a row
            if cut < 1:
                continue
            try:
                parts = [self._run([example.part(p)]) for p in (slice(0, cut), slice(cut, None))]
            except _FAILURES as error:
                _raise_if_of_others(error)
                return False
            joined = torch.cat([part.values[0] for part in parts])
            kinds = [_kinds(part.states[0], part.values[0]) for part in parts]
            own = _kinds(state, value)
            if not _equal(joined, value.reshape(-1)) or own is None or any(kind != own for kind in kinds):
                return False
            if not all(_is_joined(kept, [part.states[0][name] for part in parts]) for name, kept in state.items()):
                return False
            if torch.equal(value, example.initial):  # a rule may begin to move parameters after a trial has ended
                return False
        return True

    def check_independent(self, examples: Sequence[_Example], alone: _Outcome) -> None:
        """Refuse a rule by which parameters depend on each other, because these are on different ranks.

        Raises:
            ValueError: the update of a parameter depends on others, or on random numbers; or it fails beside others.
        """
        # There are two parameters of each shape, so that a group with one shape can be tested, too.
        try:
            together = self._run([*examples, *(e._replace(initial=e.initial * 2) for e in examples)])
        except _FAILURES as error:
            _raise_if_of_others(error)
            raise ValueError(
                f"{self.name} cannot run over shards: it can update a parameter alone, but not together with others: "
                f"{error}; {_remedy()}"
            ) from error
        for value, expected in zip(together.values, alone.values, strict=False):
            if not _equal(value, expected):
                raise ValueError(
                    f"{self.name} cannot run over shards: what it makes of one parameter depends on the others, which "
                    f"lie on other ranks, or on random numbers; alone, a value differs by up to "
                    f"{(value - expected).abs().max().item():.3g}; {_remedy()}"
                )

    def run(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """The state of a parameter of this shape and dtype after the steps."""
        with torch.random.fork_rng(devices=[]):
            return self._run([_Example.of(shape, self.device, dtype)]).states[0]

    def _run(self, examples: Sequence[_Example], groups: int = 1) -> _Outcome:
        """Update the examples with one call per step. All of them are in the first of the groups."""
        tensors = [example.initial.clone() for example in examples]
        states = {tensor: fresh_state(self.optimizer, tensor) for tensor in tensors}
        hyperparameters = _at_rate({k: copy.deepcopy(v) for k, v in self.group.items() if k != "params"})
        optimizer, written = snapshot(self.optimizer), []
        for step in range(_STEPS):
            for tensor, example in zip(tensors, examples, strict=True):
                tensor.grad = example.gradients[step].clone()
            before = copy.deepcopy((hyperparameters, attributes_of(optimizer)))
            closure = _Closure()
            call = StepCall(optimizer, **({"closure": closure} if takes_closure(optimizer) else {}))
            members = [ShellGroup(tensors, hyperparameters), *[ShellGroup([], hyperparameters)] * (groups - 1)]
            shell = run_step(optimizer, members, states, call)
            written.append(Written.by(shell, *before))
            if type(self.optimizer) not in ELEMENT_WISE:
                changed = Written.between(*before, hyperparameters, attributes_of(optimizer))
                if changed or any(not written[-1].same(Written.by(shell, *before, i)) for i in range(groups)):
                    raise _CannotRunError(
                        f"{self.name} keeps state outside `state`, in tensors that a step changes in place or "
                        f"differently by group. Keep it in self.state[parameter]{advice(Case.CANNOT_BE_SHARDED, ', ')}"
                    )
                if closure.calls > 1:
                    raise _CannotRunError(
                        f"{self.name} cannot run over shards: it evaluates the loss {closure.calls} times in a step, "
                        f"the gradients of which would have to be reduced in between; {_remedy()}"
                    )
            hyperparameters.update(written[-1].group)
            vars(optimizer).update(written[-1].attributes)
        return _Outcome(tensors, [states[tensor] for tensor in tensors], written)


class _CannotRunError(ValueError):
    """Raised if the optimizer cannot run over shards at all, so that no other trial is worthwhile."""


class _Closure:
    """Stands for the evaluation of the loss, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return torch.zeros((), dtype=torch.float32, device="cpu")


def _raise_if_of_others(error: Exception) -> None:
    """Raise errors that are not the rule's: a device that lags behind the host may report earlier work's only now."""
    if is_communication_error(error) or isinstance(error, torch.OutOfMemoryError | KeptOutsideError | _CannotRunError):
        raise error


def _equal(values: Tensor, others: Tensor) -> bool:
    return torch.equal(values.isnan(), others.isnan()) and torch.equal(values.nan_to_num(), others.nan_to_num())


def _kinds(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """The kind of value of each name. ``None`` if a value is neither one number nor one number for every element.

    Matrices, histories and objects may begin to influence the update only after a trial has ended.
    """
    kinds = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            return None
        if not isinstance(value, Tensor | int | float | str | None):
            return None
        kinds[name] = (type(value), value.dtype, value.numel() > 1) if isinstance(value, Tensor) else type(value)
    return kinds


def _is_joined(whole: Any, parts: Sequence[Any]) -> bool:
    """Tell whether a value of state is that of the parts: joined if it has a number for every element, else the same.

    One number, such as an average of norms, may begin to influence the update only after a trial has ended.
    """
    if not isinstance(whole, Tensor):
        return all(part == whole for part in parts)
    if whole.numel() > 1:
        return torch.equal(torch.cat([_bits(part) for part in parts]), _bits(whole))
    return all(torch.equal(_bits(part), _bits(whole)) for part in parts)


def _bits(values: Tensor) -> Tensor:
    """The bits of values of any dtype as bytes: not all dtypes can be compared."""
    return values.reshape(-1).contiguous().view(torch.uint8)


def check_plain(name: str, state: Mapping[str, Any]) -> None:
    """Refuse tensors of other classes than torch's plain one. Shards and checkpoints would make them plain and large.

    Raises:
        ValueError: ``state`` has such a tensor.
    """
    for key, value in state.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and type(leaf) not in (Tensor, Parameter):
                raise ValueError(
                    f"{name} cannot run over shards: it keeps {key!r} as a {type(leaf).__name__}, which shards and "
                    "checkpoints would have to convert to an ordinary tensor; use an optimizer whose state has a dtype "
                    f"of torch, such as CPUAdamW(state_dtype=torch.bfloat16){advice(Case.CANNOT_BE_SHARDED, ', ')}"
                )


def state_dtypes(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """The dtypes of the state with one value per element that ``optimizer`` keeps of a parameter, from a trial.

    Args:
        optimizer: an element-wise optimizer, which is not changed.
        group: the parameter's group.
        dtype: dtype of the parameter.
        device: device of the parameter.

    Returns:
        The dtypes by name of the state.
    """
    state = _Trial(optimizer, *_place(optimizer, group, device)).run(_MATRIX, dtype)
    return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == _MATRIX}


def state_names(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> frozenset[str]:
    """The names of the tensors that an element-wise ``optimizer`` keeps of a parameter in ``group``, from a trial."""
    state = _Trial(optimizer, *_place(optimizer, group, device)).run(_MATRIX, torch.float32)
    return frozenset(name for name, value in state.items() if isinstance(value, Tensor))


def settings_of(group: Mapping[str, Any]) -> str:
    """A key for the results of trials. It is the same for groups with the same hyperparameters."""
    settings = [(str(k), v) for k, v in group.items() if k not in ("params", "param_names")]
    return repr(sorted(settings, key=lambda setting: setting[0]))


def portable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters for a trial on the host, where not all implementations of a rule run. The state is the same."""
    plain = {k: v.item() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in group.items() if k != "params"}
    return plain | {k: False for k in ("capturable", "differentiable", "fused") if k in plain}


def _at_rate(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters with the rate of trials. That of a warm-up begins at 0, or so low that it moves no parameter."""
    rate = hyperparameters.get("lr")
    if isinstance(rate, Tensor) and rate.is_floating_point():
        return hyperparameters | {"lr": torch.full_like(rate, _RATE)}
    return hyperparameters | {"lr": _RATE} if isinstance(rate, int | float) else hyperparameters


def _place(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], torch.device]:
    """Hyperparameters and device of a trial. Classes that are neither torch's nor ours may run on ``device`` only."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "lightning_zero."))
    return (portable(group), torch.device("cpu")) if known or device.type == "meta" else (group, device)


def fresh_state(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    """State for ``tensor`` like that which the optimizer's constructor has made for its parameters, as Adagrad does."""
    made = next(((p, state) for p, state in optimizer.state.items() if p.dim() > 0), None)
    if made is None:
        return {}
    parameter, state = made

    def like(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            return torch.full_like(tensor, value.flatten()[0].item())
        return copy.deepcopy(value)

    return {name: like(value) for name, value in state.items()}


def _remedy() -> str:
    return f"use an optimizer such as torch.optim.AdamW{advice(Case.CANNOT_BE_SHARDED, ', ')}"
