"""A learned matrix between query and key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.errors import refusal
from attnspan.scores.base import DotForm, Score, check_heads, checked_matrix, in_dtype, per_head, xp_of
from attnspan.shapes import Sizes

__all__ = ["Bilinear", "LowRankBilinear"]


@dataclass(frozen=True, eq=False, repr=False)
class Bilinear(Score):
    r"""A learned bilinear form: a = qᵀ M k [1]_.

    The cheaper of (QM)Kᵀ and Q(MKᵀ) is chosen by counting operations.

    Parameters
    ----------
    M : array
        ``(Dq, Dk)``, or ``(H, Dq, Dk)`` one per head.

    References
    ----------
    .. [1] Luong et al., "Effective approaches to attention-based neural machine translation", 2015,
       equation 8 (general).

    Examples
    --------
    >>> import numpy as np
    >>> M = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> float(Bilinear(M).pair(np.array([1.0, 0.0]), np.array([0.0, 1.0])))
    1.0
    """

    M: Any = field(metadata={"positional": True})

    def _check(self) -> None:
        checked_matrix("M", self.M, "Dq, Dk", 2)

    def check(self, sizes: Sizes) -> None:
        check_heads("Bilinear.M", self.M, 2, sizes)
        if tuple(self.M.shape[-2:]) != (sizes.Dq, sizes.Dk):
            raise refusal("Bilinear.M", self.M, f"(Dq, Dk) = ({sizes.Dq}, {sizes.Dk})")

    def pair(self, q: Any, k: Any) -> Any:
        xp = xp_of(q)
        M = in_dtype(self.M, q)
        M = M[:, None, None] if len(M.shape) == 3 else M
        return xp.sum(xp.matmul(q[..., None, :], M)[..., 0, :] * k, axis=-1)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        xp = xp_of(q)
        M = in_dtype(self.M, q)
        H, G, L, S, Dq, Dk = (getattr(sizes, n) for n in ("H", "G", "L", "S", "Dq", "Dk"))
        heads = H if len(M.shape) == 3 else G  # a matrix per head needs keys per head
        by_queries = H * L * Dq * Dk + H * L * S * Dk
        by_keys = heads * S * Dq * Dk + H * L * S * Dq
        if by_queries <= by_keys:
            return DotForm(xp.matmul(q, M), k)
        k = per_head(k, H) if len(M.shape) == 3 else k
        return DotForm(q, xp.matmul(k, xp.matrix_transpose(M)))


@dataclass(frozen=True, eq=False, repr=False)
class LowRankBilinear(Score):
    r"""A bilinear form of rank r: a = (W_q q)·(W_k k), that is M = W_qᵀ W_k.

    With unit-variance inputs and weights of variance 1/Dq and 1/Dk the score has variance r;
    divide a weight by √r to have 1.

    Parameters
    ----------
    W_q, W_k : array
        ``(r, Dq)`` and ``(r, Dk)``, each with an optional leading H.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, section 3.2.2: each head of multi-head
       attention is one.

    Examples
    --------
    >>> import numpy as np
    >>> score = LowRankBilinear(np.array([[1.0, 0.0]]), np.array([[0.0, 2.0, 0.0]]))
    >>> float(score.pair(np.array([3.0, 1.0]), np.array([1.0, 2.0, 1.0])))
    12.0
    """

    W_q: Any = field(metadata={"positional": True})
    W_k: Any = field(metadata={"positional": True})

    def _check(self) -> None:
        checked_matrix("W_q", self.W_q, "r, Dq", 2)
        checked_matrix("W_k", self.W_k, "r, Dk", 2)
        if self.W_q.shape[-2] != self.W_k.shape[-2]:
            raise refusal(
                "W_q, W_k", f"ranks {self.W_q.shape[-2]} and {self.W_k.shape[-2]}", "one rank r on axis -2"
            )

    def check(self, sizes: Sizes) -> None:
        for name, W, D in (("W_q", self.W_q, sizes.Dq), ("W_k", self.W_k, sizes.Dk)):
            check_heads(f"LowRankBilinear.{name}", W, 2, sizes)
            if W.shape[-1] != D:
                raise refusal(f"LowRankBilinear.{name}", W, f"width {D} on the last axis")

    def pair(self, q: Any, k: Any) -> Any:
        return xp_of(q).sum(project_vectors(q, self.W_q) * project_vectors(k, self.W_k), axis=-1)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        return DotForm(projected(q, self.W_q), projected(k, self.W_k, sizes.H))


def projected(x: Any, W: Any, H: int | None = None) -> Any:
    """Multiply by Wᵀ, (..., G, N, D) to (..., G, N, r); weights per head make keys per head."""
    xp = xp_of(x)
    W = in_dtype(W, x)
    if len(W.shape) == 3 and H is not None and W.shape[0] > 1:
        x = per_head(x, H)
    return xp.matmul(x, xp.matrix_transpose(W))


def project_vectors(x: Any, W: Any) -> Any:
    """Multiply vectors (..., D) by Wᵀ; weights per head line up with (B, H, L, S, D)."""
    xp = xp_of(x)
    W = in_dtype(W, x)
    W = W[:, None, None] if len(W.shape) == 3 else W
    return xp.matmul(x[..., None, :], xp.matrix_transpose(W))[..., 0, :]
