"""Python in a process of its own, for what holds only of a fresh one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *arguments: str | Path, cwd: Path, status: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this process's import path, without GN_OVERRIDE; it has to return `status`.

    What is in `cwd` comes first for -c and -m, so that is not the root, but to test the sources.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "GN_OVERRIDE"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done
