"""The arrows between the layers never point back, and nothing of this machine is in the tree.

    binding -> launch -> kernels -> plan
    binding -> cpu -> plan

binding alone knows torch, launch and kernels know CUDA, plan and cpu are plain host C++.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
# What each layer may include of the others.
LAYERS = {
    "binding": {"binding", "launch", "cpu", "plan"},
    "launch": {"launch", "kernels", "plan"},
    "cpu": {"cpu", "plan"},
    "kernels": {"kernels", "plan"},
    "plan": {"plan"},
}
SOURCES = sorted(p for p in NATIVE.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})
PYTHON = sorted((ROOT / "gn_override").glob("*.py"))
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|torchgen)/")
CUDA = re.compile(r"^(cuda|cub/|cooperative_groups|nv/|thrust/|cutlass/|cute/|curand|mma\.h)")

if not SOURCES:
    pytest.skip("the tests run without the source tree", allow_module_level=True)


def includes(text: str) -> list[tuple[str, str]]:
    return INCLUDE.findall(text)


def violations(layer: str, text: str) -> list[str]:
    """What a file of a layer includes and must not."""
    wrong = []
    for quote, path in includes(text):
        if path.startswith("native/"):
            if path.split("/")[1] not in LAYERS[layer]:
                wrong.append(f"{path}: {layer} may not include this layer")
        elif quote == '"':
            wrong.append(f"{path}: includes of our own are rooted at the repository")
        elif TORCH.match(path) and layer != "binding":
            wrong.append(f"{path}: only binding may include torch")
        elif CUDA.match(path) and layer in ("plan", "cpu"):
            wrong.append(f"{path}: {layer} is plain C++")
    return wrong


def test_layers_are_known():
    assert {p.name for p in NATIVE.iterdir() if p.is_dir()} == set(LAYERS)
    assert {p.relative_to(NATIVE).parts[0] for p in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(NATIVE)))
def test_includes(path):
    layer = path.relative_to(NATIVE).parts[0]
    assert not violations(layer, path.read_text())


@pytest.mark.parametrize(
    "layer, line",
    [
        ("plan", "#include <ATen/ATen.h>"),
        ("plan", "#include <cuda_runtime.h>"),
        ("plan", '#include "native/kernels/two_pass.cuh"'),
        ("kernels", "#  include <c10/util/Half.h>"),
        ("kernels", '#include "native/launch/launch.h"'),
        ("cpu", "#include <torch/library.h>"),
        ("cpu", '#include "native/binding/state.h"'),
        ("launch", '#include "native/binding/classify.h"'),
        ("launch", '#include "native/cpu/cpu.h"'),
        ("plan", '#include "plan.h"'),
    ],
)
def test_a_wrong_arrow_is_found(layer, line):
    assert violations(layer, f"// comment\n{line}\n")


def test_planner_reads_no_environment():
    """Plans depend on the problem and the device alone."""
    for path in SOURCES:
        if path.relative_to(NATIVE).parts[0] in ("plan", "kernels", "launch", "cpu"):
            assert "getenv" not in path.read_text(), path


def test_no_floating_point_atomics():
    """Results repeat bit for bit: sums have one order."""
    for path in SOURCES:
        if path.relative_to(NATIVE).parts[0] in ("kernels", "launch"):
            assert not re.search(r"\b(atomicAdd|red\.global\.add\.f|red\.add\.f)", path.read_text())


# What a function may import where it is there: with CUDA builds of torch, and the extra `plot`.
OPTIONAL = {"_bench.py": "triton", "_picture.py": "matplotlib"}


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.name)
def test_package_imports_torch_and_the_standard_library_only(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names = [node.module or ""]
        else:
            continue
        allowed = {*sys.stdlib_module_names, "torch", "gn_override"}
        if node not in tree.body:
            allowed.add(OPTIONAL.get(path.name, ""))
        for name in names:
            assert name.split(".")[0] in allowed, f"{path.name}:{node.lineno} imports {name}"


TEXT = {".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".in"}
TEXT |= {".json", ".patch", ".sh", ""}
# Home directories and work folders of whoever built or measured this.
MACHINE = re.compile(r"(?<![\w.])/(?:root|home|work|Users|mnt|scratch)/[\w.]+")


def tracked_files() -> list[Path]:
    """Files that git tracks or would; all files of an unpacked source archive."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        timeout=300,
    )
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    skipped = {"build", "dist", "__pycache__"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.parts)]


def test_no_machine_specific_paths():
    found = []
    for path in tracked_files():
        if path.suffix in TEXT and path != Path(__file__).resolve():
            for match in MACHINE.finditer(path.read_text(errors="replace")):
                found.append(f"{path.relative_to(ROOT)}: {match.group()}")
    assert not found


@pytest.mark.parametrize("folder", ["root", "home", "mnt"])
def test_a_machine_specific_path_is_found(folder):
    assert MACHINE.search(f'open("/{folder}/x")')


def test_no_build_products_are_tracked():
    for path in tracked_files():
        assert path.suffix not in {".so", ".o", ".pyc", ".a"}, path
