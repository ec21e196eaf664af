"""The textbook section on attention scoring and masking, as experiments that check themselves.

Each experiment states its claim in one sentence, runs it through attnspan's public surface in
PyTorch or JAX, and compares every value that the book prints with what comes out::

    >>> from attnspan import book
    >>> record = book.run("softmax", "torch")
    >>> record.ok
    True

``attnspan book`` on the command line runs them all and writes a report. The book's own function
`attention_stats` lives in `attnspan.book.torch` and `attnspan.book.jax`. To add an experiment, write
a file with an `EXPERIMENT` and name it below.
"""

from attnspan.book import (
    additive,
    causal,
    composite,
    dot_product,
    entropy,
    plotting,
    product,
    scores,
    softmax,
)
from attnspan.book.frameworks import installed
from attnspan.book.record import Check, Experiment, Picture, Record
from attnspan.errors import refusal

__all__ = ["EXPERIMENTS", "Check", "Experiment", "Picture", "Record", "installed", "run"]

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        scores, entropy, softmax, causal, composite, product, dot_product, additive, plotting,
    )
}  # fmt: skip


def run(name: str, framework: str) -> Record:
    """Run one experiment.

    Parameters
    ----------
    name : str
        One of `EXPERIMENTS`.
    framework : {"torch", "jax"}
        Where the arrays live.

    Returns
    -------
    Record
        The claim, every check with its verdict, and the figures.
    """
    if name not in EXPERIMENTS:
        raise refusal("name", repr(name), "one of " + ", ".join(EXPERIMENTS))
    return EXPERIMENTS[name].run(framework)
