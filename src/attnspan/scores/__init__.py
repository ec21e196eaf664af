"""How well a key matches a query: scores as values, each with its meaning and its lowered form."""

from attnspan.scores.additive import Additive
from attnspan.scores.base import AdditiveForm, DotForm, Score
from attnspan.scores.bilinear import Bilinear, LowRankBilinear
from attnspan.scores.cosine import Cosine
from attnspan.scores.dot import Dot, ScaledDot
from attnspan.scores.gaussian import Gaussian

__all__ = [
    "Additive",
    "AdditiveForm",
    "Bilinear",
    "Cosine",
    "Dot",
    "DotForm",
    "Gaussian",
    "LowRankBilinear",
    "ScaledDot",
    "Score",
]
