"""Fixtures of the whole suite: devices, threads, seeds, poisoned memory.

Tests import their helpers flat (`from shapes import ...`): this directory is no package, so pytest
puts it on sys.path, and `gn_override` comes from where it is installed, not from the checkout.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Their assertions say what they compared, as a test's do.
pytest.register_assert_rewrite("fusing", "reference")

# Files of many minutes, most of them spent by compilers: where processes share the tests, these
# begin first, so that none is left with one of them at the end.
LONGEST = ("emulator", "upstream_torch", "sanitizers", "compile", "assembly")

SEED = int(os.environ.get("GN_OVERRIDE_TEST_SEED", "0"))


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "cuda: runs on a GPU; skipped with the reason where there is none",
        "cuda_build: of fake CUDA tensors, for which the extension has to have its CUDA part",
        "any_torch: does not depend on the version of torch; .ci/run has it once",
        "large: needs tens of GiB of GPU memory; skipped where there is less",
    ):
        config.addinivalue_line("markers", line)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(2, os.cpu_count() or 1))
    torch.backends.cudnn.allow_tf32 = False  # networks are compared to what float32 can hold


def why_no_cuda_build() -> str | None:
    """Why there are no CUDA kernels here, or None."""
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    import gn_override  # noqa: F401  (loads the library that build_info asks)

    if "cuda" not in json.loads(torch.ops.gn_override.build_info())["backends"]:
        return "the extension is built without CUDA"
    return None


def why_no_cuda() -> str | None:
    """Why CUDA kernels cannot run here, or None."""
    return why_no_cuda_build() or (None if torch.cuda.is_available() else "no GPU is visible")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    for marker, why_not in (("cuda", why_no_cuda), ("cuda_build", why_no_cuda_build)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    return request.param


def _seed_of(item: pytest.Item) -> int:
    return (zlib.crc32(item.name.encode()) + SEED) % (1 << 32)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random numbers that depend on the test's name alone, so that any test repeats by itself."""
    torch.manual_seed(_seed_of(request.node))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(
            (
                "seed",
                f"torch.manual_seed({_seed_of(item)}); GN_OVERRIDE_TEST_SEED={SEED} "
                f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            )
        )


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    """Every test starts with the override on and counters at zero, and leaves all settings at their
    defaults."""
    loaded = "gn_override" in sys.modules and hasattr(torch.ops.gn_override, "set_enabled")
    if loaded:
        sys.modules["gn_override"].enable()
        torch.ops.gn_override.reset_counters()
    yield
    if loaded:
        sys.modules["gn_override"].enable()
        sys.modules["gn_override"].set_inductor(True)
        sys.modules["gn_override"].set_autocast("float32")


@pytest.fixture
def poison(request: pytest.FixtureRequest) -> Iterator[ctypes.c_bool]:
    """Fresh memory holds NaN or garbage during the test, so that unwritten outputs show.

    CPU: torch's allocator fills what it hands out with 0x7fedbeef, a NaN in float (its switch, a
    variable of libc10, is the fixture's value). GPU: the caching allocator is left with free blocks
    that hold NaN.
    """
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    junk_fill = ctypes.c_bool.in_dll(libc10, "FLAGS_caffe2_cpu_allocator_do_junk_fill")
    junk_fill.value = True
    if request.node.get_closest_marker("cuda"):
        poison_cuda_cache()
    yield junk_fill
    junk_fill.value = False
    if request.node.get_closest_marker("cuda"):
        torch.cuda.empty_cache()  # other processes may test on this GPU too


def poison_cuda_cache() -> None:
    """Leave NaN in the free memory of the caching allocator: its large and its small pool.

    What lives keeps its segments: the gaps between are filled exactly, and so is new memory.
    """
    torch.cuda.empty_cache()
    stream = torch.cuda.current_stream().cuda_stream
    small = 1 << 20  # larger blocks come from the large pool
    sizes = [1 << power for power in range(9, 21) for _ in range(64)]
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream:
            continue
        most = small if segment["segment_type"] == "small" else segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                whole, rest = divmod(block["size"], most)
                sizes += [most] * whole + [rest] * (rest > 0)
    free, _ = torch.cuda.mem_get_info()
    sizes.append(min(4 << 30, free // 4))
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sorted(sizes)]
    del blocks
