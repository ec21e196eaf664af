"""Inputs that once went wrong, or were found by trying to break the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.biases import ALiBi
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    FirstKeys,
    Not,
    Predicate,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.scores import Additive, Bilinear, Cosine, Dot, Gaussian, LowRankBilinear, ScaledDot

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

X = np.random.default_rng(0).normal(size=(2, 4, 3))
LIBRARIES: dict[str, Any] = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}
every_library = pytest.mark.parametrize("to", list(LIBRARIES.values()), ids=list(LIBRARIES))


def test_double_backward_of_one_tensor_in_three_places() -> None:
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def twice(implementation: str) -> Any:
        out = asp.attention(x, x, x, implementation=implementation).square().sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), x)[0]

    for a, b in zip(twice("sdpa"), twice("eager"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_graph_is_kept_only_when_asked() -> None:
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    out = asp.attention(x, x, x, implementation="sdpa").sum()
    (a,) = torch.autograd.grad(out, x, retain_graph=True)
    (b,) = torch.autograd.grad(out, x)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, x)


def test_a_function_that_cannot_take_zeros_has_finite_gradients_beside_padding() -> None:
    q, k = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)

    def cosine(q: Any, k: Any) -> Any:
        return q / q.norm(dim=-1, keepdim=True) @ (k / k.norm(dim=-1, keepdim=True)).mT

    mask = ValidLens([2, 3], query_lens=[3, 4])
    out = asp.attention(q, k, k, score=cosine, mask=mask)
    right = asp.attention(q, k, k, score=Cosine(), mask=mask)
    torch.testing.assert_close(out, right)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k)), torch.autograd.grad(right.sum(), (q, k)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@every_library
@pytest.mark.parametrize(
    "score", [Gaussian(), Dot(), lambda q, k: (q[..., :, None, :] * k[..., None, :, :]).sum(-1)]
)
def test_some_rows_of_the_weights_are_rows_of_all(to: Any, score: Any) -> None:
    x = to(X.astype(np.float32))
    record = asp.inspect(x, x, x, score=score, mask=Causal())
    some, whole = np.asarray(record.weights(rows=[3, 1])), np.asarray(record.weights())
    np.testing.assert_allclose(some, whole[:, [3, 1]], rtol=1e-6, atol=1e-7)


@every_library
def test_a_mask_may_have_more_sequences_than_the_queries(to: Any) -> None:
    q, k = to(X[:1].astype(np.float32)), to(X.astype(np.float32))
    mask = ValidLens(to(np.array([2, 3])))
    for score in (Gaussian(), Dot()):
        out = np.asarray(asp.attention(q, k, k, score=score, mask=mask))
        both = np.asarray(asp.attention(to(X[[0, 0]].astype(np.float32)), k, k, score=score, mask=mask))
        np.testing.assert_allclose(out, both, rtol=1e-6, atol=1e-7)


@every_library
def test_a_large_offset_costs_no_digits_beside_a_visible_nan(to: Any) -> None:
    x = (X + 1e3).astype(np.float32)
    bad = x.copy()
    bad[0, 0] = np.nan
    out = np.asarray(asp.attention(to(bad), to(x), to(x - 1000), score=Gaussian()), np.float64)
    wide = x.astype(np.float64)
    right = asp.attention(wide, wide, wide - 1000, score=Gaussian())
    np.testing.assert_allclose(out[0, 1:], right[0, 1:], rtol=1e-5, atol=1e-6)
    assert np.isnan(out[0, 0]).all()


def test_a_plan_takes_nothing_from_a_generator() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    x = torch.tensor(X)
    asp.plan(x, x, x, dropout=0.5, rng=generator)
    with pytest.raises(asp.ArgumentError):
        asp.attention(x, x, x, dropout=0.5, rng=generator, mask=ValidLens([1, 2, 3]))
    assert (generator.get_state() == before).all()
    asp.attention(x, x, x, dropout=0.5, rng=generator)
    assert not (generator.get_state() == before).all()


def test_views_and_rare_tensors() -> None:
    x = torch.randn(4, 4, 3)
    back = np.array([4, 3, 2, 1])[::-1]
    eye = np.eye(4, dtype=bool)[::-1]
    out = asp.attention(
        x, x, x, mask=Dense(eye) & ValidLens(back), score=Bilinear(np.eye(3, dtype="f4")[::-1])
    )
    copied = asp.attention(
        x,
        x,
        x,
        mask=Dense(eye.copy()) & ValidLens(back.copy()),
        score=Bilinear(np.eye(3, dtype="f4")[::-1].copy()),
    )
    assert (out == copied).all()
    imaginary = torch.complex(x, x).conj().imag  # a view whose sign is a flag
    torch.testing.assert_close(asp.attention(imaginary, x, x), asp.attention(-x, x, x))


@every_library
def test_finite_inputs_far_out_are_never_nan_in_eager(to: Any) -> None:
    one = to(np.ones((1, 1, 1), np.float32))
    for a, b in ((1e20, -1e20), (1e20, 1e20), (-3e38, 3e38)):
        out = asp.attention(one * a, one * b, one * 7, implementation="eager")
        assert np.asarray(out).ravel().tolist() == [7]
    far = to(np.full((1, 1), -1e308 if to is not LIBRARIES["jax"] else -3e38))
    assert np.asarray(asp.attention(one, one, one * 2, bias=far)).ravel().tolist() == [2]


def test_infinite_options_have_a_meaning() -> None:
    np.testing.assert_array_equal(asp.attention(X, X, X, softcap=float("inf")), asp.attention(X, X, X))
    assert (asp.attention(X, X, X, sink=float("inf")) == 0).all()
    np.testing.assert_array_equal(asp.attention(X, X, X, sink=-float("inf")), asp.attention(X, X, X))


MADE_INSIDE: dict[str, Any] = {
    "causal": lambda n: Causal(align=0),
    "lengths, a number": lambda n: ValidLens(3),
    "lengths, a list": lambda n: ValidLens([1, 2]),
    "lengths, traced": lambda n: ValidLens(n),
    "window": lambda n: SlidingWindow(back=1, ahead=1, align="top_left"),
    "prefix": lambda n: PrefixLM(2),
    "sinks": lambda n: (SlidingWindow(back=0) | FirstKeys(1)) & Causal(),
    "documents, a list": lambda n: Documents([0, 0, 1, 1]),
    "documents, traced": lambda n: Documents(torch.stack([n, n, n + 1, n + 1], -1), each=Causal()),
    "documents, lengths": lambda n: Documents.from_lengths([1, 3]),
    "strided": lambda n: Not(Strided(2)),
    "predicate": lambda n: Predicate(lambda q, k: q >= k),
    "alibi": None,
}


PLAIN = (
    "lengths, traced",
    "sinks",
    "documents, traced",
    "predicate",
    "alibi",
)  # the others wait for the sweep


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.sweep]) for name in MADE_INSIDE],
)
def test_everything_is_made_and_used_inside_one_compiled_graph(name: str) -> None:
    q = torch.randn(2, 2, 4, 3)
    W = torch.randn(3, 3)

    def attend(q: Any, n: Any, W: Any) -> Any:
        options: dict[str, Any] = {"mask": MADE_INSIDE[name](n)} if MADE_INSIDE[name] else {}
        if name == "alibi":
            options["bias"] = ALiBi([0.5, 0.25])
        out = asp.attention(q, q, q, **options)
        record = asp.inspect(q, q, q, score=Additive(W, W, W[0]), **options)
        return out, record.out, record.lse, record.stats.entropy

    torch._dynamo.reset()
    n = torch.tensor([1, 3])
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for a, b in zip(compiled(q, n, W), attend(q, n, W), strict=True):
        torch.testing.assert_close(a, b)


def test_every_score_is_made_and_used_inside_one_compiled_graph() -> None:
    q, W = torch.randn(2, 2, 4, 3), torch.randn(3, 3)

    def attend(q: Any, W: Any) -> list[Any]:
        scores = [Additive(W, W, W[0]), LowRankBilinear(W, W), Bilinear(W), Gaussian(), Cosine(2.0), Dot()]
        return [asp.attention(q, q, q, score=score) for score in scores]

    torch._dynamo.reset()
    for a, b in zip(torch.compile(attend, fullgraph=True, backend="eager")(q, W), attend(q, W), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Documents([0, 0, 0], each=Dense(np.eye(2, dtype=bool))), "each: .* fits every document"),
        (lambda: Strided(2, phase=3), "phase: given 3, needed a phase of 0 or more, below the step of 2"),
        (lambda: asp.attention(X, X, X, sink=torch.tensor(1.0)), "sink: given PyTorch float32"),
        (
            lambda: asp.attention(X, X, X, score=lambda a, b: np.zeros((7, 4, 4))),
            r"float64 scores \(2, 3, 2\)",
        ),
        (lambda: asp.inspect(X, X, X).weights(rows=[True, False]), "rows: given list, needed an integer"),
        (lambda: asp.inspect(X, X, X).weights(rows=4), r"rows: given \[4\], needed numbers between -4 and 3"),
        (lambda: asp.inspect(X, X, X).weights(heads=0), "heads: given 0, needed None"),
        (lambda: Gaussian(np.array(0.0)), "bandwidth: .*holding 0.0, needed a positive number"),
        (lambda: asp.attention(X.astype(np.longdouble), X, X), "q: given float128|longdouble"),
        (lambda: asp.attention(X, X, X, align="left"), "align: given 'left', needed \"top_left\""),
        (
            lambda: asp.attention(X, X, X, mask=Causal),
            r"mask: given the class Causal.*write Causal\(\.\.\.\)",
        ),
        (lambda: asp.attention(X, X, X, score=Gaussian), r"score: given the class Gaussian"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(asp.ArgumentError, match=message):
        call()


NOT_A_NUMBER = np.where(np.eye(3) > 0, np.nan, np.eye(3)).astype(np.float32)


@pytest.mark.parametrize(
    "score",
    [
        Bilinear(torch.tensor(NOT_A_NUMBER)),
        LowRankBilinear(torch.tensor(NOT_A_NUMBER), torch.eye(3)),
        LowRankBilinear(torch.eye(3), torch.tensor(NOT_A_NUMBER)),
        ScaledDot(float("nan")),
        ScaledDot(torch.tensor(float("nan"))),
        ScaledDot(-float("inf")),
        Cosine(float("nan")),
        Cosine(torch.tensor(float("nan"))),
    ],
    ids=repr,
)
def test_a_parameter_that_is_not_finite_is_no_zero(score: Any) -> None:
    x = torch.tensor(X.astype(np.float32))  # few keys: there PyTorch's kernel gives 0 for a row of NaN
    for mask in (None, Causal(), ValidLens(torch.tensor([3, 0]))):
        out, right = (
            asp.attention(x, x, x, score=score, mask=mask, implementation=one) for one in ("auto", "eager")
        )
        torch.testing.assert_close(out, right, equal_nan=True)
        assert out.isnan().any()
        if mask is not None and hasattr(mask, "lens"):
            assert (out[1] == 0).all()
            assert out[0].isnan().all()


def test_a_parameter_that_is_not_finite_is_no_zero_under_a_compiler() -> None:
    def called(x: Any, M: Any) -> Any:
        return asp.attention(x, x, x, score=Bilinear(M))

    x = torch.tensor(X.astype(np.float32))
    compiled = torch.compile(called, backend="eager", fullgraph=True)
    assert compiled(x, torch.tensor(NOT_A_NUMBER)).isnan().all()


def test_scores_that_overflow_are_those_of_the_formula() -> None:
    large, small = torch.full((1, 2, 4), 1e20), torch.full((1, 2, 64), 1e19)
    mixed = torch.tensor([[1e19, 1.0], [-1e19, 2.0], [3.0, 4.0]])[None]
    for dtype in (torch.float32, torch.bfloat16):
        for x, score in ((large, None), (small, ScaledDot(1e-38)), (mixed, None), (mixed, Dot())):
            for mask in (None, Causal()):
                q = x.to(dtype)
                out = asp.attention(q, q, torch.ones_like(q), score=score, mask=mask)
                assert (out == 1).all()
                right = asp.attention(q, q, q, score=score, mask=mask, implementation="eager")
                found = asp.attention(q, q, q, score=score, mask=mask, implementation="sdpa")
                torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)
    x = large.clone().requires_grad_()
    assert torch.autograd.grad(asp.attention(x, x, x, mask=Causal()).sum(), x)[0].isfinite().all()


@every_library
def test_a_distance_is_finite_whatever_its_unit(to: Any) -> None:
    """Each query is nearest to itself, and keys far from all others stay apart from each other."""
    v = np.arange(4.0).reshape(1, 4, 1)
    near, far = [[0.0], [1.0], [2.0], [2.5]], [[1e20], [-1e20], [3e20], [3e38]]
    tiny = to(np.float32(1e-25).reshape(()))
    for points, sigma in ((near, 1e-20), (near, tiny), (near, 1e-200), (near, 1e-3), (far, 1.0), (far, 1e-9)):
        x = to(np.array([points], np.float32))
        out = asp.attention(x, x, to(v.astype(np.float32)), score=Gaussian(sigma), implementation="eager")
        np.testing.assert_allclose(np.asarray(out), v, rtol=1e-6)
        out = asp.attention(x, x, to(v.astype(np.float32)), score=Gaussian(sigma))
        assert np.isfinite(np.asarray(out)).all()  # compiled, a product may be rounded once more or less
        assert np.isfinite(np.asarray(Gaussian(1e-200).pair(x[:, :1], x))).all()
    wide = np.array([near])
    np.testing.assert_allclose(asp.attention(wide, wide, v, score=Gaussian(1e-200)), v)


def refused(text: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(asp.AttnspanError) as caught:
        call(*args, **options)
    assert str(caught.value).startswith(text), caught.value


def test_a_plan_refuses_what_attention_refuses() -> None:
    q, k = jnp.ones((1, 2, 3)), jnp.ones((1, 3, 3))
    for ask in (asp.plan, asp.attention, asp.inspect):
        with pytest.raises(asp.ArgumentError, match="align: given nothing, for Causal over 2 queries and 3"):
            jax.eval_shape(lambda q, k, ask=ask: ask(q, k, k, mask=Causal()) and None, q, k)


def test_a_record_that_left_its_trace_says_where_to_ask() -> None:
    x = jnp.ones((2, 1, 3, 4))
    record = jax.vmap(lambda q: asp.inspect(q, q, q, mask=Causal()))(x)
    refused("weights: given a record that left vmap", record.weights)
    inside = jax.vmap(lambda q: asp.inspect(q, q, q, mask=Causal()).weights())(x)
    assert inside.shape == (2, 1, 3, 3)
    record = jax.jit(
        lambda q, a: asp.inspect(q, q, q, score=lambda q, k: a * (q @ k.swapaxes(-1, -2)))
    )(x[0], 2.0)  # fmt: skip
    refused("weights: given a record that left jit", record.weights)


@every_library
def test_weights_of_rows_backwards(to: Any) -> None:
    x = to(X)
    record = asp.inspect(x, x, x)
    whole = np.asarray(record.weights())
    for rows in (slice(None, None, -1), slice(3, 0, -2), slice(1, 3), slice(2, 2)):
        np.testing.assert_allclose(np.asarray(record.weights(rows=rows)), whole[:, rows], rtol=1e-6)


def test_arrays_that_are_not_plain_are_named() -> None:
    x, t = X, torch.tensor(X)
    refused("q: given a masked array float64[2, 4, 3]", asp.attention, np.ma.masked_less(x, 0), x, x)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.asmatrix(x[0])
    refused("q: given a matrix float64[4, 3]", asp.attention, matrix, x[0], x[0])
    refused("k: given float64[2, 4, 3] of layout torch.sparse_coo", asp.attention, t, t.to_sparse(), t)
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([t[0], t[1]])
    refused("q: given a nested tensor", asp.attention, nested, t, t)
    nnx = pytest.importorskip("flax.nnx")
    held = nnx.Param(jnp.ones((3, 3)))
    refused("M: given Param float32[3, 3], needed a floating-point array (Dq, Dk)", Bilinear, held)
    refused("q: given Param float32[3, 3], needed an array", asp.attention, held, held, held)
    refused("scale: given Param float32[3, 3]", ScaledDot, held)
    with pytest.raises(asp.ArgumentError, match=r"write M\[...\]"):
        Bilinear(held)


def test_a_half_type_of_numpy_is_known_to_pytorch() -> None:
    half = np.array(0.5, jnp.bfloat16)
    x = torch.tensor(X)
    torch.testing.assert_close(
        asp.attention(x, x, x, score=ScaledDot(half)), asp.attention(x, x, x, score=ScaledDot(0.5))
    )


@every_library
def test_what_is_not_used_is_checked_too(to: Any) -> None:
    x = to(X)
    refused("align: given an array of shape (3,)", asp.attention, x, x, x, align=[0, 1, 2])
    refused("rng: given abc", asp.attention, x, x, x, rng="abc")
    refused("rng: given 1.5", asp.attention, x, x, x, rng=1.5)
    asp.attention(x, x, x, rng=3, align=[0, 1])


def test_lengths_as_a_mask_beside_scores_of_two_axes() -> None:
    scores = np.zeros((2, 3))
    with pytest.raises(asp.ArgumentError, match="one sequence; pass lengths of each row as valid_lens="):
        asp.masked_softmax(scores, mask=ValidLens([1, 2]))
    assert asp.masked_softmax(scores, np.array([1, 2])).tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    assert asp.masked_softmax(scores[:, None], mask=ValidLens([1, 2])).shape == (2, 1, 3)
    asp.masked_softmax(np.zeros((2, 2)), mask=Documents([0, 1]))


def test_modules_and_drop_ins_refuse_what_is_no_number() -> None:
    import attnspan.torch as ours

    x = torch.ones(1, 1, 1, 1)
    refused("attn_mask: given list, needed a tensor", ours.scaled_dot_product_attention, x, x, x, [[True]])
    refused("dropout: given 'a', needed a rate", ours.DotProductAttention, "a")
    refused("num_heads: given 2.0, needed a divisor", ours.MultiHeadAttention, 8, 2.0)
    jours = pytest.importorskip("attnspan.jax")
    nnx = pytest.importorskip("flax.nnx")
    refused("dropout: given 'a', needed a rate", jours.DotProductAttention, "a")
    refused("num_heads: given 2.0, needed a divisor", jours.MultiHeadAttention, 8, 2.0, rngs=nnx.Rngs(0))
