"""What masks refuse, word for word (B95): the argument, what was given, what is needed, the likely fix."""

import re

import numpy as np
import pytest

import attnspan as asp
from attnspan import masks
from attnspan.errors import ArgumentError, AttnspanError
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    FirstKeys,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.masks.parameters import MaskSizes

from .transcripts import AXES, MADE, USED, transcript

I = np.array  # noqa: E741
NAMES = {**vars(masks), "np": np, "I": I}


def said(ask, *args, **options):
    """Give the words of a refusal."""
    with pytest.raises(ArgumentError) as caught:
        ask(*args, **options)
    assert isinstance(caught.value, (ValueError, AttnspanError))
    return str(caught.value)


def called(mask, B=2, H=3, L=4, S=4, ndim=4, **options):
    """Use a mask in a call."""
    q, k = (np.zeros((B, H, n, 2) if ndim == 4 else (B, n, 2)) for n in (L, S))
    return asp.attention(q, k, k, mask=mask, **options)


def test_a_refusal_is_an_argument_error_and_a_value_error():
    with pytest.raises(ValueError, match="^back: given -1, needed"):
        SlidingWindow(back=-1)


@pytest.mark.parametrize(("call", "text"), transcript(MADE), ids=[call for call, _ in transcript(MADE)])
def test_made(call, text):
    assert said(eval, call, NAMES) == text


@pytest.mark.parametrize(("call", "text"), transcript(USED), ids=[call for call, _ in transcript(USED)])
def test_used(call, text):
    made, L, S = re.fullmatch(r"(.*) -> (\S+) x (\S+)", call).groups()
    mask, L, S = eval(made, NAMES), int(L), int(S)
    assert said(mask.dense, L, S) == text
    assert said((mask & Everything()).bound, L, S) == text  # inside an expression too
    assert said((~mask).visible_pairs, L, S) == text


def test_slices_have_step_one():
    assert (
        said(Causal().slice, 4, 4, keys=slice(None, None, 2))
        == "keys: given a slice of step 2, needed a slice of step 1"
    )
    assert said(Causal().slice, 4, 4, queries=slice(None, None, -1)).startswith(
        "queries: given a slice of step -1"
    )


# Alignment ----------------------------------------------------------------------------------------


def test_b23_unsaid_alignment_draws_both_pictures():
    assert said(Causal().dense, 2, 4) == (
        "align: given nothing, for Causal over 2 queries and 4 keys, needed to know where query 0 stands "
        'among the keys when L differs from S; pass align="top_left" (key 0), align="bottom_right" (key S - '
        "L: a cache) or the key position itself (a number, or one per sequence)\n"
        "Causal() with 3 queries (down) and 5 keys:\n"
        "top_left      bottom_right\n"
        "█····         ███··\n"
        "██···         ████·\n"
        "███··         █████"
    )


@pytest.mark.parametrize(
    "mask", [SlidingWindow(back=1), PrefixLM(9), Strided(2), SlidingWindow(back=[1]), Causal()], ids=repr
)
def test_unsaid_alignment_is_refused_by_every_positional_mask(mask):
    name = type(mask).__name__
    tall = [
        "█··           ···",
        "██·           ···",
        "███           █··",
        "███           ██·",
        "███           ███",
    ]
    for ask in (mask.dense, (Everything() & ~mask).bound, mask.visible_pairs):
        text = said(ask, 30, 20)
        assert text.startswith(f"align: given nothing, for {name} over 30 queries and 20 keys, needed")
        assert text.split("\n")[1:] == [
            "Causal() with 5 queries (down) and 3 keys:",
            "top_left      bottom_right",
            *tall,
        ]


def test_unsaid_alignment_in_a_call():
    assert "align: given nothing, for Causal over 2 queries and 4 keys" in said(called, Causal(), L=2)
    assert called(Causal(), L=2, align="bottom_right").shape == (2, 3, 2, 2)


# Batch and heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "text"), transcript(AXES), ids=[call for call, _ in transcript(AXES)])
def test_axes(call, text):
    """B57, B60: batch and heads of a call, named with the axis."""
    mask, sizes = eval(call, NAMES), MaskSizes(5, 5, B=2, H=3)
    assert said(mask.bound, 5, 5, sizes=sizes) == text
    assert said((Everything() & ~mask).check, sizes) == text
    assert said(called, mask, L=5, S=5) == text


def test_lens_that_may_mean_queries_or_heads():
    lens = np.ones((2, 3), int)
    text = said(called, ValidLens(lens), L=3, S=4)
    assert text == (
        "ValidLens.lens: given int64[2, 3], needed to know whether its second axis means the 3 queries or "
        "the 3 heads; write lens[:, None, :] for queries or lens[:, :, None] for heads"
    )
    assert called(ValidLens(lens[:, None, :]), L=3).shape == (2, 3, 3, 2)
    assert called(ValidLens(lens[:, :, None]), L=3).shape == (2, 3, 3, 2)
    assert called(ValidLens(lens), L=5).shape == (2, 3, 5, 2)  # heads: there are 5 queries
    assert called(ValidLens(lens), L=3, ndim=3).shape == (2, 3, 2)  # queries: there are no heads


def test_masks_whose_batches_differ():
    mask = ValidLens([1, 2]) & FirstKeys([1, 2, 3])
    assert said(mask.dense, 4, 4) == (
        "mask: given parts for B = 2 and B = 3, needed parts that agree on axis 0, or are 1 there"
    )
    mask = Strided([[1, 2]]) | Dense(np.ones((1, 3, 4, 4), bool))
    assert said(mask.dense, 4, 4) == (
        "mask: given parts for H = 2 and H = 3, needed parts that agree on axis 1, or are 1 there"
    )


# Frameworks -----------------------------------------------------------------------------------------


def test_unseen_integers_are_refused_as_a_mask():
    jax = pytest.importorskip("jax")
    text = said(jax.jit(lambda x: Dense(x).dense(3, 3)), I([0, 1, 1]))
    assert text == (
        "mask: given int32[3], needed booleans (True = may attend): the values of a traced or device array "
        "are not looked at; write mask != 0"
    )


def test_arrays_of_two_frameworks():
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    mask = ValidLens(torch.tensor([1])) & FirstKeys(jnp.array([1]))
    assert said(mask.dense, 3, 3) == "mask: given arrays of JAX and PyTorch, needed arrays of one framework"
    text = said(called, ValidLens(torch.tensor([1])))
    assert text == "mask: given arrays of PyTorch beside NumPy queries, needed NumPy arrays"


# Inside documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        Dense(np.ones((2, 2), bool)),
        Documents([0, 0, 1, 1]),
        Documents.from_lengths([2, 2]),
        Causal().slice(4, 4),
        ValidLens(np.ones((1, 1, 4), int)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_each_has_no_length_of_its_own(inner):
    for make in (
        lambda m: Documents([0, 0, 1, 1], each=m),
        lambda m: Documents.from_lengths([2, 2], each=Causal() & m),
    ):
        text = said(make, inner)
        assert text.startswith("each: given ")
        name = type(inner).__name__
        needed = f"needed a mask that fits every document, not one made for lengths ({name})"
        assert text.endswith(f"{inner!r}, {needed}")


def test_what_intervals_do_not_say_is_named():
    for mask, reason in (
        (Strided(2), "Strided is no union of few intervals"),
        (Documents([0, 1, 0]), "Documents: a document returns after another"),
        (Causal() & ~Dense(I([[True]])), "Dense is no union of few intervals"),
    ):
        with pytest.raises(AttnspanError) as caught:
            mask.spans(3, 3)
        assert str(caught.value) == f"{mask!r} is kept as bits ({reason}): ask bound(L, S)"


# What was once passed in silence, or failed raw -----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Strided(np.array([2]), phase=5),
            "phase: given 5, needed a phase of 0 or more, below the step",
        ),
        (lambda: Strided([2, 9], phase=[1, 9]), "phase: given [1, 9], needed"),
        (lambda: Strided([[2], [9]], phase=[[1, 5]]), "phase: given [[1, 5]], needed"),
        (lambda: Documents([0, 1, 0], contiguous="no"), "contiguous: given 'no', needed True, False or None"),
        (lambda: Documents([0, 1, 1], contiguous=1), "contiguous: given 1, needed True, False or None"),
        (
            lambda: Dense([[True], [True, False]]),
            "mask: given lists of different lengths, needed rows of one",
        ),
        (lambda: Causal().dense(None, 3), "L: given None, needed a length"),
        (lambda: Causal().dense(True, True), "L: given True, needed a length"),
        (lambda: Causal().dense(3, 2.0), "S: given 2.0, needed a length"),
        (lambda: Causal().slice(4, None), "S: given None, needed a length"),
        (lambda: Causal().slice(4, 4, queries=2), "queries: given 2, needed a slice"),
    ],
)
def test_refused_where_it_is_said(make, text):
    assert said(make).startswith(text)


def test_a_tensor_is_no_length():
    torch = pytest.importorskip("torch")
    for n in (torch.tensor(3), np.array([3])):
        assert said(Causal().dense, n, n).startswith("L: given int64[")


def test_no_keys_at_all():
    assert Dense([]).dense(2, 0).shape == (1, 1, 2, 0)


def test_a_phase_below_each_step():
    assert Strided([2, 9], phase=[1, 8]).visible_pairs(9, 9) > 0


def test_unsaid_alignment_is_found_before_any_compute():
    for mask in (SlidingWindow(back=1), ~Causal() & Everything(), Documents([0, 1]) & Strided(2)):
        mask = mask if mask.has_length else mask & Everything()
        assert said(mask.check, MaskSizes(2, 3)).startswith(("align: given nothing, for", "Documents"))


def test_an_unseen_alignment_is_cut_to_what_a_position_may_be():
    jax = pytest.importorskip("jax")
    mask = lambda at: SlidingWindow(back=None, ahead=2**31 - 1, align=at).dense(2, 3)  # noqa: E731
    assert jax.jit(mask)(np.int32(2**30)).all()
