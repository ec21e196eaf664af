"""A small network between query and key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.errors import refusal
from attnspan.scores.base import AdditiveForm, Score, check_heads, checked_matrix, in_dtype, xp_of
from attnspan.scores.bilinear import project_vectors, projected
from attnspan.shapes import Sizes

__all__ = ["Additive"]


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Score):
    r"""The additive (Bahdanau) score: a = w_v·tanh(W_q q + W_k k) [1]_.

    Parameters
    ----------
    W_q, W_k : array
        ``(F, Dq)`` and ``(F, Dk)``, each with an optional leading H.
    w_v : array
        ``(F,)`` or ``(H, F)``.

    References
    ----------
    .. [1] Bahdanau et al., "Neural machine translation by jointly learning to align and translate",
       2015, section A.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> score = Additive(np.eye(2), np.eye(2), np.ones(2))
    >>> round(float(score.pair(np.array([1.0, 0.0]), np.array([0.0, 1.0]))), 4)
    1.5232
    """

    W_q: Any = field(metadata={"positional": True})
    W_k: Any = field(metadata={"positional": True})
    w_v: Any = field(metadata={"positional": True})

    def _check(self) -> None:
        checked_matrix("W_q", self.W_q, "F, Dq", 2)
        checked_matrix("W_k", self.W_k, "F, Dk", 2)
        checked_matrix("w_v", self.w_v, "F", 1)
        widths = (self.W_q.shape[-2], self.W_k.shape[-2], self.w_v.shape[-1])
        if len(set(widths)) > 1:
            raise refusal("W_q, W_k, w_v", f"hidden widths {widths}", "one hidden width F")

    def check(self, sizes: Sizes) -> None:
        for name, W, D in (("W_q", self.W_q, sizes.Dq), ("W_k", self.W_k, sizes.Dk)):
            check_heads(f"Additive.{name}", W, 2, sizes)
            if W.shape[-1] != D:
                raise refusal(f"Additive.{name}", W, f"width {D} on the last axis")
        check_heads("Additive.w_v", self.w_v, 1, sizes)

    def width(self, sizes: Sizes) -> int:
        return int(self.w_v.shape[-1])

    def pair(self, q: Any, k: Any) -> Any:
        w = in_dtype(self.w_v, q)
        w = w[:, None, None] if len(w.shape) == 2 else w
        xp = xp_of(q)
        return xp.sum(w * xp.tanh(project_vectors(q, self.W_q) + project_vectors(k, self.W_k)), axis=-1)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> AdditiveForm:
        w = in_dtype(self.w_v, q)
        w = w[:, None, None, :] if len(w.shape) == 2 else w
        return AdditiveForm(projected(q, self.W_q), projected(k, self.W_k, sizes.H), w)
