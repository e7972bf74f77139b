"""The precision plugin of Fabric, which computes in the same way as the Trainer's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_zero.integration.precision import ZeroPrecision, default_dtype


class FabricPrecision(Precision):
    """Precision of :class:`ZeroFabricStrategy`: computes as a :class:`~lightning_zero.ZeroPrecision` says.

    If a module computes in 16 bits, its outputs are converted to the default dtype, as with Fabric's own plugins.

    Args:
        settings: dtypes and loss scaler.

    Attributes:
        device: the training device, set at the launch.
    """

    def __init__(self, settings: ZeroPrecision) -> None:
        self.settings = settings
        self.precision = settings.precision
        self.device = torch.device("cpu")

    @override
    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        # Not as for modules, which begin in fp32: tensors that the loop makes are inputs, or beside the computation.
        dtype = self.settings.module_dtype
        return contextlib.nullcontext() if dtype is None else default_dtype(dtype)

    @override
    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.settings.module_init_context()

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.settings.computing_on(self.device.type)

    @override
    def convert_input(self, data: Any) -> Any:
        return self.settings.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        if self.settings.compute_dtype.itemsize > 2:
            return data
        return apply_to_collection(data, Tensor, _in_default_dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.settings.scaler is None else self.settings.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.settings.scaler is not None and state_dict:
            self.settings.scaler.load_state_dict(state_dict)


def _in_default_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
