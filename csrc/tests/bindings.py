"""Random calls, right and wrong, at the two bindings of the dot kernel: Python's and XLA's.

    python csrc/tests/bindings.py PATH_OF_THE_MODULE [CALLS]

The address sanitizer judges (csrc/tests/run builds and loads the module so): each array lies in memory
of exactly what it reaches. What is wrong must come back as an exception, and of either kind there must be
enough.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

MOST_BYTES = 1 << 22
WRONG_KINDS = (None, "x", b"", 1.5, -1, 2**70, float("nan"), (), [1], (0, (1, 1, 1), (1, 1, 1)), object())
SHARES = ("key_bias", "bias", "slopes", "align", "start", "stop", "bits", "seed")
STORED = {"float16": "float16", "bfloat16": "uint16", "float32": "float32", "float64": "float64"}
Described = tuple[int, tuple[int, ...], tuple[int, ...]]


def load(path: str) -> Any:
    """Import the module from its file, which no installed one can stand in for."""
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Draw:
    """Random sizes, and values that are now and then no values."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        G = self.size(3)
        self.B, self.G, self.H = self.size(3), G, G * self.size(3)
        self.L, self.S, self.D, self.E = (self.size(most) for most in (120, 420, 40, 40))

    def chance(self, percent: float) -> bool:
        return bool(self.rng.random() * 100 < percent)

    def below(self, most: int) -> int:
        return int(self.rng.integers(most))

    def pick(self, many: Any) -> Any:
        return many[self.below(len(many))]

    def size(self, most: int) -> int:
        return 0 if self.chance(5) else 1 + self.below(most)

    def odd(self, right: int) -> int:
        return int(
            self.pick(
                (0, 1, -1, 2, right + 1, right - 1, -right, 2 * right, 2**31, 2**61, 2**63 - 1, -(2**63))
            )
        )

    def shared(self, *shape: int) -> tuple[int, ...]:
        """Put 1 for some of the axes that may broadcast."""
        return (*(1 if self.chance(30) else n for n in shape[:3]), shape[3])

    def values(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        x = self.rng.standard_normal(shape)
        if self.chance(15):
            x = np.where(self.rng.random(shape) < 0.05, self.pick((np.nan, np.inf, -np.inf)), x)
        if dtype == "uint16":  # the bits of bfloat16
            return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if dtype in ("uint8", "int32", "uint32"):
            return self.rng.integers(0, 256, shape).astype(dtype)
        return x.astype(dtype)

    def spans(self, intervals: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Draw starts and stops, usually sorted and within the keys."""
        cuts = np.sort(self.rng.integers(0, self.S + 1, (*shape, 2 * intervals)), axis=-1)
        if self.chance(10) and cuts.size:
            cuts.flat[self.below(cuts.size)] = np.clip(self.odd(self.S), -(2**31), 2**31 - 1)
        return cuts[..., ::2].astype(np.int32), cuts[..., 1::2].astype(np.int32)

    def options(self, dtype: str) -> dict[str, Any]:
        """Draw what stands beside q, k and v: arrays, or None, and numbers."""
        B, H, L, S = self.B, self.H, self.L, self.S
        wide = "float64" if dtype == "float64" else "float32"
        dropout = 0.0 if self.chance(60) else self.below(105) * 0.01
        start = stop = None
        if self.chance(60):
            start, stop = self.spans(self.pick((1, 1, 2, 3)), self.shared(B, H, L, 0)[:3])
        drawn: dict[str, Any] = {
            "key_bias": self.maybe(30, self.shared(B, H, 1, S), wide),
            "bias": self.maybe(30, self.shared(B, H, L, S), wide),
            "slopes": self.maybe(30, self.shared(B, H, 1, 1), wide),
            "start": start,
            "stop": stop,
            "bits": self.maybe(30, self.shared(B, H, L, (S + 7) // 8), "uint8"),
            "seed": self.maybe(98 if dropout else 2, self.shared(B, 1, 1, 2), "uint32"),
        }
        drawn["align"] = self.maybe(
            98 if drawn["slopes"] is not None else 2, self.shared(B, H, 1, 1), "int32"
        )
        if self.chance(2):
            drawn[self.pick(SHARES)] = None
        return drawn | {
            "scale": self.pick((-2.0, 0.0, 1e30, 1e38, 1e39, np.nan)) if self.chance(8) else 0.3,
            "softcap": self.pick((1e-300, 1e-30, 1e39, -1.0, np.nan))
            if self.chance(5)
            else self.pick((0.0, 2.0)),
            "dropout": self.pick((np.nan, np.inf, -0.5, 1.0)) if self.chance(3) else dropout,
            "draws": self.odd(2) if self.chance(5) else 1 + self.below(3),
        }

    def maybe(self, percent: float, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
        return self.values(shape, dtype) if self.chance(percent) else None


# Python's binding: addresses, shapes and strides ---------------------------------------------------


class Memory:
    """Arrays in memory of their own, which ends where they end."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.blocks: list[np.ndarray] = []

    def place(self, x: np.ndarray, rows: bool, spoiled: float = 2) -> Described:
        """Lay values out in a random way; sometimes a size, a stride or the address is wrong."""
        draw, shape, strides = self.draw, list(x.shape), [0] * 4
        order = [3, *draw.rng.permutation(3)] if rows else list(draw.rng.permutation(4))
        step = 1
        for axis in order:
            free = not (rows and axis == 3)
            step += free and draw.chance(20)
            strides[axis] = -step if free and draw.chance(25) else step
            step *= max(shape[axis], 1)
        for numbers in (shape, strides):
            if draw.chance(spoiled):
                axis = draw.below(4)
                numbers[axis] = draw.odd(numbers[axis])
        address = self.reached(x, shape, strides)
        if draw.chance(spoiled):
            address = address + 1 if x.itemsize > 1 and draw.chance(50) else 0
        return address, tuple(shape), tuple(strides)

    def reached(self, x: np.ndarray, shape: list[int], strides: list[int]) -> int:
        """Give the address of memory of just what is reached, or 0 where that is nothing or too much."""
        if any(n <= 0 for n in shape):
            return 0
        ends = [stride * (n - 1) for n, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)
        size = (high - low + 1) * x.itemsize
        if size > MOST_BYTES:
            return 0
        block = np.zeros(size, np.uint8)
        self.blocks.append(block)
        if tuple(shape) == x.shape:
            at = [stride * x.itemsize for stride in strides]
            np.ndarray(x.shape, x.dtype, block, -low * x.itemsize, at)[...] = x
        return block.ctypes.data - low * x.itemsize

    def packed(self, item: int, *shape: int) -> int:
        """Give the address of an output, rarely a wrong one."""
        size = math.prod(shape) * item
        if self.draw.chance(1) or size > MOST_BYTES:
            return int(self.draw.pick((0, 1, 3)))
        block = np.zeros(size, np.uint8)
        self.blocks.append(block)
        return int(block.ctypes.data)


def call_from_python(native: Any, seed: int) -> None:
    """Describe arrays, run forward, and mostly backward."""
    draw = Draw(seed)
    memory = Memory(draw)
    name = str(draw.pick(tuple(STORED)))
    qkv = {
        "q": (draw.B, draw.H, draw.L, draw.D),
        "k": (draw.B, draw.G, draw.S, draw.D),
        "v": (draw.B, draw.G, draw.S, draw.E),
    }
    given: dict[str, Any] = {n: draw.values(shape, STORED[name]) for n, shape in qkv.items()}
    given |= draw.options(name)
    rows = (*qkv, "key_bias", "bias")
    for n, x in given.items():
        if isinstance(x, np.ndarray):
            given[n] = memory.place(x, n in rows)
    given["dtype"] = draw.pick(("int8", "", "FLOAT32")) if draw.chance(2) else name
    if draw.chance(5):
        given[draw.pick(tuple(given))] = draw.pick(WRONG_KINDS)
    record = native.DotProblem(**given)

    (B, H, L, D), (_, G, S, _), (*_, E) = (given[n][1] for n in "qkv")
    item = 8 if given["dtype"] == "float64" else 4
    if B * H * max(L * max(D, E, 1), S) * item > MOST_BYTES or B * G * S * max(D, E, 1) * item > MOST_BYTES:
        return  # of steps of 0: the outputs would be too large
    if max(B, H, L, D, G, S, E) > MOST_BYTES:
        return  # beside an axis of 0
    addresses = [given[n][0] for n in "qkv"]
    out, row = memory.packed(item, B, H, L, E), lambda: memory.packed(item, B, H, L, 1)
    top, inverse = row(), row()
    looks, how = (
        draw.chance(40),
        (draw.pick((1, 2, 3, 0, -5, 10**6)), draw.pick(("auto", "pool", "openmp", "?"))),
    )
    forward = [*addresses, out, row(), top, inverse, *([row(), row(), row()] if looks else [0, 0, 0]), *how]
    if draw.chance(3):
        forward[draw.below(len(forward))] = draw.pick(WRONG_KINDS)
    record.forward(*forward)

    def gradient(percent: float, *shape: int) -> int:
        return memory.packed(item, *shape) if draw.chance(percent) else 0

    both = 100 if draw.chance(70) else 0
    wide = "float64" if item == 8 else "float32"
    bias = given["bias"]
    backward = [
        *(*addresses, out, top, inverse),
        memory.place(draw.values((B, H, L, E), wide), False),
        memory.place(draw.values((B, H, L, 1), wide), False) if draw.chance(50) else None,
        *(gradient(both, B, H, L, D), gradient(both, B, G, S, D), gradient(70, B, G, S, E)),
        gradient(90 if given["key_bias"] else 2, B, H, 1, S),
        gradient(90, *bias[1][:2], L, S) if bias and (bias[1][2] == L or draw.chance(5)) else 0,
        gradient(90 if given["slopes"] else 2, B, H, L, 1),
        *how,
    ]
    if draw.chance(3):
        backward[draw.below(len(backward))] = draw.pick(WRONG_KINDS)
    record.backward(*backward)


# XLA's binding: buffers and attributes -------------------------------------------------------------

INPUTS = ("q", "k", "v", "key_bias", "bias", "slopes", "align", "start", "stop", "bits", "seed")
SAVED = ("out", "top", "inverse", "dout", "dlse")
RESULTS = {
    "forward": ("out", "lse", "top", "inverse", "entropy", "max_weight", "jacobian_norm"),
    "backward": ("dq", "dk", "dv", "dkey_bias", "dbias", "dslopes"),
}
ORDERED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def call_from_xla(native: Any, seed: int) -> None:
    """Call a handler of the dot kernel, with and without axes of vmap."""
    draw = Draw(seed)
    name = str(draw.pick(("float16", "float32")))
    kind, order = draw.pick(tuple(RESULTS)), draw.pick(("BHLD", "BLHD"))
    B, H, G, L, S, D, E = draw.B, draw.H, draw.G, draw.L, draw.S, draw.D, draw.E
    options = draw.options(name)
    lead = draw.pick(((), (), (2,), (3, 2), (1,)))
    shapes: dict[str, tuple[int, ...]] = {"q": (B, H, L, D), "k": (B, G, S, D), "v": (B, G, S, E)}
    shapes |= {
        "out": (B, H, L, E),
        "dout": (B, H, L, E),
        "dq": shapes["q"],
        "dk": shapes["k"],
        "dv": shapes["v"],
    }
    shapes |= dict.fromkeys(("lse", "top", "inverse", "dlse", *RESULTS["forward"][4:]), (B, H, L))
    shapes |= {"dkey_bias": (B, H, 1, S), "dslopes": (B, H, L, 1)}
    shapes["dbias"] = (*(options["bias"].shape[:2] if options["bias"] is not None else (B, H)), L, S)

    def arranged(n: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1], shape[3]) if n in ORDERED and order == "BLHD" else shape

    operands, given = [], 0
    for place, n in enumerate((*INPUTS, *(SAVED if kind == "backward" else ()))):
        x = options.get(n)
        if n in shapes and not (n == "dlse" and draw.chance(50)):
            x = draw.values(arranged(n, shapes[n]), name if n in "qkv" else "float32")
        if x is None:
            continue
        axes = tuple(1 if draw.chance(20) else size for size in lead)
        if lead and draw.chance(3):
            axes = draw.pick(((5,) * len(lead), (0,) * len(lead), axes[1:], (*axes, 1)))
        x = np.broadcast_to(x, (*axes, *x.shape))
        if draw.chance(1):
            x = x.astype(draw.pick(("float32", "float16", "int32", "uint8")))
        if draw.chance(1):
            x = draw.pick((x[..., :-1], x[None], x[..., :1], x.reshape(-1), np.float32(1)))
        operands.append(jax.numpy.asarray(x))
        given |= 1 << place
    asks = {"dkey_bias": "key_bias", "dbias": "bias", "dslopes": "slopes"}
    results, asked = [], 0
    for place, n in enumerate(RESULTS[kind]):
        if n in asks and options[asks[n]] is None and not draw.chance(2):
            continue
        shape = (*lead, *arranged(n, shapes[n]))
        if draw.chance(1):
            shape = draw.pick((shape[:-1], (*shape, 1), (7, *shape), tuple(n + 1 for n in shape)))
        results.append(
            jax.ShapeDtypeStruct(shape, draw.pick(("float16", "int32")) if draw.chance(1) else "float32")
        )
        asked |= 1 << place
    if draw.chance(2) and operands:
        operands.pop(draw.below(len(operands)))
    if draw.chance(2):
        given = draw.odd(given)
    if draw.chance(2):
        asked = draw.odd(asked)
    if draw.chance(1):
        order = draw.pick(("", "BLHDX", "LBHD"))
    call = jax.ffi.ffi_call(f"fuzzed_dot_{kind}", results)
    numbers = {n: np.float64(options[n]) for n in ("scale", "softcap", "dropout")}
    for x in call(
        *operands,
        **numbers,
        draws=np.int64(options["draws"]),
        order=order,
        given=np.int64(np.clip(given, -(2**63), 2**63 - 1)),
        asked=np.int64(np.clip(asked, -(2**63), 2**63 - 1)),
    ):
        x.block_until_ready()


def softmax_from_xla(native: Any, seed: int) -> None:
    """Call the handler of the masked softmax."""
    draw = Draw(seed)
    B, H, L, S = draw.B, draw.H, draw.L, draw.S
    lead = draw.pick(((), (2,), (3, 2)))
    start, stop = draw.spans(draw.pick((1, 2)), draw.shared(B, H, L, 0)[:3])
    arrays = [draw.values((B, H, L, S), "float32"), start, stop]
    if draw.chance(50):
        arrays.append(draw.values(draw.shared(B, H, L, (S + 7) // 8), "uint8"))
    for i, x in enumerate(arrays):
        axes = tuple(1 if draw.chance(20) else size for size in lead)
        if lead and draw.chance(5):
            axes = draw.pick(((5,) * len(lead), (0,) * len(lead), axes[1:]))
        arrays[i] = np.broadcast_to(x, (*axes, *x.shape))
        if draw.chance(2):
            arrays[i] = draw.pick((arrays[i][..., :-1], arrays[i].reshape(-1), arrays[i].astype(np.float64)))
    shapes = [(*lead, B, H, L, S), (*lead, B, H, L)]
    if draw.chance(4):
        shapes[draw.below(2)] = draw.pick(((), (3,), (*lead, B, H, S, L)))
    results = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    for x in jax.ffi.ffi_call("fuzzed_softmax", results)(*map(jax.numpy.asarray, arrays)):
        x.block_until_ready()


def main(path: str, calls: int = 1500) -> None:
    """Make the calls, and count those that ran."""
    native = load(path)
    jax.ffi.register_ffi_target("fuzzed_softmax", native.softmax_handler(), platform="cpu")
    jax.ffi.register_ffi_target("fuzzed_dot_forward", native.dot_forward_handler(), platform="cpu")
    jax.ffi.register_ffi_target("fuzzed_dot_backward", native.dot_backward_handler(), platform="cpu")
    wrong = (TypeError, ValueError, jax.errors.JaxRuntimeError)
    kinds: list[tuple[Callable[[Any, int], None], int]] = [
        (call_from_python, calls),
        (call_from_xla, calls // 5),
        (softmax_from_xla, calls // 10),
    ]
    for call, count in kinds:
        ran = 0
        for seed in range(count):
            try:
                call(native, seed)
                ran += 1
            except wrong:
                pass
        print(f"{call.__name__}: {ran} of {count} calls ran", flush=True)
        assert count / 5 < ran < count * 9 / 10


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
