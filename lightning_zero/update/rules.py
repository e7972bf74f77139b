"""Rules that can run over shards: those that treat every element alike."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import is_communication_error
from lightning_zero.update.shell import ShellGroup, run_step, trial_call

# Their update of one element reads that element's parameter, gradient and state only.
ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)

# By class name, so that the same rule under another library's roof is recognized too.
NOT_ELEMENT_WISE = {
    "LBFGS": "it keeps a history over all parameters",
    "Adafactor": "its second moment is factored over rows and columns",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it needs sparse gradients",
    "LAMB": "its trust ratio is a norm over a whole parameter",
    "Lamb": "its trust ratio is a norm over a whole parameter",
    "LARS": "its trust ratio is a norm over a whole parameter",
    "Lars": "its trust ratio is a norm over a whole parameter",
    "Shampoo": "it preconditions whole matrices",
    "DistributedShampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
    "GaLoreAdamW": "it projects whole matrices",
}
_SHAPE = (4, 6)
_CUT = 11  # inside a row


def check_element_wise(optimizer: Optimizer, device: torch.device) -> frozenset[str]:
    """Make sure that updating parts of parameters equals updating whole ones; returns the names of per-element state.

    torch's element-wise classes are known, and tried on the host: that must work when a device is out of memory. Any
    other class takes three steps on a small matrix, whole and split in two as shards split it, which must agree bit for
    bit, and must keep all its state in ``state``.

    Args:
        optimizer: as the user configured it; it is not changed.
        device: where its shards will be updated.

    Raises:
        TypeError: not an optimizer.
        ValueError: not element-wise.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{optimizer!r} is not a torch.optim.Optimizer; {_remedy()}")
    name = type(optimizer).__name__
    if name in NOT_ELEMENT_WISE:
        raise ValueError(f"{name} cannot run over shards: {NOT_ELEMENT_WISE[name]}; {_remedy()}")
    per_element: set[str] = set()
    try:
        # Groups may differ in the state that they keep (momentum, amsgrad).
        for group in optimizer.param_groups:
            whole, state = _trial(optimizer, *_place(optimizer, group, device))
            per_element.update(k for k, v in state.items() if isinstance(v, Tensor) and v.shape == whole.shape)
            if type(optimizer) not in ELEMENT_WISE:
                split, _ = _trial(optimizer, group, device, [slice(0, _CUT), slice(_CUT, None)])
                if not torch.equal(whole, split):
                    raise ValueError(
                        f"{name} is not element-wise: a step on a whole matrix differs from one on its parts by up to "
                        f"{(whole - split).abs().max().item():.3g}; {_remedy()}"
                    )
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
        # Where the device is behind the host, it is the trial that hears what failed before.
        if is_communication_error(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"{name} could not update a part of a parameter as a 1-D tensor: {error}; {_remedy()}"
        ) from error
    return frozenset(per_element)


def state_dtypes(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """The state with one value per element that ``optimizer`` keeps of a parameter in ``group``, from a trial.

    Args:
        optimizer: element-wise; it is not changed.
        group: one of its parameter groups.
        dtype: of the parameter.
        device: of the parameter.
    """
    whole, state = _trial(optimizer, *_place(optimizer, group, device), dtype=dtype)
    return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == whole.shape}


def state_names(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> frozenset[str]:
    """The tensors that ``optimizer`` keeps of a parameter in ``group``, from a trial."""
    _, state = _trial(optimizer, *_place(optimizer, group, device))
    return frozenset(name for name, value in state.items() if isinstance(value, Tensor))


def portable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a trial on the host, where not all forms of a rule run; they make the same state."""
    plain = {k: v.item() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in group.items() if k != "params"}
    return plain | {k: False for k in ("capturable", "differentiable", "fused") if k in plain}


def _place(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], torch.device]:
    """Hyperparameters and device of a trial: of a class that is not torch's nobody knows whether it runs elsewhere."""
    known = type(optimizer) in ELEMENT_WISE
    return (portable(group), torch.device("cpu")) if known else (group, device)


def _trial(
    optimizer: Optimizer,
    group: dict[str, Any],
    device: torch.device,
    parts: Sequence[slice] = (slice(None),),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, dict[str, Any]]:
    """Three steps on a small parameter, part by part as the update over shards does; the result and its state."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(_SHAPE, generator=generator).to(device, dtype)
    flat = initial.reshape(-1)
    # The matrix itself where it is whole: a rule for matrices would act differently on a vector.
    tensors = [initial] if len(parts) == 1 else [flat[part] for part in parts]
    states = [fresh_state(optimizer, tensor) for tensor in tensors]
    hyperparameters = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    for _ in range(3):
        gradient = torch.randn(_SHAPE, generator=generator).to(device, dtype)
        for tensor, part, state in zip(tensors, parts, states, strict=True):
            tensor.grad = gradient if len(parts) == 1 else gradient.reshape(-1)[part]
            states_of = {tensor: state}
            before = copy.deepcopy((hyperparameters, _attributes(optimizer)))
            shell = run_step(optimizer, [ShellGroup([tensor], hyperparameters)], states_of, trial_call(optimizer))
            if type(optimizer) not in ELEMENT_WISE:  # torch's own change flags that do not matter
                _check_unchanged(type(optimizer).__name__, before, shell)
            state.update(states_of[tensor])
    return flat.clone().reshape(_SHAPE), states[0]


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """All that a class may count on the optimizer itself: numbers, as such or as tensors."""
    return {
        k: v
        for k, v in vars(optimizer).items()
        if isinstance(v, int | float) or (isinstance(v, Tensor) and v.numel() == 1)
    }


def _check_unchanged(name: str, before: tuple[dict[str, Any], dict[str, Any]], shell: Optimizer) -> None:
    """A step runs once per tile on a copy of the groups and attributes: what it writes there would be lost."""
    group = {k: v for k, v in shell.param_groups[0].items() if k != "params"}
    attributes = _attributes(shell)
    for where, old, new in (("its parameter groups", before[0], group), ("its attributes", before[1], attributes)):
        changed = [k for k, v in new.items() if k not in old or not _same(old[k], v)]
        if changed:
            raise ValueError(
                f"{name} keeps state outside `state`: a step changes {', '.join(map(repr, changed))} in {where}. Keep "
                f"it in self.state[parameter]{advice(Case.CANNOT_BE_SHARDED, ', ')}"
            )


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return isinstance(old, Tensor) and isinstance(new, Tensor) and torch.equal(old, new)
    return bool(old == new)


def fresh_state(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    """The state that the optimizer's constructor put in place for a parameter (Adagrad does), for another tensor."""
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
    return f"use an element-wise optimizer such as torch.optim.AdamW{advice(Case.CANNOT_BE_SHARDED, ', ')}"
