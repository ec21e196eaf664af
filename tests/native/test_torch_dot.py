"""The dot kernel in PyTorch: every way to differentiate, trace and keep it, against the formula.

The formula (implementation="eager") is held to the float64 oracle by the tests of attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import attnspan as asp
from attnspan import native
from attnspan.biases import ALiBi
from attnspan.errors import AttnspanError
from attnspan.masks import Causal, SlidingWindow, Strided, ValidLens
from attnspan.scores import Gaussian, LowRankBilinear, ScaledDot
from tests import fresh
from tests.attention.helpers import close, same_bits, values

torch = pytest.importorskip("torch")
pytest.importorskip("array_api_compat")
try:
    native.load()
except AttnspanError as error:
    pytest.skip(str(error), allow_module_level=True)

B, H, G, L, S, D, E = 2, 4, 2, 5, 7, 8, 6
SHAPES = {"q": (B, H, L, D), "k": (B, G, S, D), "v": (B, G, S, E)}
MASK = Causal(align=2) & ValidLens(torch.tensor([5, 0]))  # the second sequence sees nothing

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bits": {"mask": Strided(3, align=0) & Causal(align=2)},
    "no mask": {"mask": None},
    "gaussian": {"score": Gaussian(bandwidth=2.0)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.4, "rng": 2**63 - 5},
    "sink": {"sink": 0.5},
}
BIASES = {
    "each row": (1, H, L, S),
    "for all": (L, S),
    "one row": (B, 1, 1, S),
    "one column": (1, H, L, 1),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(dtype: Any = None, **shapes: tuple[int, ...]) -> list[Any]:
    """Draw q, k, v and what else has a shape, as leaves."""
    dtype = dtype or torch.float64
    return [torch.randn(n, dtype=dtype).requires_grad_() for n in (SHAPES | shapes).values()]


def ask(q: Any, k: Any, v: Any, bias: Any = None, name: str = "native", **options: Any) -> Any:
    return asp.attention(q, k, v, bias=bias, implementation=name, **{"mask": MASK, **options})


def agree(call: Callable[[str], Any], scale: float = 100.0) -> None:
    """Hold what a call gives with the kernel against what it gives with the formula."""
    given, wanted = (torch.utils._pytree.tree_leaves(call(name)) for name in ("native", "eager"))
    assert len(given) == len(wanted)
    for x, y in zip(given, wanted, strict=True):
        assert x.dtype == y.dtype
        close(values(x), values(y), "float64", scale)


def first(out: Any, leaves: list[Any], **options: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(out.sin().sum(), leaves, **options)


# First derivatives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_derivative_is_the_formulas(extra: str) -> None:
    """The first, and the second and third of what create_graph keeps."""
    leaves = draw()

    def derivatives(name: str) -> list[Any]:
        found, out = [], ask(*leaves, name=name, **EXTRAS[extra])
        for _ in range(3):
            found.append(first(out, leaves, create_graph=True))
            out = torch.cat([g.flatten() for g in found[-1]])
        return found

    agree(derivatives, 1e3)


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_bias_has_its_derivatives_in_its_own_shape(shape: str, softcap: float | None) -> None:
    leaves = draw(bias=BIASES[shape])

    def derivatives(name: str) -> list[Any]:
        once = first(ask(*leaves, name=name, softcap=softcap), leaves, create_graph=True)
        assert [g.shape for g in once] == [x.shape for x in leaves]
        return [once, first(torch.cat([g.flatten() for g in once]), leaves)]

    agree(derivatives)


def test_alibi_has_the_derivative_of_its_slopes() -> None:
    q, k, v, slopes = draw(slopes=(H,))
    for align in (2, torch.tensor([2, 1])):
        agree(lambda name: first(ask(q, k, v, ALiBi(slopes, align), name), [q, slopes]))  # noqa: B023


def test_what_is_not_asked_for_changes_nothing() -> None:
    """Each gradient alone is what it is beside the others, bit for bit."""
    leaves = draw(torch.float32, bias=BIASES["one row"])
    together = first(ask(*leaves), leaves)
    for n in range(4):
        own = [x.detach().requires_grad_(m == n) for m, x in enumerate(leaves)]
        out = ask(*own)
        assert out.requires_grad
        same_bits(first(out, [own[n]])[0], together[n])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_come_in_their_own_dtypes(dtype: Any) -> None:
    q, k, v = draw(dtype)
    bias = torch.randn(L, S, dtype=torch.float64, requires_grad=True)
    out = ask(q, k, v, bias)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, bias))
    assert [g.dtype for g in grads] == [dtype, dtype, dtype, torch.float64]


def test_views_of_any_strides_give_the_same_bits() -> None:
    """So do the gradients that arrive: expanded, transposed, with an empty place between."""
    q, k, v = draw(torch.float32)
    wanted = ask(q, k, v)
    q2 = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    k2 = torch.stack([k, k], -1).detach()[..., 1]
    v2 = v.detach().mT.contiguous().mT
    own = [x.requires_grad_() for x in (q2, k2, v2)]
    found = ask(*own)
    same_bits(found.detach(), wanted.detach())
    for g in (
        torch.ones(()).expand(wanted.shape),
        torch.randn(E, L, H, B).permute(3, 2, 1, 0),
        torch.randn(*wanted.shape, 2)[..., 0],
    ):
        plain = torch.autograd.grad(wanted, (q, k, v), g.contiguous(), retain_graph=True)
        for x, y in zip(torch.autograd.grad(found, own, g, retain_graph=True), plain, strict=True):
            same_bits(x, y)


def test_keys_shared_by_the_batch_sum_their_gradient() -> None:
    q, k, v = draw(k=(1, G, S, D), v=(1, G, S, E))
    agree(lambda name: first(ask(q, k, v, name=name), [q, k, v]))


def test_axes_between_batch_and_heads_have_gradients() -> None:
    q, k, v = draw(q=(B, 3, H, L, D), k=(B, 1, G, S, D), v=(B, 3, G, S, E))
    agree(lambda name: first(ask(q, k, v, name=name, dropout=0.3, rng=4), [q, k, v]))


def test_what_changed_since_the_forward_pass_is_noticed() -> None:
    for n in range(3):
        leaves = draw()
        inputs = [x * 1 for x in leaves]
        out = ask(*inputs)
        inputs[n].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_graph_that_is_kept_gives_the_same_gradient_bits() -> None:
    leaves = draw(torch.float32)
    plain = first(ask(*leaves), leaves)
    for x, y in zip(first(ask(*leaves), leaves, create_graph=True), plain, strict=True):
        same_bits(x.detach(), y)


# torch.func ------------------------------------------------------------------------------------------

CALLS = [dims for dims in itertools.product((0, 2, None), repeat=3) if dims != (None,) * 3]


@pytest.mark.parametrize("dims", CALLS)
def test_vmap_over_any_inputs(dims: tuple[int | None, ...]) -> None:
    """Forward, with the gradient inside and with it outside; the batch of one mapped call may be 1."""
    from torch.func import grad, vmap

    for batch in (B, 1):
        leaves = [x.detach()[:batch] for x in draw()]
        inputs = [
            x if d is None else torch.stack([x, x + 1, x * 2], d) for x, d in zip(leaves, dims, strict=True)
        ]
        mask = ValidLens([5, 0][:batch]) & Causal(align=2)

        def call(name: str) -> Any:
            return lambda *x: ask(*x, name=name, mask=mask).sin().sum()  # noqa: B023

        agree(lambda name: vmap(lambda *x: ask(*x, name=name, mask=mask), dims)(*inputs))  # noqa: B023
        agree(lambda name: vmap(grad(call(name), (0, 1, 2)), dims)(*inputs))  # noqa: B023
        agree(lambda name: grad(lambda *x: vmap(call(name), dims)(*x).sum(), (0, 1, 2))(*inputs))  # noqa: B023


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_vmap_over_a_bias(shape: str, dims: tuple[int | None, ...]) -> None:
    from torch.func import grad, vmap

    q, k, v, bias = (x.detach() for x in draw(bias=BIASES[shape]))
    q, bias = (
        x if d is None else torch.stack([x, x + 1, x * 2]) for x, d in zip((q, bias), dims, strict=True)
    )

    def call(name: str) -> Any:
        return lambda q, bias: ask(q, k, v, bias, name).sin().sum()

    agree(lambda name: vmap(grad(call(name), (0, 1)), dims)(q, bias))
    agree(lambda name: grad(lambda *x: vmap(call(name), dims)(*x).sum(), (0, 1))(q, bias))


def test_vmap_over_lengths_slopes_seeds_and_twice() -> None:
    from torch.func import grad, vmap

    q, k, v = (x.detach() for x in draw())
    lens = torch.tensor([[5, 0], [7, 1], [2, 2]])
    agree(lambda name: vmap(lambda n: ask(q, k, v, name=name, mask=ValidLens(n)))(lens))
    slopes = torch.rand(3, H, dtype=torch.float64)
    agree(lambda name: vmap(grad(lambda s: ask(q, k, v, ALiBi(s, 2), name).sin().sum()))(slopes))
    seeds = torch.tensor([3, 2**62, -1])
    agree(lambda name: vmap(lambda n: ask(q, k, v, name=name, dropout=0.4, rng=n))(seeds))
    wide = torch.randn(2, 3, *SHAPES["q"], dtype=torch.float64)
    agree(lambda name: vmap(vmap(grad(lambda q: ask(q, k, v, name=name).sin().sum())))(wide))
    with torch.no_grad():
        agree(lambda name: vmap(vmap(lambda q: ask(q, k, v, name=name)))(wide))


def test_mapped_dropout_draws_what_a_loop_draws() -> None:
    from torch.func import vmap

    q, k, v = (x.detach() for x in draw(torch.float32))
    many = torch.stack([q, q + 1])
    mapped = vmap(lambda q: ask(q, k, v, dropout=0.4, rng=3))(many)
    for x, y in zip(mapped, many, strict=True):
        same_bits(x, ask(y, k, v, dropout=0.4, rng=3))


def test_jacobians_and_nested_gradients() -> None:
    from torch.func import grad, jacrev

    leaves = [x.detach() for x in draw()]

    def total(name: str) -> Any:
        return lambda *x: ask(*x, name=name).sin().sum()

    agree(lambda name: jacrev(lambda *x: ask(*x, name=name), (0, 1, 2))(*leaves))
    agree(lambda name: jacrev(jacrev(total(name)), (0, 1, 2))(*leaves))
    agree(lambda name: grad(lambda *x: grad(total(name), 2)(*x).square().sum(), (0, 2))(*leaves))


def test_no_route_gives_a_zero_tangent() -> None:
    """Forward mode is refused, so that "auto" takes the formula; no tangent is lost on the way."""
    import torch.autograd.forward_ad as forward
    from torch.func import hessian, jvp

    q, k, v = (x.detach() for x in draw())
    t = torch.ones_like(q)
    wanted = jvp(lambda q: ask(q, k, v, name="eager"), (q,), (t,))[1]
    assert wanted.abs().max() > 0.1

    def tangent(name: str) -> Any:
        with forward.dual_level():
            return forward.unpack_dual(ask(forward.make_dual(q, t), k, v, name=name)).tangent

    same_bits(jvp(lambda q: ask(q, k, v, name="auto"), (q,), (t,))[1], wanted)
    same_bits(tangent("auto"), wanted)
    for call in (tangent, lambda name: jvp(lambda q: ask(q, k, v, name=name), (q,), (t,))):
        with pytest.raises(asp.NotSupportedError, match="no derivative under forward mode"):
            call("native")
    total = [lambda q, name=name: ask(q, k, v, name=name).sin().sum() for name in ("auto", "eager")]
    same_bits(*(hessian(f)(q) for f in total))


# Compilers -------------------------------------------------------------------------------------------


def compiled(call: Any, backend: str = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend, **options)


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", ["plain", "gaussian", "softcap", "dropout"])
def test_compiled_in_one_graph_it_gives_the_same_bits(extra: str, backend: str) -> None:
    leaves = draw(torch.float32, bias=BIASES["each row"])
    run = compiled(lambda *x: ask(*x, **EXTRAS[extra]), backend)
    out, wanted = run(*leaves), ask(*leaves, **EXTRAS[extra])
    if extra != "gaussian" or backend != "inductor":  # what stands before the kernel, inductor rounds its way
        same_bits(out.detach(), wanted.detach())
        for x, y in zip(first(out, leaves), first(wanted, leaves), strict=True):
            same_bits(x, y)


def test_compiled_inspection_gives_the_same_bits() -> None:
    leaves = [x.detach() for x in draw(torch.float32)]

    def look(*x: Any) -> list[Any]:
        r = asp.inspect(*x, mask=MASK, implementation="native")
        return [r.out, r.lse, *r.stats.in_order()]

    for x, y in zip(compiled(look)(*leaves), look(*leaves), strict=True):
        same_bits(x, y)


def test_compiled_for_open_lengths() -> None:
    run = compiled(lambda *x: ask(*x, mask=Causal(align="bottom_right")), dynamic=True)
    for l, s in ((5, 7), (9, 20), (7, 7)):  # noqa: E741
        x = draw(torch.float32, q=(B, H, l, D), k=(B, G, s, D), v=(B, G, s, E))
        same_bits(run(*x).detach(), ask(*x, mask=Causal(align="bottom_right")).detach())


def test_exported_for_open_lengths() -> None:
    """An exported program has a gradient; forward mode, whose tangent would be zero, is refused."""
    from torch.func import jvp

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ask(q, k, v, mask=Causal(align="bottom_right"))

    l, s = (torch.export.Dim(name, min=2, max=64) for name in "LS")  # noqa: E741
    sample = tuple(x.detach() for x in draw(torch.float32))
    run = torch.export.export(Layer(), sample, dynamic_shapes=({2: l}, {2: s}, {2: s})).module()
    for n, m in ((5, 7), (9, 20), (7, 7)):
        x = draw(torch.float32, q=(B, H, n, D), k=(B, G, m, D), v=(B, G, m, E))
        out, wanted = run(*x), Layer()(*x)
        same_bits(out.detach(), wanted.detach())
        for g, h in zip(first(out, x), first(wanted, x), strict=True):
            same_bits(g, h)
    with pytest.raises(asp.NotSupportedError, match="no derivative under forward mode"):
        jvp(lambda q: run(q, *sample[1:]), sample[:1], sample[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_exported_keeps_every_length_open(dtype: Any) -> None:
    """The choice of the implementation, too, leaves lengths free: some are chosen by their size."""

    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return asp.attention(x, x, x, mask=Causal())

    dim = torch.export.Dim("L", min=2, max=8192)
    run = torch.export.export(Layer(), (torch.ones(1, 2, 5, 32, dtype=dtype),), dynamic_shapes=({2: dim},))
    for length in (7, 1500):
        x = torch.randn(1, 2, length, 32).to(dtype)
        same_bits(run.module()(x), asp.attention(x, x, x, mask=Causal(), implementation="native"))


def test_compiled_transforms_and_tangents_take_another_way() -> None:
    import torch.autograd.forward_ad as forward
    from torch.func import grad, jvp

    q, k, v = (x.detach() for x in draw())
    t = torch.ones_like(q)
    wanted = jvp(lambda q: ask(q, k, v, name="eager"), (q,), (t,))[1]
    run = compiled(lambda q: jvp(lambda q: ask(q, k, v, name="auto"), (q,), (t,))[1])
    close(values(run(q)), values(wanted), "float64", 100.0)
    nested = lambda q: grad(lambda q: ask(q, k, v, name="auto").sin().sum())(q)  # noqa: E731
    close(values(compiled(nested)(q)), values(nested(q)), "float64", 100.0)
    run = compiled(lambda q: ask(q, k, v))
    assert run(q).shape == wanted.shape
    with forward.dual_level(), pytest.raises(torch._dynamo.exc.Unsupported, match="NotSupportedError"):
        run(forward.make_dual(q, t))  # compiled before without a tangent


@pytest.mark.parametrize("looks", [False, True])
def test_the_operators_keep_pytorchs_rules(looks: bool) -> None:
    from attnspan.implementations.native.problem import lowered
    from attnspan.implementations.native.torch import parted
    from attnspan.implementations.native.torch_ops import dot, dot_backward
    from attnspan.request import request_of

    q, k, v, bias = draw(torch.float32, bias=BIASES["each row"])
    for options in (
        {"mask": MASK, "bias": bias},
        {"dropout": 0.3, "rng": 5},
        {"bias": ALiBi(bias.detach()[0, :, 0, 0], 2)},
    ):
        arrays, numbers = parted(lowered(request_of(q, k, v, **options)).problem)
        plain = [x if x is None else x.detach() for x in arrays]
        leaves = [x if x is None or n > 5 else x.clone().requires_grad_() for n, x in enumerate(plain)]
        torch.library.opcheck(dot, (*leaves, *numbers, looks))
        out, lse, top, inverse, *_ = dot(*plain, *numbers, looks)
        wanted = [x is not None and n != 2 for n, x in enumerate(arrays[:6])]
        given = (torch.randn_like(out), torch.randn_like(lse), out, top, inverse, *plain, *numbers, wanted)
        torch.library.opcheck(dot_backward, given)


def test_a_dispatch_mode_sees_the_operator() -> None:
    """What it recorded can be mapped."""
    from torch.func import vmap
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = [x.detach() for x in draw(torch.float32)]
    graph = make_fx(lambda *x: ask(*x))(*leaves)
    assert any("attnspan.dot" in str(node.target) for node in graph.graph.nodes)
    same_bits(graph(*leaves), ask(*leaves))
    q = torch.stack([leaves[0], leaves[0] + 1])
    same_bits(vmap(graph, (0, None, None))(q, *leaves[1:]), torch.stack([ask(x, *leaves[1:]) for x in q]))


# What is kept, and where it runs ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_it_gives_the_same_gradients(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = draw(torch.float32)
    options = {"dropout": 0.3, "rng": 6}
    out = checkpoint(lambda *x: ask(*x, **options), *leaves, use_reentrant=reentrant)
    out.sin().sum().backward()
    for x, y in zip(leaves, first(ask(*leaves, **options), leaves), strict=True):
        same_bits(x.grad, y)


def test_all_that_is_kept_passes_the_hooks_of_saved_tensors() -> None:
    """The gradient is that of what the hooks give back, whatever stands in the tensors by then."""
    leaves = draw(torch.float32)
    wanted = first(ask(*leaves), leaves)
    kept: list[Any] = []

    def pack(x: Any) -> int:
        kept.append(x.detach().clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        out = ask(*leaves)
    g = out.detach().cos()
    for x in (*leaves, out):
        x.data.fill_(float("nan"))
    for x, y in zip(torch.autograd.grad(out, leaves, g), wanted, strict=True):
        same_bits(x, y)


def test_autocast_changes_nothing() -> None:
    leaves = draw(torch.float32)
    wanted = ask(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out = ask(*leaves)
        grads = first(out, leaves, create_graph=True)
        twice = first(torch.cat([g.flatten() for g in grads]), leaves)
    same_bits(out.detach(), wanted.detach())
    grads2 = first(wanted, leaves, create_graph=True)
    for x, y in zip(
        (*grads, *twice), (*grads2, *first(torch.cat([g.flatten() for g in grads2]), leaves)), strict=True
    ):
        same_bits(x.detach(), y.detach())


@pytest.mark.parametrize("extra", EXTRAS)
def test_inspected_it_gives_the_same_bits(extra: str) -> None:
    """Output and gradient; log-sum-exp has a derivative, the statistics have none."""
    q, k, v = draw(torch.float32, q=(B, H, 70, D), k=(B, G, 400, D), v=(B, G, 400, E))
    options = {"mask": Causal(align=40), **EXTRAS[extra]}
    r = asp.inspect(q, k, v, implementation="native", **options)
    out = ask(q, k, v, **options)
    same_bits(r.out.detach(), out.detach())
    for x, y in zip(first(r.out, [q, k, v], retain_graph=True), first(out, [q, k, v]), strict=True):
        same_bits(x, y)
    assert r.lse.requires_grad
    assert not any(x.requires_grad for x in r.stats.in_order())


def test_log_sum_exp_and_output_share_one_gradient() -> None:
    leaves = draw()

    def both(name: str) -> list[Any]:
        r = asp.inspect(*leaves, mask=ValidLens([5, 3]), implementation=name)
        once = torch.autograd.grad(r.out.sin().sum() + r.lse.square().sum(), leaves, create_graph=True)
        alone = torch.autograd.grad(r.lse.square().sum(), leaves[:2], retain_graph=True)
        return [once, alone, first(torch.cat([g.flatten() for g in once]), leaves)]

    agree(both, 1e3)


def test_other_kinds_of_tensor_are_refused() -> None:
    class Own(torch.Tensor):
        pass

    q, k, v = (x.detach() for x in draw())
    with pytest.raises(asp.NotSupportedError, match="it takes plain tensors, not Own"):
        ask(q.as_subclass(Own), k, v)
    meta = [x.to("meta") for x in (q, k, v)]
    with pytest.raises(asp.NotSupportedError, match="it runs on the CPU, and the arrays are on meta"):
        ask(*meta, mask=None)


def test_vectors_too_wide_for_a_tile_go_elsewhere() -> None:
    narrow, wide = torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 65537)
    thin = LowRankBilinear(torch.ones(65537, 3), torch.ones(65537, 3))
    for call, options in (
        ((wide, wide, narrow), {}),
        ((narrow, narrow, wide), {}),
        ((narrow, narrow, narrow), {"score": thin}),
    ):
        said = str(asp.plan(*call, **options))
        assert "refused     native: its vectors have at most 65536 numbers" in said
    fits = wide[..., :-1]
    assert torch.equal(asp.attention(fits, fits, fits, implementation="native"), fits)


PLANS = """
import torch, attnspan as asp
x = torch.ones(1, 2, 3, 4)
print(asp.plan(x, x, x))
try:
    print(asp.attention(x, x, x, implementation="native").sum())
except asp.NotSupportedError as error:
    print(error)
"""


def test_without_vector_kernels_it_is_passed_over_and_still_runs_by_name() -> None:
    text = fresh.output('import os; os.environ["ATTNSPAN_ISA"] = "scalar"' + PLANS)
    assert "runs        sdpa" in text
    assert "passed over native: it has no kernel for this machine's vector instructions" in text
    assert "tensor(24.)" in text


LONG = (1, 2, 1024, 32)
BF16: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": ((LONG,) * 3, {}),
    "causal": ((LONG,) * 3, {"mask": Causal()}),
    "grouped heads": ((LONG, (1, 1, 1024, 32), (1, 1, 1024, 32)), {}),
    "3-D": (((2, 1024, 32),) * 3, {}),
}
NOT_ITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "short": (((1, 2, 1023, 32),) * 3, {}),
    "narrow": (((1, 2, 1024, 31),) * 3, {}),
    "another width of values": ((LONG, LONG, (1, 2, 1024, 16)), {}),
    "5-D": (((1, 2, 2, 1024, 32),) * 3, {}),
    "keys for all": (((2, 2, 1024, 32), LONG, LONG), {}),
    "a window": ((LONG,) * 3, {"mask": SlidingWindow(64)}),
    "lengths": ((LONG,) * 3, {"mask": ValidLens(7)}),
    "a bias": ((LONG,) * 3, {"bias": ALiBi([0.5, 0.25])}),
    "another score": ((LONG,) * 3, {"score": Gaussian()}),
    "a negative scale": ((LONG,) * 3, {"score": ScaledDot(-1.0)}),
    "a softcap": ((LONG,) * 3, {"softcap": 2.0}),
    "dropout": ((LONG,) * 3, {"dropout": 0.5, "rng": 0}),
}


@pytest.mark.parametrize("has", [True, False])
def test_long_bfloat16_goes_to_the_matrix_unit_where_there_is_one(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnspan.torch_ops.has_matrix_unit", lambda: has)
    for name, (shapes, options) in (BF16 | NOT_ITS).items():
        qkv = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
        plan = asp.plan(*qkv, **options)
        wins = has and name in BF16
        assert plan.implementation == ("sdpa" if wins else "native"), name
        assert ("sdpa: it multiplies bfloat16 by the matrix unit of this machine" in str(plan)) == wins
        for dtype in (torch.float16, torch.float32):
            assert asp.plan(*[x.to(dtype) for x in qkv], **options).implementation == "native", name
    strided = torch.ones(1, 2, 32, 1024, dtype=torch.bfloat16).mT
    assert asp.plan(strided, strided, strided).implementation == "native"


def test_where_pytorch_writes_scores_out_the_plan_counts_them() -> None:
    q, wide = torch.ones(2, 3, 8, 4), torch.ones(2, 3, 8, 5)
    assert asp.plan(q, q, q, implementation="sdpa").cost.intermediate == 0
    assert asp.plan(q, q, wide, implementation="sdpa").cost.intermediate == 2 * 3 * 8 * 8 * 4


def test_where_it_did_not_compile_all_else_works() -> None:
    text = fresh.output('import sys; sys.modules["attnspan._native"] = None' + PLANS)
    assert "runs        sdpa" in text
    assert "refused     native: the native core is not installed" in text
    assert "implementation='native' cannot do this: the native core is not installed" in text


def test_a_step_of_decoding_that_learns_its_bias_under_a_softcap() -> None:
    q = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64).unbind()
    bias = torch.randn(1, 3, 1, 5, dtype=torch.float64, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(asp.attention(q, k, v, bias=bias, softcap=2.0, implementation=one).sum(), bias)[0]
        for one in ("native", "eager")
    )
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("softcap", [1e-42, 1e-30, 1e30, 1e39])
def test_softcaps_at_the_ends_of_the_range(softcap: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    found, wanted = (
        asp.attention(q, k, v, softcap=softcap, implementation=one) for one in ("native", "eager")
    )
    assert torch.allclose(found, wanted, atol=1e-6)
