"""The walk over tiles: what it skips, what it may close over, and its loops in JAX."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.implementations import tiled
from attnspan.implementations.tiled.walk import tiles_of
from attnspan.masks import Causal, Dense, Documents, SlidingWindow, Strided, ValidLens
from attnspan.masks.coverage import queries_that_see, seen_keys, shown, tiles_covered
from attnspan.request import request_of
from attnspan.scores import Gaussian

from .asked import Asked, hold
from .cases import Sizes, masks
from .helpers import FRAMEWORKS, TRACED, array, same_bits, values

MASKS = tuple(name for name, _, _ in masks(Sizes()))


@pytest.mark.parametrize("name", MASKS)
def test_what_a_walk_asks_of_a_mask_is_what_the_mask_shows(name: str) -> None:
    """Rows, keys and tiles against the mask written out, for tiles that divide no length."""
    for s in (Sizes(), Sizes(L=7, S=11), Sizes(L=1, S=3)):
        mask = next(mask for n, mask, _ in masks(s) if n == name)
        bound, dense = mask.bound(s.L, s.S), np.asarray(mask.dense(s.L, s.S))
        some = np.array([n for n in (0, 2, s.S - 1) if n < s.S])
        np.testing.assert_array_equal(
            np.broadcast_to(shown(bound, some), dense[..., some].shape), dense[..., some]
        )
        seeing = np.broadcast_to(queries_that_see(bound, s.L, s.S), dense.shape[:-1])
        np.testing.assert_array_equal(seeing, dense.any(-1))
        np.testing.assert_array_equal(seen_keys(bound, s.L, s.S), dense.any(-2))
        if bound.bits is None:
            touched, full = tiles_covered(bound.spans, s.L, s.S, (3, 4))
            for i, j in np.ndindex(touched.shape):
                part = dense[..., 3 * i : 3 * i + 3, 4 * j : 4 * j + 4]
                assert touched[i, j] == part.any(), (i, j)
                assert full[i, j] == part.all() or not full[i, j], (i, j)
                if bound.spans.R == 1:
                    assert full[i, j] == part.all(), (i, j)


@pytest.mark.parametrize(
    ("mask", "walked"),
    [
        (None, 16),
        (Causal(0), 10),
        (SlidingWindow(0, align=0), 4),
        (Causal(0) & SlidingWindow(3, align=0), 7),
        (Documents(np.repeat([0, 1], 8)), 8),
        (ValidLens(5), 8),
        (Dense(np.eye(16, dtype=bool)), 4),
        (Strided(16, align=0), 4),
    ],
    ids=repr,
)
def test_tiles_that_show_nothing_are_skipped(mask: Any, walked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tile that shows all its pairs has no mask."""
    monkeypatch.setattr(tiled, "TILE", (4, 4))
    x = np.ones((1, 16, 2))
    problem, _ = tiled._problem(request_of(x, x, x, mask=mask))
    found = [(rows.part.start, *tile) for rows, tiles in tiles_of(problem, (4, 4)) for tile in tiles]
    assert len(found) == walked
    if mask == Causal(0):
        assert all((keep is None) == (columns.start < row) for row, columns, keep in found)


def bilinear(q: Any, k: Any, W: Any) -> Any:
    return q @ W @ k.swapaxes(-1, -2)


@pytest.mark.parametrize("framework", TRACED)
def test_arrays_bound_by_name_have_gradients(framework: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, g = rng.standard_normal((4, 2, 5, 3))
    W = rng.standard_normal((3, 3))
    if framework == "torch":
        import torch

        def gradient(one: str) -> Any:
            w = torch.tensor(W, requires_grad=True)
            qkv = [torch.tensor(x) for x in (q, k, v)]
            out = asp.attention(*qkv, score=functools.partial(bilinear, W=w), implementation=one)
            return torch.autograd.grad(out, w, torch.tensor(g))[0]
    else:
        import jax

        def gradient(one: str) -> Any:
            qkv = [array(x, "jax", "float32") for x in (q, k, v)]

            def loss(w: Any) -> Any:
                out = asp.attention(*qkv, score=functools.partial(bilinear, W=w), implementation=one)
                return (out * g).sum()

            return jax.grad(loss)(array(W, "jax", "float32"))

    assert np.abs(values(gradient("tiled"))).max() > 0.1
    np.testing.assert_allclose(values(gradient("tiled")), values(gradient("eager")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("framework", TRACED)
def test_a_closure_over_what_is_traced_is_refused_with_the_way_out(framework: str) -> None:
    """Its gradient would be lost; auto takes the formula, whose gradient is right; constants are welcome."""
    x = array(np.random.default_rng(0).standard_normal((1, 4, 3)), framework, "float32")
    fixed = array(np.eye(3), framework, "float32")
    closed = lambda W: lambda q, k: bilinear(q, k, W)  # noqa: E731
    assert asp.plan(x, x, x, score=closed(fixed)).implementation == "tiled"
    text = r"closes over an array that (is traced|has a gradient).*functools\.partial\(fn, W=W\)"
    if framework == "torch":
        import torch

        W = torch.eye(3, requires_grad=True)
        with pytest.raises(asp.NotSupportedError, match=text):
            asp.attention(x, x, x, score=closed(W), implementation="tiled")
        plan = asp.plan(x, x, x, score=closed(W))
        assert plan.implementation == "eager" and "functools.partial" in str(plan)
        asp.attention(x, x, x, score=closed(W)).sum().backward()
        assert W.grad is not None and W.grad.abs().max() > 0
        with torch.no_grad():
            assert asp.plan(x, x, x, score=closed(W)).implementation == "tiled"
        found = torch.func.grad(lambda W: asp.attention(x, x, x, score=closed(W)).sum())(fixed)
        torch.testing.assert_close(found, W.grad)
        layer = torch.nn.Linear(3, 3)
        with pytest.raises(asp.NotSupportedError, match=text):
            asp.attention(x, x, x, score=lambda q, k: layer(q) @ k.mT, implementation="tiled")
    else:
        import jax

        named = lambda W: asp.attention(x, x, x, score=closed(W), implementation="tiled").sum()  # noqa: E731
        for transform in (jax.grad, jax.jit):
            with pytest.raises(asp.NotSupportedError, match=text):
                transform(named)(fixed)
        found = jax.grad(lambda W: asp.attention(x, x, x, score=closed(W)).sum())(fixed)
        assert np.abs(values(found)).max() > 0


def test_arrays_bound_by_place_are_refused() -> None:
    x = np.ones((1, 2, 3))
    with pytest.raises(asp.ArgumentError, match=r"score: given .*float64\[3, 3\] bound by place.*W=W"):
        asp.attention(x, x, x, score=functools.partial(lambda W, q, k: q @ W @ k.mT, np.eye(3)))


LONG = Sizes(L=7, S=9)
IN_LOOPS = {
    "plain": Asked(sizes=LONG),
    "spans, bias, sink": Asked(sizes=LONG, mask="causal, window, valid", bias="BHLS", sink="1H"),
    "bits, dropout, softcap": Asked(sizes=LONG, mask="not causal, or bits", dropout=0.4, softcap=2.0),
    "additive, alibi": Asked(sizes=LONG, score="additive", mask="causal, bottom right", bias="alibi"),
    "hidden by the bias": Asked(sizes=LONG, score="gaussian", bias="-1HL1"),
}


@pytest.mark.parametrize("name", IN_LOOPS)
@pytest.mark.parametrize("framework", FRAMEWORKS[2:])
def test_loops_in_jax(framework: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output against the oracle, gradients against the formula's, over several ragged tiles."""
    import jax

    monkeypatch.setattr(tiled, "TILE", (3, 4))
    asked = IN_LOOPS[name]
    hold(asked, framework, "float32", ("tiled",))
    x = asked.native(framework, "float32")

    def loss(x: dict[str, Any], one: str) -> Any:
        qkv, options = asked.library(x, framework)
        return (asp.attention(*qkv, **options, implementation=one) ** 2).sum()

    found, wanted = (jax.grad(loss)(x, one) for one in ("tiled", "eager"))
    for key in x:
        np.testing.assert_allclose(values(found[key]), values(wanted[key]), rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("framework", FRAMEWORKS[2:])
def test_transforms_in_jax(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jit, vmap, checkpoint, grad of grad, and a scan around it."""
    import jax
    import jax.numpy as jnp

    monkeypatch.setattr(tiled, "TILE", (3, 4))
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((3, 1, 5, 2)), framework, "float32") for _ in range(3))

    def attend(one: str) -> Any:
        return lambda q, k, v: asp.attention(q, k, v, score=Gaussian(), mask=Causal(), implementation=one)

    plain = attend("eager")(q, k, v)
    np.testing.assert_allclose(jax.jit(attend("tiled"))(q, k, v), plain, rtol=1e-5, atol=1e-6)
    single = lambda q, k, v: attend("tiled")(q[None], k[None], v[None])[0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(single)(q, k, v), plain, rtol=1e-5, atol=1e-6)
    step = lambda carry, _: (jax.checkpoint(attend("tiled"))(carry, k, v), None)  # noqa: E731
    twice = lambda q: (jax.lax.scan(step, q, None, length=2)[0] ** 2).sum()  # noqa: E731
    again = lambda q: (plain_twice(q) ** 2).sum()  # noqa: E731
    plain_twice = lambda q: attend("eager")(attend("eager")(q, k, v), k, v)  # noqa: E731
    np.testing.assert_allclose(jax.grad(twice)(q), jax.grad(again)(q), rtol=1e-4, atol=1e-5)
    second = lambda one: jax.grad(  # noqa: E731
        lambda q: (jax.grad(lambda q: (attend(one)(q, k, v) ** 2).sum())(q) ** 2).sum()
    )
    np.testing.assert_allclose(second("tiled")(q), second("eager")(q), rtol=1e-3, atol=1e-4)
    assert jnp.isfinite(second("tiled")(q)).all()


@pytest.mark.parametrize("framework", TRACED[:1])
def test_checkpoint_and_compile_in_torch(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    rng = np.random.default_rng(0)
    q, k, v = (torch.tensor(rng.standard_normal((2, 7, 3))).requires_grad_() for _ in range(3))
    attend = functools.partial(
        asp.attention, score=Gaussian(), mask=Causal(), dropout=0.3, rng=5, implementation="tiled"
    )
    plain = asp.attention(
        q, k, v, score=Gaussian(), mask=Causal(), dropout=0.3, rng=5, implementation="eager"
    )
    wanted = torch.autograd.grad(plain.square().sum(), (q, k, v))
    monkeypatch.setattr(tiled, "_UNROLLED", 3)
    torch._dynamo.reset()
    for fn in (
        lambda *x: checkpoint(attend, *x, use_reentrant=False),
        torch.compile(attend, backend="aot_eager", fullgraph=True),
    ):
        found = torch.autograd.grad(fn(q, k, v).square().sum(), (q, k, v))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_do_not_know_what_else_is_in_the_batch(framework: str) -> None:
    """A sequence alone and in a batch, and a call with more padding: the same to the last digits."""
    rng = np.random.default_rng(1)
    q, k, v = (array(rng.standard_normal((3, 6, 4)), framework, "float32") for _ in range(3))
    lens = array(np.array([4, 6, 0]), framework)
    whole = asp.attention(q, k, v, mask=ValidLens(lens), implementation="tiled")
    alone = asp.attention(q[:1], k[:1], v[:1], mask=ValidLens(lens[:1]), implementation="tiled")
    np.testing.assert_allclose(values(whole)[:1], values(alone), rtol=1e-6)
    cut = asp.attention(q[:1], k[:1, :4], v[:1, :4], implementation="tiled")
    np.testing.assert_allclose(values(whole)[:1], values(cut), rtol=1e-6)
    assert (values(whole)[2] == 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_statistics_by_tiles_are_those_of_the_weights(framework: str) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (array(3 * rng.standard_normal((2, 7, 4)), framework, "float32") for _ in range(3))
    mask = SlidingWindow(2, align=0) & ValidLens(5)
    r, e = (asp.inspect(q, k, v, mask=mask, implementation=one) for one in ("tiled", "eager"))
    for name in ("entropy", "effective_keys", "max_weight", "jacobian_norm"):
        found, wanted = (values(getattr(x.stats, name)) for x in (r, e))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    wanted_lse = oracle.attention(*(values(x) for x in (q, k, v)), keep=mask.dense(7, 7)[:, 0]).lse
    np.testing.assert_allclose(values(r.lse), np.asarray(wanted_lse).reshape(2, 7), rtol=1e-5)
    same_bits(r.out, asp.attention(q, k, v, mask=mask, implementation="tiled"))


@pytest.mark.parametrize("framework", TRACED[:1])
def test_large_excluded_scores_leave_every_derivative_finite(framework: str) -> None:
    """What overflows in the exponential is set aside before it, in double backward and inside vmap too."""
    import torch

    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], requires_grad=True)
    k = torch.tensor([[[0.0, 1.0], [300.0, 0.0]]], requires_grad=True)
    attend = lambda q, k: asp.attention(  # noqa: E731
        q, k, k, mask=Causal(), softcap=1e6, implementation="tiled"
    )
    (g,) = torch.autograd.grad(attend(q, k).square().sum(), q, create_graph=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(g.sum(), (q, k)))
    mapped = torch.vmap(attend)(q[None], k[None])
    plain = asp.attention(q, k, k, mask=Causal(), softcap=1e6, implementation="eager")
    found = torch.autograd.grad(mapped.square().sum(), (q, k))
    for a, b in zip(found, torch.autograd.grad(plain.square().sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("framework", TRACED)
def test_gradients_where_scores_are_large(framework: str) -> None:
    """The log-sum-exp of two scores of 1e8 has no digits left for log 2; the backward pass has."""
    zero, bias = np.zeros((1, 2, 3)), np.full((2, 2), 1e8)
    q, v, b = (array(x, framework, "float32") for x in (zero, np.ones((1, 2, 1)), bias))
    if framework == "torch":
        import torch

        v.requires_grad_()
        (g,) = torch.autograd.grad(asp.attention(q, q, v, bias=b, implementation="tiled").sum(), v)
    else:
        import jax

        g = jax.grad(lambda v: asp.attention(q, q, v, bias=b, implementation="tiled").sum())(v)
    np.testing.assert_allclose(values(g), np.ones((1, 2, 1)), rtol=1e-6)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_backward_inside_autocast_computes_as_written(framework: str) -> None:
    import torch

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 8, requires_grad=True) for _ in range(3))
    attend = lambda: asp.attention(q, k, v, softcap=9.0, implementation="tiled").square().sum()  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(attend(), (q, k, v))
    for a, b in zip(inside, torch.autograd.grad(attend(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("framework", TRACED)
def test_functions_of_every_kind(framework: str) -> None:
    """Integer and NumPy arrays bound by name, matrices that must be inverted, and state that changes."""
    x = array(np.random.default_rng(0).standard_normal((1, 4, 3)), framework, "float32")
    order, W = array([2, 0, 1], framework), array(np.eye(3) + 0.1, framework, "float32")
    invert = importlib.import_module({"torch": "torch", "jax": "jax.numpy"}[framework]).linalg.inv
    for score in (
        functools.partial(lambda q, k, order: q[..., order] @ k.swapaxes(-1, -2), order=order),
        functools.partial(lambda q, k, W: q @ invert(W) @ k.swapaxes(-1, -2), W=W),
        functools.partial(bilinear, W=np.eye(3, dtype=np.float32)),
    ):
        found, wanted = (asp.attention(x, x, x, score=score, implementation=o) for o in ("tiled", "eager"))
        np.testing.assert_allclose(values(found), values(wanted), rtol=1e-5, atol=1e-6)
        assert asp.plan(x, x, x, score=score).implementation == "tiled"
    held = {"W": W}
    score = lambda q, k: q @ held["W"] @ k.swapaxes(-1, -2)  # noqa: E731
    before = asp.attention(x, x, x, score=score)
    held["W"] = -3 * W
    after, wanted = (asp.attention(x, x, x, score=score, implementation=o) for o in ("tiled", "eager"))
    assert np.abs(values(after) - values(before)).max() > 0.01
    np.testing.assert_allclose(values(after), values(wanted), rtol=1e-5, atol=1e-6)
    cap = np.array(3.0, np.float32)
    a, b = (asp.attention(x, x, x, softcap=cap, implementation=one) for one in ("tiled", "eager"))
    np.testing.assert_allclose(values(a), values(b), rtol=1e-5, atol=1e-6)


def test_an_empty_batch_with_a_length_for_each_sequence() -> None:
    x = np.ones((0, 1, 5, 4))
    assert asp.attention(x, x, x, mask=ValidLens(np.zeros(0, int)), implementation="tiled").shape == x.shape


@pytest.mark.parametrize("framework", TRACED[:1])
def test_a_checkpoint_frees_all_that_the_walk_holds(framework: str) -> None:
    import torch

    kept: list[int] = []
    x = [torch.randn(1, 5, 4, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = asp.attention(*x, softcap=5.0, mask=Causal(), implementation="tiled")
    assert kept
    node = out.grad_fn
    while node is not None and "Tiled" not in type(node).__name__:
        node = next((n for n, _ in node.next_functions if n is not None), None)
    assert node is not None
    assert all(t.numel() == 0 for t in node.empty.in_order())
