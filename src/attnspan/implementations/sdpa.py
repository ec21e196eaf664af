"""PyTorch's own kernel, where its answer is ours.

Rows and keys that nobody sees are zeroed before it, empty rows are emptied behind it, and what it
cannot do is a reason against.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from attnspan.arrays import (
    TITLES,
    arange,
    as_written,
    cumulative_sum,
    framework,
    is_torch_compiling,
    is_transformed,
    look,
)
from attnspan.implementations.base import (
    Implementation,
    either,
    poisoned_rows,
    seen_keys,
    seen_true,
    usable,
    visible,
    without,
    zeroed,
)
from attnspan.masks import Causal
from attnspan.request import Request
from attnspan.scores import Bilinear, Cosine, Dot, Gaussian, LowRankBilinear, ScaledDot
from attnspan.scores.base import DotForm, in_dtype, per_head

__all__ = ["SDPA"]

_LIMITS = tuple(float(np.finfo(dtype).max) / 4 for dtype in (np.float32, np.float64))
_LONG, _WIDE = 1024, 32  # below either, with a gradient, the native kernel is as fast
_DOT_FORMS = (Dot, ScaledDot, Cosine, Gaussian, Bilinear, LowRankBilinear)


def reasons_against(request: Request) -> list[str]:
    """Say what PyTorch's kernel cannot do, or does otherwise than we mean it."""
    if request.kind != "torch":
        return [f"the arrays are {TITLES[request.kind]}'s, not PyTorch's"]
    reasons = []
    if not isinstance(request.score, _DOT_FORMS):
        reasons.append(f"the score {type(request.score).__name__} is no dot form")
    if request.softcap is not None:
        reasons.append("it has no softcap")
    if request.sink is not None:
        reasons.append("it has no sink")
    if request.dropout:
        reasons.append("its dropout draws other bits than ours")
    if not request.sizes.S or not request.sizes.L:
        reasons.append("there is nothing to attend to" if request.sizes.L else "there is no query")
    if any(framework(x) == "torch" and is_transformed(x) for _, x in request.arrays()):
        reasons.append("it has no derivative under forward mode and torch.func transforms")
    return reasons


def merits(request: Request) -> list[str]:
    """Say where PyTorch's kernel is the fastest right answer that was measured."""
    sizes = request.sizes
    if request.kind != "torch" or request.q.dtype != request.xp.bfloat16 or request.q.device.type != "cpu":
        return []
    if sys.modules["torch"].compiler.is_exporting():  # for any lengths, and for other machines
        return []
    if not _is_plain(request.score) or request.bias is not None or not _is_fused(request):
        return []
    if min(sizes.L, sizes.S) < _LONG or sizes.Dq < _WIDE:
        return []
    if request.mask is not None and not _is_top_left_causal(request):
        return []
    from attnspan.torch_ops import has_matrix_unit

    return ["it multiplies bfloat16 by the matrix unit of this machine"] if has_matrix_unit() else []


def attend(request: Request) -> Any:
    """Compute the output ``(B, ..., H, L, E)`` with torch.nn.functional.scaled_dot_product_attention."""
    return _attended(request, _is_top_left_causal(request))


def _attended(request: Request, causal: bool) -> Any:
    xp, sizes = request.xp, request.sizes
    k, v, S = request.k, request.v, sizes.S
    if causal and sizes.S > sizes.L:  # no query sees the keys behind the last query
        k, v, S = k[..., : sizes.L, :], v[..., : sizes.L, :], sizes.L
    seen = None if causal else visible(request)
    keep = None if seen is None else seen.keep
    bias = None if seen is None else seen.bias
    sees = None if seen is None else seen.sees
    live = None if keep is None else seen_keys(keep, sizes.G)

    def rows_that_see(bad: Any) -> Any:
        if not causal or bad is None:
            return poisoned_rows(keep, bad, sizes.H)
        reach = xp.clip(arange(sizes.L, bad), None, S - 1)
        bad = (cumulative_sum(xp.astype(bad, xp.int32)) > 0)[..., reach]  # any so far, at each query
        return per_head(bad[..., None], sizes.H)[..., 0]

    q, bad_q = without(xp, zeroed(xp, request.q, sees))
    k, bad_k = without(xp, zeroed(xp, k, live))
    v, bad_v = without(xp, zeroed(xp, v, live))
    poisoned = either(bad_q, rows_that_see(either(bad_k, bad_v)))
    plain = _is_plain(request.score)
    if not plain or bias is not None:  # half types go in only where nothing is computed before the kernel
        q, k, v = (xp.astype(x, request.accumulation, copy=False) for x in (q, k, v))
    form = request.score.lower(q, k, usable(sees, bad_q), sizes)
    assert isinstance(form, DotForm)
    # `without` names no bad row only where it sees that there is none.
    fits = _fits(form) if bad_q is None or look(q) is not None else None
    if fits is False and causal:
        return _attended(request, False)  # scores that are written out take the place of the flag
    if fits is False:
        q, k, v = (xp.astype(x, request.accumulation, copy=False) for x in (q, k, v))
        form = request.score.lower(q, k, usable(sees, bad_q), sizes)
        assert isinstance(form, DotForm)
        limits = xp.finfo(request.accumulation)
        scores = xp.clip(form.scores(), limits.min, limits.max)  # scaled before they can overflow
        broken = xp.isnan(scores)
        poisoned = either(poisoned, (broken if keep is None else broken & keep).any(-1))
        scores = xp.where(broken, 0.0, scores)
        bias = scores if bias is None else bias + scores
        q, k, scale = xp.zeros_like(form.q[..., :1]), xp.zeros_like(form.k[..., :1]), 1.0
    else:
        q, k, scale, added = _for_kernel(form)
        if fits is None and not plain:  # a NaN of the score's own parameters, or what overflowed
            q, broken_q = without(xp, q)
            k, broken_k = without(xp, k)
            if added is not None:
                added, broken = without(xp, added[..., None])
                added, broken_k = added[..., 0], either(broken_k, broken[..., 0, :])
            broken_q = broken_q if sees is None else broken_q & sees
            poisoned = either(poisoned, either(broken_q, rows_that_see(broken_k)))
        if added is not None:
            bias = added if bias is None else bias + added
    if k.shape[-3] != v.shape[-3]:  # weights of the score made a key per head
        v = per_head(v, sizes.H)
    if keep is not None:
        if sees is not None and not seen_true(sees):
            keep = keep | ~sees[..., None]  # an empty row is emptied behind the kernel
        bias = keep if bias is None else xp.where(keep, bias, -float("inf"))
    out = _kernel(q, k, v, bias, causal, scale, k.shape[-3] != sizes.H)
    if sees is not None and not seen_true(sees):
        out = xp.where(sees[..., None], out, 0.0)
    if poisoned is not None:
        out = xp.where(poisoned[..., None], float("nan"), out)
    return xp.astype(xp.broadcast_to(out, (*sizes.lead, sizes.L, sizes.E)), request.q.dtype, copy=False)


def _is_top_left_causal(request: Request) -> bool:
    """Tell whether the mask is the one PyTorch's ``is_causal`` means."""
    mask = request.mask
    if type(mask) is not Causal or request.bias is not None:
        return False
    if isinstance(request.score, Gaussian):  # its key bias takes the place of the flag
        return False
    if mask.align is not None and not isinstance(mask.align, (int, str)):  # one per sequence, or unseen
        return False
    square = request.sizes.L == request.sizes.S
    return mask.align in (0, "top_left") or (square and mask.align in (None, "bottom_right"))


def _is_plain(score: Any) -> bool:
    """Tell whether a score is q·k times a positive number, as the kernel takes it."""
    if type(score) is ScaledDot:
        scale = score.scale
        return scale is None or (isinstance(scale, (int, float)) and 0 < scale < float("inf"))
    return type(score) is Dot


def _is_fused(request: Request) -> bool:
    """Tell whether PyTorch has one kernel for arrays of these shapes, or does part after part."""
    q, k, v = request.q, request.k, request.v
    one_batch = len(q.shape) <= 4 and q.shape[:-3] == k.shape[:-3] == v.shape[:-3]
    return one_batch and q.shape[-1] == v.shape[-1] and all(x.stride(-1) == 1 for x in (q, k, v))


def _fits(form: DotForm) -> bool:
    """Tell whether all that the kernel makes of a form stays finite; its values are looked at.

    The kernel scales behind the product and adds the key bias then, so either may overflow. No product
    is larger than that of the norms of all queries and of all keys, which are one pass each.
    """
    limit = _LIMITS[form.q.element_size() == 8]
    product = _norm(form.q) * _norm(form.k)
    scale = abs(form.scale) if isinstance(form.scale, (int, float)) else _norm(form.scale)
    added = 0.0 if form.key_bias is None else _norm(form.key_bias)
    return product * max(1.0, scale) + added * scale < limit  # False for NaN


def _norm(x: Any) -> float:
    """Give the Euclidean norm of all entries, summed as products are."""
    torch = sys.modules["torch"]
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float32 if x.element_size() < 4 else None))


def _for_kernel(form: DotForm) -> tuple[Any, Any, float, Any]:
    """Bring a form to the kernel's terms: q, k, a positive scale, and what is added, (..., H, 1, S)."""
    q, scale = form.q, form.scale
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):  # its causal path takes no other
        q, scale = q * scale, 1.0
    added = None if form.key_bias is None else form.key_bias[..., None, :] * in_dtype(form.scale, q)
    return q, form.k, float(scale), added


def _kernel(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float, grouped: bool) -> Any:
    """Call PyTorch's kernel, by a route that can be differentiated twice where that may be asked."""
    torch = sys.modules["torch"]

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    inputs = [x for x in (q, k, v, mask) if x is not None]
    if is_torch_compiling() or not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return call(q, k, v, mask)
    chosen = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if chosen == int(
        torch.nn.attention.SDPBackend.MATH
    ):  # PyTorch differentiates its parts as often as one likes
        return call(q, k, v, mask)
    return _twice_differentiable().apply(call, q, k, v, mask)


@functools.cache
def _twice_differentiable() -> Any:
    """Make the autograd function: the kernel's own backward, and its math twin where a graph is asked.

    The kernel's backward has no derivative of its own; the formula it computes has. What a backward
    needs, the kernel's own tensors too, is kept by save_for_backward alone, so that checkpointing
    and offloading (``torch.autograd.graph.saved_tensors_hooks``) find all of it.
    """
    torch = sys.modules["torch"]
    graph = torch.autograd.graph

    class Source(torch.autograd.Function):  # type: ignore[name-defined]
        """Where the kernel's own graph begins: unlike a leaf's, its node does not hold its tensor."""

        @staticmethod
        def forward(ctx: Any, marker: Any, x: Any) -> Any:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return None, None

    class TwiceDifferentiable(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, call: Any, *inputs: Any) -> Any:
            kept: list[Any] = list(inputs)
            again: list[Any] = []  # holds the same tensors while a backward runs

            def keep(x: Any) -> int:
                for n, y in enumerate(kept):
                    if y is not None and x.is_set_to(y):  # an input has its place already
                        return n
                kept.append(x.detach())
                return len(kept) - 1

            with torch.enable_grad(), graph.saved_tensors_hooks(keep, again.__getitem__):
                marker = torch.zeros((), requires_grad=True)
                sources = [
                    Source.apply(marker, x) if x is not None and x.requires_grad else x for x in inputs
                ]
                out = call(*sources)
            wanted = [n for n, x in enumerate(inputs) if x is not None and x.requires_grad]
            ctx.call, ctx.again, ctx.wanted = call, again, wanted
            ctx.out, ctx.sources = (
                graph.get_gradient_edge(out),
                [graph.get_gradient_edge(sources[n]) for n in wanted],
            )
            ctx.save_for_backward(*kept)
            kept.clear()  # the inner graph holds `keep`
            return out.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            saved = ctx.saved_tensors
            if torch.is_grad_enabled():  # create_graph=True
                # A view each: q, k and v may be one tensor, and each has a gradient of its own.
                inputs = [x if x is None else x.view_as(x) for x in saved[:4]]
                with as_written(gradient):
                    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                        out = ctx.call(*inputs)
                    leaves = [inputs[n] for n in ctx.wanted]
                    found = torch.autograd.grad(out, leaves, gradient, create_graph=True)
            else:
                ctx.again.extend(saved)
                try:  # the graph holds places and no tensors: keeping it costs nothing
                    found = torch.autograd.grad(ctx.out, ctx.sources, gradient, retain_graph=True)
                finally:
                    ctx.again.clear()
            grads: list[Any] = [None] * 5
            for n, g in zip(ctx.wanted, found, strict=True):
                grads[1 + n] = g
            return tuple(grads)

    return TwiceDifferentiable


def intermediate(request: Request) -> int:
    """Give the bytes of the mask written out, and of the scores where PyTorch writes them out."""
    sizes = request.sizes
    mask = 0 if request.mask is None or _is_top_left_causal(request) else sizes.B * sizes.L * sizes.S
    scores = math.prod(sizes.lead) * sizes.L * sizes.S * int(request.q.dtype.itemsize)
    return max(mask, 0 if _is_fused(request) else scores)


SDPA = Implementation("sdpa", reasons_against, attend, intermediate, merits=merits)
