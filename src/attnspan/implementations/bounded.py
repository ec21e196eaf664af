"""A request with its mask bound to intervals and bits: what a walk over tiles begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnspan.arrays import constant, device_of, look
from attnspan.biases import ALiBi
from attnspan.implementations.base import Prepared, any_of_group, finite_in, prepared, with_middle_axes
from attnspan.masks.bits import pack
from attnspan.masks.bound import Bound, all_keys, both, frame_of
from attnspan.masks.coverage import queries_seeing, queries_that_see, seen_keys
from attnspan.request import Request, mask_sizes
from attnspan.scores.base import per_head

__all__ = ["bound_mask", "bound_with_bias", "broadcast", "prepared_in_bounds"]


def broadcast(request: Request) -> Request:
    """Give q, k and v all leading axes of the output, without a copy."""
    xp, sizes = request.xp, request.sizes
    lead = sizes.lead
    return replace(
        request,
        q=xp.broadcast_to(request.q, (*lead, sizes.L, sizes.Dq)),
        k=xp.broadcast_to(request.k, (*lead[:-1], sizes.G, sizes.S, sizes.Dk)),
        v=xp.broadcast_to(request.v, (*lead[:-1], sizes.G, sizes.S, request.v.shape[-1])),
    )


def bound_mask(request: Request) -> Bound | None:
    """Give the mask with all axes of the scores; None shows all."""
    if request.mask is None:
        return None
    sizes = request.sizes
    bound = request.mask.bound(sizes.L, sizes.S, like=request.q, sizes=mask_sizes(sizes))
    return bound.map_arrays(lambda x: with_middle_axes(x, sizes))


def bound_with_bias(request: Request) -> tuple[Bound | None, Any]:
    """Give the mask, with all axes of the scores, and the bias; a bias of -inf becomes part of the mask."""
    xp, sizes, device = request.xp, request.sizes, device_of(request.q)
    bound, bias = bound_mask(request), request.bias
    if bias is None:
        return bound, None
    if isinstance(bias, ALiBi):
        return bound, bias.map_arrays(lambda x: constant(x, xp, device))
    seen = look(bias)
    if seen is None or np.isneginf(seen).any():
        there = xp.broadcast_to(bias != -float("inf"), (*bias.shape[:-1], sizes.S))
        frame = frame_of(sizes.L, sizes.S, xp, device)
        bits = pack(lambda i, j: there[..., i:j, :], there.shape[-2], sizes.S)
        shown = Bound(all_keys(frame), bits)
        bound = shown if bound is None else both(bound, shown, frame)
        bias = xp.where(bias != -float("inf"), bias, 0.0)
    return bound, finite_in(xp, bias, request.accumulation)


def prepared_in_bounds(request: Request, bound: Bound | None) -> Prepared:
    """Bring a request, broadcast, to a form and values; nothing that its mask excludes is left in them."""
    sizes = request.sizes
    sees = live = None
    if bound is not None:
        sees = queries_that_see(bound, sizes.L, sizes.S)
        live = any_of_group(seen_keys(bound, sizes.L, sizes.S), sizes.G)

    def reach(bad: Any) -> Any:
        bad = per_head(bad[..., None], sizes.H)[..., 0]
        return bad.any(-1)[..., None] if bound is None else queries_seeing(bound, bad, sizes.L, sizes.S)

    return prepared(request, sees, live, reach)
