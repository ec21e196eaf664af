"""The native masked softmax against the oracle, from each library, and its own promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnspan import native, oracle
from attnspan.arrays import fetch
from attnspan.errors import ArgumentError, AttnspanError
from attnspan.masks import (
    Causal,
    Dense,
    Everything,
    FirstKeys,
    Mask,
    Nothing,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.masks.bits import Bits
from attnspan.masks.bound import Bound
from attnspan.masks.spans import Spans
from tests import fresh
from tests.attention.helpers import (
    EVERY_DTYPE,
    FRAMEWORKS,
    INF,
    NAN,
    array,
    close,
    dtype_name,
    precision,
    raw,
    rounded,
    same_bits,
    values,
)

try:
    native.load()
except AttnspanError as error:
    pytest.skip(str(error), allow_module_level=True)

MASKS: dict[str, Mask] = {
    "everything": Everything(),
    "nothing": Nothing(),
    "causal": Causal(align=1),
    "window": SlidingWindow(back=2, align=0) | FirstKeys(1),
    "lengths": ValidLens(np.array([[3, 0, 7]])),
    "not": ~SlidingWindow(back=1, ahead=1, align=0) & ValidLens(np.array([[6], [2]])),
    "bits": Strided(3, align=0),
    "both": Strided(2, align=0) & Causal(align=2),
    "dense": Dense(np.random.default_rng(3).random((2, 3, 5, 7)) < 0.4),
}
SHAPE = (2, 3, 5, 7)


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Draw float64 scores that `dtype` holds exactly."""
    return rounded(3 * np.random.default_rng(seed).standard_normal(shape), dtype)


def define(scores: np.ndarray, keep: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ask the oracle: scores are a bias on products that are 0."""
    B, H, L, S = scores.shape
    q, kv = np.zeros((B, H, L, 1)), np.zeros((B, H, S, 1))
    wanted = oracle.attention(q, kv, kv, score="dot", bias=scores, keep=keep)
    return wanted.weights, wanted.lse


def hold(given: tuple[Any, Any], wanted: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    """Hold weights and log-sum-exp against the oracle's: NaN where it is NaN, 0 where it is 0."""
    weights, lse = values(given[0]), values(given[1])
    assert dtype_name(given[0]) == dtype
    assert dtype_name(given[1]) == ("float64" if dtype == "float64" else "float32")
    for got, right in zip((weights, lse), wanted, strict=True):
        assert (np.isnan(got) == np.isnan(right)).all()
    assert (weights[wanted[0] == 0] == 0).all()
    close(np.nan_to_num(weights), np.nan_to_num(wanted[0]), dtype)
    finite = np.where(np.isnan(wanted[1]), 0, wanted[1])
    close(np.where(np.isnan(lse), 0, lse), finite, "float64" if dtype == "float64" else "float32", 20.0)


def same(given: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    for one, other in zip(given, wanted, strict=True):
        same_bits(one, other)


def dense(mask: Mask, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(fetch(mask.dense(*shape[2:])), shape)


# --- right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("framework", "dtype"), EVERY_DTYPE)
def test_it_is_what_the_oracle_says(framework: str, dtype: str, name: str) -> None:
    mask = MASKS[name]
    scores = draw(SHAPE, dtype)
    keep = dense(mask, SHAPE)
    with precision(framework, dtype):
        for poison in (None, NAN, INF, -INF, 6e4):
            given = array(scores if poison is None else np.where(keep, scores, poison), framework, dtype)
            got = native.masked_softmax(given, mask.bound(*SHAPE[2:], like=given))
            hold(got, define(scores, keep), dtype)


@pytest.mark.parametrize(("framework", "dtype"), EVERY_DTYPE)
def test_what_is_not_finite_and_seen(framework: str, dtype: str) -> None:
    """-inf excludes; NaN and +inf make the weights of what the row sees NaN, and no others."""
    scores = draw((1, 1, 6, 4), dtype)
    scores[0, 0, :5] = [
        [NAN, 1, 2, 3],
        [INF, 1, -INF, 3],
        [-INF, 1, 2, 3],
        [-INF, -INF, -INF, NAN],  # the NaN is hidden: an empty row
        [-INF, NAN, 1, 1],
    ]
    mask = ValidLens(3)
    with precision(framework, dtype):
        given = array(scores, framework, dtype)
        got = native.masked_softmax(given, mask.bound(6, 4, like=given))
    hold(got, define(scores, dense(mask, scores.shape)), dtype)
    assert (values(got[1])[0, 0, 3]) == -INF


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_size_is_too_small(framework: str) -> None:
    for B, H, L, S in [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 0, 0, 0), (1, 1, 1, 1)]:
        for mask in (Everything(), Causal(align=0), Strided(2, align=0), Nothing()):
            scores = draw((B, H, L, S), "float32")
            given = array(scores, framework, "float32")
            got = native.masked_softmax(given, mask.bound(L, S, like=given))
            hold(got, define(scores, dense(mask, scores.shape)), "float32")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_large_scores_do_not_overflow(framework: str) -> None:
    scores = rounded([[[[3e38, -3e38, 3e38, 0.0], [-3e38, -3e38, -3e38, -3e38]]]], "float32")
    given = array(scores, framework, "float32")
    weights, lse = native.masked_softmax(given, Everything().bound(2, 4, like=given))
    assert values(weights).tolist() == [[[[0.5, 0, 0.5, 0], [0.25] * 4]]]
    assert np.isfinite(values(lse)).all()


# --- any strides ----------------------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda x: x.transpose(3, 2, 1, 0),
    "heads last": lambda x: x.transpose(0, 2, 1, 3),
    "steps": lambda x: x[:, ::2, 1::3, ::2],
    "expanded": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "backwards": lambda x: x[::-1, :, ::-1, ::-1],
    "unaligned": lambda x: np.frombuffer(b"-" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_arrays_of_any_strides(dtype: str, view: str) -> None:
    scores = VIEWS[view](draw((4, 4, 6, 8), dtype).astype(dtype))
    L, S = scores.shape[2:]
    for mask in (Causal(align=1), Strided(2, align=0)):
        got = native.masked_softmax(scores, mask.bound(L, S))
        for one, other in zip(
            got, native.masked_softmax(scores.copy(order="C"), mask.bound(L, S)), strict=True
        ):
            same_bits(one, other)
        hold(got, define(scores.astype(np.float64), dense(mask, scores.shape)), dtype)


def test_torch_tensors_of_any_strides() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(draw((4, 4, 6, 8), "float32"), dtype=torch.float32)
    for scores in (
        x.mT,
        x.transpose(1, 2),
        x[:, ::2, 1::3, ::2],
        x[:1, :, :1].expand(x.shape),
        x.bfloat16().mT,
    ):
        bound = Causal(align=1).bound(*scores.shape[2:], like=scores)
        got = native.masked_softmax(scores, bound)
        same(got, native.masked_softmax(scores.contiguous(), bound))
    backwards = torch.complex(x, -x).conj().imag  # a view with its sign turned
    assert backwards.is_neg()
    bound = Everything().bound(6, 8, like=x)
    same_bits(native.masked_softmax(backwards, bound)[0], native.masked_softmax(x, bound)[0])


def test_masks_of_any_strides() -> None:
    scores = draw((2, 3, 4, 9), "float32").astype(np.float32)
    mask = (SlidingWindow(back=1, align=1) | FirstKeys(1)) & Strided(2, align=0)
    bound = mask.bound(4, 9)
    assert bound.bits is not None

    def stretched(x: np.ndarray) -> np.ndarray:  # backwards in memory, and broadcast
        x = np.broadcast_to(x, (2, 3, 4, x.shape[-1]))
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]

    spans = Spans(stretched(bound.spans.start), np.broadcast_to(bound.spans.stop, (2, 3, 4, bound.spans.R)))
    wide = Bound(spans, Bits(stretched(bound.bits.words)))
    same(native.masked_softmax(scores, bound), native.masked_softmax(scores, wide))


# --- threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["pool", "openmp"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_no_bit_depends_on_threads(framework: str, executor: str) -> None:
    if framework == "torch" or executor == "openmp":
        pytest.importorskip("torch")
    if executor == "openmp" and not native.load().openmp_loaded():
        pytest.skip("PyTorch did not load GNU's OpenMP here")
    scores = array(draw((2, 3, 65, 331), "float32"), framework, "float32")
    bound = (Causal(align=200) & Strided(3, align=0)).bound(65, 331, like=scores)
    alone = native.masked_softmax(scores, bound, threads=1)
    for threads in (2, 5):
        got = native.masked_softmax(scores, bound, threads=threads, executor=executor)
        same(alone, got)


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_frameworks_give_the_same_bits(framework: str, dtype: str) -> None:
    """Down to subnormal weights, which XLA's threads would flush to zero."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    scores = draw((2, 2, 40, 300), dtype) * 8
    scores[0, 0, 0, :4] = [0, -90, -95, -100]
    mask = Causal(align=3)
    here = scores.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    weights, lse = native.masked_softmax(here, mask.bound(40, 300))
    if dtype == "float32":
        assert 0 < weights[0, 0, 0, 2] < np.finfo(np.float32).tiny
    there = array(scores, framework, dtype)
    got, got_lse = native.masked_softmax(there, mask.bound(40, 300, like=there))
    assert values(got).tobytes() == weights.astype(np.float64).tobytes()
    same_bits(got_lse, array(lse, framework, "float32"))


def test_callers_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    scores = draw((2, 2, 64, 300), "float32").astype(np.float32)
    bound = Causal(align=200).bound(64, 300)
    alone = raw(native.masked_softmax(scores, bound, threads=1)[0])
    for executor in ("pool", "auto"):
        with ThreadPoolExecutor(4) as callers:
            jobs = [
                callers.submit(native.masked_softmax, scores, bound, threads=3, executor=executor)
                for _ in range(200)
            ]
            assert all(raw(job.result()[0]).tobytes() == alone.tobytes() for job in jobs)


@pytest.mark.parametrize("before", ["numpy", "torch"])
def test_a_forked_process_computes_alone(before: str) -> None:
    """With torch loaded the threads are OpenMP's, which a child cannot use either."""
    pytest.importorskip(before)
    said = fresh.output(
        f"import {before}"
        """
import os, signal
import numpy as np
import attnspan.native as native
from attnspan.masks import Everything
x, bound = np.ones((2, 2, 64, 300), np.float32), Everything().bound(64, 300)
here = native.masked_softmax(x, bound, threads=4)[0]
child = os.fork()
if child == 0:
    signal.alarm(30)
    same = (native.masked_softmax(x, bound, threads=4)[0] == here).all()
    os._exit(0 if same else 1)
print(os.waitpid(child, 0)[1])
"""
    )
    assert said == "0\n"


# --- JAX ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_jit_gives_the_same_bits(name: str) -> None:
    jax = pytest.importorskip("jax")
    scores = array(draw(SHAPE, "float32"), "jax", "float32")

    def compute(scores: Any) -> tuple[Any, Any]:
        return native.masked_softmax(scores, MASKS[name].bound(*SHAPE[2:], like=scores))

    same(compute(scores), jax.jit(compute)(scores))


def test_the_mask_may_be_traced() -> None:
    jax = pytest.importorskip("jax")
    scores = array(draw(SHAPE, "float32"), "jax", "float32")

    @jax.jit
    def compute(scores: Any, lens: Any) -> tuple[Any, Any]:
        return native.masked_softmax(scores, ValidLens(lens).bound(5, 7, like=scores))

    for lens in ([0, 7], [3, 1]):
        keep = dense(ValidLens(np.array(lens)), SHAPE)
        hold(compute(scores, jax.numpy.asarray(lens)), define(values(scores), keep), "float32")


@pytest.mark.parametrize("mapped", ["scores", "mask", "both", "twice", "crossed"])
def test_vmap_is_a_loop(mapped: str) -> None:
    jax = pytest.importorskip("jax")
    scores = array(draw((4, 3, *SHAPE), "float32"), "jax", "float32")
    lens = jax.numpy.asarray(np.random.default_rng(0).integers(0, 8, (4, 3, 2)))

    def compute(scores: Any, lens: Any) -> tuple[Any, Any]:
        mask = ValidLens(lens) & (Strided(2, align=0) | FirstKeys(1))
        return native.masked_softmax(scores, mask.bound(5, 7, like=scores))

    deep = mapped in ("twice", "crossed")
    cases: dict[str, tuple[Any, Any, Any, Any]] = {  # the function, its arguments, those of one element
        "scores": (
            jax.vmap(compute, (0, None)),
            scores[0],
            lens[0, 0],
            lambda i, j: (scores[0, j], lens[0, 0]),
        ),
        "mask": (
            jax.vmap(compute, (None, 0)),
            scores[0, 0],
            lens[0],
            lambda i, j: (scores[0, 0], lens[0, j]),
        ),
        "both": (jax.vmap(compute), scores[0], lens[0], lambda i, j: (scores[0, j], lens[0, j])),
        "twice": (jax.vmap(jax.vmap(compute)), scores, lens, lambda i, j: (scores[i, j], lens[i, j])),
        "crossed": (
            jax.vmap(jax.vmap(compute, (None, 0)), (0, None)),
            scores[:, 0],
            lens[0],
            lambda i, j: (scores[i, 0], lens[0, j]),
        ),
    }
    function, whole, all_lens, element = cases[mapped]
    got = function(whole, all_lens)
    for i in range(4 if deep else 1):
        for j in range(3):
            at = (i, j) if deep else (j,)
            same((got[0][at], got[1][at]), compute(*element(i, j)))


def test_many_handlers_at_once_do_not_wait_for_each_other() -> None:
    """More calls in flight than XLA has threads, each with more items than that."""
    jax = pytest.importorskip("jax")
    scores = array(draw((2, 2, 64, 300), "float32"), "jax", "float32")
    bound = Causal(align=200).bound(64, 300, like=scores)

    @jax.jit
    def compute(scores: Any) -> Any:
        return sum(native.masked_softmax(scores + i, bound)[1].sum() for i in range(12))

    results = [compute(scores) for _ in range(30)]
    assert len({float(x) for x in results}) == 1


# --- refused --------------------------------------------------------------------------------------------


def refused(scores: Any, bound: Bound, said: str, **options: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        native.masked_softmax(scores, bound, **options)


def test_what_is_refused_says_why() -> None:
    x = np.zeros((1, 1, 2, 3), np.float32)
    bound = Everything().bound(2, 3)
    refused(x[0], bound, r"scores: given float32\[1, 2, 3\], needed a floating-point array \(B, H, L, S\)")
    refused(x.astype(int), bound, r"scores: given int64\[1, 1, 2, 3\]")
    refused(x.astype(">f4"), bound, r"scores: given >f4\[1, 1, 2, 3\]")
    refused(x, bound, "threads: given 0, needed 1 or more", threads=0)
    refused(x, bound, "executor: given cuda, needed auto, pool or openmp", executor="cuda")
    wide = Bound(Spans(bound.spans.start, bound.spans.stop.astype(np.int64)))
    refused(x, wide, r"bound: given int64\[1, 1, 1, 1\] of NumPy, needed int32 of NumPy")
    refused(x, Causal().bound(4, 4), r"start: given shape \(1, 1, 4, 1\), needed \(1, 1, 2, 1\), or 1")
    refused(x, Everything().bound(2, 4), r"spans: given \[0, 4\) .* within \[0, 3\]")
    refused(
        x, Bound(bound.spans, Bits(np.zeros((1, 1, 1, 2), np.uint8))), r"bits: given shape \(1, 1, 1, 2\)"
    )


def test_torch_tensors_it_cannot_read_are_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 1, 2, 3)
    bound = Everything().bound(2, 3, like=x)
    refused(x.numpy(), bound, "bound: given .* of PyTorch, needed int32 of NumPy; bind with")
    refused(x.requires_grad_(), bound, r"scores: given a tensor that requires a gradient.*scores\.detach\(\)")
    with torch.no_grad():
        native.masked_softmax(x, bound)
    refused(torch.zeros(1, 1, 2, 3, device="meta"), bound, "scores: given a torch.strided tensor on meta")
    with pytest.raises(ArgumentError, match="inside torch.compile or torch.func"):
        torch.func.vmap(lambda x: native.masked_softmax(x, bound))(torch.zeros(2, 1, 1, 2, 3))


def test_jax_refuses_spans_that_are_wrong() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((1, 1, 2, 3))
    bound = Everything().bound(2, 4, like=x)
    with pytest.raises(Exception, match=r"spans: given \[0, 4\) at \(0, 0, 0, 0\), needed sorted, disjoint"):
        jax.block_until_ready(native.masked_softmax(x, bound))


def test_a_forced_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from attnspan import native; print(native.load().isa())"
    for name in native.load().isas():
        monkeypatch.setenv("ATTNSPAN_ISA", name)
        assert fresh.output(code) == f"{name}\n"
    monkeypatch.setenv("ATTNSPAN_ISA", "sse9")
    said = fresh.run(code).stderr
    listed = ", ".join(native.load().isas())
    assert (
        f"ArgumentError: ATTNSPAN_ISA: given sse9, needed an instruction set of this machine: {listed}"
        in said
    )
