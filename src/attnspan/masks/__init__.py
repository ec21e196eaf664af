"""Which keys a query may see: masks as values that compose with ``&``, ``|`` and ``~``.

>>> from attnspan.masks import Causal, SlidingWindow, ValidLens
>>> mask = Causal() & SlidingWindow(back=1) & ValidLens([3])
>>> print(mask.picture(4, 4))
█···
██··
·██·
··█·
"""

from attnspan.masks.base import And, Mask, Not, Or
from attnspan.masks.causal import Causal
from attnspan.masks.dense import Dense
from attnspan.masks.documents import Documents
from attnspan.masks.everything import Everything, Nothing
from attnspan.masks.first_keys import FirstKeys
from attnspan.masks.packed import Packed
from attnspan.masks.predicate import Predicate
from attnspan.masks.prefix_lm import PrefixLM
from attnspan.masks.sliced import Sliced
from attnspan.masks.sliding_window import SlidingWindow
from attnspan.masks.strided import Strided
from attnspan.masks.valid_lens import ValidLens

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Documents",
    "Everything",
    "FirstKeys",
    "Mask",
    "Not",
    "Nothing",
    "Or",
    "Packed",
    "Predicate",
    "PrefixLM",
    "Sliced",
    "SlidingWindow",
    "Strided",
    "ValidLens",
]
