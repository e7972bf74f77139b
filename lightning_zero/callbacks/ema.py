"""An exponential moving average of the weights."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging


class EMA(EMAWeightAveraging):
    """Lightning's ``EMAWeightAveraging`` with its arguments spelled out and checked.

    The average starts as the weights after the first update and becomes ``decay * average + (1 - decay) * weights``
    with every further one. Validation runs with it; checkpoints hold it as ``state_dict`` and the weights in training
    as ``current_model_state``; when training ends it replaces the weights. Under
    :class:`~lightning_zero.ZeroStrategy` it is an average of the fp32 masters of 16-bit weights, and a skipped step
    leaves it alone.

    Every rank keeps a whole copy of the module, in fp32, also at stage 3, where every update and every validation
    gathers all weights: ``update_every_n_steps`` makes that rarer.

    Args:
        decay: weight of the average so far, from 0 to 1.
        update_every_n_steps: optimizer steps between two updates, at least 1.
        update_starting_at_step: first optimizer step, counted from 0, after which it is updated; None: the first.
        use_buffers: average buffers too.
        device: where the average rests; None: the module's device.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        use_buffers: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must lie between 0 and 1: it is the weight of the average so far")
        if update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps={update_every_n_steps} must be a number of steps >= 1")
        if update_starting_at_step is not None and update_starting_at_step < 0:
            raise ValueError(f"update_starting_at_step={update_starting_at_step} must be the index of a step, >= 0")
        super().__init__(device, use_buffers, decay, update_every_n_steps, update_starting_at_step)
