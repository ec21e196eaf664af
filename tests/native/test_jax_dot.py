"""The dot kernel in JAX: derivatives, transformations, and the order of axes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.biases import ALiBi
from attnspan.masks import Causal, Documents, SlidingWindow, Strided, ValidLens
from attnspan.scores import Cosine, Gaussian, ScaledDot

jax = pytest.importorskip("jax")
jnp = jax.numpy

B, H, G, L, S, D, E = 2, 4, 2, 5, 7, 8, 6
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "spans": {"mask": Causal() & ValidLens(np.array([3, 6])), "align": 1},
    "bits": {"mask": Strided(2) & SlidingWindow(4), "align": 2},
    "empty rows": {"mask": ValidLens(np.array([0, 4])), "softcap": 2.0},
    "dropout": {"dropout": 0.4, "rng": 5, "mask": Causal(), "align": 2},
    "cosine": {"score": Cosine(3.0), "sink": 0.5},
    "gaussian": {"score": Gaussian(), "mask": Causal(), "align": "bottom_right"},
    "alibi": {"bias": ALiBi(np.array([0.5, 0.25, 1.0, 0.1])), "align": 2},
}


def drawn(dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    r = np.random.default_rng(seed)
    return [jnp.asarray(r.normal(size=s), dtype) for s in ((B, H, L, D), (B, G, S, D), (B, G, S, E))]


def called(implementation: str = "native", **options: Any) -> Callable[..., Any]:
    return lambda *qkv: asp.attention(*qkv, implementation=implementation, **options)


def near(given: Any, wanted: Any, within: float = 2e-5) -> None:
    """Hold trees of results against each other; NaN on either side fails."""
    assert jax.tree.structure(given) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.max(np.abs(x - y), initial=0) <= within * max(1.0, np.max(np.abs(y), initial=0))


def same(given: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def by_definition(kind: str, qkv: list[Any]) -> Any:
    """Give the oracle's output."""
    options = dict(KINDS[kind])
    align = {"bottom_right": S - L}.get(options.get("align"), options.get("align", 0))
    options.pop("align", None)
    mask, bias = options.pop("mask", None), options.get("bias")
    if mask is not None:
        options["keep"] = np.asarray(mask.with_align(align).dense(L, S))
    if bias is not None:
        away = np.abs(np.arange(L)[:, None] + align - np.arange(S))
        options["bias"] = -np.asarray(bias.slopes, np.float64)[None, :, None, None] * away
    options["seed"] = options.pop("rng", None)
    scores = {"cosine": lambda q, k: 3.0 * (q @ k) / np.sqrt((q @ q) * (k @ k)), "gaussian": "gaussian"}
    options["score"] = scores.get(kind, "scaled_dot")
    return oracle.attention(*(np.asarray(x, np.float64) for x in qkv), **options).out


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: jnp.sin(fn(*x).astype(jnp.float32) * 1.5).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_the_oracles(kind: str) -> None:
    qkv = drawn()
    near(jax.jit(called(**KINDS[kind]))(*qkv), by_definition(kind, qkv), 2e-6)
    ours, theirs = (
        jax.jit(jax.grad(loss(called(one, **KINDS[kind])), (0, 1, 2))) for one in ("native", "eager")
    )
    near(ours(*qkv), theirs(*qkv))


@pytest.mark.parametrize("kind", ["spans", "empty rows", "dropout", "gaussian"])
def test_second_derivatives_are_those_of_the_formula(kind: str) -> None:
    def twice(one: str) -> Any:
        once = jax.grad(loss(called(one, **KINDS[kind])), (0, 1, 2))
        return jax.jit(jax.grad(lambda *x: sum(jnp.sin(g).sum() for g in once(*x)), (0, 1, 2)))

    near(twice("native")(*drawn()), twice("eager")(*drawn()))


@pytest.mark.parametrize("shape", [(1, 1, 1, S), (B, H, L, S), (1, H, L, S), (L, S)])
def test_gradients_of_a_bias_come_in_its_shape(shape: tuple[int, ...]) -> None:
    qkv = drawn()
    bias = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def of(one: str) -> Any:
        def run(bias: Any, slopes: Any) -> Any:
            first = called(one, bias=bias, mask=Causal(), align=2)(*qkv)
            return loss(lambda: first + called(one, bias=ALiBi(slopes), align=2)(*qkv))()

        return jax.jit(jax.grad(run, (0, 1)))(bias, jnp.array([0.5, 0.25, 1.0, 0.1]))

    near(of("native"), of("eager"))


def test_gradients_through_log_sum_exp_and_statistics() -> None:
    qkv = drawn()

    def of(one: str, *x: Any) -> Any:
        r = asp.inspect(*x, mask=ValidLens(np.array([3, 6])), implementation=one)
        return jnp.sin(r.lse).sum() + r.out.sum() + r.stats.entropy.sum()

    ours, theirs = (
        jax.jit(jax.grad(lambda *x, one=one: of(one, *x), (0, 1, 2))) for one in ("native", "eager")
    )
    near(ours(*qkv), theirs(*qkv))


@pytest.mark.parametrize("jit", [False, True])
def test_looking_changes_no_bit(jit: bool) -> None:
    qkv = drawn()
    compiled = jax.jit if jit else lambda f: f
    options: dict[str, Any] = {"mask": Causal() & ValidLens(jnp.array([3, 0])), "align": 1}
    r = compiled(lambda *x: asp.inspect(*x, implementation="native", **options))(*qkv)
    same(r.out, compiled(called(**options))(*qkv))
    wanted = asp.inspect(*qkv, implementation="eager", **options)
    seen = np.isfinite(wanted.lse)
    assert (np.asarray(r.lse)[~seen] == -np.inf).all()
    near(r.lse[seen], wanted.lse[seen])
    near(tuple(x for _, x in r.stats.arrays()), tuple(x for _, x in wanted.stats.arrays()))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 2, None), (0, 0, None)])
@pytest.mark.parametrize("kind", ["dropout", "spans"])
def test_vmap_is_a_plain_loop(mapped: tuple[Any, ...], kind: str) -> None:
    n, qkv = 3, drawn()
    r = np.random.default_rng(2)
    stacked = [
        x if d is None else jnp.asarray(np.moveaxis(r.normal(size=(n, *x.shape)), 0, d), x.dtype)
        for x, d in zip(qkv, mapped, strict=True)
    ]
    out = called(**KINDS[kind])
    both = lambda *x: (out(*x), jax.grad(loss(out), (0, 1, 2))(*x))  # noqa: E731
    at = lambda i: [x if d is None else jnp.take(x, i, d) for x, d in zip(stacked, mapped, strict=True)]  # noqa: E731
    looped = [jax.jit(both)(*at(i)) for i in range(n)]
    same(jax.jit(jax.vmap(both, mapped))(*stacked), jax.tree.map(lambda *x: jnp.stack(x), *looped))


def test_vmap_within_vmap_and_of_a_mapped_bias() -> None:
    q, k, v = drawn()
    r = np.random.default_rng(3)
    qs = jnp.asarray(r.normal(size=(2, 3, *q.shape)), jnp.float32)
    bias = jnp.asarray(r.normal(size=(3, 1, 1, L, S)), jnp.float32)

    def of(one: str) -> Any:
        f = jax.grad(lambda q, b: loss(called(one, bias=b))(q, k, v), (0, 1))
        return jax.jit(jax.vmap(jax.vmap(f), (0, None)))(qs, bias)

    near(of("native"), of("eager"))


def test_scan_map_remat_and_shapes_alone() -> None:
    q, k, v = drawn()
    run = called(mask=Causal(), align=2)
    qs = jnp.stack([q, 2 * q, -q])
    wanted = jnp.stack([run(x, k, v) for x in qs])
    same(jax.jit(lambda qs: jax.lax.map(lambda x: run(x, k, v), qs))(qs), wanted)
    same(jax.jit(lambda qs: jax.lax.scan(lambda c, x: (c, run(x, k, v)), 0, qs)[1])(qs), wanted)
    plain = jax.jit(jax.grad(loss(run), (0, 1, 2)))(q, k, v)
    same(jax.jit(jax.grad(loss(jax.checkpoint(run)), (0, 1, 2)))(q, k, v), plain)
    through = lambda q, k, v: jax.lax.scan(lambda c, x: (c + loss(run)(x, k, v), None), 0.0, qs)[0]  # noqa: E731
    assert jnp.isfinite(jax.jit(jax.grad(through, 1))(q, k, v)).all()
    shape = jax.eval_shape(run, q, k, v)
    assert (shape.shape, shape.dtype) == ((B, H, L, E), jnp.float32)


def test_what_is_traced_is_an_operand() -> None:
    """One program serves lengths, ids, seeds, alignments and scales that only a call says."""
    q, k, v = drawn()
    traces = []

    def run(lens: Any, ids: Any, seed: Any, align: Any, scale: Any, one: str = "native") -> Any:
        traces.append(one)
        mask = Causal(align) & ValidLens(lens) & Documents(ids, ids, contiguous=True)
        x = k[:, :, :L], v[:, :, :L]
        return asp.attention(
            q, *x, score=ScaledDot(scale), mask=mask, dropout=0.3, rng=seed, implementation=one
        )

    compiled = jax.jit(run)
    for n in range(3):
        lens, ids = jnp.array([n, 4]), jnp.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
        args = lens, ids, jnp.uint32(n), jnp.int32(n - 1), jnp.float32(0.2 + n)
        near(compiled(*args), run(*args, one="eager"))
    assert traces.count("native") == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_come_back_as_they_came(dtype: str) -> None:
    qkv = drawn(dtype)
    out = called()(*qkv)
    grads = jax.grad(loss(called()), (0, 1, 2))(*qkv)
    assert out.dtype == dtype and [g.dtype for g in grads] == [jnp.dtype(dtype)] * 3
    near(out, oracle.attention(*(np.asarray(x, np.float64) for x in qkv)).out, 2.0**-8)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        qkv = drawn(np.float64)
        near(called(**KINDS["spans"])(*qkv), by_definition("spans", qkv), 1e-12)
        near(jax.grad(loss(called(**KINDS["spans"])), 1)(*qkv),
             jax.grad(loss(called("eager", **KINDS["spans"])), 1)(*qkv), 1e-6)  # fmt: skip


def test_donated_buffers() -> None:
    q, k, _ = drawn()
    wanted = called()(q, k, k)
    step = jax.jit(called(), donate_argnums=0)  # whose memory the output may take
    same(step(q + 0, k, k), wanted)


def test_forward_mode_is_refused_or_left_to_another() -> None:
    qkv = drawn()
    with pytest.raises(asp.NotSupportedError, match="forward mode"):
        jax.jvp(called(), qkv, qkv)
    _, tangent = jax.jvp(called("auto"), qkv, qkv)
    assert (tangent != 0).any()
    with pytest.raises((TypeError, asp.NotSupportedError)):
        jax.jvp(jax.jit(called()), qkv, qkv)
    with pytest.raises((TypeError, asp.NotSupportedError)):
        jax.hessian(loss(jax.jit(called())))(*qkv)


def test_the_drop_in_reaches_the_kernel_without_a_copy() -> None:
    from attnspan.jax import dot_product_attention

    q, k, v = (x.swapaxes(1, 2) for x in drawn())
    run = lambda *x: dot_product_attention(*x, is_causal=True, implementation="native")  # noqa: E731
    near(
        run(q, k, v),
        jax.nn.dot_product_attention(q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, 2)]), is_causal=True)[..., :E],
    )
    grad = jax.grad(loss(run), (0, 1, 2))
    near(jax.jit(grad)(q, k, v), grad(q, k, v))
    for program in (run, grad):
        text = jax.jit(program).lower(q, k, v).compile().as_text()
        assert "attnspan_dot_" in text
        lines = [line.split("metadata")[0] for line in text.splitlines()]
        assert not [x for x in lines if " transpose(" in x or " copy(" in x]
    lse = asp.inspect(*(x.swapaxes(1, 2) for x in (q, k, v)), implementation="native").lse
    _, residual = dot_product_attention(q, k, v, implementation="native", return_residual=True)
    same(residual, lse.swapaxes(1, 2))


def test_shards_compute_what_the_whole_computes() -> None:
    code = """
import jax, jax.numpy as jnp, numpy as np, attnspan as asp
from jax.sharding import PartitionSpec as P
from attnspan.masks import Causal
mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
q = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 5, 8)), jnp.float32)
run = lambda q, k, v: asp.attention(q, k, v, mask=Causal(), implementation="native")
part = jax.shard_map(run, mesh=mesh, in_specs=(P("b"),) * 3, out_specs=P("b"))
both = lambda f: jax.jit(jax.value_and_grad(lambda *x: (f(*x) * (q + 1)).sum(), (0, 1, 2)))(q, 2 * q, q - 1)
(a, da), (b, db) = both(part), both(run)
heads = jax.shard_map(run, mesh=mesh, in_specs=(P("b"), P(), P()), out_specs=P("b"))
shared = lambda f: jax.jit(jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2)))(q, q[:2], q[2:] - 1)
whole = lambda q, k, v: jnp.concatenate([run(x, k, v) for x in (q[:2], q[2:])])
for x, y in zip(shared(heads), shared(whole)):
    assert abs(x - y).max() < 1e-5
assert len(jax.devices()) == 2 and abs(a - b) < 1e-4
assert all((x == y).all() for x, y in zip(da, db))
assert (jax.jit(part)(q, q, q) == jax.jit(run)(q, q, q)).all()
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_vmap_beside_a_bias_that_all_share() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 4, n, 8)), jnp.float32) for n in (7, 9, 9))
    bias = jnp.asarray(rng.standard_normal((1, 4, 7, 9)), jnp.float32)

    def loss(bias: Any, one: str) -> Any:
        return jax.vmap(lambda q, k, v: asp.attention(q, k, v, bias=bias, implementation=one))(q, k, v)

    np.testing.assert_allclose(loss(bias, "native"), loss(bias, "eager"), atol=2e-6)
    found, wanted = (
        jax.grad(lambda b, one=one: (loss(b, one) ** 2).sum())(bias) for one in ("native", "eager")
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5)
