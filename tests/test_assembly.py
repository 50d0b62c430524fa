"""What ptxas made of the CUDA kernels, where it once went wrong. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import gn_override


def cuobjdump() -> str | None:
    """That of the toolkit, or the one that triton brings."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        ours = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(ours) if ours.exists() else None
    return found


@pytest.fixture(scope="module")
def assembly() -> str:
    """SASS of all kernels of the extension."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump")
    library = Path(gn_override.__file__).parent / "_C.abi3.so"
    done = subprocess.run([tool, "-sass", library], capture_output=True, text=True)
    if "Function :" not in done.stdout:
        pytest.skip("the extension holds no machine code for CUDA")
    if "LDGSTS" not in done.stdout:
        pytest.skip("no copies to shared memory below compute capability 8.0")
    return done.stdout


def test_copies_have_whole_descriptors(assembly: str) -> None:
    """A descriptor is a pair of registers, so it starts at an even one.

    ptxas 13.0 gave some predicated copies of 4 bytes with a cache policy `desc[UR1]`, which is an
    illegal instruction when it runs.
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
    for code in assembly.split("arch = sm_")[1:]:
        if int(re.match(r"\d+", code)[0]) < 90:
            continue
        for text in code.split("Function :")[1:]:
            name, instructions = text.split("\n", 1)
            early, wait, _ = instructions.partition("ACQBULK")
            assert not access.search(early), f"{name}: {access.search(early)[0]}"
            waiting += bool(wait)
    if not waiting:
        pytest.skip("no such kernels below compute capability 9.0")
