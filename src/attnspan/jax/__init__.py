"""The JAX front end: the textbook's modules and multi-head attention for flax.nnx, and jax.nn's function.

``import attnspan.jax as d2l`` gives everything the textbook section asks of its library.
"""

from attnspan.errors import MissingDependencyError

try:
    import flax.nnx  # noqa: F401
    import jax  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f'attnspan.jax needs JAX and flax ({error}): pip install "attnspan[jax]"'
    ) from error

from attnspan.attention import attention, inspect, plan
from attnspan.jax.drop_in import dot_product_attention
from attnspan.jax.multihead import MultiHeadAttention
from attnspan.jax.textbook import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
)
from attnspan.plots import plot, show_heatmaps
from attnspan.shapes import check_shape
from attnspan.softmax import masked_softmax
from attnspan.values import register_pytrees

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
    "attention",
    "check_shape",
    "dot_product_attention",
    "inspect",
    "masked_softmax",
    "plan",
    "plot",
    "show_heatmaps",
]

register_pytrees()  # values made before their library was imported
