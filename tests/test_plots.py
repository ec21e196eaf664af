"""Plots: arrays of every kind, honest cells, one colour scale, and no state left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnspan.errors import ArgumentError
from attnspan.masks import Causal, SlidingWindow, ValidLens
from tests import fresh

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from attnspan.plots import plot, plot_mask, show_heatmaps
from attnspan.plots.canvas import HIDDEN, VISIBLE, WARNING
from attnspan.plots.host import to_host

VALUES = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 1, 3, 4)


def saved(figure: Figure) -> int:
    """Draw the figure and give its size in bytes."""
    return len(figure._repr_png_())


def image(axes: Any) -> np.ndarray:
    return np.asarray(axes.get_images()[0].get_array())


# --- arrays of every kind ----------------------------------------------------------------------


def torch_arrays() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    base = torch.from_numpy(VALUES)
    return {
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "gradient": base.clone().requires_grad_(),
        "bfloat16 with gradient": base.bfloat16().requires_grad_(),
        "transposed": base.transpose(-1, -2).contiguous().transpose(-1, -2),
        "parameter": torch.nn.Parameter(base),
    }


def jax_arrays() -> dict[str, Any]:
    jnp = pytest.importorskip("jax.numpy")
    return {"float32": jnp.asarray(VALUES), "bfloat16": jnp.asarray(VALUES, "bfloat16")}


def numpy_arrays() -> dict[str, Any]:
    return {"float16": VALUES.astype(np.float16), "float64": VALUES.astype(np.float64)}


@pytest.mark.parametrize("arrays", [torch_arrays, jax_arrays, numpy_arrays])
def test_every_dtype_is_drawn(arrays: Any) -> None:
    for name, array in arrays().items():
        figure = show_heatmaps(array, "Keys", "Queries")
        assert saved(figure) > 1000, name
        np.testing.assert_allclose(image(figure.axes[0]), VALUES[0, 0], atol=4e-3, err_msg=name)


def test_an_accelerators_array_is_fetched() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    weights = torch.from_numpy(VALUES).cuda().bfloat16().requires_grad_()
    assert saved(show_heatmaps(weights, "Keys", "Queries")) > 1000


def test_booleans_and_lists_are_drawn() -> None:
    figure = show_heatmaps([[VALUES[0, 0], VALUES[0, 0] > 0.5]], "Keys", "Queries")
    assert image(figure.axes[1]).tolist() == (VALUES[0, 0] > 0.5).astype(float).tolist()


def test_the_array_is_not_written_to() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.from_numpy(VALUES.copy()).requires_grad_()
    to_host(weights)[...] = 7
    assert torch.equal(weights.detach(), torch.from_numpy(VALUES))


# --- heat maps ---------------------------------------------------------------------------------


def test_a_grid_has_one_scale_one_bar_and_outer_labels() -> None:
    grid = np.stack([VALUES[0], VALUES[0] * 3])  # (2, 1, 3, 4)
    grid = np.concatenate([grid, -grid], axis=1)
    figure = show_heatmaps(grid, "Keys", "Queries", titles=["a", "b"], figsize=(5, 4), cmap="Blues")
    *maps, bar = figure.axes
    assert len(maps) == 4
    assert {axes.get_images()[0].get_clim() for axes in maps} == {(-3.0, 3.0)}
    assert [axes.get_xlabel() for axes in maps] == ["", "", "Keys", "Keys"]
    assert [axes.get_ylabel() for axes in maps] == ["Queries", "", "Queries", ""]
    assert [axes.get_title() for axes in maps] == ["a", "b", "", ""]
    assert maps[0].get_images()[0].get_cmap().name == "Blues"
    assert tuple(figure.get_size_inches()) == (5, 4)
    assert bar.get_label() == "<colorbar>"


def test_titles_may_be_one_a_matrix() -> None:
    figure = show_heatmaps(np.ones((2, 1, 2, 2)), "k", "q", titles=[["above"], ["below"]])
    assert [axes.get_title() for axes in figure.axes[:2]] == ["above", "below"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (np.zeros((1, 1, 2, 2)), (0, 1)),
        (np.full((1, 1, 2, 2), 0.25), (0, 0.25)),
        (np.full((1, 1, 2, 2), np.nan), (0, 1)),
        (np.array([[[[1.0, np.nan], [3.0, np.inf]]]]), (1, 3)),
    ],
)
def test_constants_and_holes_have_a_scale(values: np.ndarray, scale: tuple[float, float]) -> None:
    figure = show_heatmaps(values, "k", "q")
    assert figure.axes[0].get_images()[0].get_clim() == scale
    assert saved(figure) > 1000


@pytest.mark.parametrize(
    ("matrices", "said"),
    [
        (np.ones((2, 2)), "add leading axes: matrices[None, None]"),
        (np.ones((1, 2, 2)), "(rows, cols, L, S)"),
        (np.ones((1, 0, 2, 2)), "no axis of size 0"),
        ([[np.ones((2, 2)), np.ones((3, 2))]], "shapes [2, 2], [3, 2], needed arrays of one shape"),
        ("abc", "array: given 'abc', needed an array of real numbers"),
    ],
)
def test_what_is_no_grid_is_refused(matrices: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        show_heatmaps(matrices, "k", "q")
    assert said in str(caught.value)


def test_titles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"titles: given 3 titles, needed one a column \(1\)"):
        show_heatmaps(VALUES, "k", "q", titles=["a", "b", "c"])


# --- curves ------------------------------------------------------------------------------------


def lines(figure: Figure) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].get_lines()]


@pytest.mark.parametrize(
    ("X", "Y", "drawn"),
    [
        ([1, 2], None, [([0, 1], [1, 2])]),
        ([[1, 2], [3, 4, 5]], None, [([0, 1], [1, 2]), ([0, 1, 2], [3, 4, 5])]),
        ([4, 8], [1, 2], [([4, 8], [1, 2])]),
        ([4, 8], [[1, 2], [3, 4]], [([4, 8], [1, 2]), ([4, 8], [3, 4])]),
        ([[4, 8], [5]], [[1, 2], [3]], [([4, 8], [1, 2]), ([5], [3])]),
        (range(2), np.array([[1, 2], [3, 4]]), [([0, 1], [1, 2]), ([0, 1], [3, 4])]),
        ([np.float32(4), np.float32(8)], (1, 2), [([4, 8], [1, 2])]),
    ],
)
def test_sequences_and_lists_of_them(X: Any, Y: Any, drawn: Any) -> None:
    assert lines(plot(X, Y)) == drawn


def test_tensors_are_curves() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = [x.bfloat16(), x * 2]
    assert lines(plot(x, y)) == [([1, 2], [1, 2]), ([1, 2], [2, 4])]
    assert lines(plot([x[0], x[1]])) == [([0, 1], [1, 2])]  # a list of 0-d tensors is one curve


def test_large_abscissae_stay_apart() -> None:
    assert lines(plot([1e9, 1e9 + 1], [0, 1]))[0][0] == [1e9, 1e9 + 1]


def test_a_log_axis_a_legend_limits_and_names() -> None:
    figure = plot(
        [4, 8, 16], [[3, 2, 1], [1, 1, 1]], "d", "entropy", ["falls", "stays"],
        (2, 20), (0, 4), xscale="log", yscale="linear", figsize=(4, 3),
    )  # fmt: skip
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert (axes.get_xlim(), axes.get_ylim()) == ((2, 20), (0, 4))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("d", "entropy")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["falls", "stays"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8", "16"]
    assert tuple(figure.get_size_inches()) == (4, 3)
    assert saved(figure) > 1000


def test_more_curves_than_formats_are_all_drawn() -> None:
    figure = plot([1, 2], [[i, i] for i in range(6)], fmts=("-", "r:"))
    assert [line.get_linestyle() for line in figure.axes[0].get_lines()] == ["-", ":"] * 3


def test_axes_of_the_caller_are_drawn_in_anew() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([9, 9])
    assert plot([1, 2], axes=axes) is figure
    assert lines(figure) == [([0, 1], [1, 2])]


@pytest.mark.parametrize(
    ("X", "Y", "said"),
    [
        ([[1, 2], [3, 4]], [[1, 2]] * 3, "X: given 2 sequences, needed 1 or 3"),
        ([1, 2, 3], [1, 2], "X of curve 0: given 3 values, needed 2"),
        (np.ones((2, 2, 2)), None, "X: given float64[2, 2, 2], needed one sequence"),
    ],
)
def test_curves_that_do_not_fit_are_refused(X: Any, Y: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plot(X, Y)
    assert said in str(caught.value)


# --- masks -------------------------------------------------------------------------------------


def colours(axes: Any) -> np.ndarray:
    rows = image(axes)
    return np.array([[to_hex(cell) for cell in row] for row in rows])


def test_a_mask_is_drawn_cell_by_cell() -> None:
    figure = plot_mask(Causal() & SlidingWindow(back=1), 5, 5, title="window")
    (axes,) = figure.axes
    expected = [[VISIBLE if 0 <= q - k <= 1 else HIDDEN for k in range(5)] for q in range(5)]
    assert colours(axes).tolist() == expected
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("window", "Keys", "Queries")
    assert saved(figure) > 1000


def test_a_query_without_keys_is_orange() -> None:
    figure = plot_mask(ValidLens(np.array([2, 0])), 2, 3)
    full, empty = figure.axes
    assert colours(full).tolist() == [[VISIBLE, VISIBLE, HIDDEN]] * 2
    assert colours(empty).tolist() == [[WARNING] * 3] * 2
    assert [axes.get_title() for axes in figure.axes] == ["batch 0", "batch 1"]


def test_heads_stand_side_by_side_and_arrays_are_masks() -> None:
    seen = np.ones((2, 3, 4, 4), bool)
    figure = plot_mask(seen, 4, 4, title="all")
    assert figure.axes[1].get_title() == "batch 0, head 1"
    assert len(figure.axes) == 6
    assert len(plot_mask(seen[0, 0], 4, 4).axes) == 1


def test_a_mask_in_an_array_of_a_framework() -> None:
    torch = pytest.importorskip("torch")
    mask = ValidLens(torch.tensor([1, 2]))
    assert len(plot_mask(mask, 2, 2).axes) == 2


def test_a_large_mask_has_no_lines_between_cells() -> None:
    figure = plot_mask(Causal(), 200, 200)
    assert len(figure.axes[0].get_xticks(minor=True)) == 0
    assert image(figure.axes[0]).shape[:2] == (200, 200)


def test_a_mask_goes_into_axes_of_the_caller() -> None:
    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert plot_mask(Causal(), 3, 3, axes=second, title="here") is figure
    assert not first.get_images()
    assert second.get_title() == "here"
    with pytest.raises(ArgumentError, match="axes: given a mask of 2 × 1 pictures"):
        plot_mask(ValidLens(np.array([1, 2])), 3, 3, axes=first)


@pytest.mark.parametrize(
    ("mask", "L", "S", "said"),
    [
        (np.ones((3, 3)), 3, 3, "a float array is a bias"),
        (np.ones((2, 3), bool), 3, 3, "mask: given bool[2, 3]"),
        (Causal(), 0, 0, "nothing to draw"),
        (ValidLens(np.arange(65) % 3), 2, 2, "mask: given 65 × 1 pictures, needed at most 64"),
    ],
)
def test_masks_that_cannot_be_drawn_are_refused(mask: Any, L: int, S: int, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plot_mask(mask, L, S)
    assert said in str(caught.value)


# --- no state, no heavy imports ------------------------------------------------------------------

DRAW = """
import sys
import numpy as np
from attnspan.masks import Causal
from attnspan.plots import plot, plot_mask, show_heatmaps
print("matplotlib" in sys.modules)
figures = [show_heatmaps(np.eye(3)[None, None], xlabel="Keys", ylabel="Queries"), plot([1, 2])]
figures.append(plot_mask(Causal(), 3, 3))
assert all(figure._repr_png_()[:4] == b"\\x89PNG" for figure in figures)
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""


def test_pyplot_is_never_imported_and_matplotlib_only_on_call() -> None:
    assert fresh.output(DRAW).split() == ["False", "True", "False"]


@pytest.mark.parametrize("call", ["plot([1, 2])", "plot_mask(Causal(), 3, 3)"])
def test_without_matplotlib_the_call_says_how_to_get_it(call: str) -> None:
    code = f"from attnspan.masks import Causal\nfrom attnspan.plots import plot, plot_mask\n{call}"
    done = fresh.run(code, missing={"matplotlib"})
    assert done.returncode != 0
    assert "MissingDependencyError: plots need matplotlib" in done.stderr
    assert 'pip install "attnspan[plot]"' in done.stderr


def test_two_figures_share_nothing() -> None:
    first, second = show_heatmaps(VALUES, "a", "b"), show_heatmaps(VALUES, "c", "d")
    assert first is not second
    assert first.axes[0].get_xlabel() == "a"
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_the_readme_picture_can_be_drawn_again(tmp_path: Path) -> None:
    import importlib.util

    script = Path(__file__).parents[1] / "docs" / "make_images.py"
    spec = importlib.util.spec_from_file_location("make_images", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw(tmp_path / "images" / "mask.png")
    assert (tmp_path / "images" / "mask.png").read_bytes()[:4] == b"\x89PNG"
