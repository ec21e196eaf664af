"""Every mistake is refused before any compute, in each framework, by a text that mends it (B95)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.biases import ALiBi
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.scores import ScaledDot

from .helpers import FRAMEWORKS, NAMES, array

B, H, L, S, D = 2, 4, 3, 5, 8
SAID = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX"}
To = Callable[[Any], Any]


def given(
    to: To, *, lead: tuple[int, ...] = (B, H), keys: int = S, G: int | None = None
) -> tuple[Any, Any, Any]:
    kv = lead if G is None else (*lead[:-1], G)
    shapes = (*lead, L, D), (*kv, keys, D), (*kv, keys, D)
    q, k, v = (to(np.ones(shape, np.float32)) for shape in shapes)
    return q, k, v


def option(name: str, make: Callable[[To], Any], **more: Any) -> Callable[[To], Any]:
    """Make the call with one option, and L ≠ S (or more, as `given` takes it)."""
    return lambda to: asp.attention(*given(to, **more), **{name: make(to)})


def booleans(*shape: int) -> Callable[[To], Any]:
    return lambda to: to(np.ones(shape, bool))


def numbers(*shape: int, dtype: str = "float32") -> Callable[[To], Any]:
    return lambda to: to(np.ones(shape, dtype))


ARGUMENTS: dict[str, tuple[Callable[[To], Any], str]] = {
    "B18: a float mask": (
        option("mask", numbers(L, S)),
        r"mask: given float32\[3, 5\], needed booleans \(True = may attend\); a float array is a bias: pass "
        r"0/-inf values as bias=, or write mask != 0 for 1/0 values and mask == 0 for 0/-inf values",
    ),
    "B22: lengths as a mask": (
        option("mask", lambda to: to(np.array([1, 3, 2, 2, 2]))),
        r"mask: given int\d+\[5\] with values from 1 to 3, needed booleans, or integers that are all 0 or 1 "
        r"\(True = may attend\); did you mean valid_lens\? Lengths go into masks.ValidLens\(lens\), document "
        r"ids into masks.Documents\(ids\)",
    ),
    "B52: document ids as a mask": (
        option("mask", lambda to: to(np.array([0, 0, 1, 1, -1]))),
        r"mask: given int\d+\[5\] with values from -1 to 1, needed booleans, .*masks.Documents\(ids\)",
    ),
    "a number": (option("mask", lambda to: 3), "mask: given 3, needed a mask of attnspan.masks or a boolean"),
    "text": (
        option("mask", lambda to: "causal"),
        "mask: given .*, needed a mask of attnspan.masks or a boolean",
    ),
    "a class": (
        option("mask", lambda to: Causal),
        "mask: given the class Causal, needed a mask; write Causal",
    ),
    "a list of lengths": (option("mask", lambda to: [1, 3, 2, 2, 2]), "did you mean valid_lens"),
    "a list of floats": (option("mask", lambda to: [0.0] * 5), "a float array is a bias"),
    "B95: another number of keys": (
        option("mask", booleans(L, S + 1)),
        r"mask: given bool\[3, 6\], needed \(\.\.\., L, S\) = \(\.\.\., 3 or 1, 5 or 1\); a mask is made for "
        "one pair of lengths; symbolic masks fit all",
    ),
    "transposed": (
        option("mask", booleans(S, L)),
        r"mask: given bool\[5, 3\].*its last two axes are \(queries, keys\): transpose it",
    ),
    "B59: the keys of each sequence": (
        option("mask", booleans(B, S)),
        r"for the keys of each sequence \(B, S\) write mask\[:, None, None, :\] \(3-D: \[:, None, :\]\)",
    ),
    "B57: heads in the batch": (
        option("mask", booleans(B * H, L, S)),
        r"mask: given bool\[8, 3, 5\] beside 4-D queries float32\[2, 4, 3, 8\], needed 4 axes \(B\|1, H\|1, ",
    ),
    "B95: three axes beside four": (
        option("mask", booleans(B, L, S)),
        r"say which axis is meant: mask\[:, None\] for \(B, 1, L, S\), mask\[None\] for \(1, H, L, S\)",
    ),
    "four axes beside three": (
        option("mask", booleans(B, 1, L, S), lead=(B,)),
        r"mask: given bool\[2, 1, 3, 5\] beside 3-D queries float32\[2, 3, 8\], needed 3 axes",
    ),
    "three axes inside a mask": (
        option("mask", lambda to: Causal(0) & Dense(to(np.ones((B, L, S), bool)))),
        r"mask: given bool\[2, 3, 5\] beside 4-D queries",
    ),
    "another batch": (option("mask", booleans(3, 1, L, S)), r"mask: given bool\[3, 1, 3, 5\], needed B = 2"),
    "another number of heads": (
        option("mask", booleans(B, 3, L, S)),
        r"mask: given bool\[2, 3, 3, 5\], needed H = 4 \(or 1\) on axis 1; masks are \(B\|1, H\|1, L\|1, ",
    ),
    "B23: causal, unsaid": (
        option("mask", lambda to: Causal()),
        r"align: given nothing, for Causal over 3 queries and 5 keys, needed to know where query 0 stands "
        r"(?s:.*)top_left +bottom_right\n█···· +███··\n██··· +████·\n███·· +█████",
    ),
    "a window, unsaid": (
        option("mask", lambda to: SlidingWindow(1)),
        "align: given nothing, for SlidingWindow",
    ),
    "a prefix, unsaid": (option("mask", lambda to: PrefixLM(2)), "align: given nothing, for PrefixLM"),
    "strided, unsaid": (option("mask", lambda to: Strided(2)), "align: given nothing, for Strided"),
    "unsaid, within": (
        option("mask", lambda to: ~(Causal() | ValidLens(2))),
        "align: given nothing, for Causal",
    ),
    "documents of one side": (option("mask", lambda to: Documents([0, 0, 1])), "Documents"),
    "a strange alignment": (
        lambda to: asp.attention(*given(to), mask=Causal(), align="right"),
        r'align: given \'right\', needed "top_left", "bottom_right", a key position',
    ),
    "B95: lengths beyond S": (
        option("mask", lambda to: ValidLens(to(np.array([2, 6])))),
        r"ValidLens.lens: given int\d+\[2\] with values from 2 to 6, needed lengths between 0 and S = 5",
    ),
    "B95: negative lengths": (
        option("mask", lambda to: ValidLens([2, -1])),
        "lens: given .*-1.*, needed",
    ),
    "lengths per head in one axis": (
        option("mask", lambda to: ValidLens([1, 2, 3, 4])),
        r"ValidLens.lens: given int64\[4\], needed B = 2 \(or 1\) on axis 0; a 1-D array means sequences, "
        r"never heads: for heads write lens\[None, :\]",
    ),
    # biases
    "a boolean bias": (
        option("bias", booleans(L, S)),
        r"bias: given bool\[3, 5\], needed a floating-point array .*; a boolean array is a mask: pass it as",
    ),
    "an integer bias": (
        option("bias", numbers(L, S, dtype="int32")),
        r"bias: given int32\[3, 5\], needed a float",
    ),
    "a list bias": (
        option("bias", lambda to: [[0.0]]),
        "bias: given list, needed a floating-point array that",
    ),
    "a bias of three axes beside four": (
        option("bias", numbers(B, L, S)),
        r"bias: given float32\[2, 3, 5\] beside 4-D queries, needed 4 axes or at most two \(L, S\); say "
        r"which axis is meant: bias\[:, None\] for \(B, 1, L, S\), bias\[None\] for \(1, H, L, S\)",
    ),
    "a bias of another length": (
        option("bias", numbers(L, S + 1)),
        r"bias: given float32\[3, 6\], needed a shape that broadcasts to the scores \(2, 4, 3, 5\)",
    ),
    "a bias per key of each head": (
        option("bias", numbers(1, 3, 1, S)),
        r"bias: given float32\[1, 3, 1, 5\]",
    ),
    "ALiBi, unsaid": (
        option("bias", lambda to: ALiBi(to(np.ones(H, np.float32)))),
        "align: given nothing, for ALiBi over 3 queries and 5 keys",
    ),
    "ALiBi for other heads": (
        option("bias", lambda to: ALiBi(to(np.ones(3, np.float32)), align=0)),
        r"ALiBi.slopes: given float32\[3\], needed one slope for each of the 4 heads",
    ),
    # numbers
    "softcap 0": (
        option("softcap", lambda to: 0),
        "softcap: given 0, needed a positive number or None; None is no",
    ),
    "softcap < 0": (
        option("softcap", lambda to: -1.5),
        "softcap: given -1.5, needed a positive number or None",
    ),
    "softcap NaN": (
        option("softcap", lambda to: float("nan")),
        "softcap: given nan, needed a positive number",
    ),
    "softcap per head": (
        option("softcap", numbers(H)),
        r"softcap: given float32\[4\], needed a positive number",
    ),
    "softcap True": (
        option("softcap", lambda to: True),
        "softcap: given True, needed a positive number or None",
    ),
    "a sink in one axis": (
        option("sink", numbers(H)),
        r"sink: given .*\(4,\).*, needed a number, \(2,\) one per sequence, or \(2 or 1, 4 or 1\) one per "
        r"head; a 1-D array means sequences, never heads: for one per head write sink\[None, :\]",
    ),
    "a sink of three axes": (
        option("sink", numbers(1, H, 1)),
        r"sink: given .*\(1, 4, 1\), needed a number, \(2,\)",
    ),
    "an integer sink": (
        option("sink", numbers(1, H, dtype="int32")),
        r"sink: given int32\[1, 4\], needed a number",
    ),
    "a sink of text": (
        option("sink", lambda to: "0"),
        "sink: given .*, needed a number, or a floating-point array",
    ),
    "dropout without a seed": (
        option("dropout", lambda to: 0.1),
        "rng: given nothing, with dropout=0.1, needed a seed whenever dropout acts: an integer, a JAX key or "
        "a torch.Generator; at inference pass dropout=0.0",
    ),
    "dropout 1": (option("dropout", lambda to: 1.0), "dropout: given 1.0, needed a number p with 0 <= p < 1"),
    "dropout < 0": (
        option("dropout", lambda to: -0.1),
        "dropout: given -0.1, needed a number p with 0 <= p < 1",
    ),
    "dropout True": (
        option("dropout", lambda to: True),
        "dropout: given True, needed a number p with 0 <= p < 1",
    ),
    "a float seed": (
        lambda to: asp.attention(*given(to), dropout=0.1, rng=1.5),
        "rng: given 1.5, needed an integer, a 0-d integer array, a JAX key .* or a torch.Generator",
    ),
    "several seeds": (
        lambda to: asp.attention(*given(to), dropout=0.1, rng=to(np.array([1, 2, 3]))),
        "rng: given .*, needed",
    ),
    # q, k and v
    "B81: keys and values": (
        lambda to: asp.attention(*given(to)[:2], given(to, keys=6)[2]),
        r"v: given q float32\[2, 4, 3, 8\], k float32\[2, 4, 5, 8\], v float32\[2, 4, 6, 8\], needed one "
        r"value per key, so 5 of them and not 6; keys and values must have the same length \(axis -2\)",
    ),
    "B81: heads that don't divide": (
        lambda to: asp.attention(*given(to, G=3)),
        r"k: given .*, needed a number of key/value heads that divides the 4 query heads, not 3; query",
    ),
    "other heads in v": (
        lambda to: asp.attention(*given(to)[:2], given(to, G=2)[2]),
        "v: given .*, needed as many heads as k, 4 and not 2",
    ),
    "other batches": (
        lambda to: asp.attention(given(to)[0], *given(to, lead=(3, H))[1:]),
        r"q, k, v: given .*, needed leading axes that agree or are 1 \(axis 0 has sizes \[2, 3\]\)",
    ),
    "other ranks": (
        lambda to: asp.attention(given(to)[0], *given(to, lead=(B,))[1:]),
        "q, k, v: given .*, needed the same number of axes, two or more: .* add the missing axes with",
    ),
    "vectors": (
        lambda to: asp.attention(*(x[0, 0, 0] for x in given(to))),
        "needed the same number of axes, two or more",
    ),
    "two dtypes": (
        lambda to: asp.attention(given(to)[0], *(to(np.ones((B, H, S, D), "float16")) for _ in range(2))),
        r"q, k, v: given q float32\[2, 4, 3, 8\], k float16\[2, 4, 5, 8\], v float16\[2, 4, 5, 8\], "
        "needed one floating-point dtype; convert them all to q's dtype",
    ),
    "integers": (
        lambda to: asp.attention(*(to(np.ones((2, 3, 4), "int32")) for _ in range(3))),
        r"q: given int32\[2, 3, 4\], needed real floating-point numbers",
    ),
    "a list": (
        lambda to: asp.attention([[1.0]], [[1.0]], [[1.0]]),
        "q: given list, needed an array of NumPy, ",
    ),
    "a score's class": (
        option("score", lambda to: ScaledDot),
        r"score: given the class ScaledDot, needed a score; write ScaledDot\(\.\.\.\)",
    ),
    "a score's name": (
        option("score", lambda to: "dot"),
        "score: given .*, needed a score of attnspan.scores or a",
    ),
    "an implementation nobody knows": (
        option("implementation", lambda to: "flash"),
        f"implementation: given 'flash', needed 'auto' or one of {', '.join(map(repr, NAMES))}",
    ),
}


@pytest.mark.parametrize("mistake", ARGUMENTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework: str, mistake: str) -> None:
    make, text = ARGUMENTS[mistake]
    with pytest.raises(asp.ArgumentError, match=text):
        make(lambda x: array(x, framework))


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_refused_by_plan_and_inspect_too(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three doors check alike."""
    make, text = ARGUMENTS[mistake]
    for door in (asp.plan, asp.inspect):
        monkeypatch.setattr(asp, "attention", door)
        with pytest.raises(asp.ArgumentError, match=text):
            make(np.asarray)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_frameworks(framework: str) -> None:
    q, k, v = given(lambda x: array(x, framework))
    for other in {"numpy", "torch", "jax"} - {framework}:
        if not importlib.util.find_spec(other):
            continue
        foreign = lambda x: array(x, other)  # noqa: B023, E731
        with pytest.raises(
            asp.ArgumentError, match=f"k {SAID[other]} .*needed arrays of one framework; convert them all"
        ):
            asp.attention(q, *given(foreign)[1:])
        bias = foreign(np.zeros((L, S), np.float32))
        with pytest.raises(
            asp.ArgumentError, match=f"bias: given {SAID[other]} .*, needed an array of {SAID[framework]}"
        ):
            asp.attention(q, k, v, bias=bias)
        if other != "numpy":  # NumPy's masks and parameters are welcome everywhere
            with pytest.raises(
                asp.ArgumentError,
                match=f"mask: given arrays of {SAID[other]} beside {SAID[framework]} queries",
            ):
                asp.attention(q, k, v, mask=foreign(np.ones((L, S), bool)))
            scale = foreign(np.ones((), np.float32))
            with pytest.raises(
                asp.ArgumentError,
                match=f"ScaledDot.scale: given {SAID[other]} .*, needed an array of {SAID[framework]}",
            ):
                asp.attention(q, k, v, score=ScaledDot(scale))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_named_implementation_lists_all_its_reasons(framework: str) -> None:
    q, k, v = given(lambda x: array(x, framework))
    call = lambda: asp.attention(  # noqa: E731
        q, k, v, score=lambda q, k: q @ k.mT, softcap=1.0, sink=0.5, dropout=0.1, rng=1, implementation="sdpa"
    )
    with pytest.raises(asp.NotSupportedError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("implementation='sdpa' cannot do this: ")
    assert text.endswith('; implementation="auto" chooses one that can')
    if framework != "torch":
        assert f"the arrays are {SAID[framework]}'s, not PyTorch's" in text
    else:
        for reason in ("is no dot form", "no softcap", "no sink", "dropout draws other bits"):
            assert reason in text


@pytest.mark.parametrize("framework", FRAMEWORKS[2:])
def test_values_that_are_traced_are_not_looked_at(framework: str) -> None:
    """Integers as a mask are refused where nobody can see that they are 0 and 1."""
    import jax

    qkv = given(lambda x: array(x, framework))
    with pytest.raises(
        asp.ArgumentError, match="values of a traced or device array are not looked at; write mask"
    ):
        jax.jit(lambda m: asp.attention(*qkv, mask=m))(np.ones((L, S), np.int32))


def test_what_is_no_mistake() -> None:
    """The neighbours of the refusals above: each is one step away from one, and runs."""
    q, k, v = given(np.asarray)
    for options in (
        {"mask": np.ones((L, S), int)},
        {"mask": [[1, 0, 1, 1, 0]] * L},
        {"mask": np.ones((B, 1, L, S), bool)},
        {"mask": Causal(), "align": "bottom_right"},
        {"mask": Everything()},
        {"mask": ValidLens(S)},
        {"bias": np.zeros(S)},
        {"sink": np.zeros((1, H))},
        {"sink": np.zeros(B)},
        {"softcap": np.float32(3)},
        {"dropout": 0},
        {"rng": None, "dropout": 0.0},
    ):
        assert asp.attention(q, k, v, **options).shape == (B, H, L, D)
