"""``attnspan doctor``: what is installed, what works, and how to get the rest.

It measures and never repairs. Every verdict comes from trying: a package is imported, a front end
computes one small attention. What is needed, and in which range, is read from the installed
package's own metadata, so pyproject.toml is the one place that says it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from attnspan.errors import AttnspanError

__all__ = ["HELP", "configure", "run"]

HELP = "say what is installed, what works here, and how to get the rest"

# Each front end: its extra, the packages it cannot do without, and its own modules.
FRONT_ENDS = {
    "numpy": (None, ("numpy",), ()),
    "torch": ("torch", ("torch", "array-api-compat"), ("attnspan.torch",)),
    "jax": ("jax", ("jax", "jaxlib", "flax"), ("attnspan.jax",)),
}
# Every package that is reported on, and the extra that brings it.
PACKAGES = {
    "numpy": None,
    "torch": "torch",
    "array-api-compat": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "flax": "jax",
    "matplotlib": "plot",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report. The status is 0 whatever it finds: finding is the job."""
    found = report()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0


def report() -> dict[str, Any]:
    """Look at everything once.

    Returns
    -------
    dict
        ``attnspan``, ``python``, ``machine``, ``packages``, ``front_ends``, ``implementations``,
        ``native`` (the compiled core) and ``install`` (commands that bring what is missing), made of
        plain JSON values.
    """
    ranges = _stated_ranges()
    packages = {name: _package(name, extra, ranges.get(name)) for name, extra in PACKAGES.items()}
    front_ends = {name: _front_end(name, packages) for name in FRONT_ENDS}
    fixes = [entry["fix"] for entry in packages.values() if entry["fix"]]
    return {
        "attnspan": {"version": _own_version(), "location": _location()},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": _machine(),
        "packages": packages,
        "front_ends": front_ends,
        "implementations": _implementations(front_ends),
        "native": _native(front_ends),
        "install": list(dict.fromkeys(fixes)),
    }


# --- packages ---------------------------------------------------------------------------------


def _package(name: str, extra: str | None, needed: str | None) -> dict[str, Any]:
    """Import one package and compare its version with the stated range."""
    entry: dict[str, Any] = {
        "version": None, "needed": needed, "extra": extra, "ok": False, "cause": None, "fix": None,
    }  # fmt: skip
    module = name.replace("-", "_")
    bring = f'pip install "attnspan[{extra}]"' if extra else f'pip install "{name}{needed or ""}"'
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return entry | {"cause": "not installed", "fix": bring}
        return entry | {"version": _version(name), "cause": _failed(error), "fix": _reinstall(name)}
    except Exception as error:  # a broken shared library raises OSError, a wrong CPU RuntimeError
        return entry | {"version": _version(name), "cause": _failed(error), "fix": _reinstall(name)}
    version = _version(name) or getattr(imported, "__version__", None)
    entry["version"] = version
    if version and needed and not _within(version, needed):
        fix = f'pip install "{name}{needed}"'
        return entry | {"cause": f"{version} is outside the range {needed}", "fix": fix}
    return entry | {"ok": True}


def _failed(error: Exception) -> str:
    return f"failed to import: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _reinstall(name: str) -> str:
    return f"pip install --force-reinstall --no-deps {name}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stated_ranges() -> dict[str, str]:
    """Give the range of each package as the installed metadata states it: ``{"torch": ">=2.6,<2.15"}``."""
    try:
        lines = importlib.metadata.requires("attnspan") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return {}
    ranges = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?([^;()\[]*)", line)
        if match and match[2].strip():
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            ranges[name] = ",".join(sorted(match[2].replace(" ", "").split(","), reverse=True))
    return ranges


def _within(version: str, needed: str) -> bool:
    """Tell whether the release numbers of a version lie in a range of ``>=``, ``>``, ``<`` and ``<=``.

    >>> _within("2.13.0+cpu", ">=2.6,<2.15"), _within("2.15.0a0", ">=2.6,<2.15")
    (True, False)
    """
    holds: dict[str, Callable[[list[int], list[int]], bool]] = {
        ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b, "<": lambda a, b: a < b,
    }  # fmt: skip
    clauses = re.findall(r"(>=|<=|>|<)\s*([0-9.]+)", needed)
    return all(holds[sign](_release(version), _release(bound)) for sign, bound in clauses)


def _release(version: str) -> list[int]:
    """Read the leading release numbers, without trailing zeros: ``2.13.0+cpu`` is ``[2, 13]``."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(n) for n in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


# --- front ends -------------------------------------------------------------------------------


def _front_end(name: str, packages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tell whether one framework's arrays and modules work, and the first cause if they don't."""
    _, needs, modules = FRONT_ENDS[name]
    for need in needs:
        if not packages[need]["ok"]:
            cause, fix = f"{need}: {packages[need]['cause']}", packages[need]["fix"]
            return {"works": False, "cause": cause, "fix": fix, "devices": [], "threads": None}
    try:
        for module in modules:
            importlib.import_module(module)
        _try_attention(name)
        devices, threads = _devices(name)
    except Exception as error:
        return {"works": False, "cause": _one_line(error), "fix": None, "devices": [], "threads": None}
    return {"works": True, "cause": None, "fix": None, "devices": devices, "threads": threads}


def _small(name: str) -> tuple[Any, Any]:
    """Make a query ``(B, L, D)`` and two keys ``(B, S, D)``, which serve as values too."""
    make = importlib.import_module({"jax": "jax.numpy"}.get(name, name)).asarray
    return make([[[1.0, 2.0]]]), make([[[1.0, 0.0], [0.0, 1.0]]])


def _try_attention(name: str) -> None:
    """Compute one small attention with a known answer: the second key is masked."""
    import attnspan
    from attnspan.masks import ValidLens

    q, kv = _small(name)
    got = attnspan.attention(q, kv, kv, mask=ValidLens(1)).tolist()
    if got != [[[1.0, 0.0]]]:
        raise ArithmeticError(f"one visible key with value [1, 0] gave {got}")


def _devices(name: str) -> tuple[list[str], int | None]:
    """List the devices that a framework sees, and its threads where it says them."""
    if name == "torch":
        import torch

        gpus = [
            f"cuda:{i} ({torch.cuda.get_device_name(i)})"
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ]
        mps = ["mps"] if torch.backends.mps.is_available() else []
        return ["cpu", *gpus, *mps], torch.get_num_threads()
    if name == "jax":
        import jax

        return [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()], None
    return ["cpu"], None


def _implementations(front_ends: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask each implementation whether it takes the plainest request of each framework, and why not."""
    import attnspan
    from attnspan.implementations import IMPLEMENTATIONS

    refused = {}
    for front_end, entry in front_ends.items():
        if entry["works"]:
            q, kv = _small(front_end)
            refused[front_end] = dict(attnspan.plan(q, kv, kv).refused)
    found = []
    for name in (one.name for one in IMPLEMENTATIONS):
        serves = [front_end for front_end, reasons in refused.items() if name not in reasons]
        reasons = [f"{front_end}: {'; '.join(no[name])}" for front_end, no in refused.items() if name in no]
        broken = [
            entry["cause"] for front_end, entry in front_ends.items() if front_end not in refused
        ]  # "torch: not installed"
        cause = None if serves else "; ".join([*reasons, *broken])
        found.append({"name": name, "available": bool(serves), "serves": serves, "cause": cause})
    return found


# --- the native core ----------------------------------------------------------------------------


def _native(front_ends: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tell whether the compiled core works, on what, and if not why, and how to see the compiler's words."""
    from attnspan import native

    entry: dict[str, Any] = {
        "works": False, "serves": [], "isa": None, "isas": [], "kernel_isa": None, "openmp": None,
        "cause": None, "compiler": _compiler(), "fix": None,
    }  # fmt: skip
    try:
        module = native.load()
        for name in (name for name, front_end in front_ends.items() if front_end["works"]):
            _try_native(name)
            entry["serves"].append(name)
    except Exception as error:
        cause = str(error) if isinstance(error, AttnspanError) else _one_line(error)
        if isinstance(error.__cause__, ModuleNotFoundError):
            cause = "it did not compile when attnspan was installed"
        rebuild = isinstance(error, ImportError)
        return entry | {"cause": cause, "fix": _rebuild() if rebuild else None}
    said = {name: getattr(module, name)() for name in ("isa", "isas", "kernel_isa")}
    return entry | said | {"works": True, "openmp": module.openmp_loaded()}


def _try_native(name: str) -> None:
    """Compute one small softmax with a known answer: the second key is masked."""
    from attnspan import native
    from attnspan.masks import ValidLens

    scores = _small(name)[1][None]
    weights, _ = native.masked_softmax(scores, ValidLens(1).bound(2, 2, like=scores))
    if weights.tolist() != [[[[1.0, 0.0], [1.0, 0.0]]]]:
        raise ArithmeticError(f"one visible key gave the weights {weights.tolist()}")


def _compiler() -> str | None:
    """Find the C++ compiler that an install would find now."""
    named = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([named] if named else ["c++", "g++", "clang++"]))
    return next((path for path in found if path), None)


def _rebuild() -> str:
    """Write the command that installs attnspan again, from where it came, and fails with the cause."""
    origin = ["attnspan"]
    try:
        source = json.loads(importlib.metadata.distribution("attnspan").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        source = {}
    if source.get("url", "").startswith("file:"):
        path = urllib.request.url2pathname(urllib.parse.urlsplit(source["url"]).path)
        origin = [*(["-e"] if source.get("dir_info", {}).get("editable") else []), path]
    command = ["pip", "install", "-v", "--no-deps", "--no-cache-dir", "--force-reinstall", *origin]
    return f"ATTNSPAN_NATIVE=require {shlex.join(command)}"


# --- the rest ---------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _own_version() -> str:
    return _version("attnspan") or "not installed (run from its source)"


def _location() -> str:
    import attnspan

    return os.path.dirname(attnspan.__file__)


# --- text -------------------------------------------------------------------------------------


def _text(found: dict[str, Any]) -> str:
    machine = found["machine"]
    threads = machine["OMP_NUM_THREADS"]
    lines = [
        f"attnspan  {found['attnspan']['version']}  {found['attnspan']['location']}",
        f"Python    {found['python']['version']}  {found['python']['executable']}",
        f"machine   {machine['system']}, {machine['usable_cores']} of {machine['cores']} cores usable"
        + (f", OMP_NUM_THREADS={threads}" if threads else ""),
        "",
        "packages",
    ]
    for name, entry in found["packages"].items():
        state = "ok" if entry["ok"] else entry["cause"]
        lines.append(f"  {name:17} {entry['version'] or '-':14} {entry['needed'] or '':14} {state}".rstrip())
    lines += ["", "front ends"]
    for name, entry in found["front_ends"].items():
        if entry["works"]:
            count = f"; {entry['threads']} threads" if entry["threads"] else ""
            lines.append(f"  {name:17} works; {', '.join(entry['devices'])}{count}")
        else:
            lines.append(f"  {name:17} does not work: {entry['cause']}")
    lines += ["", "implementations"]
    for entry in found["implementations"]:
        serves = ", ".join(entry["serves"])
        state = f"for {serves}" if entry["available"] else f"not available: {entry['cause']}"
        lines.append(f"  {entry['name']:17} {state}")
    lines += ["", "native core", *_native_text(found["native"])]
    if found["install"]:
        lines += ["", "to get the rest", *(f"  {command}" for command in found["install"])]
    return "\n".join(lines)


def _native_text(native: dict[str, Any]) -> list[str]:
    if native["works"]:
        isa = f"instruction set {native['isa']} (of {', '.join(native['isas'])})"
        openmp = "; on PyTorch's OpenMP threads" if native["openmp"] else ""
        serves = ", ".join(native["serves"])
        return [f"  works for {serves}; {isa}, with kernels for {native['kernel_isa']}{openmp}"]
    lines = [f"  not available: {native['cause']}"]
    if native["fix"]:
        lines.append(f"  C++ compiler found now: {native['compiler'] or 'none (CXX, c++, g++, clang++)'}")
        lines.append(f"  to compile it, or see why it fails: {native['fix']}")
    return lines
