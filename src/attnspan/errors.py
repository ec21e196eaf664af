"""Error types, and the one form every refusal takes: argument, given, needed, fix.

A message stands where it is raised; this file only gives it its form, so that the text of
every refusal reads alike::

    mask: given float32[2, 4], needed a boolean array or a mask; a float array is a bias: pass
    it as bias=, or write mask == 0 if 0 means visible
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "AttnspanError",
    "MissingDependencyError",
    "NotSupportedError",
    "describe",
    "refusal",
]


class AttnspanError(Exception):
    """Base of every error that attnspan raises on purpose."""


class ArgumentError(AttnspanError, ValueError):
    """An argument has a value, shape, dtype or combination that has no meaning here."""


class NotSupportedError(AttnspanError, NotImplementedError):
    """A named implementation cannot do what was asked; the message lists its reasons."""


class MissingDependencyError(AttnspanError, ImportError):
    """An optional package is needed and not installed; the message says how to get it."""


def refusal(argument: str, given: Any, needed: str, fix: str = "") -> ArgumentError:
    """Build the error for a refused argument (the caller raises it).

    Parameters
    ----------
    argument : str
        The name the caller used.
    given : Any
        What was passed: a string is printed as it is, anything else through `describe`.
    needed : str
        What would have been right.
    fix : str
        The likely fix, as an instruction.

    Examples
    --------
    >>> print(refusal("back", -1, "0 or more neighbours, or None for no limit"))
    back: given -1, needed 0 or more neighbours, or None for no limit
    """
    text = given if isinstance(given, str) else describe(given)
    message = f"{argument}: given {text}, needed {needed}"
    return ArgumentError(f"{message}; {fix}" if fix else message)


def describe(value: Any) -> str:
    """Say what a value is in a few characters: ``float32[2, 4]`` for arrays.

    Examples
    --------
    >>> import numpy as np
    >>> describe(np.zeros((2, 4), np.float32))
    'float32[2, 4]'
    >>> describe(3)
    '3'
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        name = str(dtype).removeprefix("torch.")
        return f"{name}[{', '.join(str(n) for n in shape)}]"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    return type(value).__name__
