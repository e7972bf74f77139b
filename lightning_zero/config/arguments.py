"""Checks names and values of the Trainer's arguments against its signature, since Lightning's class has no schema."""

import inspect
import typing
from typing import TYPE_CHECKING, Any

from lightning_zero.config.errors import ConfigError, no_such_key

if TYPE_CHECKING:
    from omegaconf import DictConfig

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def check_trainer(cfg: "DictConfig") -> None:
    """Refuses keys of `trainer` that its class does not take, and values of a wrong type, before they are used."""
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    node = cfg.get("trainer")
    if not node or "_target_" not in node:
        return
    cls = get_class(node["_target_"])
    parameters = inspect.signature(cls).parameters
    hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in map(str, node):
        if key.startswith("_"):
            continue
        if key not in parameters:
            if not takes_any:
                raise ConfigError(no_such_key(f"trainer.{key}", key, "trainer", list(parameters)))
        elif not (OmegaConf.is_missing(node, key) or _fits(node[key], expected := _simple_types(hints.get(key)))):
            words = [_WORDS[type_] for type_ in expected if not (type_ is int and float in expected)]
            raise ConfigError(f"trainer.{key}={node[key]} must be {' or '.join(words)}.")


def _simple_types(hint: Any) -> tuple[type, ...]:
    """Lists the types of an annotation; empty if it has other types than numbers, booleans and strings."""
    types = typing.get_args(hint) or (hint,)
    return types if all(isinstance(type_, type) and type_ in _WORDS for type_ in types) else ()


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    return not types or isinstance(value, types) or (isinstance(value, int) and float in types)
