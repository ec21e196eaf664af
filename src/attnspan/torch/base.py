"""What the modules share: dropout in training only, and weights that can be looked at afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from attnspan.attention import attention, inspect
from attnspan.errors import AttnspanError
from attnspan.shapes import check_rate
from attnspan.values import Value

__all__ = ["AttentionModule", "Learned", "autocasted", "draw_seed"]


@dataclass(frozen=True, eq=False)
class _Call:
    """The inputs of one call, cut off from differentiation; nothing in it grows with L·S."""

    queries: Tensor
    keys: Tensor
    score: Any
    options: dict[str, Any]


class AttentionModule(nn.Module):
    """Base of the modules: `_attend` runs attention and keeps what `attention_weights` needs.

    Attributes
    ----------
    dropout : torch.nn.Dropout
        Holds the rate and its own training mode; it is never called.
    remember : bool
        Keep the latest inputs for `attention_weights` (the default). Setting it to False frees them
        and keeps no others, as activation checkpointing under torch.compile needs.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        check_rate(dropout)
        self.dropout = nn.Dropout(dropout)
        self._latest: _Call | None = None
        self.remember = True

    @property
    def remember(self) -> bool:
        return self._remember

    @remember.setter
    def remember(self, value: bool) -> None:
        self._remember = value
        if not value:
            self._latest = None

    @property
    def attention_weights(self) -> Tensor:
        """The weights of the latest call, before dropout, computed when read.

        Shape (B, L, S), with heads (B, H, L, S), in the accumulation dtype. The module keeps the
        latest call's inputs and not its weights; parameters are those of that call if it was in
        training mode. Inputs that were changed in place since then give the weights of the change.

        Raises
        ------
        AttnspanError
            If nothing is kept: no call yet, the latest call was inside one of torch.func's
            transforms or `remember` was off, or the module was copied or unpickled since.
        """
        call = self._latest
        if call is None:
            raise AttnspanError(
                "attention_weights: given no call to look at, needed one after construction, copying "
                "or unpickling, with remember=True and outside torch.func's transforms; call the "
                "module first, or ask attnspan.inspect(...).weights() where you are"
            )
        with torch.no_grad():
            nothing = call.keys.new_zeros((*call.keys.shape[:-1], 1))
            record = inspect(call.queries, call.keys, nothing, score=call.score, **call.options)
            weights: Tensor = record.weights()
        return weights

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, score: Any, **options: Any) -> Tensor:
        rate = self.dropout.p if self.dropout.training else 0.0
        rng = draw_seed(queries.device) if rate > 0 else None
        queries, keys, values = autocasted(queries, keys, values)
        out: Tensor = attention(queries, keys, values, score=score, dropout=rate, rng=rng, **options)
        self._keep(queries, keys, score, options)
        return out

    def _keep(self, queries: Tensor, keys: Tensor, score: Any, options: dict[str, Any]) -> None:
        if not self._remember or torch.compiler.is_exporting():
            return  # an exported program has no module to keep anything on
        if _inside_transform():
            self._latest = None
            return
        # An optimizer changes parameters in place: in training the score keeps copies of its own.
        self._latest = _Call(
            queries.detach(),
            keys.detach(),
            _detached(score, copy=self.training),
            {name: _detached(value, copy=False) for name, value in options.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}


class Learned(nn.Module):
    """A score whose arrays are the module's: nn.Parameter becomes a parameter, a tensor a buffer.

    Calling it gives the score with its arrays as they are now (moved, cast, trained). A function
    is given back as it is; if it is an nn.Module it becomes a submodule.
    """

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.kind = type(score) if isinstance(score, Value) else None
        self.function = None if self.kind else score
        self.arrays: tuple[str, ...] = ()
        self.settings: dict[str, Any] = {}
        for field in fields(score) if self.kind else ():
            item = getattr(score, field.name)
            if isinstance(item, nn.Parameter):
                self.register_parameter(field.name, item)
            elif isinstance(item, Tensor):
                self.register_buffer(field.name, item)
            else:
                self.settings[field.name] = item
                continue
            self.arrays += (field.name,)

    def forward(self) -> Any:
        """Build the score."""
        if self.kind is None:
            return self.function
        return self.kind(**self.settings, **{name: getattr(self, name) for name in self.arrays})

    def extra_repr(self) -> str:
        return repr(self.forward())


def draw_seed(device: torch.device) -> Tensor:
    """Draw a dropout seed from PyTorch's default generator: int64, 0-d, traceable."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast under autocast, as PyTorch casts what its own attention function is given."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _inside_transform() -> bool:
    """Tell whether one of torch.func's transforms is running: what is kept then would leak."""
    return torch._C._functorch.maybe_current_level() is not None


# What torch.compiler.assume_constant_result does, without importing the compiler. While tracing
# the transforms are on the stack, and the compiled code is guarded by that stack.
_inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _detached(value: Any, *, copy: bool) -> Any:
    """Cut a tensor, or the tensors in a score, mask or bias, off from differentiation."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if copy else value
    if isinstance(value, Value):
        return value.map_arrays(lambda array: _detached(array, copy=copy))
    return value
