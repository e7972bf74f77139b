"""The base class of the optimizers for parameters in host memory: step by native kernels, masters, state dicts.

A bf16 or fp16 parameter has an fp32 master. The step updates the master, and the parameter is a rounded copy of it.
bf16 copies round ties away from zero, so that both layouts of the master give the same bits (see
`lightning_zero.ops.split_`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.advice import Case, advice
from lightning_zero.sharding.masters import CopyMaster, KernelTensors, SplitMaster
from lightning_zero.storage import HostStore
from lightning_zero.storage.host import HUGE_PAGE
from lightning_zero.storage.rested import Resident
from lightning_zero.torch_private import version_of
from lightning_zero.update.compact import decoded
from lightning_zero.update.loading import saved_states
from lightning_zero.update.native import NativeRule, Numbers, ParamGroup, first_index

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SCALES = "_scales"  # suffix: the scales of 8-bit state are kept under the name of the state and this

K = TypeVar("K")
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _Seen(NamedTuple):
    """Properties of a parameter that change when other code writes to it."""

    version: int
    address: int
    dtype: torch.dtype
    storage: UntypedStorage  # kept alive, so that no other tensor gets its address

    @classmethod
    def of(cls, parameter: Tensor) -> _Seen:
        return cls(version_of(parameter), parameter.data_ptr(), parameter.dtype, parameter.untyped_storage())

    def still(self, parameter: Tensor) -> bool:
        return self[:3] == _Seen.of(parameter)[:3]


def block_of(optimizers: Iterable[Optimizer]) -> int:
    """The number of elements that shards should not cut, because their state shares a scale in one of the optimizers.

    It is 1 if no optimizer has state in blocks.
    """
    return math.lcm(*(o.numbers.block for o in optimizers if isinstance(o, CPUOptimizer)))


class CPUOptimizer(Optimizer):
    """Base class of the CPU optimizers; construct one of those.

    A step updates the fp32, bf16 and fp16 parameters that have a gradient, in host memory, each in one pass. If user
    code changes a 16-bit parameter in place or by assigning ``data``, the next step takes the change over into the
    master. In-place changes through ``.data`` cannot be noticed and are not taken over.

    Args:
        params: as for any torch optimizer.
        defaults: hyperparameters.
        numbers: how masters and state are stored.

    Raises:
        ValueError: there is no kernel for state that is stored as ``numbers`` says.
    """

    rule: ClassVar[NativeRule]

    def __init__(self, params: Params, defaults: ParamGroup, numbers: Numbers) -> None:
        self.numbers = numbers
        # For each 16-bit parameter, its properties when its master was last up to date.
        self._seen: dict[Tensor, _Seen] = {}
        self._loaded: dict[str, Any] | None = None  # the state dict that is being loaded
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.rule.check_numbers(group, numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "numbers": self.numbers, "_seen": {}, "_loaded": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The result of ``closure``; None without one.

        Raises:
            TypeError: a parameter or gradient has a dtype or layout that the kernels do not take.
            ValueError: a parameter is not in host memory, or a hyperparameter is out of range.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        members = [(group, p) for group in self.param_groups for p in group["params"]]
        todo = [(number, group, p) for number, (group, p) in enumerate(members) if p.grad is not None]
        for group in self.param_groups:  # before anything is written
            self.rule.check(group, self.numbers)
        for _, _, parameter in todo:
            _check(parameter)
        for number, group, parameter in todo:
            self._update(parameter, group, number)
        torch.autograd.graph.increment_version([p for _, _, p in todo])
        self._seen.update({p: _Seen.of(p) for _, _, p in todo if p.dtype != torch.float32})
        return result

    def _update(self, parameter: Tensor, group: ParamGroup, number: int) -> None:
        state = self.state.get(parameter, {})
        # If only a permuted view of a parameter is contiguous (channels_last), a copy of it is updated.
        flat = parameter.detach().contiguous().view(-1)
        tensors = self._master(parameter, flat, state)
        names = self.rule.names(group)
        step = int(state.get("step", 0)) + 1
        fresh = not state.keys() >= set(names)
        for name in names:
            if name not in state:
                state[name] = self._filled(parameter, self.rule.initial(group))
                if self.numbers.in_blocks:
                    state[name + SCALES] = _no_scales(parameter)
        assert parameter.grad is not None
        with tensors as master:
            self.rule.update(
                master.param,
                [_quantized(state, name) if self.numbers.in_blocks else state[name].view(-1) for name in names],
                parameter.grad.detach().contiguous().view(-1),
                group,
                step if self.rule.counts_steps(self.numbers) else 1,
                fresh,
                remainder=master.remainder,
                copy_out=master.copy_out,
                copy_ties="away",
                seed=self.numbers.seed,
                index=first_index(number),
            )
        state.update(self.rule.scalars(step, self.numbers))
        if state:  # plain SGD has no state, and torch's format has no entry for a parameter without state
            self.state[parameter] = state
        if flat.data_ptr() != parameter.data_ptr():
            parameter.copy_(flat.view(parameter.shape))

    def _master(self, parameter: Tensor, flat: Tensor, state: dict[str, Any]) -> AbstractContextManager[KernelTensors]:
        """A context for the kernel with the tensors that it updates for a parameter with the values ``flat``."""
        if parameter.dtype == torch.float32:
            for name in ("master", "remainder"):  # left from a time when the parameter had 16 bits
                state.pop(name, None)
            self._seen.pop(parameter, None)
            return nullcontext(KernelTensors(flat))
        master: CopyMaster | SplitMaster
        if self.numbers.master_layout == "split":
            if "remainder" not in state:
                state["remainder"] = _zeros(parameter.shape, torch.int16)
            master = SplitMaster(Resident(flat), None, Resident(state["remainder"].view(-1)))
        else:
            if "master" not in state:
                state["master"] = _zeros(parameter.shape, torch.float32).copy_(parameter)
            master = CopyMaster(Resident(flat), Resident(state["master"].view(-1)), ties="away")
        if parameter not in self._seen or not self._seen[parameter].still(parameter):
            master.derive(0, flat.numel())
        return master.tensors(0, flat.numel())

    def _filled(self, parameter: Tensor, value: float) -> Tensor:
        state = _zeros(parameter.shape, self.numbers.state_dtype)
        return state.fill_(value) if value else state

    # --------------------------------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Gives the state in the format of the torch optimizer of the same name. 8-bit state becomes fp32, exactly."""
        state_dict = super().state_dict()
        return {**state_dict, "state": dict(self.portable(state_dict["state"].items()))}

    def portable(self, states: Iterable[tuple[K, dict[str, Any]]]) -> list[tuple[K, dict[str, Any]]]:
        """Converts the state of parameters from the format of this class to that of torch's optimizers.

        Args:
            states: pairs of a key, which is kept, and a parameter's state.
        """
        return [(key, self._dequantized(state) if self.numbers.in_blocks else state) for key, state in states]

    def _dequantized(self, state: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if name + SCALES in state:
                whole[name] = _zeros(value.shape, torch.float32)
                ops.dequantize_(whole[name].view(-1), _quantized(state, name), signed=self.rule.signed[name])
            elif not name.endswith(SCALES):
                whole[name] = value
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of the torch optimizer of the same name.

        Moments are converted to this optimizer's ``state_dtype``, also those of a checkpoint with
        ``checkpoint_state="compact"``, and masters to its ``master_layout``. If the saved layout is "split" and this
        optimizer's is not, load the model before: a remainder means nothing without its parameter.

        Raises:
            ValueError: a tensor of the state has another shape than its parameter.
        """

        def note(_: Optimizer, loaded: dict[str, Any]) -> None:  # after the hooks of others, before anything is written
            for parameter, state in saved_states(self, loaded):
                _check_shapes(parameter, state)
            self._loaded = loaded

        hook = self.register_load_state_dict_pre_hook(note)
        try:
            super().load_state_dict(decoded(state_dict))
        finally:
            hook.remove()
            self._loaded = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():  # groups of another version or of DeepSpeed may lack some
                group.setdefault(name, value)
        if self._loaded is not None:
            # torch casts state to the dtype of its parameter, so that fp32 state of a 16-bit parameter loses digits.
            for parameter, saved in saved_states(self, self._loaded):
                self.state[parameter] = self._adapted(parameter, saved)

    @torch.no_grad()
    def _adapted(self, parameter: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """Converts one parameter's state, of any origin, to the form in which this optimizer stores it."""
        self._seen.pop(parameter, None)
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name == "step":
                state[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif name not in ("master", "remainder") and value is not None:
                in_blocks = self.numbers.in_blocks and name in self.rule.signed
                dtype = torch.float32 if self.numbers.in_blocks and not in_blocks else self.numbers.state_dtype
                state[name] = _zeros(parameter.shape, dtype)
                if in_blocks:
                    whole = value.detach().to("cpu", torch.float32).contiguous().view(-1)
                    state[name + SCALES] = _no_scales(parameter)
                    ops.quantize_(whole, _quantized(state, name), signed=self.rule.signed[name])
                else:
                    state[name].copy_(value)
        if parameter.dtype == torch.float32 or not saved.keys() & {"master", "remainder"}:
            return state
        split = self.numbers.master_layout == "split"
        if split and "remainder" in saved:
            state["remainder"] = _zeros(parameter.shape, torch.int16).copy_(saved["remainder"])
            return state
        flat = parameter.detach().contiguous().view(-1)
        master = _zeros(parameter.shape, torch.float32)
        if "master" in saved:
            master.copy_(saved["master"])
        else:
            ops.join_(master.view(-1), flat, saved["remainder"].contiguous().view(-1))
        if split:
            # The parameter is not written here. It becomes the master's high part when the model is loaded.
            state["remainder"] = _zeros(parameter.shape, torch.int16)
            ops.split_(master.view(-1), torch.empty_like(flat), state["remainder"].view(-1))
        else:
            state["master"] = master
        return state


def _quantized(state: dict[str, Any], name: str) -> ops.Quantized:
    return ops.Quantized(state[name].view(-1), state[name + SCALES])


def _no_scales(parameter: Tensor) -> Tensor:
    """Makes zeros for the scales of a parameter's blocks: ``[blocks]`` uint8."""
    return torch.zeros(ops.count_blocks(0, parameter.numel()), dtype=torch.uint8, device="cpu")


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocates contiguous zeros in host memory. Large ones use huge pages, which are taken at the first write."""
    numel = shape.numel()
    if numel * dtype.itemsize < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return HostStore().zeros(numel, dtype).view(shape)


def _check_shapes(parameter: Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise ValueError(
                f"{name!r} in the state dict has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}; "
                "load the state of the same model"
            )


def _check(parameter: Tensor) -> None:
    """Raises an error unless a kernel can take a parameter and its gradient."""
    shape, grad = tuple(parameter.shape), parameter.grad
    assert grad is not None
    if not ops.runs_on(parameter.device):
        raise ValueError(
            f"a parameter of shape {shape} is on device {parameter.device}; CPU optimizers update host memory. Move "
            f"it with .cpu(){advice(Case.NOT_ON_HOST, ', or ')}"
        )
    if grad.layout is not torch.strided or parameter.layout is not torch.strided:
        raise TypeError(
            f"a parameter of shape {shape} has layout {parameter.layout} and a gradient of layout {grad.layout}; "
            "expected dense ones. Use sparse=False in embeddings"
        )
    for name, tensor in (("parameter", parameter), ("gradient", grad)):
        if tensor.dtype not in _PARAM_DTYPES:
            raise TypeError(
                f"a {name} of shape {shape} has dtype {tensor.dtype}; expected torch.float32, torch.bfloat16 or "
                "torch.float16. Convert the model, or use the optimizer of torch.optim"
            )
