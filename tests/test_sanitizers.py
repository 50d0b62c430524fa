"""The CPU kernels and their planner under AddressSanitizer and UndefinedBehaviorSanitizer, and
under ThreadSanitizer: built without torch, driven by cpu_driver.cpp, which says what it checks.
"""

from __future__ import annotations

import itertools
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_plan
from reference import ACTIVATIONS, MASKS
from shapes import EDGE_CASES, Case

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [f"native/plan/{name}.cpp" for name in ("plan", "policy_cpu", "policy_cuda")]
SOURCES += ["native/plan/estimates_cuda.cpp"]
SOURCES += ["native/cpu/cpu.cpp", "native/cpu/kernels_baseline.cpp", "tests/cpu_driver.cpp"]
FLAGS = ["-std=c++20", "-O0", "-g1", "-fno-sanitize-recover=all", f"-I{ROOT}"]
DTYPES = ("float", "double", "half", "bfloat16")  # as native/plan/problem.h counts them

pytestmark = pytest.mark.any_torch
if not (ROOT / "native").exists():
    pytest.skip("the tests run without the source tree", allow_module_level=True)


def compile_with(sanitizers: str, directory: Path, *command: str) -> None:
    """The C++ compiler in a directory; skips where it does not have the sanitizers."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [*FLAGS, f"-fsanitize={sanitizers}"]
    if not (directory / "empty").exists():
        (directory / "empty.cpp").write_text("int main() {}\n")
        for trial in ([compiler, *flags, "empty.cpp", "-o", "empty"], ["./empty"]):
            done = subprocess.run(trial, cwd=directory, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                pytest.skip(f"-fsanitize={sanitizers} does not work here: {done.stderr.strip()}")
    done = subprocess.run(
        [compiler, *flags, *command], cwd=directory, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


def compiled(directory: Path, sanitizers: str) -> Path:
    """The driver with the sanitizers, beside its objects."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    sources = {source: [] for source in SOURCES} | setup["INSTRUCTION_SETS"]
    objects = {source: f"{Path(source).stem}.o" for source in sources}

    def run(source: str) -> None:
        options = (*sources[source], "-c", str(ROOT / source), "-o", objects[source])
        compile_with(sanitizers, directory, *options)

    run(SOURCES[0])  # alone, as it looks whether the sanitizers work
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, reversed(list(sources)[1:])))  # the longest first
    compile_with(sanitizers, directory, *objects.values(), "-o", "driver", "-pthread")
    return directory / "driver"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("address"), "address,undefined")


@pytest.fixture(scope="module")
def race_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("thread"), "thread")


def run(driver: Path, lines: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(driver), *arguments],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=600,
    )


def line(
    case: Case,
    backward: bool,
    dtype: str = "float",
    param_dtype: str | None = None,
    affine: tuple[bool, bool] = (True, True),
    mask: tuple[bool, bool, bool] = (True, True, True),
    activation: str = "identity",
    offset: int = 0,
    threads: int = 2,
) -> str:
    """A line of what the driver reads."""
    param = DTYPES.index(param_dtype or dtype)
    wide = activation != "identity"
    sizes = (case.N, case.C, case.HxW, case.G)
    fields = (backward, DTYPES.index(dtype), param, wide, *sizes, ACTIVATIONS.index(activation))
    return " ".join(str(int(field)) for field in (*fields, *affine, *mask, offset, threads))


# Small enough for an instrumented build, and one that takes every loop of the schedule.
CASES = [case for case in EDGE_CASES if case.numel <= 1 << 16 and not case.one_layout]
CASES += [Case("streamed", (1, 64, 400, 260), 32), Case("fold", (2, 3, 60, 61), 3)]
CASES += [Case("large_odd_rows", (1, 258, 160, 161), 2)]  # rows that cannot be streamed


def lines() -> list[str]:
    """Every case with every dtype; every mask, activation, offset and number of threads."""
    found: list[str] = []
    affines = [(True, True), (True, False), (False, True), (False, False)]
    options = itertools.cycle(itertools.product(ACTIVATIONS, affines, MASKS[1:]))
    for case in CASES:
        many = case.numel <= 1 << 16
        for dtype, _ in itertools.product(DTYPES if many else ["float"], range(3 if many else 1)):
            activation, affine, mask = next(options)
            half = dtype in ("half", "bfloat16")
            for backward in (False, True):
                number = len(found) // 2
                found.append(
                    line(
                        case,
                        backward,
                        dtype,
                        "float" if half and number % 2 else dtype,
                        affine,
                        mask,
                        activation,
                        offset=number % 5,
                        threads=1 + number % 3,
                    )
                )
    found += [line(case, True, activation="silu") for case in CASES if case.name == "streamed"]
    return found


def test_addresses_and_undefined_behaviour(driver):
    asked = lines()
    done = run(driver, asked)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(asked)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_planner(driver, device_type):
    """Plans and their explanations for both devices, also of shapes that are far too large."""
    (driver.parent / "planner.cpp").write_text(test_plan.DRIVER)
    objects = [f"{Path(source).stem}.o" for source in SOURCES if "/plan/" in source]
    compile_with("address,undefined", driver.parent, "planner.cpp", *objects, "-o", "planner")
    questions = [
        (case, backward, dtype, 16)
        for case in test_plan.ALL_CASES + test_plan.HUGE
        for backward in (False, True)
        for dtype in test_plan.SIZES
    ]
    answers = test_plan.ask(driver.parent / "planner", device_type, questions)
    assert len(answers) == len(questions)


def test_races(race_driver):
    """With more threads than there is work for some, each on its own part."""
    names = ("n_odd", "d10", "c30", "g1", "volume")
    asked = [
        line(case, backward, dtype, threads=threads, activation=activation)
        for case in CASES
        if case.name in names
        for activation in ("identity", "silu")
        for backward in (False, True)
        for dtype in ("float", "bfloat16")
        for threads in (2, 3, 7)
    ]
    done = run(race_driver, asked)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(asked)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_write_past_an_output_is_found(driver, case, backward):
    done = run(driver, [line(case, backward)], "short")
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr


def test_an_overflow_is_found(driver):
    """Sizes that binding refuses: their product does not fit 64 bits."""
    huge = Case("huge", (1 << 40, 1 << 40, 1), 1)
    done = run(driver, [line(huge, False)])
    assert done.returncode != 0
    assert "runtime error: signed integer overflow" in done.stderr
