"""Every transform of PyTorch and JAX: double backward, forward mode, vmap, checkpoint, hessians (B71, B73).

No route gives a tangent or a second derivative of zero in silence: it is right, or it raises and names
what would be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.masks import Causal, ValidLens

from .asked import Asked
from .cases import Sizes
from .helpers import NAMES, TRACED, array, runs, same_bits, values

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
            assert torch.autograd.gradcheck(
                fn, leaves, check_forward_ad=one in ("auto", "eager"), fast_mode=True
            )
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

    return jax.jit(jax.vmap(fn, in_axes=axes))


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
    for name, (fn, axes) in calls.items():
        if framework == "jax":
            if name == "inside":
                continue  # a mask of numbers is the same in- or outside
            import jax

            fn = jax.jit(fn)
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
            x = {n: y.requires_grad_() for n, y in asked.native(framework, "float64").items()}
            qkv, options = asked.library(x, framework)
            if one == "auto":
                assert asp.plan(*qkv, **options).implementation == "native"
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
                x = {n: y.requires_grad_() for n, y in asked.native(framework, "float32").items()}
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

        def along(fn: Callable[..., Any], which: str = "qkv") -> Any:
            """Take the difference quotient of fn along the directions of some inputs."""
            sides = []
            for step in (1e-5, -1e-5):
                moved = zip("qkv", (q, k, v), direction, strict=True)
                sides.append(fn(*(x + step * d if n in which else x for n, x, d in moved)))
            return (sides[0] - sides[1]) / 2e-5

        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        grads = gradient(q, k, v)
        assert (values(grads[0])[:, 2] == 0).all()
        wanted = float(along(loss))
        total = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
        assert abs(total - wanted) <= 1e-8 * max(1, abs(wanted))
        with pytest.raises(TypeError, match="forward-mode"):  # under jit the planner cannot see it coming
            jax.jvp(loss, (q, k, v), direction)
        unjitted = lambda q, k, v: (asp.attention(q, k, v, mask=EMPTY_ROW) ** 2).sum()  # noqa: E731
        _, tangent = jax.jvp(unjitted, (q, k, v), direction)
        assert abs(float(tangent) - wanted) <= 1e-8 * max(1, abs(wanted))
        hessian = jax.jit(jax.hessian(unjitted))(q, k, v)
        second = np.einsum("abcdef,def->abc", values(hessian), values(direction[0]))
        np.testing.assert_allclose(second, values(along(lambda *x: gradient(*x)[0], "q")), rtol=0, atol=1e-7)
        assert (second[:, 2] == 0).all() and np.abs(second).max() > 0
        again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v)
        for a, b in zip(again, grads, strict=True):
            np.testing.assert_allclose(values(a), values(b), rtol=0, atol=1e-14)
        several = jax.vmap(gradient)(*(jnp.stack([x, 2 * x]) for x in (q, k, v)))
        for n in range(2):
            for a, b in zip(several, gradient(*((n + 1) * x for x in (q, k, v))), strict=True):
                np.testing.assert_allclose(values(a[n]), values(b), rtol=0, atol=1e-13)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_the_kernel_keeps_nothing_beside_saved_tensors(framework: str) -> None:
    """Checkpointing and offloading free all of it, and bring all of it back."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    x = [torch.randn((1, 2, 5, 4), dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for mask in (None, Causal(), ValidLens([3])):
        ours: list[StorageWeakRef] = []
        begun: list[int] = []

        def block(*x: Any, mask: Any = mask, ours: Any = ours, begun: Any = begun) -> Any:
            qkv = [2 * y for y in x]
            begun.append(1)
            out = asp.attention(*qkv, mask=mask, implementation="sdpa")
            ours += [StorageWeakRef(y.untyped_storage()) for y in (*qkv, out)]
            return 3 * out

        wanted = torch.autograd.grad(block(*x).sum(), x)
        ours.clear()
        out = torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)
        assert len(ours) == 4
        assert all(one.expired() for one in ours)
        found = torch.autograd.grad(out.sum(), x)
        assert len(begun) == 3  # computed again once, and once only
        for a, b in zip(found, wanted, strict=True):
            same_bits(a, b)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda y: y):
            ours.clear()
            out = block(*x)
        out = out + 0
        assert all(one.expired() for one in ours)
        for _ in range(2):
            found = torch.autograd.grad(out.sum(), x, retain_graph=True)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b)
        (first,) = torch.autograd.grad(out.sum(), x[:1], create_graph=True)
        again = asp.attention(*(2 * y for y in x), mask=mask, implementation="eager")
        (same,) = torch.autograd.grad(3 * again.sum(), x[:1], create_graph=True)
        for a, b in zip(
            torch.autograd.grad(first.pow(2).sum(), x),
            torch.autograd.grad(same.pow(2).sum(), x),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_double_backward_under_autocast_is_in_the_accumulation_dtype(framework: str) -> None:
    import torch

    x = torch.randn((1, 2, 6, 8), requires_grad=True)
    (wanted,) = torch.autograd.grad(asp.attention(x, x, x).sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(asp.attention(x, x, x).sum(), x, create_graph=True)
    torch.testing.assert_close(found, wanted)
