"""The flax.nnx modules: what they compute, when they drop weights, and what NNX may do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp

import attnspan as asp
import attnspan.jax as d2l
from attnspan.biases import ALiBi
from attnspan.errors import ArgumentError
from attnspan.masks import Causal, Dense, SlidingWindow
from attnspan.scores import Additive, Bilinear, Dot, Gaussian

B, L, S, D, E, F = 2, 3, 5, 4, 3, 6

TEXTBOOK: dict[str, Any] = {
    "dot": lambda p=0.0, rngs=None: d2l.DotProductAttention(p, rngs),
    "additive": lambda p=0.0, rngs=None: d2l.AdditiveAttention(D, D, F, p, rngs=rngs or nnx.Rngs(0)),
    "gaussian": lambda p=0.0, rngs=None: d2l.GaussianAttention(None, p, rngs),
    "gaussian, learned": lambda p=0.0, rngs=None: d2l.GaussianAttention(jnp.array(0.7), p, rngs),
    "bilinear": lambda p=0.0, rngs=None: d2l.BilinearAttention(D, D, p, rngs=rngs or nnx.Rngs(0)),
}


def heads(p: float = 0.0, rngs: Any = None) -> Any:
    return d2l.MultiHeadAttention(D, 2, vdim=E, dropout=p, rngs=rngs or nnx.Rngs(0))


MODULES: dict[str, Any] = {**TEXTBOOK, "heads": heads}
# JAX compiles each of them anew: where they share their code, most wait for the sweep.
FEW = [pytest.param(n, marks=[] if n in ("dot", "additive") else [pytest.mark.sweep]) for n in MODULES]


def call(module: Any, q: Any, k: Any, v: Any, valid_lens: Any = None) -> Any:
    """Give the output alone, whichever module it is."""
    if isinstance(module, d2l.MultiHeadAttention):
        return module(q, k, v, valid_lens=valid_lens)
    return module(q, k, v, valid_lens)[0]


def jitted(module: Any, *args: Any, **options: Any) -> Any:
    """Call a module under jit: where shapes are new, quicker than compiling operation by operation."""
    return nnx.jit(lambda module: module(*args, **options))(module)


def looked(module: Any, *args: Any, **options: Any) -> Any:
    """Give the weights of several heads, under jit."""
    return nnx.jit(lambda module: module.attention_weights(*args, **options))(module)


def draw(*shape: int, seed: int = 0) -> Any:
    """Draw with NumPy: a JAX draw is compiled for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs() -> tuple[Any, Any, Any]:
    return draw(B, L, D, seed=1), draw(B, S, D, seed=2), draw(B, S, E, seed=3)


def scores(module: Any, q: Any, k: Any, xp: Any = np) -> Any:
    """The textbook's formulas, written out."""
    if isinstance(module, d2l.DotProductAttention):
        return xp.asarray(q) @ xp.asarray(k).mT / D**0.5
    if isinstance(module, d2l.BilinearAttention):
        return xp.asarray(q) @ xp.asarray(module.M[...]) @ xp.asarray(k).mT
    if isinstance(module, d2l.GaussianAttention):
        bandwidth = module.score().bandwidth
        square = D**0.5 if bandwidth is None else xp.asarray(bandwidth) ** 2
        return -((xp.asarray(q)[:, :, None] - xp.asarray(k)[:, None]) ** 2).sum(-1) / (2 * square)
    W_q, W_k, w_v = (xp.asarray(layer.kernel[...]) for layer in (module.W_q, module.W_k, module.w_v))
    return (xp.tanh((xp.asarray(q) @ W_q)[:, :, None] + (xp.asarray(k) @ W_k)[:, None]) @ w_v)[..., 0]


def softmax(s: Any, keep: Any, xp: Any = np) -> Any:
    p = xp.exp(s - s.max(-1, keepdims=True)) * keep
    total = p.sum(-1, keepdims=True)
    return p / xp.where(total == 0, 1, total)


def dense(valid_lens: Any) -> Any:
    if valid_lens is None:
        return np.ones((B, L, S), bool)
    lens = np.asarray(valid_lens)
    lens = np.broadcast_to(lens[:, None], (B, L)) if lens.ndim == 1 else lens
    return np.arange(S) < lens[..., None]


def close(a: Any, b: Any, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(
        np.asarray(a, np.float64), np.asarray(b, np.float64), tolerance * 10, tolerance
    )


LENS = {
    "none": None,
    "per sequence": jnp.array([2, 5]),
    "per query": jnp.array([[1, 2, 3], [5, 4, 1]]),
    "an empty sequence": jnp.array([0, 3]),
    "an empty query": jnp.array([[0, 2, 5], [1, 0, 3]]),
}


# --- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("name", TEXTBOOK)
def test_output_and_weights_are_the_definition(name: str, lens: Any) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs()
    wanted = softmax(scores(module, q, k), dense(lens))
    out, weights = module(q, k, v, lens)
    assert out.shape == (B, L, E) and weights.shape == (B, L, S)
    close(weights, wanted)
    close(out, wanted @ v)


@pytest.mark.parametrize("name", FEW[:-1])
def test_empty_rows_are_zero_and_have_no_gradient(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs()
    lens = jnp.array([0, 2])
    out, weights = module(q, k, v, lens)
    assert (out[0] == 0).all() and (weights[0] == 0).all() and (out[1] != 0).any()
    grads = nnx.jit(nnx.grad(lambda m, *x: m(*x, lens)[0].sum(), argnums=(0, 1, 2, 3)))(module, q, k, v)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert all((g[0] == 0).all() for g in grads[1:])
    assert (grads[3][1, :2] != 0).any() and (grads[3][1, 2:] == 0).all()


@pytest.mark.parametrize("name", FEW[:-1])
def test_gradients_are_the_definition(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs()
    lens = LENS["per query"]
    probe = draw(B, L, E, seed=4)

    def ours(m: Any, *x: Any) -> Any:
        return (m(*x, lens)[0] * probe).sum()

    def theirs(m: Any, q: Any, k: Any, v: Any) -> Any:
        return ((softmax(scores(m, q, k, jnp), dense(lens), jnp) @ v) * probe).sum()

    one, other = (nnx.jit(nnx.grad(f, argnums=(0, 1, 2, 3)))(module, q, k, v) for f in (ours, theirs))
    assert len(jax.tree.leaves(one)) == 3 + len(jax.tree.leaves(nnx.state(module, nnx.Param)))
    jax.tree.map(lambda a, b: close(a, b, 1e-5), one, other)


@pytest.mark.parametrize("name", FEW[:-1])
def test_mask_and_valid_lens_must_both_agree(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs()
    lens = jnp.array([[1, 5, 5], [3, 3, 0]])
    array = np.broadcast_to(np.arange(S) > 0, (B, L, S)).copy()
    array[1] = True
    array = jnp.asarray(array)
    out, weights = module(q, k, v, lens, mask=array)
    wanted = softmax(scores(module, q, k), np.asarray(array) & dense(lens))
    close(weights, wanted)
    close(out, wanted @ v)
    close(module(q, k, v, lens, mask=Dense(array))[0], out)
    assert (out[0, 0] == 0).all() and (out[1, 2] == 0).all()
    window = SlidingWindow(back=1, align="bottom_right")
    spelled = window.dense(L, S)[0, 0] & dense(lens)
    close(module(q, k, v, lens, mask=window)[0], module(q, k, v, mask=spelled)[0])


def test_widths_may_differ_for_additive_and_bilinear() -> None:
    q, k, v = draw(B, L, 20), draw(B, S, 2), draw(B, S, E)
    for module in (
        d2l.AdditiveAttention(20, 2, 8, rngs=nnx.Rngs(0)),
        d2l.BilinearAttention(20, 2, rngs=nnx.Rngs(0)),
    ):
        _, weights = jitted(module, q, k, v)
        close(weights, softmax(scores(module, q, k), True))
        with pytest.raises(ArgumentError, match="W_q|M"):
            module(k, k, v)


def test_heads_beside_the_textbook_lengths() -> None:
    q, k, v = (draw(B, 2, n, D, seed=n) for n in (2, S, S))
    lens = jnp.array([[1, 4], [2, 5]])  # (B, L) with L = H: it speaks of queries
    module = d2l.DotProductAttention()
    out, _ = jitted(module, q, k, v, lens)
    for h in range(2):
        close(out[:, h], jitted(module, q[:, h], k[:, h], v[:, h], lens)[0])


def test_bilinear_scores_have_unit_variance() -> None:
    module = d2l.BilinearAttention(64, 16, rngs=nnx.Rngs(0))
    q, k = draw(400, 64, seed=1), draw(400, 16, seed=2)
    assert float((q @ module.M[...] @ k.T).var()) == pytest.approx(1.0, rel=0.15)


def test_a_number_is_no_parameter_and_an_array_is() -> None:
    assert not jax.tree.leaves(nnx.state(d2l.GaussianAttention(2.0)))
    learned = d2l.GaussianAttention(jnp.array(2.0))
    assert learned.score.bandwidth.shape == ()
    assert isinstance(learned.score.bandwidth, nnx.Param)
    q, k, v = inputs()
    close(learned(q, k, v)[0], d2l.GaussianAttention(2.0)(q, k, v)[0])
    grads = nnx.grad(lambda m: m(q, k, v)[0].sum())(learned)
    assert abs(float(jax.tree.leaves(grads)[0])) > 0


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_widths_are_checked(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="num_hiddens: given"):
        d2l.AdditiveAttention(2, 2, bad, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="query_size: given"):
        d2l.BilinearAttention(bad, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_dtypes(name: str, dtype: Any) -> None:
    module, x = MODULES[name](), inputs()
    small = nnx.clone(module)
    if name == "heads":  # nnx.Linear promotes to its parameters' dtype
        nnx.update(small, jax.tree.map(lambda p: p.astype(dtype), nnx.state(small, nnx.Param)))
    out = call(small, *(y.astype(dtype) for y in x))
    assert out.dtype == dtype
    close(out, call(module, *x), 0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: d2l.AdditiveAttention(D, D, F, **o),
        lambda **o: d2l.BilinearAttention(D, D, **o),
        lambda **o: d2l.MultiHeadAttention(D, 2, **o),
    ],
)
def test_param_dtype(make: Any) -> None:
    state = nnx.state(make(param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), nnx.Param)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.bfloat16)}


# --- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_views_and_modes_switch_dropout(name: str) -> None:
    module, x = MODULES[name](0.5, nnx.Rngs(0)), inputs()
    plain = call(MODULES[name](0.0, nnx.Rngs(0)), *x)
    still = nnx.view(module, deterministic=True)
    assert (still.deterministic, module.deterministic) == (True, False)
    close(call(still, *x), plain)
    assert not np.allclose(call(module, *x), plain)
    assert not np.array_equal(call(module, *x), call(module, *x))
    module.eval()
    close(call(module, *x), plain)
    module.train()
    assert not np.allclose(call(module, *x), plain)
    again = nnx.view(still, deterministic=False)
    assert not np.allclose(call(again, *x), plain)


@pytest.mark.parametrize("name", FEW)
def test_rngs_govern_dropout(name: str) -> None:
    x = inputs()

    def draws(**seeds: int) -> Any:
        module = MODULES[name](0.5, nnx.Rngs(params=0, **seeds))
        return np.stack([call(module, *x) for _ in range(3)])

    assert np.array_equal(draws(dropout=1), draws(dropout=1))
    assert not np.array_equal(draws(dropout=1), draws(dropout=2))


def test_modules_of_one_rngs_draw_apart() -> None:
    rngs, (q, k, v) = nnx.Rngs(0), inputs()
    one, other = d2l.DotProductAttention(0.5, rngs), d2l.DotProductAttention(0.5, rngs)
    count = int(rngs.dropout.count[...])
    assert not np.array_equal(one(q, k, v)[0], other(q, k, v)[0])
    assert int(rngs.dropout.count[...]) == count  # each has a stream of its own
    stream = d2l.DotProductAttention(0.5, nnx.Rngs(0).dropout)
    assert np.array_equal(stream(q, k, v)[0], d2l.DotProductAttention(0.5, nnx.Rngs(0))(q, k, v)[0])


@pytest.mark.parametrize("name", ["dot", "gaussian"])
def test_dropout_without_rngs_is_refused(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](0.5), inputs()
    with pytest.raises(ArgumentError, match=r"rngs: given None.*rate 0.5.*nnx.Rngs.*deterministic=True"):
        module(q, k, v)
    out, _ = nnx.view(module, deterministic=True)(q, k, v)
    assert np.array_equal(out, TEXTBOOK[name](0.0)(q, k, v)[0])


def test_dropped_weights_are_zero_or_scaled() -> None:
    q, k, _ = inputs()
    module = d2l.DotProductAttention(0.25, nnx.Rngs(0))
    eye = jnp.broadcast_to(jnp.eye(S), (B, S, S))
    many = nnx.jit(lambda m: jnp.stack([m(q, k, eye)[0] for _ in range(8)]))
    outs = np.concatenate([many(module) for _ in range(50)])
    weights = np.broadcast_to(module(q, k, eye)[1], outs.shape)
    close(weights.sum(-1), np.ones(outs.shape[:-1]))
    kept = outs != 0
    assert 0.7 < kept.mean() < 0.8
    close(outs[kept], (weights / 0.75)[kept])
    np.testing.assert_allclose(outs.mean(0), weights[0], 0.2, 0.02)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(ArgumentError, match=f"dropout: given {rate}.*0 <= p < 1"):
        d2l.DotProductAttention(rate)


# --- NNX's machinery -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_jit_draws_what_a_plain_call_draws(name: str) -> None:
    x, lens = inputs(), jnp.array([2, 4])
    jitted = nnx.jit(call)
    one, other = MODULES[name](0.5, nnx.Rngs(0)), MODULES[name](0.5, nnx.Rngs(0))
    results = [(jitted(one, *x, lens), call(other, *x, lens)) for _ in range(2)]
    for a, b in results:
        close(a, b)
    assert not np.allclose(results[0][0], results[1][0])
    close(
        jitted(nnx.view(one, deterministic=True), *x, lens),
        call(nnx.view(other, deterministic=True), *x, lens),
    )


@pytest.mark.parametrize("name", FEW)
def test_grad_through_dropout(name: str) -> None:
    x = inputs()
    module = MODULES[name](0.5, nnx.Rngs(0))
    twins = [nnx.clone(module) for _ in range(2)]

    def loss(module: Any, q: Any) -> Any:
        return jnp.square(call(module, q, *x[1:])).sum()

    params, q_grad = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, x[0])
    assert all((np.asarray(g) != 0).any() and np.isfinite(g).all() for g in jax.tree.leaves((params, q_grad)))
    step = draw(*x[0].shape, seed=9) * 1e-2
    ends = [float(loss(twin, x[0] + s * step)) for twin, s in zip(twins, (1, -1), strict=True)]
    assert (ends[0] - ends[1]) / 2 == pytest.approx(float((q_grad * step).sum()), rel=0.02, abs=1e-4)


def test_training_with_an_optimizer() -> None:
    optax = pytest.importorskip("optax")
    q, k, v = inputs()
    module = d2l.AdditiveAttention(D, D, F, 0.1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: ((m(q, k, v)[0] - v[:, :1]) ** 2).mean())(module)
        optimizer.update(module, grads)
        return loss

    losses = [float(step(module, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("name", MODULES)
def test_split_merge_and_clone(name: str) -> None:
    module, x = MODULES[name](0.5, nnx.Rngs(0)), inputs()
    twins = [nnx.clone(module), nnx.merge(*nnx.split(nnx.clone(module)))]
    out = call(module, *x)
    for twin in twins:
        assert np.array_equal(call(twin, *x), out)


@pytest.mark.parametrize("name", FEW[:-1])
def test_vmap(name: str) -> None:
    module, x = TEXTBOOK[name](), inputs()
    mapped = nnx.vmap(lambda m, *x: m(*x)[0], in_axes=(None, 0, 0, 0))
    close(mapped(module, *(y[:, None] for y in x))[:, 0], module(*x)[0])


# --- several heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}])
def test_heads_equal_those_of_flax(widths: dict[str, int], bias: bool) -> None:
    ours = d2l.MultiHeadAttention(8, 4, bias=bias, **widths, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(
        4, 8, in_kv_features=8, qkv_features=8, use_bias=bias, decode=False, rngs=nnx.Rngs(1)
    )
    kinds = (
        ("query", ours.W_q, 8),
        ("key", ours.W_k, widths.get("kdim", 8)),
        ("value", ours.W_v, widths.get("vdim", 8)),
    )
    for name, layer, width in kinds:
        getattr(theirs, name).kernel = nnx.Param(layer.kernel[...].reshape(width, 4, 2))
        if bias:
            getattr(theirs, name).bias = nnx.Param(draw(4, 2, seed=width))
            layer.bias[...] = getattr(theirs, name).bias[...].reshape(8)
    theirs.out.kernel = nnx.Param(ours.W_o.kernel[...].reshape(4, 2, 8))
    if bias:
        ours.W_o.bias[...] = draw(8, seed=5)
        theirs.out.bias = nnx.Param(ours.W_o.bias[...])
    q, k, v = (
        draw(B, L, 8),
        draw(B, S, widths.get("kdim", 8), seed=1),
        draw(B, S, widths.get("vdim", 8), seed=2),
    )
    lens = jnp.array([2, 5])
    keep = (jnp.arange(S) < lens[:, None])[:, None, None]

    @nnx.jit
    def reference(theirs: Any) -> tuple[Any, Any]:
        projected = [
            jnp.einsum("bld,dhk->blhk", x, getattr(theirs, name).kernel[...])
            + (getattr(theirs, name).bias[...] if bias else 0)
            for x, (name, _, _) in zip((q, k, v), kinds, strict=True)
        ]
        out = theirs.out(nnx.dot_product_attention(*projected, mask=keep, deterministic=True))
        return out, jnp.einsum("blhd,bshd->bhls", *projected[:2]) / 2**0.5

    wanted, products = reference(theirs)
    close(jitted(ours, q, k, v, valid_lens=lens), wanted)
    weights = softmax(np.asarray(products), np.asarray(keep))
    close(looked(ours, q, k, valid_lens=lens), weights)


def test_one_input_is_query_key_and_value() -> None:
    module, x, y = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0)), draw(B, L, 8), draw(B, S, 8)
    assert np.array_equal(jitted(module, x), jitted(module, x, x, x))
    assert np.array_equal(jitted(module, x, y), jitted(module, x, y, y))
    assert np.array_equal(looked(module, x), looked(module, x, x))


def test_an_empty_batch_passes() -> None:
    module = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0))
    assert jitted(module, jnp.ones((0, S, 8)), mask=Causal()).shape == (0, S, 8)
    assert looked(module, jnp.ones((0, S, 8)), mask=Causal()).shape == (0, 2, S, S)


def test_grouped_heads_are_repeated_heads() -> None:
    grouped = d2l.MultiHeadAttention(8, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    full = d2l.MultiHeadAttention(8, 4, rngs=nnx.Rngs(0))
    assert grouped.W_k.kernel.shape == (8, 4)
    for name in ("W_q", "W_k", "W_v", "W_o"):
        kernel = np.asarray(getattr(grouped, name).kernel[...])
        if kernel.shape[1] == 4:
            kernel = kernel.reshape(8, 2, 2).repeat(2, axis=1).reshape(8, 8)
        getattr(full, name).kernel[...] = jnp.asarray(kernel)
    x = draw(B, S, 8)
    close(jitted(grouped, x, mask=Causal()), jitted(full, x, mask=Causal()))
    weights = looked(grouped, x, mask=Causal())
    assert weights.shape == (B, 4, S, S)
    close(weights, looked(full, x, mask=Causal()))


SCORES: dict[str, Any] = {
    "dot": lambda: Dot(),
    "gaussian": lambda: Gaussian(jnp.array([[0.5, 2.0]])),
    "bilinear": lambda: Bilinear(draw(2, 4, 4)),
    "additive": lambda: Additive(draw(5, 4), draw(5, 4, seed=1), draw(5)),
}


@pytest.mark.parametrize("name", SCORES)
def test_heads_with_any_score(name: str) -> None:
    score = SCORES[name]()
    module, x = d2l.MultiHeadAttention(8, 2, score=score, rngs=nnx.Rngs(0)), draw(B, S, 8)

    @nnx.jit
    def wanted(module: Any) -> Any:
        q, k, v = (w(x).reshape(B, S, 2, 4).swapaxes(1, 2) for w in (module.W_q, module.W_k, module.W_v))
        joined = asp.attention(q, k, v, score=score, mask=Causal()).swapaxes(1, 2).reshape(B, S, 8)
        return module.W_o(joined)

    close(jitted(module, x, mask=Causal()), wanted(module))
    assert len(jax.tree.leaves(nnx.state(module.score, nnx.Param))) == len(list(score.arrays()))
    grads = nnx.jit(nnx.grad(lambda m: jnp.square(m(x, mask=Causal())).sum()))(module)
    learned = jax.tree.leaves(grads["score"]) if len(list(score.arrays())) else []
    assert len(learned) == len(list(score.arrays()))
    assert all((np.asarray(g) != 0).any() for g in learned)


def test_a_function_as_score() -> None:
    ours = d2l.MultiHeadAttention(8, 2, score=lambda q, k: q @ k.mT / 2, rngs=nnx.Rngs(0))
    same, x = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0)), draw(B, S, 8)  # 4 wide, and √4 is 2
    close(jitted(ours, x), jitted(same, x))
    close(looked(ours, x), looked(same, x))


def test_bias_and_alignment_of_the_scores() -> None:
    module, x, y = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0)), draw(B, L, 8), draw(B, S, 8, seed=1)
    with pytest.raises(ArgumentError, match="align"):
        jitted(module, x, y, mask=Causal())
    last = jitted(module, x, y, mask=Causal(), align="bottom_right")
    assert not np.allclose(last, jitted(module, x, y, mask=Causal(), align="top_left"))
    array = jnp.tril(jnp.ones((L, S), bool), S - L)
    close(last, jitted(module, x, y, mask=array))
    close(last, jitted(module, x, y, score_bias=jnp.where(array, 0, -jnp.inf)))
    slopes = jnp.array([0.5, 0.25])
    away = jnp.abs(jnp.arange(L)[:, None] + S - L - jnp.arange(S))
    near = {"score_bias": ALiBi(slopes), "align": "bottom_right"}
    spelled = {"score_bias": -(slopes[:, None, None] * away)[None]}
    close(jitted(module, x, y, **near), jitted(module, x, y, **spelled))
    close(looked(module, x, y, **near), looked(module, x, y, **spelled))


def test_lengths_per_query_never_mean_heads() -> None:
    module, x = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0)), draw(B, 2, 8)
    weights = looked(module, x, valid_lens=jnp.array([[1, 2], [2, 0]]))
    assert (weights[0, :, 0, 1] == 0).all() and (weights[0, :, 1, 1] > 0).all()
    assert (weights[1, :, 0] > 0).all() and (weights[1, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 3}, "num_heads: given 3, needed a divisor of embed_dim = 8"),
        ({"num_heads": 0}, "num_heads: given 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: given 3, needed a divisor of num_heads = 4"),
    ],
)
def test_heads_that_do_not_divide(change: dict[str, int], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        d2l.MultiHeadAttention(**({"embed_dim": 8, "num_heads": 4} | change), rngs=nnx.Rngs(0))


def test_inputs_of_heads_are_checked() -> None:
    module, x = d2l.MultiHeadAttention(8, 2, rngs=nnx.Rngs(0)), draw(B, S, 8)
    with pytest.raises(ArgumentError, match=r"key: given float32\[2, 5, 7\].*\(B, length, 8\)"):
        module(x, x[..., :7])
    with pytest.raises(ArgumentError, match="query: given.*batch first"):
        module(x[0])
    with pytest.raises(ArgumentError, match="mask"):
        module(x, mask=jnp.ones((B, S, S), bool))  # heads or sequences?


# --- the textbook's listings ---------------------------------------------------------------------


def test_listing_masked_softmax() -> None:
    weights = d2l.masked_softmax(jax.random.uniform(jax.random.key(0), (2, 2, 4)), jnp.array([2, 3]))
    printed = [
        [[0.4922724, 0.5077276, 0, 0], [0.5997409, 0.40025908, 0, 0]],
        [[0.3531402, 0.19856434, 0.4482954, 0], [0.31042197, 0.2873157, 0.40226236, 0]],
    ]
    close(weights, printed, 1e-7)
    weights = d2l.masked_softmax(
        jax.random.uniform(jax.random.key(1), (2, 2, 4)), jnp.array([[1, 3], [2, 4]])
    )
    printed = [
        [[1, 0, 0, 0], [0.35672572, 0.2543091, 0.38896522, 0]],
        [[0.43679553, 0.5632045, 0, 0], [0.2580636, 0.2509437, 0.258296, 0.23269679]],
    ]
    close(weights, printed, 1e-7)


def test_listing_dot_product_attention() -> None:
    pytest.importorskip("matplotlib")
    queries = jax.random.normal(jax.random.key(0), (2, 1, 2))
    keys = jax.random.normal(jax.random.key(1), (2, 10, 2))
    values = jax.random.normal(jax.random.key(2), (2, 10, 4))
    valid_lens = jnp.array([2, 6])
    attention = nnx.view(d2l.DotProductAttention(dropout=0.5), deterministic=True)
    output, attention_weights = attention(queries, keys, values, valid_lens)
    d2l.check_shape(output, (2, 1, 4))
    assert (attention_weights > 0).sum(-1).tolist() == [[2], [6]]
    d2l.show_heatmaps(attention_weights.reshape((1, 1, 2, 10)), xlabel="Keys", ylabel="Queries")


def test_listing_additive_attention() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((3, 20), (6, 2), (8, 20), (8, 2), (8,))
    queries, states, W_q, W_k, w_v = (jax.random.normal(a, s) for a, s in zip(keys, shapes, strict=True))
    attention = d2l.AdditiveAttention(query_size=20, key_size=2, num_hiddens=8, dropout=0.1, rngs=nnx.Rngs(0))
    assert attention.W_q.bias is None
    attention.W_q.kernel[...] = W_q.T / 20**0.5
    attention.W_k.kernel[...] = W_k.T / 2**0.5
    attention.w_v.kernel[...] = w_v[:, None] / 8**0.5
    attention = nnx.view(attention, deterministic=True)
    _, weights = attention(queries[None], states[None], states[None])
    printed = [
        [0.13390937, 0.3772766, 0.17127123, 0.1027277, 0.06276076, 0.15205443],
        [0.19218282, 0.31524566, 0.14511336, 0.08953383, 0.07662669, 0.18129766],
        [0.15669951, 0.3378386, 0.15281527, 0.11713327, 0.09428051, 0.1412329],
    ]
    close(weights[0], printed, 1e-6)
