"""Bug reports I to P: scores, transforms, dropout, sizes, memory, paths, weights, messages."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.masks import Causal, SlidingWindow, ValidLens
from attnspan.scores import Bilinear, Dot, Gaussian, ScaledDot
from tests.cases.fixture import LIBRARIES, arrays, close, every_library, every_path, outputs


@every_library
def test_b63_the_gaussian_formula(library: str) -> None:
    to = LIBRARIES[library]
    score = Gaussian(bandwidth=1)
    pair = score.pair(to(np.array([3.0, 4.0], np.float32)), to(np.zeros(2, np.float32)))
    assert float(pair) == -12.5
    q, k = to(np.zeros((1, 1, 1), np.float32)), to(np.array([0, 1, 2], np.float32).reshape(1, 3, 1))
    close(np.asarray(asp.inspect(q, k, k, score=score).weights()).ravel(), [0.5741, 0.3482, 0.0777], 1e-4)


def test_b64_the_gaussian_gradient_at_zero_distance() -> None:
    q = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    record = asp.inspect(q, q.detach(), q.detach(), score=Gaussian(1.0))
    (g,) = torch.autograd.grad(record.lse.sum(), q)
    assert g.tolist() == [[[0, 0]]]
    x = jnp.array([[[1.0, 2.0]]])
    g = jax.grad(lambda q: asp.inspect(q, x, x, score=Gaussian(1.0)).lse.sum())(x)
    assert np.asarray(g).tolist() == [[[0, 0]]]


def test_b68_each_score_is_its_formula() -> None:
    q, k = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert float(Dot().pair(q, k)) == 0
    assert float(ScaledDot().pair(q, k)) == 0
    assert float(Bilinear(np.array([[0.0, 1.0], [1.0, 0.0]])).pair(q, k)) == 1
    for score in (Dot, ScaledDot, Gaussian, Bilinear):
        assert "a = " in (score.__doc__ or "")


def test_b71_double_backward_and_forward_mode() -> None:
    q, k, v = (x.double().requires_grad_() for x in arrays("torch"))
    mask = Causal() & ValidLens(3, pad="left")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return asp.attention(q, k, v, score=Dot(), mask=mask)

    small = tuple((x / 10).detach().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(attend, small, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, small)


def test_b73_vmap_is_a_loop() -> None:
    q, k, v = (x.expand(3, -1, -1, -1, -1) for x in arrays("torch"))
    lens = torch.tensor([1, 2, 3])
    kept = torch.tensor([True, False, True, True])
    right = torch.stack([asp.attention(q[n], k[n], v[n], mask=ValidLens(lens[n]) & kept) for n in range(3)])
    mapped = torch.func.vmap(lambda q, k, v, n: asp.attention(q, k, v, mask=ValidLens(n) & kept))
    close(mapped(q, k, v, lens), right)
    Q, K, V = (jnp.asarray(x.numpy()) for x in (q, k, v))
    ours = jax.vmap(lambda q, k, v, n: asp.attention(q, k, v, mask=ValidLens(n) & jnp.asarray(kept.numpy())))(
        Q, K, V, jnp.asarray(lens.numpy())
    )
    close(ours, right)


def test_b74_one_graph_and_at_most_one_more_for_another_length() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def attend(x: Any, lens: Any) -> Any:
        return asp.attention(x, x, x, mask=Causal() & ValidLens(lens))

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for L in (3, 4, 5):
        x = torch.randn(2, 1, L, 4)
        lens = torch.tensor([0, L])
        close(compiled(x, lens), attend(x, lens))
    assert counter.frame_count <= 2
    jitted = jax.jit(lambda x, n: asp.attention(x, x, x, mask=ValidLens(n)))
    x = jnp.ones((2, 1, 3, 4))
    close(jitted(x, jnp.array([0, 3]))[0], 0)
    assert jitted._cache_size() == 1
    close(jitted(x, jnp.array([2, 9]))[1], 1)  # not seen: clipped
    assert jitted._cache_size() == 1


@every_library
def test_b76_dropout_acts_when_asked_and_needs_a_seed(library: str) -> None:
    close(outputs(library, "eager"), outputs(library, "eager"))
    with pytest.raises(asp.ArgumentError, match="rng: given nothing, with dropout=0.5, needed a seed"):
        outputs(library, "eager", dropout=0.5)


@every_library
def test_b77_inspected_weights_are_those_before_dropout(library: str) -> None:
    to = LIBRARIES[library]
    q, v = to(np.ones((1, 64, 1), np.float32)), to(np.ones((1, 1, 1), np.float32))
    record = asp.inspect(q, v, v, dropout=0.2, rng=3)
    close(np.asarray(record.weights()), 1)
    assert set(np.asarray(record.out).ravel().round(6).tolist()) == {0.0, 1.25}


@every_library
def test_b78_dropout_comes_after_the_softmax(library: str) -> None:
    to = LIBRARIES[library]
    q, k = to(np.zeros((1, 4096, 1), np.float32)), to(np.zeros((1, 2, 1), np.float32))
    v = to(np.array([[[1.0], [5.0]]], np.float32))
    bias = to(np.array([0, -np.inf], np.float32))
    out = np.asarray(asp.attention(q, k, v, bias=bias, dropout=0.5, rng=0))
    assert set(out.ravel().tolist()) == {0.0, 2.0}
    assert abs(out.mean() - 1) < 0.05


def test_b79_dropout_is_scaled_forward_and_backward() -> None:
    q = torch.zeros(1, 1, 1)
    k = torch.zeros(1, 4096, 1)
    v = torch.ones(1, 4096, 1, requires_grad=True)
    draws = torch.stack([asp.attention(q, k, v, dropout=0.5, rng=seed).squeeze() for seed in range(20)])
    assert abs(draws.mean().item() - 1) < 0.05
    assert draws.var().item() > 0
    small = [torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: asp.attention(*x, dropout=0.5, rng=1), small)


@every_path
def test_b81_lengths_and_heads_that_do_not_fit(library: str, implementation: str) -> None:
    to = LIBRARIES[library]

    def ones(*shape: int) -> Any:
        return to(np.ones(shape, np.float32))

    with pytest.raises(asp.ArgumentError, match="needed one value per key, so 5 of them and not 6"):
        asp.attention(ones(1, 1, 3, 8), ones(1, 1, 5, 8), ones(1, 1, 6, 8), implementation=implementation)
    with pytest.raises(asp.ArgumentError, match="that divides the 3 query heads, not 2"):
        asp.attention(ones(1, 3, 3, 8), ones(1, 2, 5, 8), ones(1, 2, 5, 8), implementation=implementation)


def test_b82_a_long_window_allocates_in_proportion_to_its_length() -> None:
    tracemalloc.start()
    SlidingWindow(back=127).spans(65536, 65536)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6  # a dense mask would take 4.3 GB


@every_path
def test_b84_b88_looking_and_gradients_leave_the_output_alone(library: str, implementation: str) -> None:
    mask = ValidLens(LIBRARIES[library](np.array([3, 3])))
    out = outputs(library, implementation, mask, shape={"B": 2})
    assert out.shape == (2, 1, 4, 1)
    close(out, 53.5)
    q, k, v = arrays(library, B=2)
    record = asp.inspect(q, k, v, score=Dot(), mask=mask, implementation=implementation)
    assert (np.asarray(record.out, np.float64) == out).all()
    if library == "torch":
        trained = asp.attention(
            q.requires_grad_(), k, v, score=Dot(), mask=mask, implementation=implementation
        )
        assert (trained.detach().double().numpy() == out).all()
        with torch.no_grad():
            quiet = asp.attention(q, k, v, score=Dot(), mask=mask, implementation=implementation)
        assert (quiet.double().numpy() == out).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_b85_strides(implementation: str) -> None:
    torch.manual_seed(0)
    base = torch.randn(2, 5, 3, 14)
    mask = Causal() & ValidLens(torch.tensor([5, 3]))
    views = {
        "transposed": base.transpose(1, 2)[..., :7],
        "strided": base.transpose(1, 2)[..., ::2],
        "expanded": base.transpose(1, 2)[:, :1, :, :7].expand(2, 3, 5, 7),
        "odd slice": torch.randn(2, 3, 7, 7)[:, :, 1:6],
    }
    for name, x in views.items():
        inputs = [x.detach().requires_grad_() for _ in range(3)]
        copies = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for _ in range(3)]
        gradient = torch.randn(2, 3, 7, 5).transpose(-1, -2)
        out = asp.attention(*inputs, mask=mask, implementation=implementation)
        right = asp.attention(*copies, mask=mask, implementation=implementation)
        close(out.detach(), right.detach(), 1e-6)
        ours = torch.autograd.grad(out, inputs, gradient)
        theirs = torch.autograd.grad(right, copies, gradient.contiguous())
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape, name
            close(a, b, 1e-5)


def test_b89_the_mask_follows_q_whatever_the_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        q, k, v = arrays("torch")
        for implementation in ("eager", "sdpa"):
            out = asp.attention(
                q, k, v, score=Dot(), mask=Causal() & ValidLens(3), implementation=implementation
            )
            assert out.dtype == torch.float32
            close(out.ravel(), [1, 7, 53.5, 53.5])
        dense = (Causal() & ValidLens(torch.tensor(3))).dense(4, 4)
        assert dense.dtype == torch.bool
    finally:
        torch.set_default_dtype(torch.float32)


@every_library
def test_b90_weights_are_per_head(library: str) -> None:
    to = LIBRARIES[library]
    bias = np.zeros((1, 2, 1, 4), np.float32)
    bias[0, 1, 0, 0] = 1e4
    q, k, v = arrays(library, H=2)
    weights = np.asarray(asp.inspect(q, k, v, score=Dot(), bias=to(bias)).weights())
    assert weights.shape == (1, 2, 4, 4)
    close(weights[0, 0], np.broadcast_to([0.1, 0.2, 0.3, 0.4], (4, 4)))
    close(weights[0, 1], np.broadcast_to([1, 0, 0, 0], (4, 4)))


@every_library
def test_b95_messages_say_argument_given_needed_and_fix(library: str) -> None:
    to = LIBRARIES[library]
    x = to(np.ones((2, 10, 10, 4), np.float32))
    for mask, message in (
        (to(np.ones((2, 10, 10), bool)), r"mask: given bool\[2, 10, 10\] beside 4-D.*mask\[:, None\]"),
        (to(np.ones((10, 11), bool)), r"mask: given bool\[10, 11\], needed .*10 or 1"),
        (ValidLens(to(np.array([3, 11]))), r"lens: given int64\[2\] with values from 3 to 11|int32\[2\]"),
        (to(np.ones((10, 10), np.float32)), "a float array is a bias"),
    ):
        with pytest.raises(asp.ArgumentError, match=message):
            asp.attention(x, x, x, mask=mask)
    with pytest.raises(asp.ArgumentError, match="holding -1, needed an integer of 0 or more"):
        ValidLens(to(np.array([3, -1])))
