"""Masks as values: pytrees, hashing, comparing, copying; and arrays beside them."""

import copy
import pickle

import numpy as np
import pytest

from attnspan.errors import AttnspanError
from attnspan.masks import (
    Causal,
    Documents,
    Everything,
    FirstKeys,
    Predicate,
    PrefixLM,
    Sliced,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.values import register_pytrees

from .cases import LIBRARIES, arrays
from .examples import classes, examples
from .test_contract import same

CLASSES = classes()


def trees():
    """Give (name, flatten, unflatten, map) of the pytree libraries that are installed."""
    for name in ("jax", "torch"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        register_pytrees()
        if name == "jax":
            import jax

            yield name, jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten, jax.tree_util.tree_map
        else:
            from torch.utils import _pytree

            yield name, _pytree.tree_flatten, lambda d, x: _pytree.tree_unflatten(x, d), _pytree.tree_map


@pytest.mark.parametrize("name", CLASSES)
def test_pytrees(name):
    for _, flatten, unflatten, tree_map in trees():
        for case in examples(name, 4, 4, arrays("numpy"), most=8):
            leaves, structure = flatten(case.mask)
            held = [x for _, x in case.mask.arrays()]
            assert [id(x) for x in leaves] == [id(x) for x in held]
            again = unflatten(structure, leaves)
            assert again == case.mask and hash(again) == hash(case.mask)
            assert flatten(again)[1] == structure
            for strange in (object(), None, "text", -1.5):  # never validated
                hollow = unflatten(structure, [strange] * len(leaves))
                assert type(hollow) is type(case.mask)
            hollow = unflatten(structure, [0.5] * len(leaves))
            back, same_structure = flatten(hollow)
            assert back == [0.5] * len(leaves) and same_structure == structure
            same(tree_map(lambda x: x.copy(), case.mask).dense(4, 4), case.table(4, 4))


def test_numbers_are_static_and_arrays_are_not():
    jax = pytest.importorskip("jax")
    structure = jax.tree_util.tree_structure
    a, b = np.array([1, 2]), np.array([3, 4])
    assert structure(ValidLens(a)) == structure(ValidLens(b))
    assert structure(SlidingWindow(1)) != structure(SlidingWindow(2))
    assert structure(Causal()) != structure(Causal(align=0))
    assert structure(ValidLens(a)) != structure(ValidLens(a, pad="left"))
    assert hash(structure(ValidLens(a) & Causal())) == hash(structure(ValidLens(b) & Causal()))
    assert jax.tree_util.tree_leaves(Documents([0, 1], each=ValidLens(a)))[1] is a


def test_masks_of_numbers_hash_and_compare_equal():
    def make():
        return [
            Causal(),
            Causal(align=1),
            Causal(align="top_left"),
            SlidingWindow(back=1),
            SlidingWindow(back=None, ahead=1),
            ValidLens(3),
            ValidLens(3, pad="left"),
            FirstKeys(3),
            PrefixLM(3),
            Strided(3),
            Everything(),
            Causal() & FirstKeys(1),
            FirstKeys(1) & Causal(),
            Causal() | FirstKeys(1),
            ~Causal(),
            ~~Causal(),
            Predicate(np.greater),
            Sliced(Causal(), (4, 4), (0, 2), (0, 2)),
            Causal().slice(4, 4, queries=slice(0, 2)),
        ]

    first, second = make(), make()
    assert first == second
    assert [hash(m) for m in first] == [hash(m) for m in second]
    assert len(set(first)) == len(first)
    assert {m: i for i, m in enumerate(first)}[second[4]] == 4
    assert SlidingWindow(back=np.int64(1)) == SlidingWindow(back=1)


def test_arrays_count_by_identity():
    a = np.array([1, 2])
    assert ValidLens(a) == ValidLens(a)
    assert hash(ValidLens(a) & Causal()) == hash(ValidLens(a) & Causal())
    assert ValidLens(a) != ValidLens(a.copy())
    assert ValidLens(a).equals(ValidLens(a.copy()), 3, 3)
    assert ValidLens(a) != a
    assert ValidLens(1) != 1


def test_masks_are_frozen_and_copy_and_pickle():
    mask = ValidLens([1, 2]) & ~Causal(align=0)
    with pytest.raises(AttributeError):
        mask.left = Causal()
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), copy.copy(mask)):
        assert again.equals(mask, 3, 3) and repr(again) == repr(mask)


def test_no_truth_value():
    for ask in (bool, lambda m: m and m, lambda m: not m, lambda m: 1 if m else 0):
        with pytest.raises(
            AttnspanError, match=r"no truth value: combine masks with & \(both\), \| \(either\) and ~ \(not\)"
        ):
            ask(Causal())


@pytest.mark.parametrize("library", LIBRARIES)
def test_boolean_arrays_on_either_side(library):
    pytest.importorskip(library)
    array, low = arrays(library)(np.eye(3, k=1, dtype=bool)), np.tri(3, dtype=bool)
    for mask in (array | Causal(), Causal() | array):
        same(mask.dense(3, 3)[0, 0], np.eye(3, k=1, dtype=bool) | low)
    for mask in (array & Causal(), Causal() & array):
        same(mask.dense(3, 3)[0, 0], np.eye(3, k=1, dtype=bool) & low)


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_without_axes(library):
    pytest.importorskip(library)
    n = arrays(library)([2])[0]
    pairs = [(ValidLens(n), ValidLens(2)), (Causal(align=n), Causal(align=2)), (FirstKeys(n), FirstKeys(2))]
    pairs += [
        (SlidingWindow(n, ahead=n), SlidingWindow(2, 2)),
        (PrefixLM(n), PrefixLM(2)),
        (Strided(n), Strided(2)),
    ]
    for mask, wanted in pairs[:: 1 if library != "jax" else 3]:
        same(mask.dense(3, 3), np.asarray(wanted.dense(3, 3)))
