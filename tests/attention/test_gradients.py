"""Every gradient against central differences of the oracle, and every transform of PyTorch and JAX.

The differences are taken in float64 from inputs that float32 holds exactly, so that one reference serves
every framework and dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.masks import Causal, ValidLens

from .asked import Asked
from .cases import Sizes
from .helpers import NAMES, TRACED, array, dtype_name, precision, runs, same_bits, values

SMALL = Sizes(B=2, H=2, G=1, L=3, S=4, D=3, E=3)
REQUESTS = {
    "scaled dot": Asked(mask="bits"),
    "dot, bias": Asked(score="dot", bias="BHLS", mask="causal, bottom right"),
    "scale, 0-d": Asked(score="scaled dot, 0-d", bias="1H1S", bias_dtype="float64", mask="valid (B,)"),
    "scale, per sequence": Asked(score="scaled dot, per sequence", bias="S", bias_dtype="float16"),
    "cosine": Asked(score="cosine", bias="-B1LS", mask="window, ahead"),
    "cosine, per head": Asked(score="cosine, per head", sink="1H", mask="valid (B,)"),
    "gaussian": Asked(score="gaussian", softcap="learned", mask="bits"),
    "bandwidth": Asked(score="gaussian, per sequence and head", bias="alibi", mask="causal at -2"),
    "bilinear": Asked(score="bilinear", dropout=0.4, mask="documents that return"),
    "bilinear, per head": Asked(score="bilinear, per head", bias="alibi", softcap=2.0),
    "low rank": Asked(score="low rank", sink="", dropout=0.3, mask="bits", bias="L1"),
    "low rank, per head": Asked(score="low rank, per head", mask="not causal, or bits"),
    "additive": Asked(score="additive", mask="valid (B,)", bias="LS", softcap="learned"),
    "additive, per head": Asked(score="additive, per head", sink="BH", mask="causal at -2"),
    "function": Asked(score="function", mask="sinks, window, causal", sink="B1"),
    "nothing": Asked(mask="nothing", bias="LS", sink="1H"),
}
COMPILED = ("bandwidth", "cosine, per head", "additive")  # JAX compiles each anew: the rest is in the sweep
REQUESTS = {name: dataclasses.replace(asked, sizes=SMALL) for name, asked in REQUESTS.items()}


def upstream(asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """Draw the gradients that arrive at out and lse."""
    s, rng = asked.sizes, np.random.default_rng(9)
    shape = (s.B, s.H, s.L)
    return rng.standard_normal((*shape, s.E)).astype("f4"), rng.standard_normal(shape).astype("f4")


@functools.cache
def differences(name: str) -> dict[str, np.ndarray]:
    """Differentiate sum(out * g_out) + sum(lse * g_lse) in every input, by the oracle alone."""
    asked = REQUESTS[name]
    x = asked.draw("float32")
    g = upstream(asked)
    qkv, options = asked.oracle(x)
    found = oracle.gradients(*qkv, *g, **options)
    grads = {n: found["d" + n].reshape(x[n].shape) for n in x if "d" + n in found}

    def objective(x: dict[str, np.ndarray]) -> float:
        qkv, options = asked.oracle(x)
        r = oracle.attention(*qkv, **options)
        lse = np.where(np.isfinite(r.lse), r.lse, 0)  # an empty row has no share
        return float(np.sum(r.out * g[0]) + np.sum(lse * g[1]))

    for n in x.keys() - grads.keys():  # parameters of the score, slopes, softcap
        grads[n] = np.zeros(x[n].shape)
        for at in np.ndindex(*x[n].shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = x[n].copy()
                moved[at] += step
                sides.append(objective({**x, n: moved}))
            grads[n][at] = (sides[0] - sides[1]) / 2e-5
    return grads


def judge(found: dict[str, Any], name: str, dtype: str) -> None:
    """Hold gradients against the differences, each in its own shape and dtype."""
    wanted, asked = differences(name), REQUESTS[name]
    for n, grad in found.items():
        assert dtype_name(grad) == (asked.bias_dtype if n == "bias" and asked.bias_dtype else dtype)
        assert tuple(grad.shape) == wanted[n].shape
        scale = max(1.0, np.abs(wanted[n]).max(initial=0))
        allowed = 1e-7 if dtype == "float64" else 2e-5
        if dtype_name(grad) == "float16":
            allowed = 2e-3
        assert np.abs(values(grad) - wanted[n]).max(initial=0) <= allowed * scale, n  # NaN fails


def torch_leaves(asked: Asked, dtype: str) -> dict[str, Any]:
    x = asked.native("torch", dtype, asked.draw("float32"))
    return {n: y.requires_grad_() for n, y in x.items()}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("framework", TRACED[:1])
def test_gradients_in_torch(framework: str, name: str) -> None:
    """Of q, k, v, bias, sink, slopes, softcap and parameters, through out and lse together."""
    import torch

    asked = REQUESTS[name]
    for dtype, one in itertools.product(("float32", "float64"), ("auto", *NAMES)):
        x = torch_leaves(asked, dtype)
        qkv, options = asked.library(x, framework)
        if one != "auto" and not runs(one, *qkv, **options):
            continue
        g_out, g_lse = (torch.tensor(g, dtype=getattr(torch, dtype)) for g in upstream(asked))
        r = asp.inspect(*qkv, **options, implementation=one)
        assert not any(y.requires_grad for y in dataclasses.astuple(r.stats) if hasattr(y, "requires_grad"))
        found = torch.autograd.grad((r.out, r.lse), list(x.values()), (g_out, g_lse))
        judge(dict(zip(x, found, strict=True)), name, dtype)


def jax_gradients(name: str, dtype: str) -> None:
    import jax

    asked = REQUESTS[name]
    g_out, g_lse = (array(g, "jax", dtype) for g in upstream(asked))

    def objective(x: dict[str, Any]) -> Any:
        qkv, options = asked.library(x, "jax")
        r = asp.inspect(*qkv, **options)
        lse = jax.numpy.where(jax.numpy.isfinite(r.lse), r.lse, 0)
        return (r.out * g_out).sum() + (lse * g_lse).sum()

    found = jax.jit(jax.grad(objective))(asked.native("jax", dtype, asked.draw("float32")))
    judge(found, name, dtype)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("framework", TRACED[1:])
def test_gradients_in_jax(framework: str, name: str) -> None:
    jax_gradients(name, "float32")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("framework", TRACED[1:])
def test_every_gradient_in_jax(framework: str, name: str, dtype: str) -> None:
    if dtype == "float32" and REQUESTS[name].bias_dtype == "float64":
        pytest.skip("JAX has no float64 bias beside float32")
    with precision("jax", dtype):
        jax_gradients(name, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("framework", TRACED[:1])
def test_gradients_of_half_types(framework: str, dtype: str) -> None:
    """They are those of float32, rounded: nothing is summed in half precision on the way."""
    import torch

    asked = REQUESTS["dot, bias"]
    for one in NAMES:
        found = {}
        for d in (dtype, "float32"):
            x = {n: y.requires_grad_() for n, y in asked.native("torch", d, asked.draw(dtype)).items()}
            qkv, options = asked.library(x, framework)
            out = asp.attention(*qkv, **options, implementation=one)
            g = torch.tensor(upstream(asked)[0]).to(out.dtype)
            found[d] = torch.autograd.grad(out, list(x.values()), g)
        for half, full in zip(found[dtype], found["float32"], strict=True):
            assert dtype_name(half) == dtype
            step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
            assert (half.float() - full).abs().max() <= 4 * step * max(1, full.abs().max())


@pytest.mark.parametrize("framework", TRACED[:1])
def test_only_what_is_asked_for_is_differentiated(framework: str) -> None:
    """Any one input alone has the gradient it has among all."""
    import torch

    asked = REQUESTS["dot, bias"]
    for one in NAMES:
        leaves = torch_leaves(asked, "float64")
        g = torch.tensor(upstream(asked)[0]).double()
        qkv, options = asked.library(leaves, framework)
        out = asp.attention(*qkv, **options, implementation=one)
        among = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g), strict=True))
        for n in leaves:
            lone = {m: y.detach().requires_grad_(m == n) for m, y in leaves.items()}
            qkv, options = asked.library(lone, framework)
            out = asp.attention(*qkv, **options, implementation=one)
            out.backward(g, retain_graph=True)
            torch.testing.assert_close(lone[n].grad, among[n], rtol=0, atol=1e-14)
            out.backward(g)  # the graph was kept: once more
            torch.testing.assert_close(lone[n].grad, 2 * among[n], rtol=0, atol=1e-14)
            assert all(y.grad is None for m, y in lone.items() if m != n)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_a_gradient_may_arrive_as_any_view(framework: str) -> None:
    """B85: expanded, transposed and sliced upstream gradients equal their contiguous copies."""
    import torch

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, 3, 5, 7), generator=g).requires_grad_() for _ in range(3))
    views = {
        "expanded": torch.randn((2, 3, 1, 1), generator=g).expand(2, 3, 5, 7),
        "transposed": torch.randn((2, 3, 7, 5), generator=g).mT,
        "heads last": torch.randn((2, 5, 3, 7), generator=g).transpose(1, 2),
        "every other": torch.randn((2, 3, 5, 14), generator=g)[..., ::2],
        "odd slice": torch.randn((2, 3, 6, 9), generator=g)[:, :, 1:, 1:8],
    }
    for one, mask, view in itertools.product(NAMES, (Causal(), ValidLens([2, 5]), None), views.values()):
        assert not view.is_contiguous()
        out = asp.attention(q, k, v, mask=mask, implementation=one)
        found = torch.autograd.grad(out, (q, k, v), view, retain_graph=True)
        wanted = torch.autograd.grad(out, (q, k, v), view.contiguous())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Transforms of PyTorch -------------------------------------------------------------------------------

EMPTY_ROW = ValidLens(3, query_lens=[2]) & Causal("bottom_right")
TINY = Sizes(B=1, H=2, G=1, L=3, S=3, D=2, E=2)


def tiny(score: str = "scaled dot", bias: str | None = "LS") -> tuple[Asked, dict[str, Any]]:
    asked = Asked(sizes=TINY, score=score, bias=bias)
    return asked, asked.native("torch", "float64")


def called(asked: Asked, names: list[str], one: str, what: str = "out") -> Callable[..., Any]:
    """Give attention, with an empty row, as a function of its arrays."""

    def fn(*arrays: Any) -> Any:
        qkv, options = asked.library(dict(zip(names, arrays, strict=True)), "torch")
        options["mask"] = EMPTY_ROW
        if what == "out":
            return asp.attention(*qkv, **options, implementation=one)
        lse = asp.inspect(*qkv, **options, implementation=one).lse
        return lse[..., :2]  # the last row is empty: its lse is -inf

    return fn


@pytest.mark.parametrize("score", ["scaled dot, 0-d", "gaussian", "cosine", "low rank", "additive"])
@pytest.mark.parametrize("framework", TRACED[:1])
def test_gradcheck(framework: str, score: str) -> None:
    """B71: first and second derivatives, reverse and forward, with an empty row."""
    import torch

    asked, x = tiny(score)
    leaves = [y.requires_grad_() for y in x.values()]
    for one in ("auto", *NAMES):
        qkv, options = asked.library(x, framework)
        if one != "auto" and not runs(one, *qkv, **options):
            continue
        for what in ("out", "lse") if one == "eager" else ("out",):
            fn = called(asked, list(x), one, what)
            assert torch.autograd.gradcheck(fn, leaves, check_forward_ad=one != "sdpa", fast_mode=True)
            assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)
    out = called(asked, list(x), "auto")(*leaves)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    assert (dq[:, :, 2] == 0).all()
    second = torch.autograd.grad(dq.pow(2).sum(), leaves)
    assert (second[0][:, :, 2] == 0).all()
    assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_forward_mode(framework: str) -> None:
    """No route gives a tangent of zero: each is the difference quotient, or raises and says what does."""
    import torch
    from torch.autograd import forward_ad

    asked, x = tiny()
    g = torch.Generator().manual_seed(1)
    directions = [torch.randn(y.shape, generator=g, dtype=y.dtype) for y in x.values()]
    for what in ("out", "lse"):
        plain = called(asked, list(x), "eager", what)
        up, down = (
            plain(*(y + step * d for y, d in zip(x.values(), directions, strict=True)))
            for step in (1e-6, -1e-6)
        )
        wanted = (up - down) / 2e-6
        for one in ("auto", "eager"):
            fn = called(asked, list(x), one, what)
            _, tangent = torch.func.jvp(fn, tuple(x.values()), tuple(directions))
            torch.testing.assert_close(tangent, wanted, rtol=1e-6, atol=1e-8)
            for n in range(len(x)):  # a tangent on one input alone is seen too
                alone = [torch.zeros_like(d) if m != n else d for m, d in enumerate(directions)]
                with forward_ad.dual_level():
                    duals = list(x.values())
                    duals[n] = forward_ad.make_dual(duals[n], directions[n])
                    found = forward_ad.unpack_dual(fn(*duals)).tangent
                if what == "out" or n != 2:  # lse knows no value
                    _, tangent = torch.func.jvp(fn, tuple(x.values()), tuple(alone))
                    torch.testing.assert_close(found, tangent)
                    assert found.abs().max() > 0
    for one in set(NAMES) - {"eager"}:
        with pytest.raises(asp.NotSupportedError, match="forward mode"):
            torch.func.jvp(called(asked, list(x), one), tuple(x.values()), tuple(directions))


@pytest.mark.parametrize("framework", TRACED[:1])
def test_function_transforms(framework: str) -> None:
    """torch.func: grad, vjp, jacrev, jacfwd, hessian, and their vmaps, equal autograd's own."""
    import torch

    asked, x = tiny("gaussian")
    arrays = tuple(x.values())
    for one in ("auto", "eager"):
        fn = called(asked, list(x), one)
        loss = lambda *a: fn(*a).pow(2).sum()  # noqa: B023, E731
        leaves = [y.clone().requires_grad_() for y in arrays]
        plain = torch.autograd.grad(loss(*leaves), leaves)
        everything = tuple(range(len(arrays)))
        for a, b in zip(torch.func.grad(loss, everything)(*arrays), plain, strict=True):
            torch.testing.assert_close(a, b)
        _, pull = torch.func.vjp(loss, *arrays)
        for a, b in zip(pull(torch.ones((), dtype=torch.float64)), plain, strict=True):
            torch.testing.assert_close(a, b)
        rev, fwd = torch.func.jacrev(fn)(*arrays), torch.func.jacfwd(fn)(*arrays)
        torch.testing.assert_close(rev, torch.autograd.functional.jacobian(fn, arrays)[0])
        torch.testing.assert_close(fwd, rev)
        hessian = torch.func.hessian(loss)(*arrays)
        torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, arrays)[0][0])
        assert (hessian[:, :, 2] == 0).all() and hessian.isfinite().all()
        several = tuple(torch.stack([y, 2 * y, -y]) for y in arrays)
        mapped = torch.func.vmap(torch.func.grad(loss))(*several)
        for n in range(3):
            torch.testing.assert_close(mapped[n], torch.func.grad(loss)(*(y[n] for y in several)))


def mapped(framework: str, fn: Callable[..., Any], axes: Any) -> Callable[..., Any]:
    if framework == "torch":
        import torch

        return torch.func.vmap(fn, in_dims=axes)
    import jax

    return jax.vmap(fn, in_axes=axes)


@pytest.mark.parametrize("framework", TRACED)
def test_vmap_is_a_loop(framework: str) -> None:
    """B73: a mask made inside, one captured, mapped lengths and mapped booleans; queries mapped alone."""
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((3, 2, 4, 2)), framework, "float32") for _ in range(3))
    lens = array([0, 2, 4], framework)
    seen = array(rng.random((3, 4, 4)) < 0.6, framework)
    captured = Causal() & ValidLens(3)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "inside": (lambda q, k, v, n, m: asp.attention(q, k, v, mask=Causal() & ValidLens(3)), (0,) * 5),
        "captured": (lambda q, k, v, n, m: asp.attention(q, k, v, mask=captured), (0,) * 5),
        "lengths": (lambda q, k, v, n, m: asp.attention(q, k, v, mask=ValidLens(n)), (0,) * 5),
        "booleans": (lambda q, k, v, n, m: asp.attention(q, k, v, mask=m), (0,) * 5),
        "queries alone": (
            lambda q, k, v, n, m: asp.attention(q, k[0], v[0], mask=ValidLens(n)),
            (0, None, None, 0, 0),
        ),
    }
    for fn, axes in calls.values():
        found = values(mapped(framework, fn, axes)(q, k, v, lens, seen))
        for n in range(3):
            taken = (y if axis is None else y[n] for y, axis in zip((q, k, v, lens, seen), axes, strict=True))
            np.testing.assert_allclose(found[n], values(fn(*taken)), rtol=0, atol=1e-6)
    assert (found[0] == 0).all()


@pytest.mark.parametrize("framework", TRACED[:1])
def test_double_backward_through_the_kernel(framework: str) -> None:
    """With "auto" a gradient penalty works, and is what the formula gives."""
    import torch

    for score, mask in itertools.product(
        ("scaled dot", "gaussian", "low rank, per head"), ("bits", "causal")
    ):
        asked, found = Asked(score=score, mask=mask, bias="1H1S"), {}
        for one in ("auto", *NAMES):
            x = torch_leaves(asked, "float64")
            qkv, options = asked.library(x, framework)
            if one == "auto":
                assert asp.plan(*qkv, **options).implementation == "sdpa"
            out = asp.attention(*qkv, **options, implementation=one)
            first = torch.autograd.grad(out.pow(2).sum(), qkv, create_graph=True)
            penalty = sum(g.pow(2).sum() for g in first) + out.sum()
            found[one] = torch.autograd.grad(penalty, list(x.values()))
        for one in ("auto", "sdpa"):
            for a, b in zip(found[one], found["eager"], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("framework", TRACED[:1])
def test_checkpoint_in_torch(framework: str, reentrant: bool) -> None:
    """Recomputing in backward changes nothing, dropout included."""
    from torch.utils.checkpoint import checkpoint

    for asked in (Asked(mask="bits"), Asked(mask="causal", dropout=0.5), Asked(score="additive")):
        for one in ("auto", "eager"):
            grads = []
            for recompute in (False, True):
                x = torch_leaves(asked, "float32")
                names = list(x)

                def fn(*arrays: Any) -> Any:
                    qkv, options = asked.library(dict(zip(names, arrays, strict=True)), framework)  # noqa: B023
                    return asp.attention(*qkv, **options, implementation=one)  # noqa: B023

                run = functools.partial(checkpoint, fn, use_reentrant=reentrant) if recompute else fn
                out = run(*x.values())
                out.pow(2).sum().backward()
                grads.append([out.detach(), *(y.grad for y in x.values())])
            for a, b in zip(*grads, strict=True):
                same_bits(a, b)


# Transforms of JAX -----------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", TRACED[1:])
def test_transforms_of_jax(framework: str) -> None:
    """grad, jvp, hessian, checkpoint and vmap of grad, with an empty row, against differences."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(rng.standard_normal((1, 3, 2))) for _ in range(3))
        loss = jax.jit(lambda q, k, v: (asp.attention(q, k, v, mask=EMPTY_ROW) ** 2).sum())
        direction = tuple(jnp.asarray(rng.standard_normal((1, 3, 2))) for _ in range(3))

        def along(fn: Callable[..., Any], step: float = 1e-5) -> Any:
            up, down = (
                fn(*(x + s * d for x, d in zip((q, k, v), direction, strict=True))) for s in (step, -step)
            )
            return (up - down) / (2 * step)

        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        grads = gradient(q, k, v)
        assert (values(grads[0])[:, 2] == 0).all()
        wanted = float(along(loss))
        total = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
        assert abs(total - wanted) <= 1e-8 * max(1, abs(wanted))
        _, tangent = jax.jvp(loss, (q, k, v), direction)
        assert abs(float(tangent) - wanted) <= 1e-8 * max(1, abs(wanted))
        hessian = jax.jit(jax.hessian(loss))(q, k, v)
        second = along(lambda *x: gradient(*x)[0])
        only_q = np.einsum("abcdef,def->abc", values(hessian), values(direction[0]))
        q_alone = (
            gradient(q + 1e-5 * direction[0], k, v)[0] - gradient(q - 1e-5 * direction[0], k, v)[0]
        ) / 2e-5
        np.testing.assert_allclose(only_q, values(q_alone), rtol=0, atol=1e-7)
        assert np.isfinite(values(second)).all()
        again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v)
        for a, b in zip(again, grads, strict=True):
            np.testing.assert_allclose(values(a), values(b), rtol=0, atol=1e-14)
        several = jax.vmap(gradient)(*(jnp.stack([x, 2 * x]) for x in (q, k, v)))
        for n in range(2):
            for a, b in zip(several, gradient(*((n + 1) * x for x in (q, k, v))), strict=True):
                np.testing.assert_allclose(values(a[n]), values(b), rtol=0, atol=1e-13)
