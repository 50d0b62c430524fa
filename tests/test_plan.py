"""Where a shape goes, and in which geometry: the planner's answers, without a GPU.

explain_shape() answers for an H200 where there is no GPU. The planner itself is plain C++: the
last tests compile native/plan without torch and CUDA and compare its answers.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from shapes import CPU_CASES, EDGE_CASES, EMPTY_CASES, KERNEL_CASES, LARGE_CASES, MODEL_CASES, Case

import gn_override  # noqa: F401  (loads the extension)

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
PARAMS = {"float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "bfloat16"}
WORKSPACE_FREE = 64 << 20  # bytes of X from which the workspace is bounded ...
WORKSPACE_SHARE = 0.02  # ... by this share of it
MAX_GRID = (1 << 31) - 1
# By the kernels' launch bounds.
MAX_THREADS = {"registers": 640, "resident": 512, "cooperative": 512, "two_pass": 256}
MAX_CLUSTER = 16
MAX_SHARED = 232448  # bytes of shared memory that a block of an H200 may ask for

ALL_CASES = KERNEL_CASES + CPU_CASES + MODEL_CASES + EDGE_CASES + EMPTY_CASES + LARGE_CASES
directions = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
devices = pytest.mark.parametrize("device_type", ["cpu", "cuda"])


def explain(
    case: Case,
    device_type: str,
    backward: bool,
    *,
    dtype: str | None = None,
    param_dtype: str | None = None,
    channels_last: bool = True,
    alignment: int = 16,
    wide: bool = False,
    activation: str = "identity",
) -> dict:
    dtype = dtype or case.dtype
    text = torch.ops.gn_override.explain_shape(
        device_type,
        backward,
        case.N,
        case.C,
        case.HxW,
        case.G,
        dtype,
        param_dtype or dtype,
        channels_last,
        alignment,
        activation,
        wide_output=wide,
    )
    return json.loads(text)


def geometry(answer: dict) -> dict[str, int]:
    """The numbers of a printed plan: "rule key=value key=value"."""
    return {
        key: int(value) for key, value in (part.split("=") for part in answer["plan"].split()[1:])
    }


@devices
@directions
@pytest.mark.parametrize("case", KERNEL_CASES + CPU_CASES + MODEL_CASES, ids=lambda c: c.id)
def test_shapes_of_models_are_ours(case, device_type, backward):
    answer = explain(case, device_type, backward)
    assert answer["rule"] != "aten", answer
    assert answer["declined_by_binding"] is None


@devices
@directions
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("case", EDGE_CASES + LARGE_CASES, ids=lambda c: c.name)
def test_no_odd_shape_is_declined(case, dtype, device_type, backward):
    """Every channels-last shape is ours; what is NCHW as well goes to aten where that takes it."""
    for param_dtype in {dtype, PARAMS[dtype]}:
        for alignment in (1, 2, 4, 8, 16):
            answer = explain(
                case,
                device_type,
                backward,
                dtype=dtype,
                param_dtype=param_dtype,
                alignment=alignment,
            )
            refused = device_type == "cuda" and param_dtype != dtype
            assert (answer["rule"] == "aten") == (case.one_layout and not refused), answer


@devices
@directions
@pytest.mark.parametrize("case", KERNEL_CASES[:4] + EMPTY_CASES, ids=lambda c: c.id)
def test_nchw_and_empty_go_to_aten(case, device_type, backward):
    answer = explain(case, device_type, backward, channels_last=case.N == 0)
    assert answer["rule"] == "aten"
    assert answer["workspace_bytes"] == 0
    # Every rule on the way says what it missed.
    assert answer["declined"]
    assert all(row["failed"] for row in answer["declined"])


@directions
@devices
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: c.id)
def test_workspace_is_small(case, device_type, backward):
    for dtype in SIZES:
        answer = explain(case, device_type, backward, dtype=dtype)
        bytes_of_X = case.numel * SIZES[dtype]
        if bytes_of_X > WORKSPACE_FREE:
            assert answer["workspace_bytes"] <= WORKSPACE_SHARE * bytes_of_X, answer
        else:
            assert answer["workspace_bytes"] <= WORKSPACE_FREE, answer


@pytest.mark.parametrize("N, dtype", [(200, "float32"), (512, "bfloat16")])
def test_sums_of_many_samples_are_small(N, dtype):
    """On a CPU: of large tensors of few pixels, they are what the workspace holds."""
    case = Case("few_pixels", (N, 2048, 7, 7), 32)
    answer = explain(case, "cpu", True, dtype=dtype)
    assert answer["workspace_bytes"] <= WORKSPACE_SHARE * case.numel * SIZES[dtype], answer


@directions
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_many_small_samples_take_no_more_than_caches(backward, dtype):
    """On a CPU: what all threads work on together counts with its workspace."""
    answer = explain(Case("tiny_samples", (1_000_000, 2, 2), 2), "cpu", backward, dtype=dtype)
    assert answer["workspace_bytes"] <= WORKSPACE_FREE, answer


@directions
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("C", [2, 3, 8, 32, 96, 320])
@pytest.mark.parametrize("N, width", [(1, 4), (1, 64), (1, 200), (4, 32), (16, 16)])
def test_chunks_are_worth_their_calls(N, C, width, dtype, backward):
    """On a CPU: a sample of few channels is not cut into chunks of almost nothing."""
    case = Case("few_channels", (N, C, width, width), 1)
    plan = geometry(explain(case, "cpu", backward, dtype=dtype))
    assert plan["splits"] == 1 or plan["pixels_per_split"] * C >= 4096 // 2, plan


def assert_covers(answer: dict, case: Case, dtype: str, alignment: int) -> None:
    """Tiles cover [N, HxW, C] exactly: no channel and no pixel is left out or done twice."""
    plan = geometry(answer)
    across = plan["vector"] * plan["columns"]
    assert case.C % plan["vector"] == 0, "a vector would straddle two pixels"
    assert plan["vector"] * SIZES[dtype] <= max(alignment, SIZES[dtype])
    assert (plan["column_tiles"] - 1) * across < case.C <= plan["column_tiles"] * across
    run = plan["pixels_per_split"]
    assert (plan["splits"] - 1) * run < case.HxW <= plan["splits"] * run
    assert 1 <= plan["columns"] * plan["rows"] <= plan["threads"] <= MAX_THREADS[answer["rule"]]
    assert plan["shared_bytes"] <= MAX_SHARED
    assert 1 <= case.N * plan["column_tiles"] * plan["splits"] <= MAX_GRID


@directions
@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.N > 0 and not case.one_layout], ids=lambda c: c.id
)
def test_tiles_cover_the_tensor(case, backward):
    for dtype in SIZES:
        for alignment in (1, 2, 4, 8, 16):
            answer = explain(case, "cuda", backward, dtype=dtype, alignment=alignment)
            assert_covers(answer, case, dtype, alignment)


@directions
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.N > 0 and not case.one_layout], ids=lambda c: c.id
)
def test_wide_output(case, dtype, backward):
    """Half X, float Y: as many channels to a vector as 16 bytes of Y hold, and whole tiles."""
    for alignment in (1, 2, 4, 8, 16):
        answer = explain(
            case,
            "cuda",
            backward,
            dtype=dtype,
            param_dtype="float32",
            alignment=alignment,
            wide=True,
        )
        assert answer["rule"] != "aten"
        assert_covers(answer, case, dtype, alignment)
        vector = geometry(answer)["vector"]
        assert vector <= 4
        if alignment >= 8:
            assert vector == next(width for width in (4, 2, 1) if case.C % width == 0)
        # X and Y; or dY, X and dX.
        assert answer["minimum_bytes"] == (8 if backward else 6) * case.numel
        assert f"{dtype} to float32 with float32 parameters" in answer["problem"]


@directions
def test_slabs_of_a_wide_output(backward):
    """dY takes twice the room of X on chip, Y none: backward, a thread keeps fewer pixels."""
    case = Case("det", (2, 256, 200, 272))
    kept = {}
    for name, options in {
        "bfloat16": {"dtype": "bfloat16", "alignment": 8},  # vectors of 4 channels too
        "wide": {"dtype": "bfloat16", "param_dtype": "float32", "wide": True},
        "float32": {"dtype": "float32"},
    }.items():
        answer = explain(case, "cuda", backward, **options)
        assert answer["rule"] == "cooperative" and geometry(answer)["vector"] == 4
        plan = geometry(answer)
        kept[name] = plan["pixels_kept"] * plan["threads"]
    if backward:
        assert kept["bfloat16"] > kept["wide"] > kept["float32"]
    else:
        assert kept["bfloat16"] == kept["wide"] > kept["float32"]


@directions
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 1001, 100, 150), 77), ((1, 4095, 300, 300), 1), ((3, 33, 1023, 1021), 1)],
)
def test_first_of_two_passes_is_one_wave(backward, shape, groups):
    """Up to four blocks a multiprocessor, and no fewer than two; of an odd C."""
    case = Case("one wave", shape, groups)
    answer = explain(case, "cuda", backward, dtype="float16")
    plan = geometry(answer)
    assert answer["rule"] == "two_pass" and plan["vector"] == 1
    blocks = case.N * plan["column_tiles"] * plan["splits"]
    assert 2 * 132 < blocks <= 4 * 132, answer
    assert plan["pixels_per_split"] >= 8 * plan["rows"]


HUGE = (
    Case("N past 65535", (1 << 20, 32, 2, 2), 32),
    Case("N * G past 2^31", (1 << 27, 32, 1, 2), 32),
    Case("G past 65535", (1, 1 << 20, 2, 2), 1 << 20),
    Case("C past 65535", (2, 1 << 20, 7, 7), 32),
    Case("HxW past 2^31", (1, 2, 1 << 16, 1 << 16), 1),
    Case("all large", (1 << 12, 1 << 12, 1 << 6, 1 << 6), 1 << 11),
)


@directions
@pytest.mark.parametrize("case", HUGE, ids=lambda c: c.name)
def test_huge_shapes_stay_within_grid_limits(case, backward):
    for dtype in SIZES:
        answer = explain(case, "cuda", backward, dtype=dtype)
        assert answer["rule"] != "aten"
        assert_covers(answer, case, dtype, 16)


def random_calls(count: int) -> Iterator[tuple[Case, bool, dict]]:
    """Calls near the limits of the schemes: a case, whether backward, and options of explain()."""
    source = random.Random(5)
    while count:
        dtype = source.choice(list(SIZES))
        half = SIZES[dtype] == 2
        wide = half and source.random() < 0.3
        mixed = wide or (half and source.random() < 0.2)
        D = source.choice([1, 2, 3, 4, 6, 8, 10, 16, 20, 32, 40, 64, 96, 128, 256, 512, 1000])
        G = source.choice([1, 2, 3, 4, 8, 16, 32, 32, 64, 77])
        N = source.choice([1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 64, 128, 300, 1024])
        HxW = source.choice([2, 4, 9, 16, 49, 64, 196, 1024, 3136, 16384, source.randint(2, 5000)])
        if N * D * G * HxW > 1 << 32 or D * G == 1:
            continue
        count -= 1
        options = {
            "dtype": dtype,
            "param_dtype": "float32" if mixed else dtype,
            "wide": wide,
            "alignment": source.choice([16, 16, 16, 8, 4, 2]),
            "activation": source.choice(["identity", "silu"]),
        }
        yield Case("random", (N, D * G, HxW), G), source.random() < 0.5, options


def test_plans_of_random_calls_can_be_launched():
    """Within launch bounds and cluster sizes, and where blocks wait for each other, all at once."""
    multiprocessors = int(device_figures("cuda")[1])
    seen = set()
    for case, backward, options in random_calls(6000):
        answer = explain(case, "cuda", backward, **options)
        rule, plan = answer["rule"], geometry(answer)
        seen.add((rule, backward))
        assert_covers(answer, case, options["dtype"], options["alignment"])
        across, D = plan["vector"] * plan["columns"], case.C // case.G
        if rule == "registers":
            assert plan["rows"] * plan["pixels_kept"] >= case.HxW, answer
            assert across == D and plan["vector"] == 8, answer
            assert options["param_dtype"] == options["dtype"], answer
            assert plan["threads"] % (32 * (case.N if backward else 1)) == 0, answer
            assert plan["threads"] >= D, answer  # gamma and beta: one to a thread
        elif rule == "resident":
            assert plan["cluster"] <= MAX_CLUSTER, answer
            assert plan["cluster"] in (plan["splits"], case.N * plan["splits"]), answer
        elif rule == "cooperative":
            blocks = plan["samples_per_wave"] * plan["column_tiles"] * plan["splits"]
            assert blocks <= multiprocessors, answer
            assert plan["pixels_kept"] >= 4 * (2 if backward else 4), answer  # a thread's ring
        if rule in ("resident", "cooperative"):
            assert plan["vector"] * SIZES[options["dtype"]] >= 4, answer
            assert across % D == 0 or plan["column_tiles"] == 1, answer
    assert seen == {(rule, backward) for rule in MAX_THREADS for backward in (False, True)}


@directions
def test_limits_of_the_schemes(backward):
    """What their kernels count in 32 bits."""
    for shape, groups, rule in (
        ((1, 1 << 22, 2), 1 << 21, "two_pass"),
        ((1 << 31, 32, 2), 32, "aten"),
        ((1, 1 << 30, 2), 1 << 20, "aten"),
    ):
        case = Case("limit", shape, groups)
        assert explain(case, "cuda", backward, dtype="float32")["rule"] == rule, shape


def test_one_result_for_each_tiny_group():
    """Of two elements, which no cluster copies: the workspace has one Moments of each segment, and
    of each group."""
    case = Case("tiny groups", (1 << 16, 2049, 2), 2049)
    answer = explain(case, "cuda", False, dtype="float16")
    assert answer["rule"] == "two_pass", answer
    segments = case.G + geometry(answer)["column_tiles"] - 1
    assert answer["workspace_bytes"] == 16 * case.N * (segments + case.G), answer


def test_sums_of_the_whole_chip_are_small():
    """Where they would take more than the share that a workspace may have, it is another scheme."""
    case = Case("sums_of_channels", (300, 2000, 256), 2)
    options = {"dtype": "float16", "param_dtype": "float32", "wide": True}
    answer = explain(case, "cuda", True, **options, activation="gelu", alignment=4)
    assert answer["workspace_bytes"] <= WORKSPACE_SHARE * case.numel * SIZES["float16"], answer


@devices
@directions
def test_answer_is_complete(device_type, backward):
    """What explain() prints for people: problem, rule with its reason, plan, least traffic."""
    case = KERNEL_CASES[0]
    answer = explain(case, device_type, backward)
    assert answer["device"]
    for part in (device_type, "backward" if backward else "forward", f"N={case.N}", f"C={case.C}"):
        assert part in answer["problem"]
    assert f"G={case.G}" in answer["problem"] and case.dtype in answer["problem"]
    assert answer["plan"].startswith(answer["rule"])
    assert len(answer["reason"]) > 20
    assert answer["minimum_bytes"] == (3 if backward else 2) * case.numel * 2
    assert all(rule["rule"] != answer["rule"] and rule["failed"] for rule in answer["declined"])


MEASURED = re.compile(
    r"\{k(Forward|Backward), k(\w+), (\d+), (\d+), (\d+), (\d+),"
    r"\s+\{k(\w+), (\d+), (\d+), (\d+)\},\s+(0\.\d+)\}"
)


def test_measured_plans_are_taken():
    """Each row of measured_cuda.h makes a plan, its own; and only for what it was measured for."""
    header = (ROOT / "native/plan/measured_cuda.h").read_text()
    rows = MEASURED.findall(header)
    assert len(rows) == header.count("{k") / 2 > 0
    assert len({row[:6] for row in rows}) == len(rows)
    for direction, activation, *numbers, scheme, columns, splits, threads, share in rows:
        N, C, HxW, G = map(int, numbers)
        case = Case("measured", (N, C, HxW, 1), G, "bfloat16")
        backward = direction == "Backward"
        call = {"activation": activation.lower()}
        answer = explain(case, "cuda", backward, **call)
        plan = geometry(answer)
        assert answer["rule"] == scheme.lower()
        assert f"measured on an H200, and takes {round(100 * float(share))}% of" in answer["reason"]
        shared = "samples_per_wave" if scheme == "Cooperative" else "splits"
        # 0 leaves it to the scheme, which for registers has but one.
        free = ("0",) if scheme == "Registers" else ()
        assert columns in (str(plan["columns"]), *free)
        assert splits in (str(plan[shared]), *free)
        assert scheme == "Cooperative" or plan["threads"] == int(threads)
        assert explain(case, "cuda", backward, dtype="float16", **call)["plan"] == answer["plan"]
        wide = {"param_dtype": "float32", "wide": True}
        for other in ({"dtype": "float32"}, {"alignment": 8}, {"channels_last": False}, wide):
            assert "measured" not in explain(case, "cuda", backward, **call, **other)["reason"]


def test_clusters_of_all_samples_need_no_second_launch():
    """They add dgamma and dbeta up themselves; others leave sums in the workspace."""
    seen = set()
    for case in KERNEL_CASES + EDGE_CASES + MODEL_CASES:
        answer = explain(case, "cuda", True)
        if answer["rule"] != "resident":
            continue
        plan = geometry(answer)
        has_all = plan["cluster"] == case.N * plan["splits"]
        assert has_all or plan["cluster"] == plan["splits"], answer
        assert (answer["workspace_bytes"] == 0) == has_all, answer
        seen.add((has_all, case.N > 1, plan["splits"] > 1))
    # Of one sample and of several, split and whole.
    assert seen >= {(True, True, True), (True, True, False), (False, True, True)}
    assert {kind for kind in seen if kind[:2] == (True, False)}


def test_idle_threads_take_no_room():
    """Cooperative blocks have threads without a row only where all pixels are kept all the same."""
    usual = 384
    idle = full = 0
    for case in ALL_CASES:
        for backward in (False, True):
            answer = explain(case, "cuda", backward)
            if answer["rule"] != "cooperative":
                continue
            plan = geometry(answer)
            fewest = -(-plan["rows"] * plan["columns"] // 32) * 32
            reads_again = plan["pixels_kept"] < -(-plan["pixels_per_split"] // plan["rows"])
            if reads_again:
                assert plan["threads"] == fewest, answer
            elif "this plan was measured" not in answer["reason"]:  # with a number of its own
                assert plan["threads"] == max(usual, fewest), answer
            idle += plan["threads"] > fewest
            full += reads_again and fewest < usual
    assert idle and full, "cases of both kinds"


def test_estimates_count_activations():
    """Clusters have more threads where these hide an activation."""
    case = next(case for case in KERNEL_CASES if case.name == "sd15" and case.dtype == "float32")
    alone, fused = (
        explain(case, "cuda", False, activation=activation) for activation in ("identity", "silu")
    )
    assert alone["rule"] == fused["rule"] == "resident"
    assert geometry(alone)["threads"] < geometry(fused)["threads"]


def test_alignment_narrows_the_vector():
    case = KERNEL_CASES[0]
    widths = [
        geometry(explain(case, "cuda", False, alignment=alignment))["vector"]
        for alignment in (2, 4, 8, 16)
    ]
    assert widths == [1, 2, 4, 8]


def test_single_image_fills_the_chip():
    """One image and 32 groups are not 32 blocks: most multiprocessors get one."""
    for case in KERNEL_CASES:
        for backward in (False, True):
            plan = geometry(explain(case, "cuda", backward))
            blocks = case.N * plan["column_tiles"] * plan["splits"]
            vectors = case.numel // plan["vector"]
            # A third of 132, unless that leaves a thread less than eight vectors.
            assert blocks >= min(44, vectors // (plan["columns"] * plan["rows"] * 8))


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("tpu", False, 1, 4, 4, 2, "float32", "float32", True, 16), "device must be"),
        (("cpu", False, 1, 4, 4, 2, "int8", "float32", True, 16), "dtype must be"),
        (("cpu", False, 1, 4, 4, 3, "float32", "float32", True, 16), "num_groups"),
        (("cpu", False, 1, 4, 4, 0, "float32", "float32", True, 16), "num_groups"),
        (("cpu", False, -1, 4, 4, 2, "float32", "float32", True, 16), "N"),
        (("cuda", False, 1, 0, 4, 2, "float32", "float32", True, 16), "C"),
        (("cuda", False, 1, 4, 0, 2, "float32", "float32", True, 16), "HxW > 0"),
        (("cuda", False, 1, 4, 4, 2, "float32", "float32", True, 3), "alignment"),
        (
            ("cuda", False, 1, 4, 4, 2, "float32", "float32", True, 16, "identity", True),
            "wide output",
        ),
        (("cpu", False, 1, 4, 4, 2, "float16", "float32", True, 16, "identity", True), "on cpu"),
    ],
)
def test_questions_without_an_answer(arguments, text):
    with pytest.raises(ValueError, match=text):
        torch.ops.gn_override.explain_shape(*arguments)


def test_a_tensor_without_an_answer():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        torch.ops.gn_override.explain(torch.randn(8), None, None, 4, False)


# --- the planner alone -----------------------------------------------------------------------

DRIVER = r"""
#include <iostream>
#include "native/plan/plan.h"
using namespace gn_override;

// Lines of: device backward dtype param_dtype wide N C HxW G channels_last alignment threads
// sm_count compute_capability shared_memory_per_block l2_bytes l2_policies clusters whole_chip; one
// answer a line.
int main() {
  int device, backward, dtype, param_dtype, wide, channels_last;
  Problem p;
  Device d;
  while (std::cin >> device >> backward >> dtype >> param_dtype >> wide >> p.N >> p.C >> p.HxW >>
         p.G >> channels_last >> p.alignment >> d.threads >> d.sm_count >> d.compute_capability >>
         d.shared_memory_per_block >> d.l2_bytes >> d.l2_policies) {
    for (size_t size = 1; size < d.clusters.size(); ++size) {
      std::cin >> d.clusters[size];
    }
    std::cin >> d.whole_chip;
    p.device = static_cast<DeviceType>(device);
    p.direction = static_cast<Direction>(backward);
    p.dtype = static_cast<DType>(dtype);
    p.param_dtype = static_cast<DType>(param_dtype);
    p.wide_output = wide;
    p.channels_last = channels_last;
    const Plan plan = make_plan(p, d);
    if (!(plan == make_plan(p, d))) {
      return 1;
    }
    std::cout << "{\"splits\": " << plan.splits << ", \"pixels_per_split\": "
              << plan.pixels_per_split << ", \"workspace_bytes\": " << plan.workspace_bytes
              << ", \"explain\": " << explain(p, d) << "}\n";
  }
}
"""
DTYPE_CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """native/plan and a driver, compiled by a plain C++20 compiler: no torch, no CUDA."""
    return compiled(tmp_path_factory.mktemp("planner"), DRIVER, "native/plan/*.cpp")


def compiled(directory: Path, driver: str, pattern: str) -> Path:
    """The driver with the sources of this pattern."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = sorted(ROOT.glob(pattern))
    if not sources:
        pytest.skip("the tests run without the source tree")
    (directory / "driver.cpp").write_text(driver)
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    command += [*map(str, sources), str(directory / "driver.cpp"), "-o", str(directory / "driver")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return directory / "driver"


# Questions about every shape that is ours.
OURS = [
    (case, backward, dtype, 16)
    for case in ALL_CASES
    if case.N > 0 and not case.one_layout
    for backward in (False, True)
    for dtype in SIZES
]


def device_figures(device_type: str) -> list[str]:
    """What explain_shape() plans for: this machine, or an H200 where there is no GPU."""
    return re.findall(r"(?<=[=,])\d+", explain(KERNEL_CASES[0], device_type, False)["machine"])


def ask(
    planner: Path,
    device_type: str,
    questions: list[tuple[Case, bool, str, int]],
    wide: bool = False,
    figures: Sequence[str] = (),
) -> list:
    figures = figures or device_figures(device_type)
    lines = [
        [
            int(device_type == "cuda"),
            int(backward),
            DTYPE_CODES[dtype],
            DTYPE_CODES["float32" if wide else dtype],
            int(wide),
            case.N,
            case.C,
            case.HxW,
            case.G,
            int(not case.one_layout),
            alignment,
            *figures,
        ]
        for case, backward, dtype, alignment in questions
    ]
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    done = subprocess.run([str(planner)], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@devices
def test_planner_alone_gives_the_same_answers(planner, device_type):
    questions = [
        (case, backward, dtype, alignment)
        for case in ALL_CASES + HUGE
        for backward in (False, True)
        for dtype in SIZES
        for alignment in (8, 16)
    ]
    answers = ask(planner, device_type, questions)
    assert len(answers) == len(questions)
    for question, answer in zip(questions, answers, strict=True):
        case, backward, dtype, alignment = question
        built = explain(case, device_type, backward, dtype=dtype, alignment=alignment)
        del built["device"], built["declined_by_binding"]
        assert answer["explain"] == built


def test_measured_plans_that_a_device_cannot_run(planner):
    """Of clusters that it does not have: the estimates choose, and nothing is said of measuring."""
    question = (Case("clusters_of_16", (8, 1920, 64, 64), 32), False, "bfloat16", 16)
    figures = device_figures("cuda")
    measured, other = (
        ask(planner, "cuda", [question], figures=of_device)[0]["explain"]
        for of_device in (figures, [*figures[:-9], *8 * ["0"], figures[-1]])
    )
    assert geometry(measured)["cluster"] == 16 and "was measured" in measured["reason"]
    assert other["rule"] == "cooperative" and "was measured" not in other["reason"]


def test_older_devices_are_left_to_pytorch(planner):
    question = (KERNEL_CASES[0], False, "bfloat16", 16)
    figures = device_figures("cuda")
    for capability, served in (("80", True), ("75", False)):
        figures[2] = capability
        answer = ask(planner, "cuda", [question], figures=figures)[0]["explain"]
        assert (answer["rule"] != "aten") == served
    assert any("8.0 or later" in text for text in answer["declined"][0]["failed"])


def test_plans_that_leave_room_for_others(planner):
    """Without the whole chip: small clusters and two passes, where others are as they were."""
    figures = device_figures("cuda")
    assert figures[-1] == "1"
    whole, part = (
        [answer["explain"] for answer in ask(planner, "cuda", OURS, figures=[*figures[:-1], share])]
        for share in "10"
    )
    schemes = {answer["rule"] for answer in part}
    assert schemes == {answer["rule"] for answer in whole} - {"cooperative"}
    sizes = {answer["rule"]: set() for answer in part + whole}
    for answer in part:
        sizes[answer["rule"]].add(geometry(answer).get("cluster", 1))
    assert max(sizes["resident"]) == 8
    for answer, other in zip(whole, part, strict=True):
        took = answer["rule"] == "cooperative" or geometry(answer).get("cluster", 1) > 8
        assert took or answer["plan"] == other["plan"], (answer, other)
        if answer["rule"] == "cooperative" and other["rule"] == "two_pass":
            failed = {rule["rule"]: rule["failed"] for rule in other["declined"]}
            assert "no other's kernels wait for it" in failed["cooperative"][0]


def test_plans_without_policies_of_the_l2_cache(planner):
    """Nothing is to stay in it, and no plan counts on that."""
    case = Case("reads_a_part_twice", (2, 320, 128, 128), 32)
    question = (case, True, "bfloat16", 16)
    figures = device_figures("cuda")
    with_them, without = (
        geometry(ask(planner, "cuda", [question], figures=of_device)[0]["explain"])
        for of_device in ([*figures[:5], policies, *figures[6:]] for policies in "10")
    )
    assert with_them["pixels_cached"] > 0
    assert without.get("pixels_cached", 0) == 0


def test_measured_plans_are_for_gpus_like_the_one_that_ran(planner):
    question = (Case("measured", (2, 320, 64, 64), 32), False, "bfloat16", 16)
    threads, _, _, *rest = device_figures("cuda")
    for of_device, measured in (
        (("132", "90"), True),
        (("114", "90"), False),
        (("132", "100"), False),
    ):
        figures = [threads, *of_device, *rest]
        reason = ask(planner, "cuda", [question], figures=figures)[0]["explain"]["reason"]
        assert ("was measured" in reason) == measured, of_device


def test_a_rule_that_measuring_overruled_says_so(planner):
    """And not that its plan does not fit, or is estimated to be slower: it is not."""
    header = (ROOT / "native/plan/measured_cuda.h").read_text()
    questions = [
        (Case("measured", (int(N), int(C), int(HxW), 1), int(G)), False, "bfloat16", 16)
        for direction, activation, N, C, HxW, G, *_ in MEASURED.findall(header)
        if (direction, activation) == ("Forward", "Identity")
    ]
    threads, sm_count, _, *rest = device_figures("cuda")
    measured, estimated = (
        [answer["explain"] for answer in ask(planner, "cuda", questions, figures=figures)]
        for figures in ([threads, sm_count, capability, *rest] for capability in ("90", "100"))
    )
    overruled = 0
    for answer, other in zip(measured, estimated, strict=True):
        failed = {rule["rule"]: rule["failed"] for rule in answer["declined"]}
        for rule, texts in failed.items():
            by_measuring = texts == ["no other plan that was measured to be faster"]
            assert by_measuring == (rule == other["rule"]), (rule, answer, other)
            overruled += by_measuring
    assert overruled > 0


def test_planner_alone_with_a_wide_output(planner):
    questions = [
        (case, backward, "bfloat16", alignment)
        for case in ALL_CASES + HUGE
        for backward in (False, True)
        for alignment in (4, 16)
    ]
    for question, answer in zip(questions, ask(planner, "cuda", questions, True), strict=True):
        case, backward, dtype, alignment = question
        built = explain(
            case,
            "cuda",
            backward,
            dtype=dtype,
            param_dtype="float32",
            alignment=alignment,
            wide=True,
        )
        del built["device"], built["declined_by_binding"]
        assert answer["explain"] == built


def test_cpu_runs_cover_the_pixels(planner):
    for (case, *_), plan in zip(OURS, ask(planner, "cpu", OURS), strict=True):
        run = plan["pixels_per_split"]
        assert (plan["splits"] - 1) * run < case.HxW <= plan["splits"] * run, plan


# --- the cache -------------------------------------------------------------------------------

CACHE_DRIVER = r"""
#include <iostream>
#include "native/binding/plan_cache.h"
using namespace gn_override;

int made = 0;

namespace gn_override {

Plan make_plan(const Problem& problem, const Device& device) {
  ++made;
  Plan plan;
  plan.pixels_per_split = problem.C * problem.HxW + device.threads;
  return plan;
}

} // namespace gn_override

// Asks three times for the plans of a number of problems, and once more on another device; prints
// how many plans were made before that, and after.
int main() {
  int count = 0;
  std::cin >> count;
  Device device;
  for (int round = 0; round < 4; ++round) {
    if (round == 3) {
      std::cout << made << ' ';
      device.threads = 7;
    }
    for (int i = 0; i < count; ++i) {
      Problem problem;
      problem.N = 2;
      problem.G = 32;
      problem.C = 320 * (1 + i % 6);
      problem.HxW = 64 << i / 6;
      const Plan plan = binding::cached_plan(problem, device);
      if (plan.pixels_per_split != problem.C * problem.HxW + device.threads) {
        return 1;
      }
    }
  }
  std::cout << made << '\n';
}
"""


def test_plans_are_remembered(tmp_path):
    """Those of a model all; of more problems than there is room for, none is mixed up."""
    driver = compiled(tmp_path, CACHE_DRIVER, "native/binding/plan_cache.cpp")

    def made(count: int) -> list[int]:
        done = subprocess.run(
            [str(driver)], input=str(count), capture_output=True, text=True, check=True, timeout=60
        )
        return [int(number) for number in done.stdout.split()]

    assert made(36) == [36, 72]
    assert made(240)[0] > 240
