"""Checks the values of the scripts' options."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_zero.config import ConfigError


def is_checkpoint(path: Any) -> bool:
    """Whether there is a file, or a folder with a sharded checkpoint."""
    return Path(str(path)).is_file() or (Path(str(path)) / ".metadata").is_file()


def is_resumable(path: Any) -> bool:
    """Whether Lightning accepts `path` as `ckpt_path`."""
    return path in (None, "last", "hpc") or "://" in str(path) or is_checkpoint(path)


RULES = {
    "seed": (lambda seed: type(seed) is int and 0 <= seed < 2**32, "an integer from 0 to 4294967295, such as 1337"),
    "prompt": (lambda prompt: isinstance(prompt, str) and prompt, "a text of at least one character, such as The"),
    "length": (lambda length: type(length) is int and length >= 0, "an integer of at least 0, such as 400"),
    "temperature": (lambda t: type(t) in (int, float) and t > 0, "a number > 0, such as 0.8"),
    "top_k": (
        lambda k: k is None or (type(k) is int and k > 0),
        "an integer of at least 1, or null for all",
    ),
    "checkpoint": (lambda path: is_checkpoint(Path(str(path)).expanduser()), "an existing file or sharded folder"),
    "start_method": (
        lambda method: method in (None, "popen"),
        "popen (or start the ranks by torchrun): the others keep the results in the processes that they start",
    ),
    "ckpt_path": (is_resumable, "an existing file or sharded folder, or null to start anew"),
    "max_steps": (lambda steps: type(steps) is int and steps > 0, "an integer of at least 1, such as 2000"),
    "gradient_clip_algorithm": (lambda name: name in (None, "norm", "value"), "norm or value"),
    "val_check_interval": (
        lambda count: count is None or (type(count) is int and count > 0),
        "an integer of at least 1, which counts micro-batches, or null to validate at the end; this loop has no epochs",
    ),
    "check_val_every_n_epoch": (lambda count: count is None, "null: this loop has no epochs"),
}
# The options of the group `trainer` of which Lightning knows more values than the loop in fabric.py.
OF_LOOP = (
    "trainer.max_steps",
    "trainer.gradient_clip_algorithm",
    "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch",
)


def check_options(cfg: DictConfig, *names: str) -> None:
    """Raise for values that would fail only after the training, or deep inside Lightning."""
    for name in names:
        value = OmegaConf.select(cfg, name)
        valid, expected = RULES[name.rpartition(".")[2]]
        if not valid(value):
            raise ConfigError(f"{name}={value!r} must be {expected}: change {name}.")
