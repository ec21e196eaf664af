"""The PyTorch modules: what they compute, what they keep, and what PyTorch may do with them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import attnspan as asp
import attnspan.torch as d2l
from attnspan.biases import ALiBi
from attnspan.errors import ArgumentError, AttnspanError
from attnspan.masks import Causal, Dense, SlidingWindow
from attnspan.scores import Additive, Bilinear, Dot, Gaussian

B, L, S, D, E, F = 2, 3, 5, 4, 3, 6

TEXTBOOK: dict[str, Any] = {
    "dot": lambda p=0.0: d2l.DotProductAttention(p),
    "additive": lambda p=0.0: d2l.AdditiveAttention(D, D, F, p),
    "gaussian": lambda p=0.0: d2l.GaussianAttention(dropout=p),
    "gaussian, learned": lambda p=0.0: d2l.GaussianAttention(nn.Parameter(torch.tensor(0.7)), p),
    "bilinear": lambda p=0.0: d2l.BilinearAttention(D, D, p),
}


class Itself(nn.Module):
    """Multi-head attention called like the textbook's modules, for the tests that all share."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.heads = d2l.MultiHeadAttention(D, 2, vdim=E, dropout=p)

    def forward(self, queries: Any, keys: Any, values: Any, valid_lens: Any = None) -> Any:
        return self.heads(queries, keys, values, valid_lens=valid_lens)


MODULES: dict[str, Any] = {**TEXTBOOK, "heads": Itself}


def inner(module: Any) -> Any:
    return getattr(module, "heads", module)


def inputs(dtype: Any = torch.float32, grad: bool = False) -> tuple[Any, Any, Any]:
    g = torch.Generator().manual_seed(3)
    shapes = ((B, L, D), (B, S, D), (B, S, E))
    return tuple(torch.randn(s, generator=g, dtype=dtype).requires_grad_(grad) for s in shapes)


def scores(module: Any, q: Any, k: Any) -> Any:
    """The textbook's formulas, written out."""
    if isinstance(module, d2l.DotProductAttention):
        return q @ k.mT / D**0.5
    if isinstance(module, d2l.BilinearAttention):
        return q @ module.M @ k.mT
    if isinstance(module, d2l.GaussianAttention):
        bandwidth = module.score().bandwidth
        square = D**0.5 if bandwidth is None else bandwidth**2
        return -((q[:, :, None] - k[:, None]) ** 2).sum(-1) / (2 * square)
    hidden = torch.tanh(module.W_q(q)[:, :, None] + module.W_k(k)[:, None])
    return module.w_v(hidden)[..., 0]


def softmax(s: Any, keep: Any) -> Any:
    p = s.masked_fill(~keep, -torch.inf).softmax(-1)
    return p.masked_fill(~keep, 0.0)


def dense(valid_lens: Any) -> Any:
    if valid_lens is None:
        return torch.ones(B, L, S, dtype=torch.bool)
    lens = torch.as_tensor(valid_lens)
    lens = lens[:, None].expand(B, L) if lens.ndim == 1 else lens
    return torch.arange(S) < lens[..., None]


LENS = {
    "none": None,
    "per sequence": torch.tensor([2, 5]),
    "per query": torch.tensor([[1, 2, 3], [5, 4, 1]]),
    "an empty sequence": torch.tensor([0, 3]),
    "an empty query": torch.tensor([[0, 2, 5], [1, 0, 3]]),
}


# --- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("name", TEXTBOOK)
def test_output_and_weights_are_the_definition(name: str, lens: Any) -> None:
    torch.manual_seed(0)
    module = TEXTBOOK[name]().double()
    q, k, v = inputs(torch.float64)
    weights = softmax(scores(module, q, k), dense(lens))
    out = module(q, k, v, lens)
    assert out.shape == (B, L, E)
    torch.testing.assert_close(out, weights @ v, rtol=1e-11, atol=1e-12)
    assert module.attention_weights.shape == (B, L, S)
    torch.testing.assert_close(module.attention_weights, weights.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", TEXTBOOK)
def test_empty_rows_are_zero_and_have_no_gradient(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs(grad=True)
    out = module(q, k, v, torch.tensor([0, 2]))
    out.sum().backward()
    assert (out[0] == 0).all() and (module.attention_weights[0] == 0).all()
    assert (out[1] != 0).any()
    for x in (q, k, v, *module.parameters()):
        assert torch.isfinite(x.grad).all()
    for x in (q, k, v):
        assert (x.grad[0] == 0).all()
    assert (v.grad[1, :2] != 0).any() and (v.grad[1, 2:] == 0).all()


@pytest.mark.parametrize("name", TEXTBOOK)
def test_gradients_are_the_definition(name: str) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = TEXTBOOK[name]().double(), inputs(torch.float64, grad=True)
    lens = LENS["per query"]
    wanted = [q, k, v, *module.parameters()]
    probe = torch.randn(B, L, E, dtype=torch.float64)
    ours = torch.autograd.grad(module(q, k, v, lens), wanted, probe)
    theirs = torch.autograd.grad(softmax(scores(module, q, k), dense(lens)) @ v, wanted, probe)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", TEXTBOOK)
def test_mask_and_valid_lens_must_both_agree(name: str) -> None:
    module, (q, k, v) = TEXTBOOK[name](), inputs()
    lens = torch.tensor([[1, 5, 5], [3, 3, 0]])
    array = torch.arange(S) > torch.zeros(B, L, 1)
    array[1] = True
    both = module(q, k, v, lens, mask=array)
    torch.testing.assert_close(both, module(q, k, v, mask=array & dense(lens)))
    torch.testing.assert_close(both, module(q, k, v, mask=Dense(array) & dense(lens)))
    torch.testing.assert_close(both, softmax(scores(module, q, k), array & dense(lens)).nan_to_num() @ v)
    assert (both[0, 0] == 0).all() and (both[1, 2] == 0).all()
    window = SlidingWindow(back=1, align="bottom_right")
    torch.testing.assert_close(
        module(q, k, v, lens, mask=window),
        module(q, k, v, mask=window.dense(L, S)[0, 0] & dense(lens).numpy()),
    )


def test_widths_may_differ_for_additive_and_bilinear() -> None:
    q, k, v = torch.randn(B, L, 20), torch.randn(B, S, 2), torch.randn(B, S, E)
    for module in (d2l.AdditiveAttention(20, 2, 8), d2l.BilinearAttention(20, 2)):
        assert module(q, k, v).shape == (B, L, E)
        torch.testing.assert_close(module.attention_weights, scores(module, q, k).softmax(-1).detach())
        with pytest.raises(ArgumentError, match="W_q|M"):
            module(k, k, v)


def test_heads_beside_the_textbook_lengths() -> None:
    q, k, v = torch.randn(B, 2, 2, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, E)
    lens = torch.tensor([[1, 4], [2, 5]])  # (B, L) with L = H: it speaks of queries
    module = d2l.DotProductAttention()
    out = module(q, k, v, lens)
    for h in range(2):
        torch.testing.assert_close(out[:, h], module(q[:, h], k[:, h], v[:, h], lens))


def test_bilinear_scores_have_unit_variance() -> None:
    torch.manual_seed(0)
    module = d2l.BilinearAttention(64, 16)
    q, k = torch.randn(400, 64), torch.randn(400, 16)
    assert (q @ module.M @ k.T).var().item() == pytest.approx(1.0, rel=0.15)


def test_learned_and_fixed_bandwidths() -> None:
    learned = d2l.GaussianAttention(nn.Parameter(torch.tensor(2.0)))
    fixed = d2l.GaussianAttention(torch.tensor(2.0))
    assert [n for n, _ in learned.named_parameters()] == ["score.bandwidth"]
    assert [n for n, _ in fixed.named_buffers()] == ["score.bandwidth"]
    assert fixed.double()._score().bandwidth.dtype == torch.float64
    q, k, v = inputs()
    learned(q, k, v).sum().backward()
    assert learned.score.bandwidth.grad.abs() > 0
    torch.testing.assert_close(learned(q, k, v), d2l.GaussianAttention(2.0)(q, k, v))


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_widths_are_checked(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="num_hiddens: given"):
        d2l.AdditiveAttention(2, 2, bad)
    with pytest.raises(ArgumentError, match="query_size: given"):
        d2l.BilinearAttention(bad, 2)


# --- the weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_weights_need_a_call(name: str) -> None:
    with pytest.raises(AttnspanError, match="call the module first"):
        _ = inner(MODULES[name]()).attention_weights


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_those_before_dropout(name: str) -> None:
    module, (q, k, v) = MODULES[name](0.5).train(), inputs()
    module(q, k, v, torch.tensor([2, 4]))
    weights = inner(module).attention_weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert (weights[0, ..., 2:] == 0).all() and (weights[1, ..., 4:] == 0).all()


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if hasattr(value, "__dict__"):
        return [t for item in vars(value).values() for t in tensors(item)]
    return []


@pytest.mark.parametrize("name", MODULES)
def test_what_is_kept_is_small_and_detached(name: str) -> None:
    module = MODULES[name](0.5)
    q, k, v = (torch.randn(1, 50, n, requires_grad=True) for n in (D, D, E))
    module(q, k, v, torch.tensor([40]))
    kept = tensors(inner(module)._latest)
    assert len(kept) >= 2
    assert max(t.numel() for t in kept) < 50 * 50
    assert not any(t.requires_grad for t in kept)
    assert inner(module).attention_weights.requires_grad is False


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_of_the_call_also_after_a_step(name: str) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES[name]().train(), inputs()
    loss = module(q, k, v).square().sum()
    before = inner(module).attention_weights
    if not list(module.parameters()):
        return
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=10.0).step()
    assert torch.equal(inner(module).attention_weights, before)
    module(q, k, v)
    assert not torch.allclose(inner(module).attention_weights, before)


@pytest.mark.parametrize("name", MODULES)
def test_copies_pickles_and_state_dicts_after_a_call(name: str) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES[name](), inputs()
    fresh_keys = list(MODULES[name]().state_dict())
    out = module(q, k, v)
    assert list(module.state_dict()) == fresh_keys
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    other = MODULES[name]()
    other.load_state_dict(module.state_dict())
    copies = (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
        other,
    )
    for twin in copies:
        with pytest.raises(AttnspanError, match="attention_weights"):
            _ = inner(twin).attention_weights
        assert torch.equal(twin(q, k, v), out)
        assert torch.equal(inner(twin).attention_weights, inner(module).attention_weights)


def test_remember_off_keeps_nothing() -> None:
    module, (q, k, v) = d2l.DotProductAttention(), inputs()
    out = module(q, k, v)
    module.remember = False
    assert torch.equal(module(q, k, v), out)
    assert module._latest is None


# --- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_dropout_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES[name](0.5), inputs()
    still = copy.deepcopy(module)
    inner(still).dropout.p = 0.0
    module.eval()
    assert torch.equal(module(q, k, v), still(q, k, v))
    assert torch.equal(module(q, k, v), module(q, k, v))
    module.train()
    assert not torch.allclose(module(q, k, v), still(q, k, v))
    assert not torch.equal(module(q, k, v), module(q, k, v))


@pytest.mark.parametrize("name", MODULES)
def test_the_generator_governs_dropout(name: str) -> None:
    module, (q, k, v) = MODULES[name](0.5).train(), inputs()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(torch.stack([module(q, k, v) for _ in range(3)]))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_evaluation_draws_nothing() -> None:
    module, (q, k, v) = d2l.DotProductAttention(0.5).eval(), inputs()
    torch.manual_seed(0)
    module(q, k, v)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_dropped_weights_are_zero_or_scaled() -> None:
    torch.manual_seed(0)
    module, (q, k, _) = d2l.DotProductAttention(0.25).train(), inputs()
    eye = torch.eye(S).expand(B, S, S)
    mean = torch.zeros(B, L, S)
    for _ in range(400):
        out = module(q, k, eye)
        weights = module.attention_weights
        kept = out != 0
        torch.testing.assert_close(out[kept], (weights / 0.75)[kept])
        mean += out / 400
    assert 0 < kept.float().mean() < 1
    torch.testing.assert_close(mean, weights, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(ArgumentError, match=f"dropout: given {rate}.*0 <= p < 1"):
        d2l.DotProductAttention(rate)


# --- PyTorch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param("train", marks=pytest.mark.sweep), "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_compiles_as_one_graph(name: str, mode: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = getattr(MODULES[name](0.5), mode)()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(grad=True)
    lens = torch.tensor([2, 4])
    outs = []
    for _ in range(2):
        with torch._dynamo.config.patch(error_on_recompile=bool(outs)):
            torch.manual_seed(5)
            outs.append(compiled(q, k, v, lens))
    assert torch.equal(*outs)
    weights = inner(module).attention_weights
    grads = torch.autograd.grad(outs[0].sum(), [q, k, v, *module.parameters()])
    torch.manual_seed(5)
    eager = module(q, k, v, lens)
    torch.testing.assert_close(weights, inner(module).attention_weights)
    torch.testing.assert_close(outs[0], eager)
    for a, b in zip(grads, torch.autograd.grad(eager.sum(), [q, k, v, *module.parameters()]), strict=True):
        torch.testing.assert_close(a, b)


def test_the_default_compiler_draws_anew_and_reproducibly() -> None:
    torch._dynamo.reset()
    module, (q, k, v) = d2l.DotProductAttention(0.5).train(), inputs()
    compiled = torch.compile(module, fullgraph=True)
    torch.manual_seed(0)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(compiled(q, k, v), first)
    assert torch.equal(module.attention_weights.sum(-1).round(decimals=5), torch.ones(B, L))


@pytest.mark.parametrize("name", MODULES)
def test_transforms_leave_nothing_behind(name: str) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES[name](), inputs()
    out = module(q, k, v)
    looped = torch.func.vmap(module)(q[:, None], k[:, None], v[:, None])[:, 0]
    torch.testing.assert_close(looped, out)
    with pytest.raises(AttnspanError, match="transforms"):
        _ = inner(module).attention_weights
    lens = torch.tensor([2, 4])
    module(q, k, v)
    gradient = torch.func.grad(lambda q: module(q, k, v, lens).square().sum())(q)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors(inner(module)._latest))
    leaf = q.clone().requires_grad_()
    module(leaf, k, v, lens).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


def test_transforms_inside_compile_leave_nothing_behind() -> None:
    torch._dynamo.reset()
    module, (q, k, v) = d2l.DotProductAttention(), inputs()
    mapped = torch.compile(torch.func.vmap(module), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(mapped(q[:, None], k[:, None], v[:, None])[:, 0], module(q, k, v))
    mapped(q[:, None], k[:, None], v[:, None])
    assert module._latest is None


@pytest.mark.parametrize("name", MODULES)
def test_functional_call_with_other_parameters(name: str) -> None:
    torch.manual_seed(0)
    module, other, (q, k, v) = MODULES[name](), MODULES[name](), inputs()
    state = dict(other.state_dict())
    torch.testing.assert_close(torch.func.functional_call(module, state, (q, k, v)), other(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_exports(name: str, strict: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, args = MODULES[name]().eval(), (*inputs(), torch.tensor([2, 4]))
    module(*args)
    weights = inner(module).attention_weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # strict export warns of what is kept on the module
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # torch's own
        program = torch.export.export(module, args, strict=strict)
    assert torch.equal(inner(module).attention_weights, weights)  # of the call, not of the tracing
    torch.testing.assert_close(program.module()(*args), module(*args))


def test_checkpointing() -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES["additive"](0.5).train(), inputs(grad=True)
    torch.manual_seed(1)
    plain = torch.autograd.grad(module(q, k, v).square().sum(), [q, *module.parameters()])
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(out.square().sum(), [q, *module.parameters()]), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    module.remember = False  # what outlives the call cannot leave a compiled checkpoint

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False)

    assert compiled(q).shape == (B, L, E)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_dtypes(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    module, (q, k, v) = MODULES[name](), inputs()
    expected = module(q, k, v)
    out = module.to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert inner(module).attention_weights.dtype == wide


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_autocast_casts_inputs_and_nothing_inside(name: str, compiles: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, x = MODULES[name](), inputs()
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module
    half = [y.bfloat16() for y in x]
    with torch.autocast("cpu", torch.bfloat16):
        out, mixed = run(*x), run(half[0], *x[1:])
        weights = inner(module).attention_weights
    assert out.dtype == mixed.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    torch.testing.assert_close(out, mixed)
    if name != "heads":  # its projections are PyTorch's own, and cast
        torch.testing.assert_close(out, module(*half), rtol=0, atol=0)
        torch.testing.assert_close(weights, module.attention_weights, rtol=1e-6, atol=1e-6)


# --- several heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}])
def test_heads_equal_those_of_pytorch(widths: dict[str, int], bias: bool) -> None:
    torch.manual_seed(0)
    ours = d2l.MultiHeadAttention(8, 4, bias=bias, **widths)
    theirs = nn.MultiheadAttention(8, 4, bias=bias, batch_first=True, **widths)
    projections = (ours.W_q, ours.W_k, ours.W_v)
    with torch.no_grad():
        if widths:
            for layer, name in zip(projections, ("q", "k", "v"), strict=True):
                getattr(theirs, f"{name}_proj_weight").copy_(layer.weight)
        else:
            theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in projections]))
        theirs.out_proj.weight.copy_(ours.W_o.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([layer.bias for layer in projections]))
            theirs.out_proj.bias.copy_(ours.W_o.bias)
    q, k, v = (torch.randn(B, n, widths.get(w, 8)) for n, w in ((L, ""), (S, "kdim"), (S, "vdim")))
    lens = torch.tensor([2, 5])
    out, weights = theirs(
        q, k, v, key_padding_mask=torch.arange(S) >= lens[:, None], average_attn_weights=False
    )
    torch.testing.assert_close(ours(q, k, v, valid_lens=lens), out)
    torch.testing.assert_close(ours.attention_weights, weights)


def test_one_input_is_query_key_and_value() -> None:
    module, x, y = d2l.MultiHeadAttention(8, 2), torch.randn(B, L, 8), torch.randn(B, S, 8)
    assert torch.equal(module(x), module(x, x, x))
    assert torch.equal(module(x, y), module(x, y, y))


def test_an_empty_batch_passes() -> None:
    module = d2l.MultiHeadAttention(8, 2)
    assert module(torch.ones(0, S, 8), mask=Causal()).shape == (0, S, 8)
    assert module.attention_weights.shape == (0, 2, S, S)


def test_grouped_heads_are_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped, full = d2l.MultiHeadAttention(12, 6, num_kv_heads=2), d2l.MultiHeadAttention(12, 6)
    assert grouped.W_k.weight.shape == (4, 12)
    state = grouped.state_dict()
    for name in ("W_k", "W_v"):
        for part in ("weight", "bias"):
            x = state[f"{name}.{part}"].unflatten(0, (2, 2))
            state[f"{name}.{part}"] = x.repeat_interleave(3, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(B, S, 12)
    torch.testing.assert_close(grouped(x, mask=Causal()), full(x, mask=Causal()))
    assert grouped.attention_weights.shape == (B, 6, S, S)
    torch.testing.assert_close(grouped.attention_weights, full.attention_weights)


SCORES: dict[str, Any] = {
    "dot": lambda: Dot(),
    "gaussian, learned": lambda: Gaussian(nn.Parameter(torch.tensor([[0.5, 2.0]]))),
    "bilinear": lambda: Bilinear(nn.Parameter(torch.randn(2, 4, 4))),
    "additive": lambda: Additive(*(nn.Parameter(torch.randn(s)) for s in ((5, 4), (5, 4), (5,)))),
    "additive, fixed": lambda: Additive(*(torch.randn(s) for s in ((5, 4), (5, 4), (5,)))),
}


@pytest.mark.parametrize("name", SCORES)
def test_heads_with_any_score(name: str) -> None:
    torch.manual_seed(0)
    score = SCORES[name]()
    module, x = d2l.MultiHeadAttention(8, 2, score=score), torch.randn(B, S, 8)
    q, k, v = (w(x).unflatten(-1, (2, 4)).transpose(1, 2) for w in (module.W_q, module.W_k, module.W_v))
    heads = asp.attention(q, k, v, score=score, mask=Causal())
    out = module(x, mask=Causal())
    torch.testing.assert_close(out, module.W_o(heads.transpose(1, 2).flatten(-2)))
    out.square().sum().backward()
    owned = [p for n, p in module.named_parameters() if n.startswith("score.")]
    assert len(owned) == sum(isinstance(a, nn.Parameter) for _, a in score.arrays())
    assert all((p.grad != 0).any() for p in owned)
    buffers = [b for n, b in module.named_buffers() if n.startswith("score.")]
    assert len(buffers) == (3 if name == "additive, fixed" else 0)
    assert set(module.double().state_dict()) == {n for n, _ in module.named_parameters()} | {
        n for n, _ in module.named_buffers()
    }


def test_a_function_as_score() -> None:
    def halved(q: Any, k: Any) -> Any:
        return q @ k.mT / 2

    x = torch.randn(B, S, 8)
    torch.manual_seed(0)
    ours = d2l.MultiHeadAttention(8, 2, score=halved)
    torch.manual_seed(0)
    same = d2l.MultiHeadAttention(8, 2)  # its heads are 4 wide, and √4 is 2
    torch.testing.assert_close(ours(x), same(x))
    torch.testing.assert_close(ours.attention_weights, same.attention_weights)


def test_bias_and_alignment_of_the_scores() -> None:
    torch.manual_seed(0)
    module, x, y = d2l.MultiHeadAttention(8, 2), torch.randn(B, L, 8), torch.randn(B, S, 8)
    with pytest.raises(ArgumentError, match="align"):
        module(x, y, mask=Causal())
    last = module(x, y, mask=Causal(), align="bottom_right")
    assert not torch.allclose(last, module(x, y, mask=Causal(), align="top_left"))
    array = torch.ones(L, S, dtype=torch.bool).tril(S - L)
    torch.testing.assert_close(last, module(x, y, mask=array))
    bias = torch.zeros(L, S).masked_fill(~array, -torch.inf).requires_grad_()
    torch.testing.assert_close(last, module(x, y, score_bias=bias))
    assert not module._latest.options["bias"].requires_grad
    near = module(x, y, score_bias=ALiBi(torch.tensor([0.5, 0.25])), align="bottom_right")
    away = (torch.arange(L)[:, None] + S - L - torch.arange(S)).abs()
    slopes = -torch.tensor([0.5, 0.25])[:, None, None] * away
    torch.testing.assert_close(near, module(x, y, score_bias=slopes[None]))
    torch.testing.assert_close(module.attention_weights.sum(-1), torch.ones(B, 2, L))


def test_lengths_per_query_never_mean_heads() -> None:
    module, x = d2l.MultiHeadAttention(8, 2), torch.randn(B, 2, 8)
    module(x, valid_lens=torch.tensor([[1, 2], [2, 0]]))
    weights = module.attention_weights
    assert (weights[0, :, 0, 1] == 0).all() and (weights[0, :, 1, 1] > 0).all()
    assert (weights[1, :, 0] > 0).all() and (weights[1, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 3}, "num_heads: given 3, needed a divisor of embed_dim = 8"),
        ({"num_heads": 0}, "num_heads: given 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: given 3, needed a divisor of num_heads = 4"),
    ],
)
def test_heads_that_do_not_divide(change: dict[str, int], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        d2l.MultiHeadAttention(**({"embed_dim": 8, "num_heads": 4} | change))


def test_inputs_of_heads_are_checked() -> None:
    module, x = d2l.MultiHeadAttention(8, 2), torch.randn(B, S, 8)
    with pytest.raises(ArgumentError, match=r"key: given float32\[2, 5, 7\].*\(B, length, 8\)"):
        module(x, x[..., :7])
    with pytest.raises(ArgumentError, match="query: given.*batch first"):
        module(x[0])
    with pytest.raises(ArgumentError, match="mask"):
        module(x, mask=torch.ones(B, S, S, dtype=torch.bool))  # heads or sequences?


# --- the textbook's listings ---------------------------------------------------------------------


def test_listing_masked_softmax() -> None:
    weights = d2l.masked_softmax(torch.rand(2, 2, 4), torch.tensor([2, 3]))
    assert (weights[0, :, 2:] == 0).all() and (weights[1, :, 3:] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
    weights = d2l.masked_softmax(torch.rand(2, 2, 4), torch.tensor([[1, 3], [2, 4]]))
    assert weights[0, 0].tolist() == [1, 0, 0, 0]
    assert (weights > 0).sum(-1).tolist() == [[1, 3], [2, 4]]


def test_listing_dot_product_attention() -> None:
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    queries = torch.randn(2, 1, 2)
    keys = torch.randn(2, 10, 2)
    values = torch.randn(2, 10, 4)
    valid_lens = torch.tensor([2, 6])
    attention = d2l.DotProductAttention(dropout=0.5)
    attention.eval()
    d2l.check_shape(attention(queries, keys, values, valid_lens), (2, 1, 4))
    assert (attention.attention_weights > 0).sum(-1).tolist() == [[2], [6]]
    d2l.show_heatmaps(attention.attention_weights.reshape((1, 1, 2, 10)), xlabel="Keys", ylabel="Queries")


def test_listing_additive_attention() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 1, 20), torch.randn(2, 10, 2), torch.randn(2, 10, 4)
    valid_lens = torch.tensor([2, 6])
    attention = d2l.AdditiveAttention(query_size=20, key_size=2, num_hiddens=8, dropout=0.1)
    attention.eval()
    d2l.check_shape(attention(queries, keys, values, valid_lens), (2, 1, 4))
    assert attention.W_q.bias is None and attention.W_k.weight.shape == (8, 2)
    assert (attention.attention_weights > 0).sum(-1).tolist() == [[2], [6]]


def test_listing_additive_scores() -> None:
    attention = d2l.AdditiveAttention(20, 2, 8)  # draws too, so it comes before the listing's seed
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 20), torch.randn(6, 2)
    drawn = torch.randn(8, 20) / 20**0.5, torch.randn(8, 2) / 2**0.5, torch.randn(8) / 8**0.5
    with torch.no_grad():
        for layer, w in zip((attention.W_q, attention.W_k, attention.w_v), drawn, strict=True):
            layer.weight.copy_(w)
    attention(queries[None], keys[None], keys[None])
    printed = torch.tensor(
        [
            [0.1692, 0.1612, 0.1816, 0.1560, 0.1502, 0.1818],
            [0.1664, 0.1849, 0.1657, 0.1338, 0.1623, 0.1870],
            [0.1517, 0.2188, 0.1441, 0.1317, 0.2166, 0.1371],
        ]
    )
    torch.testing.assert_close(attention.attention_weights[0], printed, rtol=0, atol=5.1e-5)
