"""python -m gn_override doctor: what is wrong with an installation, and how to mend it.

Imported before the extension is loaded: it has to speak where that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gn_override import _library

_REBUILD = f"in the source tree of gn_override: {_library.REBUILD}"
_LEAST_CAPABILITY = (8, 0)
_TOOLKIT = Path("/usr/local/cuda")  # where setup.py looks last


@dataclass(frozen=True)
class Check:
    """What was looked at."""

    name: str
    ok: bool
    found: str
    mend: str = ""  # what to run or to do, where it is not ok


def take_over() -> None:
    """Ends the process with doctor's answer if it is `python -m gn_override doctor`.

    To be called where the extension cannot be loaded. While Python looks for the module of -m, and
    so imports this package, sys.argv begins with "-m".
    """
    if sys.argv[:1] != ["-m"] or "doctor" not in sys.argv[1:]:
        return
    # -m gn_override, -mgn_override, -Bm gn_override
    command = " ".join(sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1])
    if re.search(r"(^| )-[A-Za-z]*m ?gn_override$", command):
        from gn_override import __main__

        sys.exit(__main__.run())


def main(*, modules: Sequence[str] = (), as_json: bool = False) -> int:
    """Print every check, and return 0 if all are ok, 1 otherwise.

    Args:
        modules: imported before the dispatcher is looked at, as a program does that uses them
            beside this package; what they print goes to stderr.
        as_json: print JSON instead of text.
    """
    checks = list(examine(modules))
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        for check in checks:
            print(f"{'ok' if check.ok else 'WRONG':<6}{check.name:<12}{check.found}")
            if check.mend:
                print(f"{'':<6}{'to mend it':<12}{check.mend}")
    return int(not all(check.ok for check in checks))


def examine(modules: Sequence[str] = ()) -> Iterator[Check]:
    """The checks, in an order in which one that fails may explain those after it."""
    try:
        info = _library.build_info()
        _library.load()
    except ImportError as error:
        # The last sentence says how to mend it.
        reason, _, mend = str(error).rpartition(". ")
        yield Check("extension", False, reason, mend)
        return
    yield Check("extension", True, f"{_library.LIBRARY}, built for torch {info['torch']}")
    yield _cuda(info)
    yield from _gpus(info)
    yield _switch()
    yield from _dispatcher(modules)
    for device in info["backends"]:
        if device == "cpu" or torch.cuda.is_available():
            yield _call(device)


def _cuda(info: dict[str, Any]) -> Check:
    """Whether the build has the backend that the machine could use."""
    name = "CUDA"
    if "cuda" in info["backends"]:
        archs = " ".join(info["cuda_archs"])
        return Check(name, True, f"CUDA backend for {archs}, built with CUDA {info['torch_cuda']}")
    found = "gn_override was built without its CUDA backend"
    if not torch.cuda.is_available() and not _gpus_of_driver():
        return Check(name, True, f"{found}, and there is no GPU here")
    if torch.version.cuda is None:
        return Check(
            name,
            False,
            f"{found}, since torch {torch.__version__} has none; but nvidia-smi lists a GPU",
            f"install a torch with CUDA (see https://pytorch.org), then {_REBUILD}",
        )
    nvcc = _nvcc()
    major = torch.version.cuda.partition(".")[0]
    if nvcc is None:
        return Check(
            name,
            False,
            f"{found}, and there is no nvcc in CUDA_HOME, on PATH or in {_TOOLKIT}",
            f"install the toolkit of CUDA {major}, set CUDA_HOME to it, then {_REBUILD}",
        )
    return Check(
        name,
        False,
        f"{found}; nvcc is {nvcc}",
        f"if that is of CUDA {major}, {_REBUILD}",
    )


def _nvcc() -> str | None:
    """nvcc where setup.py looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(_TOOLKIT / "bin"))


def _gpus_of_driver() -> list[str]:
    """GPUs that nvidia-smi lists."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a GPU can run code that was compiled for these ("9.0", "9.0a", "8.0+PTX").

    Machine code runs on GPUs of the same major version from its own minor version on, and if it is
    specific ("a") on its own only; PTX on all later ones.
    """
    for name in architectures:
        plain = name.removesuffix("+PTX")
        built = tuple(int(part) for part in plain.rstrip("af").split("."))
        specific = plain.endswith(("a", "f"))
        if plain.endswith("a"):
            fits = capability == built
        else:
            fits = capability[0] == built[0] and capability[1] >= built[1]
        if fits or (name.endswith("+PTX") and not specific and capability >= built):
            return True
    return False


def _gpus(info: dict[str, Any]) -> Iterator[Check]:
    """Whether each visible GPU has kernels."""
    name = "GPU"
    if torch.version.cuda is None:
        return
    if not torch.cuda.is_available():
        listed = _gpus_of_driver()
        if listed:
            yield Check(
                name,
                False,
                f"nvidia-smi lists {len(listed)}, and torch sees none",
                "unset CUDA_VISIBLE_DEVICES; then python -c 'import torch; torch.cuda.init()' says "
                "why, an old driver for instance",
            )
        else:
            yield Check(name, True, "no GPU is visible; CPU tensors are served")
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        text = ".".join(map(str, capability))
        found = f"{torch.cuda.get_device_name(index)}, compute capability {text}"
        if capability < _LEAST_CAPABILITY:
            yield Check(name, True, f"{found}: below 8.0, PyTorch's own kernels run")
        elif "cuda" not in info["backends"]:
            yield Check(name, False, f"{found}: there is no CUDA backend for it", "see CUDA above")
        elif not runs_on(capability, info["cuda_archs"]):
            found += f", and the build is for {' '.join(info['cuda_archs'])}"
            archs = ";".join([*info["cuda_archs"], text])  # there may be GPUs of several kinds
            yield Check(
                name, False, found, f"export TORCH_CUDA_ARCH_LIST='{archs}', then {_REBUILD}"
            )
        else:
            yield Check(name, True, found)


def _switch() -> Check:
    """Whether the import switches on."""
    value = os.environ.get("GN_OVERRIDE", "")
    if value == "0":
        return Check("switch", False, "GN_OVERRIDE=0 is set, so it is off", "unset GN_OVERRIDE")
    if value not in ("", "1"):
        found = f"GN_OVERRIDE={value} is set, which leaves it on"
        return Check("switch", False, found, "set GN_OVERRIDE=0 to switch it off, or unset it")
    return Check("switch", True, "the import switches on")


def _dispatcher(modules: Sequence[str]) -> Iterator[Check]:
    """Whether another package took the operators."""
    from gn_override import _report

    for module in modules:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever a package or a script raises
            found = f"import {module}: {type(error).__name__}: {error}"
            yield Check("import", False, found, f"leave out --import {module}, or mend {module}")
    foreign = [o for o in _report.report().owners if o.package not in ("gn_override", "torch")]
    if not foreign:
        yield Check("dispatcher", True, "no other package has registered the operators")
    # The latest registration wins among those at one key, or at what stands for several.
    over_ours = {
        (owner.op, owner.where)
        for owner in foreign
        if any(_report.package_of(where) == "gn_override" for where in owner.below)
    }
    for owner in foreign:
        found = f"{owner.package} has taken {owner.op} on {owner.key}: {owner.where}"
        mend = f"do without {owner.package}, or keep it from registering {owner.op}"
        if (owner.op, owner.where) in over_ours:
            mend = f"import gn_override after {owner.package}"
        yield Check("dispatcher", False, found, mend)


def _call(device: str) -> Check:
    """Whether a small norm runs on our kernel, and is right."""
    import gn_override

    name = f"{device} call"
    rebuild = f"GN_OVERRIDE=0 does without it; to build it again, {_REBUILD}"

    def run() -> torch.Tensor:
        X = torch.arange(2 * 8 * 5 * 3, dtype=torch.float32, device=device).sin()
        return F.group_norm(X.view(2, 8, 5, 3).contiguous(memory_format=torch.channels_last), 4)

    def count() -> int:
        return sum(gn_override.report().calls.values())

    try:
        with gn_override.disabled():
            stock = run()
        before = count()
        with gn_override.enabled():
            ours = run()
        taken = count() > before
    except Exception as error:  # whatever a kernel raises, another package's too
        return Check(name, False, f"raises {type(error).__name__}: {error}".split("\n")[0], rebuild)
    if not taken:
        return Check(name, False, "group_norm ran, but not on this package's kernel", rebuild)
    if not torch.allclose(ours, stock, rtol=1e-5, atol=1e-6):
        return Check(name, False, "the result is not PyTorch's", rebuild)
    return Check(name, True, "group_norm ran on this package's kernel, with PyTorch's result")
