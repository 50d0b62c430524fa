"""What every results file says of where it was measured, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What changes the kernels that are measured.
ENVIRONMENT = ("GN_OVERRIDE_WHOLE_CHIP",)


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """The commit that was measured, "-dirty" if the tree differs from it.

    A copy of the tree without its history takes the name from GN_OVERRIDE_COMMIT.
    """
    described = _output_of("git", "describe", "--always", "--abbrev=12", "--dirty")
    return os.environ.get("GN_OVERRIDE_COMMIT") or described or "unknown"


def command() -> str:
    """The command line, with what the environment says of launches, and without the machine's
    folders: those that files are written to are left out, and that of a checkout has a name."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(ROOT)
    words = [str(script.relative_to(ROOT)) if inside else sys.argv[0], *sys.argv[1:]]
    for option in ("--folder", "--plot", "--roofline", "--log"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    if "--pytorch" in words:
        words[words.index("--pytorch") + 1] = "CHECKOUT"
    environment = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    return shlex.join([*environment, "python", *words])


def merged(
    old: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
    key: str,
    order: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """The newest of the rows with the same key: those that `order` names, or all as they came."""
    rows = {row[key]: row for row in (*old, *new)}
    return [rows[name] for name in (rows if order is None else order) if name in rows]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine(device: str) -> dict[str, Any]:
    """Where and from what: the head of a results file. device is "cuda" or "cpu"."""
    described: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        described |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _output_of(*query),
            "cuda": torch.version.cuda,
        }
    else:
        described["threads"] = torch.get_num_threads()
    return described


def write(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write folder/name.json, one row a line, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content.get("rows", ()))
    text = json.dumps(head, indent=1)
    if rows:
        text = f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}'
    path.write_text(text + "\n")
    return path


def update(
    name: str,
    content: dict[str, Any],
    key: str,
    folder: Path = RESULTS,
    order: Iterable[str] | None = None,
) -> Path:
    """write(), but the file keeps those of its rows that `content` has not: see merged().

    So each row says by which command it was measured.
    """
    path = folder / f"{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row | {"command": content["command"]} for row in content["rows"]]
    return write(name, content | {"rows": merged(before, rows, key, order)}, folder)
