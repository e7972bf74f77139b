"""Counts activations and operations of one forward and backward, by a run on tensors that have no memory.

The module runs once on fake tensors of the CPU, whose operators choose the same algorithms as with memory (flash
attention, checkpointing, packed saved tensors). Every storage is counted as long as it lives, whether autograd, a
temporary of the backward, or the loss holds it. Parameters, buffers and gradients are left out, since a plan counts
them. If activations rest in host memory, the run moves them as a training does, to memory that is only counted.
Temporary memory inside an operator is not seen, such as workspaces of cuBLAS and cuDNN, except that of an LSTM on a
CPU.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_zero.engine.activations import ActivationLimits, ActivationOffload, NoOffload
from lightning_zero.sharding.partition import ROOT, find_units, is_norm
from lightning_zero.sharding.policies import MixedPrecisionPolicy
from lightning_zero.storage import DONE, Ticket
from lightning_zero.storage.live import LiveBytes
from lightning_zero.storage.staging import staged_size
from lightning_zero.torch_private import (
    DEPENDS_ON_VALUES,
    FLASH_ATTENTION,
    FakeTensor,
    FakeTensorMode,
    tree_leaves,
)

_aten = torch.ops.aten
Loss = Callable[[nn.Module], Tensor]


class TraceError(ValueError):
    """A module cannot run without values; the message says where."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch on one rank.

    Attributes:
        flops: of forward and backward: additions and multiplications of matrix products, convolutions and attention.
        forward: the most bytes alive at a time while a unit computed in forward, by its name;
            :data:`~lightning_zero.sharding.partition.ROOT` stands for the time outside of all units.
        backward: the most bytes alive in backward between the previous gradient and the accumulation of a parameter's
            gradient, by the parameter's name, in the order of accumulation. The time before the backward of a unit
            begins is not in it but in ``entered``.
        entered: the most bytes alive in backward between the previous gradient and the arrival of the first gradient
            of a unit's outputs, by the unit's name.
        left: the bytes still alive after the gradient of a parameter was accumulated, by the parameter's name.
        recomputed: whether units run under reentrant checkpointing.
        on_host: the most bytes in host memory at a time.
        copied: bytes copied between device and host memory, ``"d2h"`` and ``"h2d"``.
    """

    flops: int = 0
    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    entered: Mapping[str, int] = field(default_factory=dict)
    recomputed: bool = False
    on_host: int = 0
    copied: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return max([*self.forward.values(), *self.backward.values(), *self.entered.values()], default=0)


def trace(
    module: nn.Module,
    loss: Loss,
    precision: MixedPrecisionPolicy | None = None,
    units: Any = None,
    activations: ActivationLimits | None = None,
) -> Trace:
    """Runs a forward and a backward on a copy of ``module`` without memory.

    Args:
        module: on any device, ``meta`` included; it is not changed.
        loss: function that runs the forward of the given module on a batch that it makes, and returns a scalar. All
            tensors that it makes are without values.
        precision: how parameters and buffers are cast; ``None``: they are not cast.
        units: see :func:`~lightning_zero.sharding.partition.find_units`.
        activations: which activations rest in host memory; ``None``: none.

    Returns:
        The bytes of activations and the operations of one micro-batch.

    Raises:
        TraceError: the module's forward depends on values, or the loss needs no gradient.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _without_memory(module, precision or MixedPrecisionPolicy(), fake)
    with fake:
        run = _Run(twin, units, activations)
        try:
            with run.watching():
                run.backward(loss(twin))
        except DEPENDS_ON_VALUES as error:
            raise TraceError(
                f"{type(module).__name__} cannot be traced without values: an operator's output depends on them "
                f"({error})"
            ) from error
    return run.result()


def _without_memory(module: nn.Module, precision: MixedPrecisionPolicy, fake: FakeTensorMode) -> nn.Module:
    """Returns a copy on fake CPU tensors, in the dtypes that an engine would give it; tied parameters stay tied."""
    made: dict[int, Tensor] = {}
    norms = {id(p) for m in module.modules() if is_norm(m) for p in m.parameters(recurse=False)}
    attributes = [value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor)]
    with fake:
        for parameter in module.parameters():
            dtype = precision.target_dtype(parameter.dtype, id(parameter) in norms)
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="cpu")
            made[id(parameter)] = Parameter(empty, requires_grad=parameter.requires_grad)
        for tensor in (*module.buffers(), *attributes):
            dtype = precision.buffer_dtype(tensor.dtype)
            made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=dtype, device="cpu"))
    return copy.deepcopy(module, memo=made)


class _Run:
    """Watches one forward and backward of a module."""

    def __init__(self, module: nn.Module, units: Any, activations: ActivationLimits | None) -> None:
        self._module = module
        self._copies = _CountedCopies()
        self._offload: ActivationOffload | NoOffload = NoOffload()
        if activations is not None:
            stay, cpu = [*module.parameters(), *module.buffers()], torch.device("cpu")
            self._offload = ActivationOffload(cpu, self._copies, activations, lambda: stay, FakeTensor)
        self._units = {unit.module: unit.name for unit in find_units(module, units)}
        self._live = _Live([*module.parameters(), *module.buffers()])
        self._forward: dict[str, int] = {}
        self._backward: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._entered: dict[str, int] = {}
        self._in_backward = self._recomputed = False
        self._flops = FlopCounterMode(display=False, custom_mapping=_FLOPS)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Makes a context in which operators and storages are counted."""
        handles = []
        for module in self._units:
            handles += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))
        gc.freeze()  # the collector runs often, and need only look at objects of this run
        try:
            with self._flops, self._live, self._offload.saving():
                yield
        finally:
            gc.unfreeze()
            for handle in handles:
                handle.remove()

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a loss."""
        if not loss.requires_grad:
            raise TraceError("the loss depends on no parameter that requires a gradient")
        self._note(ROOT)
        self._in_backward = True
        loss.backward()

    def result(self) -> Trace:
        return Trace(
            self._flops.get_total_flops(),
            self._forward,
            self._backward,
            self._left,
            self._entered,
            self._recomputed,
            self._copies.most,
            self._copies.copied,
        )

    def _note(self, where: str) -> None:
        if not self._in_backward:
            self._forward[where] = max(self._forward.get(where, 0), self._live.most_since())

    def _begin_backward(self, unit: str) -> None:
        if self._in_backward and unit not in self._entered:  # if a unit is called twice, the last call counts
            self._entered[unit] = self._live.most_since()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._note(ROOT)
        self._begin_backward(self._units[module])  # to recompute it
        self._recomputed |= not self._in_backward and not torch.is_grad_enabled()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note(self._units[module])
        for made in tree_leaves(output):
            if isinstance(made, Tensor) and made.requires_grad and not isinstance(made, Parameter):
                made.register_hook(lambda _: self._begin_backward(self._units[module]))

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            most = max(self._backward.pop(name, 0), self._live.most_since())
            gc.collect()  # recomputation leaves tensors in cycles, but only if tensors have no values
            self._backward[name] = most  # the last value counts if it is accumulated more than once
            if parameter.grad is not None:
                self._live.disown(parameter.grad)
                parameter.grad = None
            self._left[name] = self._live.now

        return hook


class _Counted:
    """A copy in host memory that has only a size."""

    def __init__(self, nbytes: int, copies: _CountedCopies) -> None:
        self.nbytes, self._copies = nbytes, copies

    def __del__(self) -> None:
        self._copies.now -= staged_size(self.nbytes)


class _CountedCopies:
    """Counts copies of storages in host memory instead of making them; see :class:`PinnedCopies`.

    Attributes:
        now: bytes of the existing copies.
        most: the most bytes at any time so far.
        copied: bytes copied, by direction.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self.copied = {"d2h": 0, "h2d": 0}

    def save(self, source: Tensor) -> tuple[_Counted, Ticket]:
        nbytes = source.untyped_storage().nbytes()
        self.copied["d2h"] += nbytes
        self.now += staged_size(nbytes)
        self.most = max(self.most, self.now)
        return _Counted(nbytes, self), DONE

    def fetch(self, copy: Any) -> tuple[Tensor, Ticket]:
        self.copied["h2d"] += copy.nbytes
        return torch.empty(copy.nbytes, dtype=torch.uint8, device="cpu"), DONE


class _Live(LiveBytes):
    """Counts the bytes of storages while they live, and of the memory inside oneDNN's recurrent layers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.mkldnn_rnn_layer.default:
            self.see(result[3].untyped_storage(), _recurrent_workspace(*args[:3]))
            self.touch(_recurrent_scratch(*args[:3]))
        elif func is _aten.mkldnn_rnn_layer_backward.default:
            self.touch(_recurrent_scratch(*args[:3]) + _recurrent_gradients(*args[1:3]))
        return result


# Memory of oneDNN for a layer of an LSTM. Only the written part of the workspace counts, since most of it never becomes
# resident. The sizes are measured from resident memory, with oneDNN 3.12 and AVX-512.
def _recurrent_workspace(batch: Tensor, of_input: Tensor, of_hidden: Tensor) -> int:
    """Bytes that are kept for backward: gates of all steps, and cells in fp32."""
    cells = batch.shape[0] * batch.shape[1] * of_hidden.shape[1]
    return _gates_bytes(batch, of_input) + cells * torch.float32.itemsize


def _recurrent_scratch(batch: Tensor, of_input: Tensor, of_hidden: Tensor) -> int:
    """Bytes of reordered weights and of temporary gates."""
    return of_input.nbytes + of_hidden.nbytes + _gates_bytes(batch, of_input)


def _recurrent_gradients(of_input: Tensor, of_hidden: Tensor) -> int:
    """Bytes of reordered gradients of weights, in fp32."""
    return (of_input.numel() + of_hidden.numel()) * torch.float32.itemsize


def _gates_bytes(batch: Tensor, of_input: Tensor) -> int:
    return batch.shape[0] * batch.shape[1] * of_input.shape[0] * batch.dtype.itemsize


# Operations by the shapes of the arguments. Torch's counter lacks attention on a CPU, and recurrent layers.
def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query, key, value)
    return flops


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(grad, query, key, value)
    return flops


def _recurrent_flops(batch: Any, of_input: Any, of_hidden: Any, *_: Any, **__: Any) -> int:
    flops: int = 2 * batch[0] * batch[1] * (math.prod(of_input) + math.prod(of_hidden))
    return flops


def _recurrent_backward_flops(batch: Any, of_input: Any, of_hidden: Any, *_: Any, **__: Any) -> int:
    flops: int = 2 * _recurrent_flops(batch, of_input, of_hidden)
    return flops


_FLOPS = {
    FLASH_ATTENTION[0]: _attention_flops,
    FLASH_ATTENTION[1]: _attention_backward_flops,
    _aten.mkldnn_rnn_layer: _recurrent_flops,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
}
