"""Bug reports A: rows that see nothing, and what is masked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.masks import Causal, SlidingWindow, ValidLens
from attnspan.scores import Dot
from tests.cases.fixture import LIBRARIES, arrays, close, every_library, every_path, outputs

ROW3_EMPTY = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool)


@every_path
def test_b01_an_all_false_row_is_zero_and_stays_alone(library: str, implementation: str) -> None:
    close(outputs(library, implementation, LIBRARIES[library](ROW3_EMPTY)).ravel(), [1, 7, 53.5, 0])
    q, k, v = arrays(library)
    weights = np.asarray(asp.inspect(q, k, v, score=Dot(), mask=LIBRARIES[library](ROW3_EMPTY)).weights())
    assert (weights[0, 0, 3] == 0).all()


@every_path
def test_b02_bool_and_bias_forms_agree_and_a_float_mask_is_refused(library: str, implementation: str) -> None:
    keep = ROW3_EMPTY.copy()
    keep[2] = False
    to = LIBRARIES[library]
    as_bool = outputs(library, implementation, to(keep))
    as_bias = outputs(library, implementation, bias=to(np.where(keep, 0, -np.inf).astype(np.float32)))
    close(as_bool, as_bias)
    close(as_bool.ravel(), [1, 7, 0, 0])
    with pytest.raises(asp.ArgumentError, match="a float array is a bias: pass 0/-inf values as bias="):
        outputs(library, implementation, to(keep.astype(np.float32)))


@every_path
def test_b03_a_row_of_huge_negative_biases_is_the_softmax_of_them(library: str, implementation: str) -> None:
    bias = np.zeros((4, 4), np.float32)
    bias[0] = np.finfo(np.float32).min
    out = outputs(library, implementation, bias=LIBRARIES[library](bias)).ravel()
    close(out, [277.75, 432.1, 432.1, 432.1])  # min + log(k) rounds to min: all equal, so uniform


def test_b05_gradients_of_empty_rows_are_zero_in_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    W = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    mask = Causal() & SlidingWindow(back=1) & ValidLens(torch.tensor([4, 2]))
    out = asp.attention(*(x @ w for w in W), mask=mask)
    both = torch.autograd.grad(out[0].sum(), W, retain_graph=True)
    alone = torch.autograd.grad(
        asp.attention(*(x[:1] @ w for w in W), mask=Causal() & SlidingWindow(back=1)).sum(), W
    )
    for a, b in zip(both, alone, strict=True):
        close(a, b, 1e-5)
    empty = torch.autograd.grad(out[1, 3].sum(), W)
    assert all((g == 0).all() for g in empty)


def test_b05_gradients_of_empty_rows_are_zero_in_jax() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    mask = Causal() & SlidingWindow(back=1) & ValidLens([4, 2])

    def loss(x: Any) -> Any:
        return asp.attention(x, x, x, mask=mask)[1, 3].sum()

    assert (np.asarray(jax.grad(loss)(x)) == 0).all()


@every_library
def test_b06_softmax_of_a_masked_row_is_zero(library: str) -> None:
    scores = LIBRARIES[library](np.zeros(4, np.float32))
    hidden = LIBRARIES[library](np.zeros(4, bool))
    assert np.asarray(asp.masked_softmax(scores, mask=hidden)).tolist() == [0, 0, 0, 0]


@every_library
def test_b07_valid_length_zero_and_scores_below_any_filler(library: str) -> None:
    to = LIBRARIES[library]
    weights = asp.masked_softmax(to(np.zeros((2, 2, 4), np.float32)), to(np.array([0, 3])))
    close(np.asarray(weights)[0], np.zeros((2, 4)))
    close(np.asarray(weights)[1], np.broadcast_to([1 / 3, 1 / 3, 1 / 3, 0], (2, 4)))
    low = asp.masked_softmax(to(np.array([[[-2e6, -2e6, 5, 5]]], np.float32)), to(np.array([2])))
    assert np.asarray(low).ravel().tolist() == [0.5, 0.5, 0, 0]


@every_path
def test_b08_an_empty_row_is_not_the_mean_of_the_values(library: str, implementation: str) -> None:
    assert (outputs(library, implementation, ValidLens(0)) == 0).all()


@every_library
def test_b09_integer_masks_of_zeros_and_ones(library: str) -> None:
    to = LIBRARIES[library]
    keep = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    x = to(np.ones((1, 3, 2), np.float32))
    out = np.asarray(asp.attention(x, x, x, mask=to(keep)))
    close(out[0], [[1, 1], [1, 1], [0, 0]])


@every_path
def test_b10_masks_that_leave_something_each_and_nothing_together(library: str, implementation: str) -> None:
    window = Causal() & SlidingWindow(back=1)
    close(outputs(library, implementation, window & ValidLens(2)).ravel(), [1, 7, 10, 0])
    left = outputs(library, implementation, window & ValidLens(2, pad="left")).ravel()
    close(left, [0, 0, 100, 614.285714])


@every_path
def test_b11_a_long_row_whose_first_keys_are_masked(library: str, implementation: str) -> None:
    x = LIBRARIES[library](np.ones((1, 1, 600, 2), np.float32))
    mask = Causal() & SlidingWindow(back=9)
    close(np.asarray(asp.attention(x, x, x, mask=mask, implementation=implementation)), 1.0)


@every_library
def test_b12_masked_log_softmax(library: str) -> None:
    to = LIBRARIES[library]
    x = to(np.zeros((2, 3), np.float32))
    lse = np.asarray(asp.masked_logsumexp(x, mask=to(np.array([[True] * 3, [False] * 3]))))
    close(lse[0], np.log(3))
    assert lse[1] == -np.inf
    third = asp.masked_logsumexp(to(np.array([0, 0, 5], np.float32)), mask=to(np.array([True, True, False])))
    close(np.asarray(third), np.log(2))


def test_b12_gradients_of_an_empty_row_are_zero() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3])
    (g,) = torch.autograd.grad(asp.masked_logsumexp(x, mask=mask), x, torch.tensor([1.0, float("nan")]))
    close(g, [[1 / 3] * 3, [0] * 3])
    g = jax.grad(lambda x: asp.masked_logsumexp(x, mask=mask.numpy())[0])(jnp.zeros((2, 3)))
    close(g, [[1 / 3] * 3, [0] * 3])


@every_library
def test_b14_a_masked_score_that_dominates(library: str) -> None:
    to = LIBRARIES[library]
    weights = asp.masked_softmax(
        to(np.array([0, 0, 200], np.float32)), mask=to(np.array([True, True, False]))
    )
    assert np.asarray(weights).tolist() == [0.5, 0.5, 0]


def test_b15_no_epsilon_in_the_denominator() -> None:
    x = torch.zeros(2, requires_grad=True)
    weights = asp.masked_softmax(x, mask=torch.zeros(2, dtype=torch.bool))
    (g,) = torch.autograd.grad(weights.sum(), x)
    assert weights.tolist() == [0, 0]
    assert g.tolist() == [0, 0]
