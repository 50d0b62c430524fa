"""The CUDA kernels without a GPU: every scheme, on a CPU that takes their threads in random order.

tests/emulator stands in for what the kernels ask of a GPU; kernels, launchers and planner are
those of native/. What a missing barrier, a copy that is not waited for or a store beyond shared
memory would do on a GPU some day shows here on some seed. Reciprocals and exponentials round
otherwise than on a GPU, and so do products that it adds without rounding them first.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ACTIVATIONS,
    ALL,
    MASKS,
    Inputs,
    Mask,
    Results,
    assert_parity,
    make_inputs,
)
from shapes import Case
from test_activation import assert_parity as assert_fused_parity
from test_activation import assert_parity_of_sum, away_from_kink, make_added
from test_build import load_setup
from test_schemes import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
KERNELS = sorted((ROOT / "native" / "launch").glob("*.cu"))

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # DType of problem.h
SCHEMES = ("aten", "registers", "resident", "cooperative", "two_pass")  # Scheme
CODES = ("9.0", "8.0", "9.0, small clusters")  # emulator::Code

# Few elements: a thread that waits costs more than its sums.
CASES = (
    Case("d10", (5, 40, 7, 5), 4),
    Case("vectors_of_two", (3, 6, 9, 31), 3),
    Case("odd", (2, 9, 7, 5), 3),
    Case("odd_pixels", (1, 9, 31, 29), 3),  # that threads of the second of two passes walk on to
    Case("many_samples", (19, 6, 3, 2), 3),  # that the second of two passes takes one by one
    Case("many_tiles", (2, 1040, 3, 2), 26),
    Case("one_group", (3, 96, 5, 9), 1),
    Case("group_each", (3, 96, 5, 9), 96),
    Case("pixels", (2, 16, 61, 53), 2),
    Case("samples", (17, 16, 5, 3), 2),  # more than blocks of a cluster
    Case("few_pixels", (2, 512, 4, 3), 16),  # some threads have none
)
WHOLE_VECTORS = Case("whole_vectors", (3, 80, 7, 5), 2)
PLANE = Case("plane", (1, 30, 37, 41), 1)  # parts of two sizes
LARGE = Case("larger_than_chip", (3, 48, 151, 157), 8)

MIXED = {
    "float": (torch.float32, None),
    "double": (torch.float64, None),
    "half": (torch.float16, None),
    "half-float": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, None),
    "half to float": (torch.float16, torch.float32, torch.float32),
    "bfloat16 to float": (torch.bfloat16, torch.float32, torch.float32),
}


def fields(names: str, kind: type) -> Iterable[tuple[str, type]]:
    return ((name, kind) for name in names.split())


class Call(ctypes.Structure):
    """Call of tests/emulator/calls.cpp."""

    _fields_ = (
        *fields("backward dtype param_dtype wide_statistics wide_output", ctypes.c_int64),
        *fields("N C HxW G activation", ctypes.c_int64),
        *fields("alignment scheme columns share threads code", ctypes.c_int64),
        *fields("l2_bytes multiprocessors seed", ctypes.c_int64),
        *fields("eps", ctypes.c_double),
        *fields("dY X added gamma beta Y mean rstd dX dgamma dbeta", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Pin:
    """What is not left to the policy."""

    scheme: str = "aten"
    share: int = 0  # blocks of a cluster, or samples of a wave; 0 leaves it open
    threads: int = 0

    def __str__(self) -> str:
        return f"{self.scheme}-{self.share}-{self.threads}"


PINS = (
    *(Pin("registers", threads=most) for most in (64, 160, 640)),
    *(Pin("resident", blocks) for blocks in (1, 3, 8)),
    *(Pin("cooperative", samples) for samples in (0, 1, 2)),
    Pin("cooperative", threads=96),
    Pin("two_pass"),
)


def small_case(pin: Pin) -> Case:
    """One that the scheme takes, of an odd number of pixels."""
    return WHOLE_VECTORS if pin.scheme == "registers" else CASES[0]


SCHEMES_OPEN = (Pin("registers"), Pin("resident"), Pin("cooperative"), Pin("two_pass"))


class CannotPlanError(Exception):
    """The policy has no plan of the scheme and geometry."""


class Emulator:
    """The kernels, compiled for the CPU."""

    def __init__(self, library: Path):
        self._run = ctypes.CDLL(str(library)).run
        self._run.argtypes = [ctypes.POINTER(Call)]
        self._run.restype = ctypes.c_char_p

    def _call(self, call: Call, pin: Pin) -> str:
        text = self._run(ctypes.byref(call)).decode()
        scheme = text.split(" ", 1)[0]
        if scheme == "error:":
            raise RuntimeError(text)
        if scheme != pin.scheme != "aten":
            raise CannotPlanError(text)
        return text

    def __call__(
        self,
        inputs: Inputs,
        pin: Pin = Pin(),
        *,
        mask: Mask = ALL,
        activation: str = "identity",
        added: Tensor | None = None,
        code: str = "9.0",
        l2_bytes: int = 0,
        multiprocessors: int = 0,
        seed: int = 0,
    ) -> tuple[Results, tuple[str, str]]:
        """Forward and backward of channels-last inputs; results and both plans.

        added: [N, C], which forward alone adds to X.
        """
        i = inputs
        affine = [t for t in (i.gamma, i.beta) if t is not None]
        param_dtype = affine[0].dtype if affine else i.dY.dtype
        fused = activation != "identity"
        wide = torch.promote_types(i.X.dtype, torch.float32)

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.full(size, float("nan"), dtype=dtype)

        N, C, HxW, G = i.sizes
        results = Results(
            torch.full_like(i.dY, float("nan")),
            *(empty(N, G, dtype=wide if fused else param_dtype) for _ in range(2)),
            torch.full_like(i.X, float("nan")) if mask[0] else None,
            *(empty(C, dtype=param_dtype) if m else None for m in mask[1:]),
        )
        affine_and_added = {"gamma": i.gamma, "beta": i.beta, "added": added}
        operands = {"dY": i.dY, "X": i.X, **affine_and_added, **vars(results)}
        pointers = {k: None if t is None else t.data_ptr() for k, t in operands.items()}
        alignment = 16 // i.X.element_size()  # in elements
        while any(
            operands[k].data_ptr() % (alignment * operands[k].element_size())
            for k in ("dY", "X", "Y", "dX")
            if pointers[k]
        ):
            alignment //= 2
        plans = []
        for backward in (False, True):
            call = Call(
                backward=backward,
                dtype=DTYPES.index(i.X.dtype),
                param_dtype=DTYPES.index(param_dtype),
                wide_statistics=fused,
                wide_output=i.dY.dtype != i.X.dtype,
                N=N,
                C=C,
                HxW=HxW,
                G=G,
                activation=ACTIVATIONS.index(activation),
                alignment=alignment * i.X.element_size(),
                scheme=SCHEMES.index(pin.scheme),
                share=pin.share,
                threads=pin.threads,
                code=CODES.index(code),
                l2_bytes=l2_bytes,
                multiprocessors=multiprocessors,
                seed=seed,
                eps=i.eps,
                **pointers,
            )
            plans.append(self._call(call, pin))
        return results, (plans[0], plans[1])


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def include_flags() -> list[str] | None:
    """Of the emulator, the kernels and CUDA's headers; none where these are missing."""
    toolkit = load_setup(ROOT).find_toolkit(os.environ)
    if isinstance(toolkit, str):
        return None
    return [f"-I{EMULATOR}", f"-I{ROOT}", *(f"-isystem{path}" for path in toolkit.includes)]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Path], str], Path]:
    """Compiles sources, as C++ of the emulator, into a shared library."""
    flags = include_flags()
    if compiler() is None or flags is None:
        pytest.skip("needs a C++ compiler and CUDA's headers")

    def link(sources: list[Path], name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        common = [compiler(), "-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", *flags]
        sanitize = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
        # A page fault shows the one, and the emulator what is beyond shared memory; they take as
        # long to compile as all others.
        sanitize.append("-fno-sanitize=null,object-size,pointer-overflow")
        common += sanitize
        # Of g++ alone: pragmas that only nvcc knows, and what nvcc compares without a word.
        common += ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
        common += ["-Wno-class-memaccess"]

        def compile_one(source: Path) -> Path:
            target = folder / f"{source.stem}.o"
            command = [*common, "-include", "cuda.h", "-x", "c++", "-c", source, "-o", target]
            subprocess.run(command, check=True, timeout=900)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        library = folder / "library.so"
        command = [compiler(), "-shared", *sanitize, *objects, "-o", library]
        subprocess.run(command, check=True, timeout=900)
        return library

    return link


@pytest.fixture(scope="session")
def emulator(build: Callable[[list[Path], str], Path]) -> Emulator:
    plan = sorted((ROOT / "native" / "plan").glob("*.cpp"))
    return Emulator(build([*KERNELS, *plan, *sorted(EMULATOR.glob("*.cpp"))], "emulator"))


def numbers(plan: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", plan)}


def run_twice(emulator: Emulator, inputs: Inputs, pin: Pin, **options) -> Results:
    """The results, which do not depend on the order in which threads run."""
    first, second = torch.randint(1 << 62, (2,)).tolist()
    try:
        results, _ = emulator(inputs, pin, seed=first, **options)
    except CannotPlanError as plan:
        pytest.skip(f"no {pin.scheme} plan of such a geometry: {plan}")
    again, _ = emulator(inputs, pin, seed=second, **options)
    assert_same_bits(again, results)
    return results


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_scheme(emulator, dtypes, case, pin):
    inputs = make_inputs(case, "cpu", *dtypes)
    assert_parity(run_twice(emulator, inputs, pin), inputs)


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_pinned_threads(emulator, dtypes):
    """Numbers that the policy has for no type, and for some."""
    inputs = make_inputs(Case("pixels", (2, 16, 31, 23), 2), "cpu", *dtypes)
    for threads in (96, 224):
        results, plans = emulator(inputs, Pin("resident", 1, threads))
        assert [numbers(plan)["threads"] for plan in plans] == [threads] * 2
        assert_parity(results, inputs)


def test_clusters_of_one_sample_and_of_all(emulator):
    """Of the geometries of test_scheme, so that it has both backward kernels."""
    kinds = set()
    for case in CASES:
        inputs = make_inputs(case, "cpu", torch.float32)
        for pin in (pin for pin in PINS if pin.scheme == "resident"):
            try:
                _, (_, plan) = emulator(inputs, pin)
            except CannotPlanError:
                continue
            number = numbers(plan)
            kinds.add((number["splits"] > 1, number["cluster"] == case.N * number["splits"]))
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_more_parts_than_a_warp_adds_up(emulator, dtypes):
    """A block does: of the statistics, and of the sums of a group."""
    inputs = make_inputs(Case("parts", (1, 30, 160, 161), 1), "cpu", *dtypes)
    for plan in emulator(inputs, Pin("two_pass"), multiprocessors=132)[1]:
        assert numbers(plan)["splits"] > 128, plan
    assert_parity(run_twice(emulator, inputs, Pin("two_pass"), multiprocessors=132), inputs)


def assert_read_again(plans):
    """Threads do not keep all of their pixels."""
    for plan in plans:
        number = numbers(plan)
        assert number["pixels_kept"] * number["rows"] < number["pixels_per_split"], plan


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("name", ["float", "bfloat16", "half to float"])
def test_more_than_the_chip_keeps(emulator, name, samples):
    inputs = make_inputs(LARGE, "cpu", *MIXED[name])
    results, plans = emulator(inputs, Pin("cooperative", samples))
    assert_read_again(plans)
    assert_parity(results, inputs)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_activation_of_more_than_the_chip_keeps(emulator, dtypes, activation):
    """dZ stays where its pixel does; of the others it is computed again."""
    inputs = away_from_kink(make_inputs(LARGE, "cpu", *dtypes), activation)
    results, plans = emulator(inputs, Pin("cooperative"), activation=activation)
    assert_read_again(plans)
    assert_fused_parity(results, inputs, activation)


@pytest.mark.parametrize(
    ("shape", "pin"),
    [((41, 64, 9, 11), Pin("resident", 3)), ((5, 64, 61, 53), Pin("cooperative", 2))],
    ids=str,
)
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_prefetch(emulator, dtypes, shape, pin):
    """Blocks ask for what later ones read, once; the first of these have nobody to ask for them."""
    inputs = make_inputs(Case("waves", shape, 8), "cpu", *dtypes)
    N, _, HxW, _ = inputs.sizes
    l2_bytes = 512 << 10
    results, plans = emulator(inputs, pin, l2_bytes=l2_bytes)
    assert_parity(results, inputs)
    for plan, read in zip(plans, [(inputs.X,), (inputs.X, inputs.dY)], strict=True):
        number = numbers(plan)
        assert number["bytes_ahead"] == l2_bytes // 6
        size = sum(operand.nbytes for operand in read)
        pixel = size // (N * HxW)
        if pin.scheme == "resident":
            tiles = number["column_tiles"]
            of_block = number["pixels_per_split"] * pixel // tiles
            ahead = number["bytes_ahead"] // of_block
            assert ahead > 0
            most = -(-number["pixels_per_split"] // tiles) * pixel  # that a block asks for
            assert size - ahead * most <= number["prefetched"] < size
        else:
            waves = -(-N // number["samples_per_wave"])
            assert 0 < number["prefetched"] <= number["bytes_ahead"] * (waves - 1)


def test_prefetch_of_one_wave(emulator):
    for pin in (Pin("resident", 3), Pin("cooperative", 0)):
        _, plans = emulator(make_inputs(CASES[0], "cpu", torch.float32), pin)
        for plan in map(numbers, plans):
            assert "bytes_ahead" not in plan
            assert plan["prefetched"] == 0


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("pin", SCHEMES_OPEN, ids=str)
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_activation(emulator, dtypes, pin, activation):
    inputs = away_from_kink(make_inputs(small_case(pin), "cpu", *dtypes), activation)
    results = run_twice(emulator, inputs, pin, activation=activation)
    assert_fused_parity(results, inputs, activation)


@pytest.mark.parametrize("far", [(-30, -30, -30, -30, -8, 3), (-60, 0), (-100,), (2e38,)], ids=str)
@pytest.mark.parametrize("pin", SCHEMES_OPEN, ids=str)
def test_silu_far_below_zero(emulator, pin, far):
    """Neighbours share reciprocals, but no errors, and nothing that is not a number."""
    inputs = make_inputs(small_case(pin), "cpu", torch.bfloat16)
    C = inputs.sizes[1]
    inputs.gamma.fill_(1)
    inputs.beta.copy_(torch.tensor(far).repeat(C)[:C])
    inputs.beta[C // 2] = float("nan")
    results, _ = emulator(inputs, pin, activation="silu")
    operands = (operand.double() for operand in (inputs.gamma, inputs.beta))
    Z = F.group_norm(inputs.X.double(), inputs.groups, *operands, inputs.eps)
    torch.testing.assert_close(
        results.Y.double(), F.silu(Z), rtol=2**-7, atol=1e-37, equal_nan=True
    )


@pytest.mark.parametrize("pin", [pin for pin in PINS if pin.scheme != "two_pass"], ids=str)
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_added(emulator, dtypes, pin):
    inputs = make_inputs(small_case(pin), "cpu", *dtypes)
    added = make_added(inputs)
    results = run_twice(emulator, inputs, pin, activation="silu", added=added)
    assert_parity_of_sum(results, inputs, added, "silu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("pin", (Pin(), *SCHEMES_OPEN), ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "float"])
def test_code_of_an_older_architecture(emulator, name, pin, case):
    """Neither clusters nor programmatic launches: the emulator refuses both there."""
    inputs = make_inputs(case, "cpu", *MIXED[name])
    assert_parity(run_twice(emulator, inputs, pin, code="8.0"), inputs)


def test_older_code_has_no_clusters(emulator):
    inputs = make_inputs(CASES[0], "cpu", torch.float32)
    emulator(inputs, Pin("resident", 2))
    with pytest.raises(CannotPlanError):
        emulator(inputs, Pin("resident", 2), code="8.0")


def test_a_driver_that_refuses_large_clusters(emulator):
    """They are optional, so nothing fails for their want."""
    inputs = make_inputs(CASES[0], "cpu", torch.float32)
    emulator(inputs, Pin("resident", 9))
    with pytest.raises(CannotPlanError):
        emulator(inputs, Pin("resident", 9), code="9.0, small clusters")
    results, _ = emulator(inputs, Pin("resident", 2), code="9.0, small clusters")
    assert_parity(results, inputs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("pin", (Pin(), *SCHEMES_OPEN), ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "bfloat16 to float"])
def test_output_masks(emulator, name, pin, mask):
    inputs = make_inputs(small_case(pin), "cpu", *MIXED[name])
    results = run_twice(emulator, inputs, pin, mask=mask)
    assert_parity(results, inputs, mask)
    whole, _ = emulator(inputs, pin)
    for name in ("dX", "dgamma", "dbeta"):
        if getattr(results, name) is not None:
            assert torch.equal(getattr(results, name), getattr(whole, name)), name


@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
@pytest.mark.parametrize("pin", SCHEMES_OPEN, ids=str)
@pytest.mark.parametrize("name", ["float", "bfloat16", "half to float"])
def test_without_weight_or_bias(emulator, name, pin, affine):
    inputs = make_inputs(small_case(pin), "cpu", *MIXED[name], affine=affine)
    assert_parity(run_twice(emulator, inputs, pin), inputs)


def test_sums_are_compensated_between_lanes(emulator):
    """Where they were not, one rstd of this was a unit off, and Y and dX missed their bounds."""
    torch.manual_seed(4211077807)
    inputs = make_inputs(Case("width", (2, 10, 5, 9), 2), "cpu", torch.float32)
    results, _ = emulator(inputs, Pin("resident", 4))
    assert_parity(results, inputs)


def test_first_pixels_far_from_the_mean(emulator):
    """They are the pivot: sums of deviations from it are large, and so is what rounding takes."""
    torch.manual_seed(1)
    inputs = make_inputs(Case("group_each", (1, 2049, 5, 23), 2049), "cpu", torch.float32)
    inputs.X[:, :, 0, :8] += 5
    results, _ = emulator(inputs, Pin("resident", 1))
    assert_parity(results, inputs, only=("mean", "rstd"))


@pytest.mark.parametrize("value, eps", [(69476.435, 1e-12), (5.16384852e8, 1e-5), (2e34, 1e-5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pin", SCHEMES_OPEN, ids=str)
@pytest.mark.parametrize("case", [PLANE, WHOLE_VECTORS], ids=lambda case: case.name)
def test_constant_groups(emulator, case, pin, dtype, value, eps):
    """They have no variance, whatever their mean is rounded to."""
    inputs = make_inputs(case, "cpu", dtype)
    inputs.X.fill_(value)
    inputs.eps = eps
    rstd = run_twice(emulator, inputs, pin).rstd
    exact = torch.full_like(rstd, eps**-0.5)
    torch.testing.assert_close(rstd, exact, rtol=2 * torch.finfo(rstd.dtype).eps, atol=0)


@pytest.mark.parametrize("size", [1e18, 1e19, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pin", SCHEMES_OPEN, ids=str)
@pytest.mark.parametrize("case", [PLANE, WHOLE_VECTORS], ids=lambda case: case.name)
def test_variances_that_overflow(emulator, case, pin, dtype, size):
    """They are infinite, not NaN: rstd is zero, or where they do not overflow next to it."""
    inputs = make_inputs(case, "cpu", dtype)
    inputs.X.mul_(size)
    results = run_twice(emulator, inputs, pin)
    for name, result in vars(results).items():
        assert result.isfinite().all(), name
    if size == 1e20:
        assert results.rstd.eq(0).all() and results.dX.eq(0).all() and results.dgamma.eq(0).all()
        assert torch.equal(results.Y, inputs.beta[:, None, None].expand_as(results.Y))


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_unaligned(emulator, dtypes):
    inputs = make_inputs(CASES[0], "cpu", *dtypes, layout="unaligned")
    assert_parity(run_twice(emulator, inputs, Pin()), inputs)


# --- what the emulator notices ---------------------------------------------------------------

FAULTS = """
#include <exception>
#include <string>

#include "emulator.h"
#include "native/kernels/hardware.cuh"

namespace gn_override {

// out[i] = in[count - 1 - i]; the faults are wrong ways to do it.
enum Fault { kNone, kNoBarrier, kNoWait, kOverrun, kDeadlock };

__global__ void reverse(int fault, const int* in, int* out) {
  int* const shared = reinterpret_cast<int*>(dynamic_shared_memory());
  const unsigned i = threadIdx.x;
  copy_async(shared + i, in + i);
  end_batch();
  if (fault != kNoWait) {
    wait_for_copies<0>();
  }
  if (fault == kOverrun && i == 0) {
    shared[blockDim.x] = 0;
  }
  if (fault != kNoBarrier && !(fault == kDeadlock && i == 0)) {
    __syncthreads();
  }
  out[i] = shared[blockDim.x - 1 - i];
  if (fault == kDeadlock) {
    __shfl_xor_sync(0xffffffffu, i, 1);
  }
}

// Blocks of a cluster tell each other their numbers.
__global__ void tell(int fault, int* out) {
  uint64_t* const shared = reinterpret_cast<uint64_t*>(dynamic_shared_memory());
  uint64_t* const barrier = shared + 2;
  if (threadIdx.x == 0) {
    begin_counting(barrier);
  }
  arrive_at_cluster();
  wait_for_cluster();
  if (threadIdx.x == 0) {
    expect_bytes(barrier, 2 * sizeof(uint64_t));
  }
  if (threadIdx.x < 2) {
    send(uint64_t{blockIdx.x}, shared + blockIdx.x, barrier, threadIdx.x);
  }
  if (fault != kNoWait) {
    wait_for_bytes(barrier);
  }
  if (threadIdx.x == 0) {
    out[blockIdx.x] = static_cast<int>(shared[0] + 10 * shared[1]);
  }
}

// In place, twice.
__global__ void increment(int fault, const int* in, int* out) {
  const int before = fault == kNoWait ? in[threadIdx.x] : 0;
  wait_for_previous_kernel();
  out[threadIdx.x] = 1 + (fault == kNoWait ? before : in[threadIdx.x]);
}

} // namespace gn_override

using namespace gn_override;

extern "C" const char* run(int kernel, int fault, const int* in, int* out) {
  static std::string text;
  cudaLaunchAttribute attribute = {};
  if (kernel == 2) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  } else {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kernel == 0 ? 1 : 2;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kernel == 1 ? 2 : 1);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = 64 * sizeof(int);
  config.attrs = &attribute;
  config.numAttrs = 1;
  try {
    text = "";
    emulator::seed(0);
    if (kernel == 2) {
      cudaLaunchKernelEx(&config, increment, int{kNone}, in, out);
      cudaLaunchKernelEx(&config, increment, fault, out, out);
    } else {
      kernel == 0 ? cudaLaunchKernelEx(&config, reverse, fault, in, out)
                  : cudaLaunchKernelEx(&config, tell, fault, out);
    }
    emulator::finish();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}
"""


@pytest.fixture(scope="session")
def faults(build, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """Runs kernel 0, 1 or 2 of the above with a fault: "right", "wrong", or the error."""
    source = tmp_path_factory.mktemp("faults") / "faults.cu"
    source.write_text(FAULTS)
    run = ctypes.CDLL(str(build([source, EMULATOR / "emulator.cpp"], "faults"))).run
    run.restype = ctypes.c_char_p
    names = ("none", "no barrier", "no wait", "overrun", "deadlock")

    def call(kernel: int, fault: str) -> str:
        given = torch.arange(1, 65, dtype=torch.int32)
        out = torch.zeros_like(given)
        error = run(
            kernel,
            names.index(fault),
            ctypes.c_void_p(given.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
        )
        expected = (given.flip(0), torch.tensor([10, 10]), given + 2)[kernel]
        right = torch.equal(out[: len(expected)], expected.int())
        return error.decode() or ("right" if right else "wrong")

    return call


@pytest.mark.parametrize(
    ("kernel", "fault", "outcome"),
    [
        (0, "none", "right"),
        (0, "no barrier", "wrong"),
        (0, "no wait", "wrong"),
        (0, "overrun", "a store beyond the block's shared memory"),
        (0, "deadlock", "a thread waits for what never comes"),
        (1, "none", "right"),
        (1, "no wait", "wrong"),
        (2, "none", "right"),
        (2, "no wait", "wrong"),
    ],
)
def test_faults_are_noticed(faults, kernel, fault, outcome):
    assert faults(kernel, fault) == outcome
