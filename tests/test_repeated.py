"""A call that repeats takes a short way, and gives what the long way gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="what is kept is kept for PyTorch's tensors")

import attnspan as asp
from attnspan import repeated
from attnspan.masks import Causal, Dense, Predicate, SlidingWindow, ValidLens
from attnspan.scores import Dot

pytestmark = pytest.mark.skipif(
    asp.plan(*[torch.ones(1, 2, 2)] * 3).implementation != "native",
    reason="nothing is kept without the kernel",
)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repeated, "_KNOWN", {})
    return


def draw(*shape: int, **options: Any) -> list[Any]:
    return [torch.randn(shape, **options) for _ in range(3)]


@pytest.mark.parametrize("shape", [(2, 7, 4), (2, 3, 7, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_bits_again(shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v = draw(*shape, dtype=dtype)
    for options in ({}, {"mask": Causal() & SlidingWindow(back=2)}, {"score": Dot(), "softcap": 3.0}):
        first = asp.attention(q, k, v, **options)
        for _ in range(3):  # the long way twice, then the short one
            again = asp.attention(q, k, v, **options)
            assert again.dtype == dtype and again.shape == first.shape and torch.equal(first, again)
    assert len(repeated._KNOWN) == 3 and all(repeated._KNOWN.values())


def test_other_values_strides_and_masks_are_other_calls() -> None:
    q, k, v = draw(1, 2, 6, 4)
    asp.attention(q, k, v, mask=Causal())
    for inputs, mask in (
        (draw(1, 2, 6, 4), Causal()),  # the same plan, other numbers
        ([q.transpose(1, 2).contiguous().transpose(1, 2), k, v], Causal()),
        ([q, k, v], SlidingWindow(back=1)),
        ([q.double(), k.double(), v.double()], Causal()),
    ):
        for _ in range(3):
            out = asp.attention(*inputs, mask=mask)
            wanted = asp.attention(*inputs, mask=mask, implementation="eager")
            assert torch.allclose(out, wanted, atol=1e-6)


def test_gradients_again() -> None:
    q, k, v = (x.requires_grad_() for x in draw(2, 3, 5, 4, dtype=torch.float64))
    found = []
    for _ in range(4):
        out = asp.attention(q, k, v, mask=Causal())
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert len(repeated._KNOWN) == 1
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
    assert torch.autograd.gradcheck(lambda *x: asp.attention(*x, mask=Causal()), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *x: asp.attention(*x, mask=Causal()), (q, k, v))


def test_only_some_inputs_learn() -> None:
    q, k, v = draw(1, 2, 5, 4)
    v.requires_grad_()
    for _ in range(4):
        (g,) = torch.autograd.grad(asp.attention(q, k, v).sum(), v)
        assert torch.allclose(g.sum(), torch.tensor(float(q.numel())))
    with torch.no_grad():
        assert not asp.attention(q, k, v).requires_grad


def test_arrays_beside_the_three_are_never_kept() -> None:
    q, k, v = draw(2, 3, 5, 4)
    lens = torch.tensor([5, 2])
    mask = ValidLens(lens)
    first = asp.attention(q, k, v, mask=mask)
    lens[1] = 4  # the mask follows its array
    assert not torch.equal(first, asp.attention(q, k, v, mask=mask))
    asp.attention(q, k, v, bias=torch.zeros(5, 5))
    asp.attention(q, k, v, dropout=0.5, rng=1)
    asp.attention(q, k, v, sink=0.0)
    assert not repeated._KNOWN


def test_transforms_compilers_and_refusals_do_not_come_here() -> None:
    q, k, v = draw(3, 2, 4, 4)
    whole = asp.attention(q, k, v)
    assert torch.equal(
        torch.func.vmap(lambda *x: asp.attention(*x))(q[:, None], k[:, None], v[:, None])[:, 0], whole
    )
    _, tangent = torch.func.jvp(asp.attention, (q, k, v), (q, k, v))
    assert tangent.abs().max() > 0
    compiled = torch.compile(lambda *x: asp.attention(*x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), whole)
    for _ in range(2):
        with pytest.raises(ValueError, match="widths"):
            asp.attention(q[..., :3], k, v)


def test_functions_that_may_change_are_never_kept() -> None:
    class Window:
        reach = 0

        def __call__(self, i: Any, j: Any) -> Any:
            return j - i <= self.reach

    window = Window()
    q, k, v = draw(1, 2, 6, 4)
    for reach in (0, 0, 0, -2, 3):
        window.reach = reach
        out = asp.attention(q, k, v, mask=Predicate(window, name="window"))
        wanted = asp.attention(q, k, v, mask=SlidingWindow(back=None, ahead=None) & Dense(window(*grid(6))))
        assert torch.allclose(out, wanted, atol=1e-6)
    assert not any(repeated._KNOWN.values())


def grid(n: int) -> tuple[Any, Any]:
    i = torch.arange(n)
    return i[:, None], i[None]


def test_training_after_inference() -> None:
    q, k, v = draw(1, 2, 6, 4)
    with torch.inference_mode():
        for _ in range(3):
            asp.attention(q, k, v, mask=Causal())
    q.requires_grad_()
    for _ in range(3):
        asp.attention(q, k, v, mask=Causal()).sum().backward()
    assert q.grad.abs().max() > 0


def test_a_jacobian_taken_in_one_batch() -> None:
    q, k, v = draw(1, 2, 3, 4, dtype=torch.float64)
    for _ in range(3):
        rows, whole = (
            torch.autograd.functional.jacobian(
                lambda q: asp.attention(q, k, v, mask=Causal()), q, vectorize=batched
            )
            for batched in (False, True)
        )
        assert torch.allclose(rows, whole, atol=1e-12)


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_MOST", 4)
    for n in range(1, 9):
        asp.attention(*draw(1, 1, n, 2))
    assert len(repeated._KNOWN) == 4


def test_a_hash_is_not_carried_to_another_process() -> None:
    mask = Causal() & SlidingWindow(back=3)
    hash(mask)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert "_hash" not in other.__dict__ and other == mask and hash(other) == hash(mask)
