"""Size of the machine code that the change for PyTorch adds, by compute capability.

    python tools/code_size.py --output size-cuda13.0

Compiles the CUDA files that are staged for PyTorch's main branch, against the headers of the torch
that runs, and adds up the sizes of their cubins, in bytes: not compressed, as they are in no
library. Needs nvcc and a torch with CUDA, no GPU; takes five minutes on two cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import progress
import render_readme
import results
import stage_upstream

from codegen import verify

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def new_files() -> dict[str, str]:
    """The texts of the files that the change brings, by their paths in PyTorch."""
    before, after = stage_upstream.change_of("main")
    return {path: text for path, text in after.items() if path not in before}


def sizes(files: dict[str, str], architecture: str) -> dict[str, int]:
    """Bytes of the cubin of each CUDA file, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"-arch={architecture}", "-O3"]
        cubins = verify.compile_units(files, Path(folder), flags, cubins=True)
        return {cubin.stem: cubin.stat().st_size for cubin in cubins}


def compiler() -> str:
    """nvcc's version: "13.0.88"."""
    nvcc = verify.find_nvcc()
    assert nvcc is not None, "sizes() has used it"
    command = [nvcc, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r" V([\d.]+)", said)[0]


def main(argv: Sequence[str]) -> int:
    arguments = results.Parser(__doc__).parse_args(argv)
    files, rows = new_files(), []
    with progress.Progress(len(ARCHITECTURES)) as shown:
        for architecture in ARCHITECTURES:
            shown.step(architecture)
            try:
                of_files = sizes(files, architecture)
            except verify.StagingError as error:
                raise SystemExit(f"code_size: {error}") from None
            rows.append({"name": architecture, "bytes": sum(of_files.values()), "files": of_files})
    content = results.machine("cpu") | {"nvcc": compiler(), "rows": rows}
    print(render_readme.size(content))
    if arguments.output:
        print(results.write(arguments.output, content, arguments.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
