"""Run code in a new Python process, where packages can be made to look missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

_BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    missing, broken = {missing!r}, {broken!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        if name.partition(".")[0] in self.broken:
            raise OSError(self.broken[name.partition(".")[0]])

sys.meta_path.insert(0, Blocker())
"""


def run(
    code: str, *, missing: Iterable[str] = (), broken: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code``; importing a name in ``missing`` fails as if it were not installed, and one in
    ``broken`` with an OSError of the given text, as a missing shared library would."""
    blocker = _BLOCKER.format(missing=sorted(missing), broken=dict(broken or {}))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:attnspan", "-c", blocker + code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )


def output(code: str, **options: Iterable[str] | Mapping[str, str]) -> str:
    """Run ``code`` and give what it printed; fail with its traceback if it failed."""
    done = run(code, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
