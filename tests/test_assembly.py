"""What ptxas made of the CUDA kernels, where it once went wrong. Needs no GPU.

Looks at the extension, and where there is nvcc at some kernels compiled for architectures that it
may not be built for: ptxas does otherwise there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gn_override

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # after what is installed

OLDEST = "80"
NEWER = ("100", "120")
# Of native/launch: where ptxas went wrong, and one of each kind.
UNITS = ("resident_half", "resident_float", "two_pass_half", "two_pass_float", "registers_half")


def cuobjdump() -> str | None:
    """That of the toolkit, or the one that triton brings."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        ours = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(ours) if ours.exists() else None
    return found


def compiled(arch: str, folder: Path) -> list[Path]:
    """Machine code of UNITS for an architecture."""
    if not (ROOT / "native").exists():
        pytest.skip("the tests run without the source tree")
    nvcc = importlib.import_module("codegen.verify").find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    if f"compute_{arch}" not in subprocess.check_output([nvcc, "--list-gpu-arch"], text=True):
        pytest.skip(f"nvcc does not know compute_{arch}")
    command = [nvcc, "-O3", "-std=c++20", f"-arch=sm_{arch}", f"-I{ROOT}", "-cubin"]

    def compile_one(unit: str) -> Path:
        target = folder / f"{unit}.cubin"
        source = ROOT / "native" / "launch" / f"{unit}.cu"
        subprocess.run([*command, str(source), "-o", str(target)], check=True, timeout=900)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, UNITS))


@pytest.fixture(scope="module", params=["extension", *NEWER])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SASS of all kernels of the extension, or of some for another architecture."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump")
    is_extension = request.param == "extension"
    if is_extension:
        binaries = [Path(gn_override.__file__).parent / "_C.abi3.so"]
    else:
        binaries = compiled(request.param, tmp_path_factory.mktemp(request.param))
    dumps = [
        subprocess.run([tool, "-sass", binary], capture_output=True, text=True).stdout
        for binary in binaries
    ]
    text = "".join(dumps)
    if is_extension and "Function :" not in text:
        pytest.skip("the extension holds no machine code for CUDA")
    if is_extension and "LDGSTS" not in text:
        pytest.skip("no copies to shared memory below compute capability 8.0")
    assert all("Function :" in dump for dump in dumps), "cuobjdump cannot read what nvcc made"
    return text


def test_copies_have_whole_descriptors(assembly: str) -> None:
    """A descriptor is a pair of registers, so it starts at an even one.

    ptxas gave some predicated copies with a cache policy `desc[UR1]`, which is an illegal
    instruction when it runs: 13.0 some of 4 bytes for 9.0, 12.9 to 13.4 many for 10.0 and later.
    """
    copies = re.findall(r"LDGSTS\S* .*?desc\[UR(\d+)\]", assembly)
    assert copies, "no copy with a descriptor was found"
    assert all(int(register) % 2 == 0 for register in copies)


def test_nothing_is_read_ahead_of_the_wait(assembly: str) -> None:
    """From 9.0 on kernels may start early: they wait for the one before (ACQBULK), then read.

    Compilers may move loads of what they take for constant across it.
    """
    access = re.compile(r"\s(?:LD|LDG|LDGSTS|ST|STG|RED|ATOM\w*)[. ].*")
    waiting = 0
    for code in assembly.split("code for sm_")[1:]:
        if int(re.findall(r"\d+", code)[0]) < 90:
            continue
        for text in code.split("Function :")[1:]:
            name, instructions = text.split("\n", 1)
            early, wait, _ = instructions.partition("ACQBULK")
            assert not access.search(early), f"{name}: {access.search(early)[0]}"
            waiting += bool(wait)
    if not waiting:
        pytest.skip("no such kernels below compute capability 9.0")


def test_the_oldest_architecture_has_kernels(tmp_path: Path) -> None:
    assert all(binary.stat().st_size for binary in compiled(OLDEST, tmp_path))
