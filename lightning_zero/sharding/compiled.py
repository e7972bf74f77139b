"""Hooks and parameter names of modules under ``torch.compile``.

``torch.compile(module)`` returns a wrapper that holds the module as its child ``_orig_mod``; ``module.compile()`` puts
the module's own call, including its hooks, into the graph. A hook inside a graph would be compiled with it, and the
graph's guards would depend on the hook, so that equal blocks could not share one graph. So hooks are attached around
the whole call of a compiled module, and never to modules inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from lightning_zero.torch_private import ORIGINAL, compiled_call, registered_modules, set_compiled_call

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Arguments | None]  # returns those to use instead
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]  # returns the output


class Handle(Protocol):
    """Detaches hooks."""

    def remove(self) -> None: ...


def original(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s wrapper, or ``module`` itself if it is no wrapper."""
    children = registered_modules(module)  # those of a script are no `dict`, and have no `get`
    inside = children[ORIGINAL] if ORIGINAL in children else None  # noqa: SIM401
    return module if inside is None else inside


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is compiled, by a wrapper or in place."""
    return original(module) is not module or compiled_call(module) is not None


def plain_name(name: str) -> str:
    """Remove the wrappers' ``_orig_mod`` from a name in the module tree."""
    return ".".join(part for part in name.split(".") if part != ORIGINAL)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of ``state`` to their names without wrappers."""
    return {plain_name(name): value for name, value in state.items()}


def names_of(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of ``state``, with or without wrappers in their names, to the names in ``module``.

    The beginning of a name, up to the innermost module that has it, decides; the rest stays as it is.
    """
    own = {plain_name(name): name for name, _ in module.named_modules(remove_duplicate=False)}

    def renamed(name: str) -> str:
        parts = plain_name(name).split(".")
        inner = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in own), 0)
        prefix = own[".".join(parts[:inner])]
        return ".".join([*filter(None, [prefix]), *parts[inner:]])

    return {renamed(name): value for name, value in state.items()}


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what :meth:`torch.nn.Module.named_modules` does, but each wrapper instead of the module inside it."""
    inside = {id(original(module)) for module in root.modules() if original(module) is not module}
    for name, module in root.named_modules():
        if id(module) not in inside:
            yield plain_name(name), module


def inside_graphs(root: nn.Module) -> dict[int, nn.Module]:
    """Maps the id of each module inside a compiled module to the outermost compiled module around it."""
    found: dict[int, nn.Module] = {}
    for module in root.modules():  # outer ones come first
        if is_compiled(module):
            for child in module.modules():
                if child is not module:
                    found.setdefault(id(child), found.get(id(module), module))
    return found


def attach(module: nn.Module, before: Before, after: After | None = None) -> list[Handle]:
    """Call ``before`` and ``after`` around every call of ``module``, outside its graph.

    Args:
        module: the module, compiled or not.
        before: called before all other hooks.
        after: called with the output, or with ``None`` if the call raises; returns the output to use.

    Returns:
        Handles that detach the hooks.
    """
    if compiled_call(module) is not None:
        return [_AroundCall(module, before, after)]
    handles: list[Handle] = [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
    if after is not None:
        handles.append(module.register_forward_hook(after, always_call=True))
    return handles


class _AroundCall:
    """Replaces the compiled call of a module that was compiled in place, and calls the hooks around it."""

    def __init__(self, module: nn.Module, before: Before, after: After | None) -> None:
        self._module = module
        self._before = before
        self._after = after
        self._compiled = compiled_call(module)
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        args, kwargs = self._before(self._module, args, kwargs) or (args, kwargs)
        try:
            output = self._compiled(*args, **kwargs)
        except BaseException:
            if self._after is not None:
                self._after(self._module, args, None)
            raise
        return output if self._after is None else self._after(self._module, args, output)

    def remove(self) -> None:
        set_compiled_call(self._module, self._compiled)
