"""Masks as values: pytrees, hashing, and the same answers inside jit, compile and vmap (B73, B74)."""

import numpy as np
import pytest

from attnspan.errors import AttnspanError
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    FirstKeys,
    Not,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)

from .cases import LIBRARIES, arrays
from .examples import classes
from .test_contract import same

CLASSES = classes()
L = S = 5
LENS, BACK, IDS = [2, 5], [0, 3], [[0, 0, 1, -1, -1], [7, 7, 7, 2, 2]]


LOW = [np.tri(L, dtype=bool).tolist()]

WAYS = {  # of giving arrays: how the mask is made, and whether it is kept as bits when they are traced
    "lens": (lambda arr: ValidLens(arr(LENS)), False),
    "left": (lambda arr: ValidLens(arr(LENS), pad="left", query_lens=arr(LENS)), False),
    "heads": (lambda arr: ValidLens(arr([[[1], [2], [3]]])), False),
    "per query": (lambda arr: ValidLens(arr([[1, 2, 3, 4, 5], [0, 0, 1, 1, 5]])), False),
    "align": (lambda arr: Causal(align=arr([0, 2])), False),
    "window": (lambda arr: SlidingWindow(arr(BACK), ahead=arr([[1, 2, 3]]), align=arr([[1], [0]])), False),
    "first": (lambda arr: FirstKeys(arr([[1, 2, 3]])), False),
    "prefix": (lambda arr: PrefixLM(arr(LENS)), False),
    "lengths": (lambda arr: Documents.from_lengths(arr([[2, 0, 1], [1, 1, 3]])), False),
    "offsets": (lambda arr: Documents.from_offsets(arr([[0, 2, 5], [0, 0, 5]])), False),
    "one list": (lambda arr: Documents.from_lengths(arr([2, 0, 1])), False),
    "each": (
        lambda arr: Documents.from_lengths(arr([[2, 3], [4, 1]]), each=Causal() & FirstKeys(arr(BACK))),
        False,
    ),
    "contiguous": (lambda arr: Documents(arr(IDS), contiguous=True), False),
    "contiguous each": (lambda arr: Documents(arr(IDS), each=SlidingWindow(back=1), contiguous=True), False),
    "keys": (lambda arr: Documents(arr(IDS), key_ids=arr(IDS), contiguous=True), False),
    "ids": (lambda arr: Documents(arr(IDS)), True),
    "ids each": (lambda arr: Documents(arr(IDS), each=Causal()), True),
    "strided": (lambda arr: Strided(arr([2, 3]), phase=arr([[1, 0, 1]])), True),
    "dense": (lambda arr: Dense(arr(LOW)), True),
    "mixed": (lambda arr: (Causal() & ValidLens(arr(LENS))) | Not(FirstKeys(arr([[1, 2, 3]]))), False),
    "mixed bits": (lambda arr: Not(Causal() & Strided(2)) | ValidLens(arr(LENS)), True),
    "slice": (
        lambda arr: Causal(align=arr([0, 1])).slice(9, 9, queries=slice(2, 7), keys=slice(1, 6)),
        False,
    ),
}
FEW = ["left", "window", "each", "contiguous", "ids"]
ALL = [pytest.param(name, marks=[pytest.mark.sweep] * (name not in FEW)) for name in WAYS]


def given_to(make):
    """List what a way turns into arrays, as NumPy arrays, in order."""
    lists = []
    make(lambda x: lists.append(arrays("numpy")(x)) or lists[-1])
    return lists


def wanted_of(name):
    return np.asarray(WAYS[name][0](arrays("numpy")).dense(L, S))


def parts(mask):
    """What compiled functions give back: the table, the intervals' starts and the empty rows."""
    bound = mask.bound(L, S)
    return bound.dense(L, S), bound.spans.start, bound.empty_rows(L, S)


def check_parts(name, given):
    table, start, empty = (np.asarray(x) for x in given)
    wanted = wanted_of(name)
    assert start.dtype == np.int32 and start.ndim == 4
    same(np.broadcast_to(table, wanted.shape), wanted)
    same(empty, ~wanted.any(axis=-1))


def test_same_answers_as_numpy():
    torch = pytest.importorskip("torch")
    for name, (make, _) in WAYS.items():
        mask = make(arrays("torch"))
        assert isinstance(mask.dense(L, S), torch.Tensor)
        check_parts(name, parts(mask))


def test_numpy_arrays_follow_the_call():
    torch = pytest.importorskip("torch")
    bound = (ValidLens(np.array(LENS)) & Documents([0, 0, 1, 1, 1])).bound(L, S, like=torch.zeros(1))
    assert isinstance(bound.spans.start, torch.Tensor)
    mixed = ValidLens(torch.tensor(LENS)) & Documents([0, 0, 1, 1, 1])
    assert isinstance(mixed.dense(L, S), torch.Tensor)


# JAX ----------------------------------------------------------------------------------------------


def traced(names):
    """Trace masks made inside jit of traced arrays; how each was kept, and its parts."""
    jax = pytest.importorskip("jax")
    kept = {}

    def asked(values):
        out = {}
        for name in names:
            flat = iter(values[name])
            mask = WAYS[name][0](lambda x, flat=flat: next(flat))
            kept[name] = (mask.bound(L, S).bits is not None, bool(mask.why_bits()))
            out[name] = parts(mask)
        return out

    arr = arrays("jax")
    return jax.jit(asked)({n: [arr(x) for x in given_to(WAYS[n][0])] for n in names}), kept


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(list(WAYS), marks=pytest.mark.sweep)], ids=["few", "all"]
)
def test_inside_jit_with_traced_parameters(names):
    """B74: lengths, offsets, ids, alignments traced; contiguous=True keeps ids as intervals."""
    given, kept = traced(names)
    for name in names:
        check_parts(name, given[name])
        assert kept[name] == (WAYS[name][1],) * 2, name


def test_masks_are_arguments_of_jit():
    jax = pytest.importorskip("jax")
    traces = []

    @jax.jit
    def asked(mask):
        traces.append(1)
        return mask.dense(3, 3)

    mask = Causal() & ValidLens(np.array([1, 3])) | Documents([0, 0, 1], each=Causal())
    same(asked(mask), mask.dense(3, 3))
    other = Causal() & ValidLens(np.array([2, 0])) | Documents([0, 1, 1], each=Causal())
    same(asked(other), other.dense(3, 3))
    assert len(traces) == 1  # other values, same structure
    for back in (1, 2):
        same(asked(SlidingWindow(back=back)), SlidingWindow(back=back).dense(3, 3))
    assert len(traces) == 3  # numbers are static


def test_unseen_values_are_clipped_inside_jit():
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    far = [-(2**31), -1, 2, 99, 2**31 - 1]

    @jax.jit
    def asked(n):
        return {
            "lens": ValidLens(n).dense(4, 4),
            "left": ValidLens(n, pad="left").dense(4, 4),
            "each query's": ValidLens(jnp.tile(n[:, None, None], (1, 1, 4)), pad="left").dense(4, 4),
            "queries": ValidLens(4, query_lens=n).dense(4, 4),
            "queries left": ValidLens(4, pad="left", query_lens=n).dense(4, 4),
            "prefix": PrefixLM(n).dense(4, 4),
            "first": FirstKeys(n).dense(4, 4),
            "back": SlidingWindow(back=n, ahead=None).dense(4, 4),
            "ahead": SlidingWindow(back=None, ahead=n).dense(4, 4),
            "lengths": Documents.from_lengths(jnp.clip(n, 0, 99)[:, None]).dense(4, 4),
        }

    q, k = np.arange(4)[:, None], np.arange(4)[None, :]
    given = asked(jnp.array(far))
    for b, n in enumerate(far):
        wanted = {
            "lens": (k < n) | (q < 0),
            "left": (k >= 4 - n) | (q < 0),
            "each query's": (k >= 4 - n) | (q < 0),
            "queries": (q < n) | (k < 0),
            "queries left": (q >= 4 - n) | (k < 0),
            "prefix": (k < n) | (k <= q),
            "first": (k < n) | (q < 0),
            "back": k >= q - n,
            "ahead": k <= q + n,
            "lengths": (np.maximum(q, k) < n),
        }
        for name in wanted:
            np.testing.assert_array_equal(given[name][b, 0], wanted[name], err_msg=f"{name} {n}")


def test_far_numbers_in_seen_arrays_do_not_wrap():
    """B37: a huge window is no limit, in every integer dtype and library."""
    for library in LIBRARIES:
        pytest.importorskip(library)
        far = [("int64", 2**40), ("int32", 2**31 - 1), ("int64", 2**63 - 1), ("uint64", 2**64 - 1)]
        for dtype, n in far[: 1 if library == "jax" else 4]:
            given = np.array([n, 1], dtype)
            like = arrays(library)([1])
            for mask, one in (
                (FirstKeys(given), FirstKeys([4, 1])),
                (SlidingWindow(back=given), SlidingWindow(back=[4, 1])),
                (SlidingWindow(back=0, ahead=given), SlidingWindow(back=0, ahead=[4, 1])),
            ):
                held = np.asarray(mask.bound(4, 4, like=like).dense(4, 4))
                same(np.broadcast_to(held, (2, 1, 4, 4)), np.asarray(one.dense(4, 4)))


def test_jax_vmap():
    """B73: made inside, captured, and mapped."""
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    lens, lengths = jnp.array([0, 2, 3]), jnp.array([[1, 2], [0, 3], [3, 0]])
    captured = ValidLens(jnp.array(2))

    def one(n, docs):
        made = [
            Causal() & ValidLens(n),
            captured,
            Documents.from_lengths(docs, each=Causal()),
            Not(FirstKeys(n)),
        ]
        return [m.dense(3, 3) for m in made]

    together = jax.jit(jax.vmap(one))(lens, lengths)
    for i in range(3):
        n, docs = int(lens[i]), lengths[i].tolist()
        loop = [
            Causal() & ValidLens(n),
            ValidLens(2),
            Documents.from_lengths(docs, each=Causal()),
            ~FirstKeys(n),
        ]
        for given, mask in zip(together, loop, strict=True):
            same(np.asarray(given)[i], mask.dense(3, 3))
    mapped = jax.jit(jax.vmap(lambda m: m.dense(3, 3)))(ValidLens(lens) & Causal())
    same(mapped[:, 0, 0], (ValidLens(np.asarray(lens)) & Causal()).dense(3, 3)[:, 0])


def test_questions_of_traced_masks_say_why_they_have_no_answer():
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    for ask in ("visible_pairs", "as_valid_lens", "picture"):
        with pytest.raises(AttnspanError, match=r"traced array \(int32\[2\]\) are not known here"):
            jax.jit(lambda n, ask=ask: getattr(ValidLens(n), ask)(3, 3))(jnp.array([1, 2]))
    jax.make_jaxpr(_said)(jnp.array([1, 2]))


def _said(n):
    assert repr(ValidLens(n)) == "ValidLens(<int32[2]>)"
    return n


# PyTorch --------------------------------------------------------------------------------------------


def compiled(fn, **options):
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    return torch.compile(fn, backend="eager", fullgraph=True, **options)


@pytest.mark.parametrize("name", ALL)
def test_inside_torch_compile(name):
    """B74: no graph break, whatever is an array."""
    make = WAYS[name][0]

    def asked(values):
        flat = iter(values)
        return parts(make(lambda x: next(flat)))

    check_parts(name, compiled(asked)([arrays("torch")(x) for x in given_to(make)]))


def test_negation_inside_torch_compile():
    """torch 2.13 cannot trace ~ on an object: Not(mask) inside, or ~ outside."""
    torch = pytest.importorskip("torch")
    lens = torch.tensor([1, 3])
    outside = ~(Causal() & ValidLens(lens))

    def asked(lens):
        return Not(Causal() & ValidLens(lens)).dense(4, 4), (outside & FirstKeys(3)).dense(4, 4)

    inside, mixed = compiled(asked)(lens)
    same(inside, np.asarray(outside.dense(4, 4)))
    same(mixed, np.asarray(outside.dense(4, 4)) & (np.arange(4) < 3))


def test_torch_compile_with_lengths_that_change():
    """B74: one more trace for changing shapes, not one a shape."""
    torch = pytest.importorskip("torch")
    traces = []

    def counting(graph, _):
        traces.append(1)
        return graph.forward

    torch.compiler.reset()

    @torch.compile(backend=counting, fullgraph=True, dynamic=True)
    def asked(x, lens):
        n = x.shape[0]
        return ((Causal() | FirstKeys(1)) & ValidLens(lens)).dense(n, n)

    for n in (3, 4, 5, 9):
        lens = torch.tensor([n - 1, 2])
        wanted = ((Causal() | FirstKeys(1)) & ValidLens(lens)).dense(n, n)
        same(asked(torch.zeros(n), lens), np.asarray(wanted))
    assert len(traces) <= 2


def test_unseen_values_are_clipped_inside_torch_compile():
    torch = pytest.importorskip("torch")
    ends = torch.iinfo(torch.int64)

    def asked(n):
        return ValidLens(n).dense(4, 4), ValidLens(n, pad="left").dense(4, 4), FirstKeys(n).dense(4, 4)

    right, left, first = compiled(asked)(torch.tensor([ends.min, -1, 2, 99, ends.max]))
    assert right[:, 0].sum(-1).tolist() == [[0] * 4, [0] * 4, [2] * 4, [4] * 4, [4] * 4]
    assert torch.equal(left, right.flip(-1))
    assert torch.equal(first.expand(right.shape), right)


def test_torch_vmap():
    """B73: made inside, captured, and mapped."""
    torch = pytest.importorskip("torch")
    lens, lengths = torch.tensor([0, 2, 3]), torch.tensor([[1, 2], [0, 3], [3, 0]])
    ids = torch.tensor([[0, 1, 0], [2, 2, -1], [1, 1, 1]])
    captured = ValidLens(torch.tensor(2))

    def one(n, docs, ids):
        made = [Causal() & ValidLens(n), captured, Documents.from_lengths(docs, each=Causal()), ~FirstKeys(n)]
        made += [Documents(ids, each=Causal()), Documents(ids.sort().values, contiguous=True), Strided(n + 1)]
        return tuple(m.dense(3, 3) for m in made)

    together = torch.func.vmap(one)(lens, lengths, ids)
    for i in range(3):
        n, docs = int(lens[i]), lengths[i].tolist()
        loop = [Causal() & ValidLens(n), ValidLens(2), Documents.from_lengths(docs, each=Causal())]
        loop += [~FirstKeys(n), Documents(ids[i].tolist(), each=Causal())]
        loop += [Documents(sorted(ids[i].tolist())), Strided(n + 1)]
        for given, mask in zip(together, loop, strict=True):
            same(given[i], mask.dense(3, 3))
    mask = ValidLens(lens) & Causal()
    mapped = torch.func.vmap(lambda m: m.dense(3, 3))(mask)
    same(mapped[:, 0, 0], np.asarray(mask.dense(3, 3))[:, 0])
