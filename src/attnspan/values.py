"""What masks, scores and records have in common: they are values, and pytrees.

A value is a frozen dataclass. Its arrays (also those in a dict, and in the values inside it) are
leaves for `jax.tree_util` and `torch.utils._pytree`; its numbers, strings and functions are static.
Comparing is structural and cheap: arrays count by identity, so values made of numbers hash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from attnspan.arrays import fetch, is_array, is_torch_compiling, look

__all__ = ["Value", "as_array", "host", "register_pytrees", "show"]

V = TypeVar("V", bound="Value")

_CLASSES: list[type[Value]] = []
_REGISTERED: dict[str, int] = {"jax": 0, "torch": 0}


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """Abstract base of the frozen dataclasses of this library."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES.append(cls)

    def __post_init__(self) -> None:
        self._check()
        if not is_torch_compiling():
            register_pytrees()

    def _check(self) -> None:
        """Validate and normalise the fields; called on construction, never on unflattening."""

    def _set(self, name: str, value: Any) -> None:
        """Replace a field during `_check`."""
        object.__setattr__(self, name, value)

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self)]

    def map_arrays(self: V, fn: Callable[[Any], Any]) -> V:
        """Apply `fn` to every array in this value and in the values inside it."""
        changed: dict[str, Any] = {}
        for name, value in self._items():
            if isinstance(value, Value):
                changed[name] = value.map_arrays(fn)
            elif isinstance(value, dict):
                changed[name] = {key: fn(item) for key, item in value.items()}
            elif is_array(value):
                changed[name] = fn(value)
            else:
                changed[name] = value
        return _rebuild(type(self), changed)

    def in_order(self) -> list[Any]:
        """List every array in this value and in the values inside it, in the order of `map_arrays`."""
        found: list[Any] = []
        self.map_arrays(found.append)
        return found

    def values(self) -> Iterator[Value]:
        """Walk over this value and all values inside it."""
        yield self
        for _, value in self._items():
            if isinstance(value, Value):
                yield from value.values()

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Walk over (field name, array) of this value and of all values inside it."""
        for value in self.values():
            for name, item in value._items():
                if isinstance(item, dict):
                    yield from item.items()
                elif is_array(item):
                    yield name, item

    def _key(self) -> tuple[Any, ...]:
        return (type(self), *(_identity(v) for _, v in self._items()))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash(self._key())
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}  # another process has others

    @property
    def is_settled(self) -> bool:
        """Whether this is made of numbers, strings and values of them: nothing in it can change."""
        found = self.__dict__.get("_settled")
        if found is None:
            found = all(
                item.is_settled
                if isinstance(item, Value)
                else isinstance(item, (bool, int, float, str, type(None)))
                for _, item in self._items()
            )
            object.__setattr__(self, "_settled", found)
        return found

    def __repr__(self) -> str:
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is f.default or (type(value) in (int, str, bool) and value == f.default):
                continue
            text = show(value)
            parts.append(text if f.metadata.get("positional") else f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _identity(value: Any) -> Any:
    """Give what stands for a field when values are compared and hashed."""
    if isinstance(value, dict):
        return tuple((key, _identity(item)) for key, item in value.items())
    return ("array", id(value)) if is_array(value) else value


def show(value: Any) -> str:
    """Write a field as source text: short arrays as lists, long or traced ones as dtype[shape]."""
    if not is_array(value):
        return getattr(value, "__qualname__", None) or repr(value)
    size = 1
    for n in value.shape:
        size *= n
    dtype = str(value.dtype).removeprefix("torch.")
    summary = f"<{dtype}[{', '.join(map(str, value.shape))}]>"
    seen = look(value) if size <= 64 else None
    return summary if seen is None else repr(seen.tolist())


def _is_static(value: Any) -> bool:
    if isinstance(value, (Value, dict)) or is_array(value):
        return False
    static = (bool, int, float, str, tuple)
    return value is None or isinstance(value, static) or callable(value) or is_dataclass(value)


def _flatten(value: Value) -> tuple[list[Any], tuple[Any, ...]]:
    """Split into children and static rest; which is which survives placeholders in the leaves."""
    names = value.__dict__.get("_children")
    if names is None:
        names = tuple(name for name, item in value._items() if not _is_static(item))
    rest = tuple((name, item) for name, item in value._items() if name not in names)
    return [getattr(value, name) for name in names], (type(value), names, rest)


def _unflatten(aux: tuple[Any, ...], children: Any) -> Any:
    cls, names, rest = aux
    new = _rebuild(cls, {**dict(rest), **dict(zip(names, children, strict=True))})
    object.__setattr__(new, "_children", names)
    return new


def _rebuild(cls: type[V], items: dict[str, Any]) -> V:
    """Make a value from its fields without validating (leaves may be tracers or placeholders)."""
    new = object.__new__(cls)
    for name, item in items.items():
        object.__setattr__(new, name, item)
    return new


def host(value: V) -> V:
    """Bring all arrays of a value to NumPy, waiting for devices if need be."""
    return value.map_arrays(fetch)


def register_pytrees() -> None:
    """Register every value class with the libraries that somebody has imported so far."""
    if "jax" in sys.modules and hasattr(sys.modules["jax"], "tree_util"):
        jax = sys.modules["jax"]
        for cls in _CLASSES[_REGISTERED["jax"] :]:
            jax.tree_util.register_pytree_node(cls, _flatten, _unflatten)
        _REGISTERED["jax"] = len(_CLASSES)
    if "torch.utils._pytree" in sys.modules:
        pytree = sys.modules["torch.utils._pytree"]
        for cls in _CLASSES[_REGISTERED["torch"] :]:
            pytree.register_pytree_node(cls, _flatten, lambda children, aux: _unflatten(aux, children))
        _REGISTERED["torch"] = len(_CLASSES)


def as_array(x: Any) -> Any:
    """Turn a list or tuple of numbers into a NumPy array; leave arrays and numbers alone."""
    if isinstance(x, np.integer):
        return int(x)
    if isinstance(x, (list, tuple)):
        if is_torch_compiling():  # a NumPy array would be traced as a tensor without being one
            return sys.modules["torch"].tensor(x)
        return np.asarray(x) if len(x) else np.zeros(0, np.int64)
    return x
