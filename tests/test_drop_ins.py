"""The drop-ins against the functions they stand for, over a grid of options."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

from attnspan.errors import ArgumentError, NotSupportedError
from tests import fresh

# --- PyTorch -------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel

import attnspan.torch as ours_torch

theirs_torch = torch.nn.functional.scaled_dot_product_attention


def draws(*shapes: tuple[int, ...], dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def agree(args: tuple[Any, ...], options: dict[str, Any], tolerance: float = 1e-10) -> Any:
    """Compare output and gradients; rows that see nothing are zero in ours, whatever they are there."""
    leaves = [x.clone().requires_grad_() for x in args]
    both = []
    for function in (ours_torch.scaled_dot_product_attention, theirs_torch):
        out = function(*leaves, **options)
        both.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, other in zip(*both, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    return both[0][0]


MASKS: dict[str, Any] = {
    "square": lambda B, H, L, S: pairs(L, S),
    "keys": lambda B, H, L, S: pairs(1, S),
    "per head": lambda B, H, L, S: pairs(H, L, S),
    "per sequence": lambda B, H, L, S: pairs(B, 1, 1, S),
    "full": lambda B, H, L, S: pairs(B, H, L, S),
    "one query axis": lambda B, H, L, S: pairs(B, H, 1, S),
}


def pairs(*shape: int) -> Any:
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[..., 0] = True
    return keep


@pytest.mark.parametrize(("L", "S"), [(4, 4), (3, 5), (5, 3), (1, 6)])
@pytest.mark.parametrize("kind", ["none", "causal", *itertools.product(("boolean", "float"), MASKS)], ids=str)
def test_torch_masks(kind: Any, L: int, S: int) -> None:
    B, H, D, E = 2, 3, 4, 5
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if isinstance(kind, tuple):
        mask = MASKS[kind[1]](B, H, L, S)
        if kind[0] == "float":
            g = torch.Generator().manual_seed(2)
            mask = torch.randn(mask.shape, generator=g, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        options = {"attn_mask": mask}
    agree(tuple(draws((B, H, L, D), (B, H, S, D), (B, H, S, E))), options)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3), (6, 3), (6, 2)),
        ((2, 4, 3), (2, 6, 3), (2, 6, 2)),
        ((2, 4, 3), (1, 6, 3), (1, 6, 2)),
        ((1, 4, 3), (2, 6, 3), (2, 6, 2)),
        ((2, 3, 4, 3), (1, 3, 6, 3), (2, 1, 6, 2)),
        ((2, 3, 4, 3), (2, 1, 6, 3), (2, 1, 6, 2)),
        ((2, 1, 4, 3), (2, 3, 6, 3), (2, 3, 6, 2)),
        ((2, 2, 3, 4, 3), (2, 2, 3, 6, 3), (2, 2, 3, 6, 2)),
        ((2, 1, 3, 4, 3), (1, 2, 3, 6, 3), (2, 2, 3, 6, 2)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_torch_leading_axes(shapes: Any, masked: bool) -> None:
    options: dict[str, Any] = {}
    if masked:
        lead = np.broadcast_shapes(*(s[:-2] for s in shapes))
        options["attn_mask"] = pairs(*lead[:1], *(1 for _ in lead[1:]), 4, 6)
    agree(tuple(draws(*shapes)), options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_torch_grouped_heads(groups: int, lead: tuple[int, ...], masked: bool) -> None:
    q, k, v = draws((*lead, 4, 5, 3), (*lead, groups, 6, 3), (*lead, groups, 6, 2))
    mask = pairs(4, 5, 6) if masked else None
    agree((q, k, v), {"enable_gqa": True, "attn_mask": mask})


@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -1.0])
def test_torch_scale(scale: float | None) -> None:
    x = tuple(draws((2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3)))
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other CPU kernel is NaN for causal and scale <= 0
        agree(x, {"scale": scale, "is_causal": True})
    out = ours_torch.scaled_dot_product_attention(*x, scale=scale, is_causal=True)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_dtypes(dtype: Any, tolerance: float, causal: bool) -> None:
    x = draws((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4), dtype=dtype)
    agree(tuple(x), {"is_causal": causal}, tolerance)
    agree(tuple(x), {"attn_mask": torch.zeros(5, 5, dtype=dtype)}, tolerance)


def test_torch_learned_bias() -> None:
    q, k, v = draws((2, 3, 4, 3), (2, 3, 5, 3), (2, 3, 5, 3))
    (bias,) = draws((3, 4, 1), seed=5)
    both = []
    for function in (ours_torch.scaled_dot_product_attention, theirs_torch):
        leaf = bias.expand(3, 4, 5).clone().requires_grad_()
        both.append(torch.autograd.grad(function(q, k, v, leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*both)
    assert both[0].abs().sum() > 0


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_torch_rows_without_a_key_are_zero(kind: str) -> None:
    keep = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    mask = keep if kind == "boolean" else torch.zeros(3, 3).masked_fill(~keep, -torch.inf)
    x = [y.requires_grad_() for y in draws((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), dtype=torch.float32)]
    out = ours_torch.scaled_dot_product_attention(*x, attn_mask=mask)
    assert (out[:, :, 1] == 0).all() and (out[:, :, 0] != 0).all()
    grads = torch.autograd.grad(out.sum(), x)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:, :, 1] == 0).all()


def test_torch_dropout() -> None:
    q, k, _ = draws((2, 3, 4, 3), (2, 3, 5, 3), (2, 3, 5, 3), dtype=torch.float32)
    eye = torch.eye(5).expand(2, 3, 5, 5)
    weights = theirs_torch(q, k, eye)

    def drop(seed: int) -> Any:
        torch.manual_seed(seed)
        return ours_torch.scaled_dot_product_attention(q, k, eye, dropout_p=0.25)

    assert torch.equal(drop(0), drop(0)) and not torch.equal(drop(0), drop(1))
    mean = torch.zeros_like(weights)
    for seed in range(300):
        out = drop(seed)
        kept = out != 0
        torch.testing.assert_close(out[kept], (weights / 0.75)[kept], rtol=1e-5, atol=1e-6)
        mean += out / 300
    torch.testing.assert_close(mean, weights, rtol=0.25, atol=0.02)


def test_torch_dropout_of_everything() -> None:
    x = [y.requires_grad_() for y in draws((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))]
    out = ours_torch.scaled_dot_product_attention(*x, dropout_p=1.0)
    assert (out == 0).all() and (theirs_torch(*x, dropout_p=1.0) == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize(
    "shapes", [((0, 4, 3),) * 3, ((2, 0, 4, 3),) * 3, ((0, 2, 4, 3),) * 3, ((2, 0, 3),) * 3]
)
def test_torch_nothing_in_nothing_out(shapes: Any) -> None:
    agree(tuple(draws(*shapes)), {"attn_mask": torch.ones(shapes[0][-2], shapes[1][-2], dtype=torch.bool)})


def test_torch_no_keys_give_zeros() -> None:
    q, k, v = draws((2, 3, 4), (2, 0, 4), (2, 0, 5))
    out = ours_torch.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, torch.zeros(2, 3, 5, dtype=q.dtype))


def test_torch_autocast() -> None:
    q, k, v = draws((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), dtype=torch.float32)
    bias = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours_torch.scaled_dot_product_attention(q, k, v.bfloat16(), bias)
        wanted = theirs_torch(q, k, v.bfloat16(), bias.bfloat16())
    assert out.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_torch_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours_torch.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k, v = draws((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2), dtype=torch.float32)
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": pairs(2, 1, 5, 6)},
        {"attn_mask": torch.randn(5, 6)},
    ):
        out = compiled(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(out, theirs_torch(q, k, v, enable_gqa=True, **options))
    torch.manual_seed(0)
    first = compiled(q, k, v, enable_gqa=True, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, compiled(q, k, v, enable_gqa=True, dropout_p=0.5))


def test_torch_signature_is_pytorchs() -> None:
    names = list(inspect.signature(ours_torch.scaled_dot_product_attention).parameters)
    line = theirs_torch.__doc__.strip().splitlines()
    text = " ".join(part.strip() for part in line[:2])
    told = [part.partition("=")[0].strip() for part in text[text.index("(") + 1 : text.index(")")].split(",")]
    assert names == told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"attn_mask": torch.ones(4, 5, dtype=torch.bool), "is_causal": True},
            "attn_mask: given bool.*is_causal=True",
        ),
        ({"attn_mask": torch.ones(4, 5, dtype=torch.int64)}, "attn_mask: given int64.*boolean"),
        (
            {"attn_mask": torch.ones(4, 4, dtype=torch.bool)},
            r"attn_mask: given bool\[4, 4\].*broadcasts to \(2, 4, 4, 5\)",
        ),
        ({"attn_mask": torch.ones(3, 1, 4, 5)}, "attn_mask: given.*broadcasts"),
        ({"attn_mask": torch.ones(1, 2, 4, 4, 5)}, "attn_mask: given.*broadcasts"),
        (
            {"key": torch.ones(2, 2, 5, 3), "value": torch.ones(2, 2, 5, 3)},
            "key, value: given.*enable_gqa=True",
        ),
        ({"key": torch.ones(2, 3, 5, 3), "enable_gqa": True}, "key: given.*divides query's 4"),
        ({"query": torch.ones(3, 4, 4, 3)}, "query, key, value: given.*leading axes"),
        ({"value": torch.ones(2, 4, 6, 3)}, "v: given"),
        ({"key": torch.ones(2, 4, 5, 2)}, "q, k: given"),
        ({"key": torch.ones(2, 4, 5, 3).double()}, "dtype"),
        ({"query": torch.ones(3)}, "two or more axes"),
        ({"dropout_p": -0.1}, "dropout"),
        ({"dropout_p": 1.1}, "dropout"),
    ],
)
def test_torch_refusals(change: dict[str, Any], said: str) -> None:
    args = {"query": torch.ones(2, 4, 4, 3), "key": torch.ones(2, 4, 5, 3), "value": torch.ones(2, 4, 5, 3)}
    with pytest.raises(ArgumentError, match=said):
        ours_torch.scaled_dot_product_attention(**(args | change))
    if change.get("dropout_p", 0) >= 0:  # PyTorch drops nothing at negative rates, and says nothing
        with sdpa_kernel(SDPBackend.MATH), pytest.raises((RuntimeError, ValueError)):
            theirs_torch(**(args | change))


# --- JAX -----------------------------------------------------------------------------------------

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp

import attnspan.jax as ours_jax

theirs_jax = jax.nn.dot_product_attention

B, N, T, H = 2, 4, 5, 3


def arrays(
    S: int = T, K: int = N, dtype: Any = jnp.float32, lead: tuple[int, ...] = (B,)
) -> tuple[Any, Any, Any]:
    shapes = ((*lead, T, N, H), (*lead, S, K, H), (*lead, S, K, H))
    return tuple(draw(*shape, seed=n).astype(dtype) for n, shape in enumerate(shapes))


def draw(*shape: int, seed: int) -> Any:
    """Draw with NumPy: a JAX draw is compiled for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def spelled(S: int, options: dict[str, Any]) -> Any:
    """Write all that masks in a call as one boolean array, from jax.nn's documentation."""
    i, j = np.arange(T)[:, None], np.arange(S)
    keep = np.ones((B, N, T, S), bool)
    if options.get("is_causal"):
        keep &= j <= i
    window = options.get("local_window_size")
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        keep &= (i - left <= j) & (j <= i + right)
    for name, at in (("query_seq_lengths", i), ("key_value_seq_lengths", j)):
        if options.get(name) is not None:
            keep &= at < np.asarray(options[name])[:, None, None, None]
    if options.get("mask") is not None:
        keep &= np.asarray(options["mask"])
    return keep


def close(a: Any, b: Any, tolerance: float = 3e-6) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance)


def boolean(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).random(shape) < 0.7)


GRID = {
    "mask": [None, (B, 1, 1), (1, N, T)],
    "is_causal": [False, True],
    "query_seq_lengths": [None, jnp.array([2, 5], jnp.int32)],
    "key_value_seq_lengths": [None, jnp.array([4, 1], jnp.int32)],
    "local_window_size": [None, 1, (2, 0)],
}


HEAVY = pytest.mark.sweep


@pytest.mark.parametrize(
    ("S", "K", "biased"),
    [
        (T, N, False),
        (7, 2, True),
        pytest.param(T, N, True, marks=HEAVY),
        pytest.param(7, 2, False, marks=HEAVY),
    ],
)
def test_jax_grid(S: int, K: int, biased: bool) -> None:
    q, k, v = arrays(S, K)
    bias = draw(1, N, T, S, seed=8) if biased else None
    for values in itertools.product(*GRID.values()):
        options = dict(zip(GRID, values, strict=True))
        if options["mask"] is not None:
            options["mask"] = boolean(*options["mask"], S)
        keep = spelled(S, options)
        out = ours_jax.dot_product_attention(q, k, v, bias, **options)
        empty = ~keep.any(-1).swapaxes(1, 2)[..., None]
        close(out, np.where(empty, np.float32(0), theirs_jax(q, k, v, bias, mask=jnp.asarray(keep))))
        # jax.nn's own reading of the options, where a row sees something
        close(out, np.where(empty, np.float32(0), theirs_jax(q, k, v, bias, **options)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_jax_dtypes(dtype: Any) -> None:
    x = arrays(dtype=dtype)
    tolerance = 3e-6 if dtype == jnp.float32 else 2e-2
    close(ours_jax.dot_product_attention(*x), theirs_jax(*x), tolerance)
    mine, other = (
        f(*x, is_causal=True, return_residual=True) for f in (ours_jax.dot_product_attention, theirs_jax)
    )
    close(mine[0], other[0], tolerance)
    close(mine[1], other[1], tolerance)


def test_jax_without_batch_and_with_scale() -> None:
    x = arrays(6, 2, lead=())
    bias, mask = draw(N, T, 6, seed=1), boolean(T, 6) | (jnp.arange(6) == 0)
    lens = jnp.array([2], jnp.int32)
    for options in (
        {},
        {"bias": bias},
        {"mask": mask},
        {"key_value_seq_lengths": lens},
        {"scale": 0.5},
        {"scale": -2},
    ):
        mine, other = (
            f(*x, **options, return_residual=True) for f in (ours_jax.dot_product_attention, theirs_jax)
        )
        close(mine[0], other[0])
        close(mine[1], other[1])


def test_jax_residual_of_an_empty_row_and_its_gradient() -> None:
    x = arrays()
    lens = jnp.array([0, 3], jnp.int32)
    out, residual = ours_jax.dot_product_attention(*x, key_value_seq_lengths=lens, return_residual=True)
    assert (out[0] == 0).all() and (residual[0] == -jnp.inf).all()
    assert np.isfinite(out[1]).all() and np.isfinite(residual[1]).all()

    def tail(q: Any) -> Any:
        return ours_jax.dot_product_attention(q, *x[1:], return_residual=True)[1].sum()

    assert (jax.grad(tail)(x[0]) == 0).all()


def test_jax_gradients_and_jit() -> None:
    x = arrays(7, 2)
    bias = draw(1, N, 1, 7, seed=8)
    lens = jnp.array([2, 5], jnp.int32)

    def loss(function: Any) -> Any:
        def value(q: Any, k: Any, v: Any, bias: Any, lens: Any) -> Any:
            out = function(
                q, k, v, bias, is_causal=True, key_value_seq_lengths=lens, local_window_size=(9, 9)
            )
            return jnp.square(out).sum()

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))

    mine, other = (loss(f)(*x, bias, lens) for f in (ours_jax.dot_product_attention, theirs_jax))
    jax.tree.map(lambda a, b: close(a, b, 2e-5), mine, other)


FIXTURE = (
    jnp.ones((1, 4, 1, 1)),
    jnp.log(jnp.arange(1.0, 5.0)).reshape(1, 4, 1, 1),
    (10.0 ** jnp.arange(4.0)).reshape(1, 4, 1, 1),
)


def test_jax_window_counts_without_a_mask() -> None:  # case B33
    for mask in (None, jnp.ones((1, 1, 4, 4), bool)):
        out = ours_jax.dot_product_attention(*FIXTURE, mask=mask, local_window_size=(1, 0))
        np.testing.assert_allclose(out.ravel(), [1, 7, 64, 614.2857], rtol=1e-5)


def test_jax_key_lengths_count_without_query_lengths() -> None:  # case B39
    out = ours_jax.dot_product_attention(*FIXTURE, key_value_seq_lengths=jnp.array([2]))
    np.testing.assert_allclose(out.ravel(), [7, 7, 7, 7], rtol=1e-5)
    out = ours_jax.dot_product_attention(*FIXTURE, query_seq_lengths=jnp.array([2]))
    np.testing.assert_allclose(out.ravel(), [432.1, 432.1, 0, 0], rtol=1e-5)


def test_jax_lengths_beyond_the_array_end_with_it() -> None:
    out = ours_jax.dot_product_attention(
        *FIXTURE, key_value_seq_lengths=jnp.array([9]), query_seq_lengths=jnp.array([9])
    )
    np.testing.assert_allclose(out.ravel(), [432.1] * 4, rtol=1e-5)


def test_jax_implementations() -> None:
    x = arrays()
    close(ours_jax.dot_product_attention(*x, implementation="xla"), theirs_jax(*x, implementation="xla"))
    with pytest.raises(NotSupportedError, match="cuDNN"):
        ours_jax.dot_product_attention(*x, implementation="cudnn")
    with pytest.raises(ValueError, match="nonesuch"):
        ours_jax.dot_product_attention(*x, implementation="nonesuch")


def test_jax_signature_is_jax_nns() -> None:
    mine, other = (inspect.signature(f).parameters for f in (ours_jax.dot_product_attention, theirs_jax))
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in other.values()
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": jnp.ones((1, 1, T, T))}, "mask: given float32.*boolean"),
        ({"mask": jnp.ones((1, 1, T, 4), bool)}, "mask"),
        ({"mask": jnp.ones((1, 1, 1, T, T), bool)}, "mask: given.*at most four axes"),
        ({"key": jnp.ones((B, T, 3, H)), "value": jnp.ones((B, T, 3, H))}, "heads"),
        ({"value": jnp.ones((B, T + 1, N, H))}, "v: given"),
        ({"query": jnp.ones((T, H))}, "query: given"),
        ({"key_value_seq_lengths": jnp.ones((B,))}, "key_value_seq_lengths: given float32.*integer"),
        ({"key_value_seq_lengths": jnp.ones((B + 1,), jnp.int32)}, "lens"),
        ({"query": jnp.ones((B, T, N, H), jnp.bfloat16)}, "dtype"),
    ],
)
def test_jax_refusals(change: dict[str, Any], said: str) -> None:
    args = dict(zip(("query", "key", "value"), arrays(), strict=True))
    with pytest.raises(ArgumentError, match=said):
        ours_jax.dot_product_attention(**(args | change))
    with pytest.raises((ValueError, TypeError)):
        theirs_jax(**(args | change))


def test_jax_negative_windows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="back"):
        ours_jax.dot_product_attention(*arrays(), local_window_size=(-1, 0))


# --- the packages --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_front_end_pulls_in_its_own_framework_alone(name: str, other: str) -> None:
    loaded = fresh.output(f"import attnspan.{name}, sys\nprint(*sys.modules)").split()
    assert name in loaded
    assert other not in loaded and "matplotlib" not in loaded


@pytest.mark.parametrize(
    ("name", "gone"), [("torch", "torch"), ("torch", "array_api_compat"), ("jax", "flax"), ("jax", "jax")]
)
def test_a_missing_framework_is_said(name: str, gone: str) -> None:
    code = f"""
from attnspan.errors import MissingDependencyError
try:
    import attnspan.{name}
except MissingDependencyError as error:
    print(error)
"""
    said = fresh.output(code, missing={gone})
    assert f'pip install "attnspan[{name}]"' in said
    assert gone in said


@pytest.mark.parametrize("package", [ours_torch, ours_jax])
def test_all_names_are_there(package: Any) -> None:
    assert all(callable(getattr(package, name)) for name in package.__all__)
    assert {"masked_softmax", "attention", "inspect", "plan", "check_shape", "show_heatmaps", "plot"} <= set(
        package.__all__
    )
