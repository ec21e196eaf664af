"""Every n-th key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnspan.arrays import look
from attnspan.errors import refusal
from attnspan.masks.base import Mask
from attnspan.masks.parameters import FAR, checked_align, counted, extent, four, offset
from attnspan.values import show

__all__ = ["Strided"]


@dataclass(frozen=True, eq=False, repr=False)
class Strided(Mask):
    """Each query sees every step-th key: (q + align - k) mod step = phase.

    Kept as bits: the pattern is no union of few intervals. The strided part of sparse transformers
    [1]_ is ``Strided(step) & Causal()``.

    Parameters
    ----------
    step : int or integer array
        Distance between the keys, 1 or more.
    phase : int or integer array
        Which of the `step` residues is seen.
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands; must be said where L ≠ S.

    Raises
    ------
    ArgumentError
        If a step is below 1, or L ≠ S and the alignment is unsaid.

    References
    ----------
    .. [1] Child et al., "Generating long sequences with sparse transformers", 2019, section 4.2.

    Examples
    --------
    >>> print(Strided(2).picture(4, 4))
    █·█·
    ·█·█
    █·█·
    ·█·█
    """

    step: Any = field(metadata={"positional": True})
    phase: Any = 0
    align: Any = None

    def _check(self) -> None:
        what = "a distance of 1 or more keys"
        self._set("step", counted("step", self.step, least=1, what=what))
        what = "a phase of 0 or more, below the step"
        self._set("phase", counted("phase", self.phase, what=what))
        _check_phase(self.step, self.phase, what)
        self._set("align", checked_align(self.align))

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        step = min(self.step, FAR) if isinstance(self.step, int) else four(self.step)
        return (q + offset(self.align, L, S, self) - k) % step == four(self.phase)


def _check_phase(step: Any, phase: Any, what: str) -> None:
    """Refuse a phase that is seen not to lie below its step: no key would be seen."""
    if isinstance(step, int):
        if extent(phase)[1] >= step:
            raise refusal("phase", phase, f"{what} of {step}")
        return
    steps, phases = look(step), phase if isinstance(phase, int) else look(phase)
    if steps is None or phases is None:
        return
    try:
        beyond = four(np.asarray(phases)) >= four(steps)
    except ValueError:  # batches or heads that differ are refused with the call's sizes
        return
    if beyond.any():
        raise refusal("phase", show(phase), f"{what} of {show(step)}")
