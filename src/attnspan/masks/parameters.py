"""The parameters of masks: what they may be, and how they line up with the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import is_array, is_boolean, is_floating, is_integer, look, xp_of
from attnspan.errors import describe, refusal
from attnspan.shapes import LIMIT, is_symbolic
from attnspan.values import as_array

__all__ = [
    "FAR",
    "MaskSizes",
    "boolean",
    "check_axes",
    "checked_align",
    "counted",
    "extent",
    "four",
    "offset",
    "within",
]

FAR = 2**30 - 2
"""Further than any position, and small enough that its sums with positions fit int32."""


@dataclass(frozen=True)
class MaskSizes:
    """The sizes a mask is asked for; B and H are None where only L and S are known."""

    L: int
    S: int
    B: int | None = None
    H: int | None = None


def boolean(x: Any, argument: str) -> Any:
    """Check the array of a mask: booleans, or integers seen to be 0 and 1."""
    if is_floating(x):
        raise refusal(
            argument,
            x,
            "booleans (True = may attend)",
            "a float array is a bias: pass 0/-inf values as bias=, or write mask != 0 for 1/0 values "
            "and mask == 0 for 0/-inf values",
        )
    if is_boolean(x):
        return x
    if not is_integer(x):
        raise refusal(argument, x, "booleans (True = may attend)")
    seen = look(x)
    if seen is None:
        raise refusal(
            argument,
            x,
            "booleans (True = may attend): the values of a traced or device array are not looked at",
            "write mask != 0",
        )
    if seen.size and (seen.min() < 0 or seen.max() > 1):
        raise refusal(
            argument,
            f"{describe(x)} with values from {seen.min()} to {seen.max()}",
            "booleans, or integers that are all 0 or 1 (True = may attend)",
            "did you mean valid_lens? Lengths go into masks.ValidLens(lens), document ids into "
            "masks.Documents(ids)",
        )
    return x == 1


def counted(name: str, x: Any, *, least: int | None = 0, what: str = "") -> Any:
    """Check and normalise an integer parameter: a number, a list, or an integer array."""
    needed = what or f"an integer of {least} or more, or an integer array"
    x = as_array(x)
    if isinstance(x, bool) or not (isinstance(x, int) or is_symbolic(x) or is_array(x)):
        raise refusal(name, repr(x) if isinstance(x, str) else x, needed)
    if is_array(x):
        if not is_integer(x):
            raise refusal(name, x, needed, "convert it to an integer dtype")
        seen = look(x)
        if seen is not None and seen.size and least is not None and seen.min() < least:
            raise refusal(name, f"{describe(x)} holding {seen.min()}", needed)
    elif least is not None and isinstance(x, int) and x < least:
        raise refusal(name, x, needed)
    return x


def check_axes(mask: Any, name: str, x: Any, sizes: MaskSizes) -> None:
    """Refuse a parameter whose axes are neither sequences nor heads of the call."""
    argument = f"{type(mask).__name__}.{name}"
    shape = tuple(x.shape)
    if len(shape) > 2:
        raise refusal(argument, x, "a number, (B,) one per sequence, or (B|1, H|1) one per head")
    for axis, (n, letter) in enumerate(zip(shape, ("B", "H"), strict=False)):
        known = sizes.B if letter == "B" else sizes.H
        if known is not None and n not in (1, known):
            fix = ""
            if len(shape) == 1 and n == sizes.H:
                fix = f"a 1-D array means sequences, never heads: for heads write {name}[None, :]"
            raise refusal(argument, x, f"{letter} = {known} (or 1) on axis {axis}", fix)


def four(x: Any) -> Any:
    """Line a mask parameter up with (B, H, L, S): () and (B,) and (B, H) become 4-D, numbers stay."""
    if not is_array(x):
        return x
    if is_integer(x):  # no position is further away, and sums of three still fit int32
        x = xp_of(x).clip(x, -FAR, FAR)
    return x if len(x.shape) > 2 else x.reshape(tuple(x.shape) + (1,) * (4 - len(x.shape)))


def offset(align: Any, L: Any, S: Any, owner: Any) -> Any:
    """Resolve an alignment to the key position at which query 0 stands."""
    if align is None:
        if L is S or (isinstance(L, int) and isinstance(S, int) and L == S) or _same_symbol(L, S):
            return 0
        raise _unsaid(owner, L, S)
    if isinstance(align, str):
        return 0 if align == "top_left" else S - L
    # Said by number, it is known to lie there; where values are not seen, it is clipped to it.
    return xp_of(align).clip(four(align), -LIMIT, LIMIT) if is_array(align) else align


def _same_symbol(L: Any, S: Any) -> bool:
    return is_symbolic(L) and bool(L == S)


def _unsaid(owner: Any, L: Any, S: Any) -> Exception:
    from attnspan.masks.causal import Causal

    few, many = (3, 5) if L < S else (5, 3)
    drawn = [Causal(a).picture(few, many).splitlines() for a in ("top_left", "bottom_right")]
    rows = "\n".join(f"{a:<12}  {b}" for a, b in zip(*drawn, strict=True))
    return refusal(
        "align",
        f"nothing, for {type(owner).__name__} over {L} queries and {S} keys",
        "to know where query 0 stands among the keys when L differs from S",
        'pass align="top_left" (key 0), align="bottom_right" (key S - L: a cache) or the key position '
        f"itself (a number, or one per sequence)\nCausal() with {few} queries (down) and {many} keys:\n"
        f"top_left      bottom_right\n{rows}",
    )


def checked_align(align: Any) -> Any:
    """Check the `align` parameter of a positional mask or bias."""
    if align is None or (isinstance(align, str) and align in ("top_left", "bottom_right")):
        return align
    needed = '"top_left", "bottom_right", a key position (integer), or an integer array of them'
    if isinstance(align, str):
        raise refusal("align", repr(align), needed)
    align = counted("align", align, least=None, what=needed)
    least, most = extent(align)
    if least < -LIMIT or most > LIMIT:
        raise refusal("align", align, f"positions between -{LIMIT} and {LIMIT}")
    return align


def extent(x: Any) -> tuple[int, int]:
    """Give the least and the largest value of an integer parameter; (0, 0) where it is not seen."""
    if isinstance(x, int):
        return x, x
    seen = look(x) if is_array(x) else None
    return (int(seen.min()), int(seen.max())) if seen is not None and seen.size else (0, 0)


def within(argument: str, x: Any, n: int, letter: str) -> None:
    """Refuse lengths that are seen to lie outside [0, n]."""
    least, most = extent(x)
    if least < 0 or most > n:
        values = f" with values from {least} to {most}" if is_array(x) else ""
        raise refusal(argument, f"{describe(x)}{values}", f"lengths between 0 and {letter} = {n}")
