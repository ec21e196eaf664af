"""From any framework's array to plain NumPy on the host, wide enough for matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.arrays import fetch, is_array
from attnspan.errors import refusal

__all__ = ["to_host"]


def to_host(value: Any, dtype: Any = np.float32) -> np.ndarray:
    """Copy an array, or a (nested) list of them, to the host as a real NumPy array.

    Parameters
    ----------
    value : array or nested list of arrays or numbers
        A PyTorch tensor (any device, with or without a gradient), a JAX or NumPy array, numbers,
        or lists of any of these that stack. Half precision and bfloat16 are widened.
    dtype : NumPy dtype
        What matplotlib shall see; float32 for pictures.

    Returns
    -------
    numpy.ndarray
        The caller's own copy.

    Examples
    --------
    >>> to_host([[1, 2], [3, 4]]).dtype
    dtype('float32')
    """
    if isinstance(value, (list, tuple)):
        parts = [to_host(part, dtype) for part in value]
        if any(part.shape != parts[0].shape for part in parts):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise refusal("list of arrays", f"shapes {shapes}", "arrays of one shape")
        return np.stack(parts) if parts else np.zeros(0, dtype)
    if is_array(value):
        return fetch(value).astype(dtype)
    try:
        return np.asarray(value).astype(dtype)
    except (TypeError, ValueError) as cause:
        raise refusal("array", repr(value), "an array of real numbers, or lists of them") from cause
