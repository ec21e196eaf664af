"""Every gradient against central differences of the oracle.

The differences are taken in float64 from inputs that float32 holds exactly, so that one reference serves
every framework and dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.masks import Causal, ValidLens

from .asked import Asked
from .cases import Sizes
from .helpers import NAMES, TRACED, array, dtype_name, precision, runs, values

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
