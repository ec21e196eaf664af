"""What the modules share: dropout that `nnx.view`, `train` and `eval` switch, and learned scores."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
from flax import nnx

from attnspan.arrays import is_array
from attnspan.errors import refusal
from attnspan.shapes import check_rate
from attnspan.values import Value

__all__ = ["AttentionModule", "Learned"]


class AttentionModule(nnx.Module):
    """Base of the modules: it decides whether a call drops weights, and with which key.

    A subclass draws its parameters first, so that they don't depend on the rate.

    Attributes
    ----------
    dropout_rate : float
        Rate at which weights are dropped.
    deterministic : bool
        Drop nothing. `nnx.view(module, deterministic=True)` gives a view that drops nothing,
        `module.eval()` and `module.train()` switch the module itself.
    rngs : nnx.RngStream or None
        A fork of the dropout stream given at construction, None where nothing is dropped.
    """

    def __init__(self, dropout: float, rngs: nnx.Rngs | nnx.RngStream | None) -> None:
        check_rate(dropout)
        self.dropout_rate = dropout
        self.deterministic = False
        if dropout > 0 and isinstance(rngs, nnx.Rngs):
            rngs = rngs["dropout"]
        self.rngs = nnx.data(rngs.fork() if dropout > 0 and rngs is not None else None)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set what `nnx.view` was asked to set."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout(self) -> dict[str, Any]:
        """Give the rate of this call and a new key, as arguments of `attention`."""
        if self.deterministic or self.dropout_rate == 0:
            return {}
        if self.rngs is None:
            raise refusal(
                "rngs",
                None,
                f"random numbers to drop weights at rate {self.dropout_rate}",
                f"construct {type(self).__name__}(..., rngs=nnx.Rngs(...)), or call "
                "nnx.view(module, deterministic=True), which drops nothing",
            )
        return {"dropout": self.dropout_rate, "rng": self.rngs()}


class Learned(nnx.Module):
    """A score whose arrays are parameters (nnx.Param) of the module; calling it gives the score.

    A function is given back as it is; if it is an nnx.Module it becomes a submodule.
    """

    def __init__(self, score: Any) -> None:
        self.kind = type(score) if isinstance(score, Value) else None
        self.function = None if self.kind else score
        items = [(f.name, getattr(score, f.name)) for f in fields(score)] if self.kind else []
        self.settings = tuple((name, item) for name, item in items if not is_array(item))
        self.arrays = tuple(name for name, item in items if is_array(item))
        for name, item in items:
            if is_array(item):
                setattr(self, name, nnx.Param(jnp.asarray(item)))

    def __call__(self) -> Any:
        """Build the score."""
        if self.kind is None:
            return self.function
        return self.kind(**dict(self.settings), **{name: getattr(self, name)[...] for name in self.arrays})
