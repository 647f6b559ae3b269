"""What a module holds, kept while it runs: a run on probe inputs leaves no trace in it.

The places are those of the module objects themselves (`_parameters`, `_buffers`, attributes), each object once, so that
a submodule with two names is one submodule. `torch.func.functional_call` goes by names: what it takes out under the
second name is what it put in under the first, and that stays behind. Attributes are kept through the lists, dicts, sets
and deques that they hold, and one level into other objects; what is behind those is not looked at.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["exchange", "state_kept", "state_left"]

_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Whatever the block writes into the module and its submodules, they hold the same objects and values after it.

    Parameters and buffers are put back as objects, so a block that writes into them works on copies (`exchange`).
    """
    with ExitStack() as undo:
        seen: set[int] = set()
        for child in module.modules():
            for table in _TABLES:
                _keep(vars(child)[table], seen, undo, values=False)
            _keep(vars(child), seen, undo, values=False)
            for _, value in _attributes(child):
                _keep(value, seen, undo)
        yield


def exchange(module: nn.Module, copies: Mapping[int, Tensor]) -> None:
    """Put copies, by the identity of what they replace, in the place of parameters and buffers."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            entries: dict[str, Any] = table  # type: ignore[assignment]
            for name, value in entries.items():
                entries[name] = copies.get(id(value), value)


def state_left(module: nn.Module) -> dict[str, Any]:
    """Copies of the buffers and of the numbers, texts and tensors in attributes, by what they are called."""
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        for name, value in child.named_buffers(recurse=False):
            found[f"the buffer {_joined(path, name)}"] = value.detach().clone()
        for name, value in _attributes(child):
            _collect(f"the attribute {_joined(path, name)}", value, found, set())
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that are the user's, torch's own bookkeeping aside."""
    own = vars(nn.Module()).keys()
    return [(name, value) for name, value in vars(module).items() if name not in own]


def _keep(value: Any, seen: set[int], undo: ExitStack, *, values: bool = True, objects: bool = True) -> None:
    """Register what brings a value back to what it is now, in place; `values`: what a container holds as well."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            undo.callback(_tensor_back(value))
    elif isinstance(value, dict):
        inner = list(value.values())
        undo.callback(_refill, value, dict(value), value.update)
    elif isinstance(value, (list, deque)):
        inner = list(value)
        undo.callback(_refill, value, list(value), value.extend)
    elif isinstance(value, set):
        undo.callback(_refill, value, set(value), value.update)
    elif isinstance(value, tuple):
        inner = list(value)
    elif objects and _is_object(value):
        _keep(vars(value), seen, undo, objects=False)
    if values:
        for part in inner:
            _keep(part, seen, undo, objects=objects)


def _tensor_back(value: Tensor) -> Callable[[], None]:
    before = value.detach().clone()

    def back() -> None:
        if not torch.equal(value, before):
            with torch.no_grad():
                value.detach().copy_(before)

    return back


def _refill(container: Any, before: Any, fill: Callable[[Any], Any]) -> None:
    container.clear()
    fill(before)


def _is_object(value: Any) -> bool:
    """An object of the user's with attributes of its own: no module, class, function or file of Python's."""
    kinds = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, kinds) and type(value).__module__ != "builtins"


def _collect(name: str, value: Any, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        found[name] = value
    elif id(value) in seen:
        return
    elif isinstance(value, Tensor):
        found[name] = value.detach().clone()
    else:
        seen = seen | {id(value)}
        parts: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            parts = list(value.items())
        elif isinstance(value, (list, tuple, deque)):
            parts = list(enumerate(value))
        elif isinstance(value, set):
            found[f"{name}: size"] = len(value)
        for key, part in parts:
            _collect(f"{name}[{key!r}]", part, found, seen)
