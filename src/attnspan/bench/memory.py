"""How much memory a forward and backward call takes besides its inputs, each in a fresh process.

The peak of a process only rises, so each line has a process of its own: ``python -m
attnspan.bench.memory FRAMEWORK LINE`` prints one as JSON. Extra is the peak less what the same process
held before, when its inputs stood there and one small call had been made; the output and the gradients
count as extra.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attnspan.bench.cases import WINDOW, Case
from attnspan.errors import AttnspanError

__all__ = ["LINES", "fresh"]

LINES: dict[str, tuple[tuple[int, ...], str]] = {
    "dense": ((1, 8, 16_384, 64), "none"),
    "causal": ((1, 8, 16_384, 64), "causal"),
    f"window of {WINDOW}, a million tokens": ((1, 1, 1_000_000, 64), "window"),
}


def fresh(framework: str, line: str) -> dict[str, Any]:
    """Measure one line in a process of its own.

    Parameters
    ----------
    framework : str
        "torch" or "jax".
    line : str
        One of `LINES`.

    Raises
    ------
    AttnspanError
        If the process fails; the message has its last words.
    """
    command = [sys.executable, "-m", "attnspan.bench.memory", framework, line]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise AttnspanError(f"--memory: {framework}, {line}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(framework: str, line: str) -> dict[str, Any]:
    """Measure one line here; the process must be new."""
    from attnspan.bench.sides import ours_alone

    shape, mask = LINES[line]
    named, step = ours_alone(Case(line, framework, shape, mask=mask))
    ours_alone(Case(line, framework, (1, 1, 16, shape[-1]), mask=mask))[1]()
    before, start = _memory("VmRSS"), time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return {
        "case": line, "shape": shape, "framework": framework, "implementation": named,
        "seconds": seconds, "extra_bytes": _memory("VmHWM") - before,
    }  # fmt: skip


def _memory(field: str) -> int:
    """Give the memory of this process in bytes: now ("VmRSS"), or the most it has had ("VmHWM")."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of Linux starts at the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    # elsewhere the peak stands for both: what is freed before the call is missing from the extra then
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
