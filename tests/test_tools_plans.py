"""tune.py and counters.py, as far as they go without a GPU."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Iterable

import counters
import pytest
import render_readme
import results
import tune
from measured import SMALL
from shapes import Case

pytestmark = pytest.mark.any_torch

# Plans.


def test_random_shapes_repeat_and_are_of_models():
    cases = tune.random_cases(40, 3)
    assert cases == tune.random_cases(40, 3) != tune.random_cases(40, 4)
    assert all(case.C % 32 == 0 and case.dtype in tune.DTYPES for case in cases)


def test_plans_are_read_and_ranked():
    lines = [
        "smallfloat32 fwd 5.00 8.00 5.50 1 0.0e+00 resident vector=4 columns=8",
        "smallfloat32 fwd 5.00 6.40 0.00 0 1.0e-07 two_pass vector=4 columns=2",
        "smallfloat32 fwd 5.00 0.00 0.00 0 1.0e-07 two_pass vector=4 columns=1",
        "smallfloat32 bwd 5.00 9.00 0.00 1 inf resident vector=4 columns=8\n",
    ]
    forward, backward = tune.read_rows([SMALL], lines)
    assert forward["moved"] == {"resident vector=4 columns=8": 5.5} and not backward["moved"]
    assert "moved without computing 5.5 us" in tune.describe(forward, 1)
    assert "moved" not in tune.describe(backward, 1)
    assert forward["plans"] == {
        "resident vector=4 columns=8": 8.0,
        "two_pass vector=4 columns=2": 6.4,
    }
    assert tune.regret(forward) == 1.25 and not forward["wrong"]
    assert [line.split()[0] for line in tune.describe(forward, 1).splitlines()[1:]] == ["1", "2"]
    shortened = tune.shortened(forward, 1)
    assert shortened["plans"] == forward["plans"] and shortened["count"] == 3, "and the policy's"
    assert list(tune.shortened(backward, 1)["moved"]) == []
    shown = render_readme.tune({"rows": [shortened, backward]})
    assert "fwd | float32 | 5 | 5.5 | 6.4 | 8 | 1.10x | 1.28x | 1.60x |" in shown
    assert "bwd | float32 | 5 | - | 9 | 9 | - | 1.80x | 1.80x |" in shown
    assert backward["wrong"] == ["resident vector=4 columns=8: inf from two passes"]
    assert "WRONG" in tune.describe(backward, 1)
    assert tune.summary([forward, backward]).startswith(
        "4 plans: the policy's takes 1.125 times the best plan's time on average, 1.25 at most"
    )


def test_shapes_of_the_command_line_are_rendered_briefly():
    case = tune.parse_shape("2x320x8x8:32:bfloat16")
    line = f"{case.name}bfloat16 fwd 5.00 8.00 0.00 1 0.0e+00 two_pass vector=8"
    assert "| 2x320x8x8, fwd | bfloat16 |" in render_readme.tune(
        {"rows": tune.read_rows([case], [line])}
    )
    shapes = ",".join([case.name] * 40)
    content = dict.fromkeys(("gpu", "driver", "cuda", "torch", "commit", "date"), "?")
    content["rows"] = [{}]
    shown = render_readme.source(content | {"command": f"tune.py --shapes {shapes} --best 3"})
    assert len(shown) < 200
    assert "`tune.py --shapes 2x320x8x8:32:bfloat16,2x320" in shown
    assert shown.endswith("... --best 3`\n")


def test_worthy_plans_are_printed_as_rows_of_the_table():
    case = Case("one", (2, 320, 8, 8), 32, "bfloat16")
    policy = "cooperative vector=8 columns=40 splits=2 threads=512 samples_per_wave=1"
    best = "resident vector=8 columns=5 splits=3 threads=224 cluster=3"

    def row(plan: str, time: float) -> str:
        lines = [
            f"onebfloat16 bwd 5.00 8.00 0.00 1 0.0e+00 {policy}",
            f"onebfloat16 bwd 5.00 {time} 0.00 0 0.0e+00 {plan}",
        ]
        return tune.describe(tune.read_rows([case], lines)[0], 3, "gelu_tanh")

    pinned = "{kBackward, kGeluTanh, 2, 320, 64, 32, {kResident, 5, 3, 224}, 0.75},"
    assert row(best, 6.0).endswith(f"measured_cuda.h: {pinned}")
    assert "measured_cuda.h" not in row(best, 7.9), "not worth it"
    chip = row("cooperative columns=20 samples_per_wave=2 threads=320", 6.0)
    assert "{kCooperative, 20, 2, 320}" in chip
    assert "{kRegisters, 0, 0, 128}" in row("registers columns=2 threads=128", 6.0)
    assert "{kTwoPass, 0, 0, 0}" in row("two_pass columns=20 threads=256", 6.0)


def test_the_table_has_what_was_measured():
    """Each row is a right plan of the results, and faster than the policy's."""
    measured = set()
    files = [file for of in ("models", "unet") for file in results.RESULTS.glob(f"tune-{of}-*")]
    for file in files:
        content = json.loads(file.read_text())
        for row in content["rows"]:
            assert not row["wrong"]
            measured |= {
                tune.measured_plan(row, plan, content["activation"]) for plan in row["plans"]
            }
    header = (results.ROOT / "native" / "plan" / "measured_cuda.h").read_text()
    table = re.findall(r"^    (\{k.*\},)$", header, re.MULTILINE)
    assert table and measured.issuperset(table)
    assert all(float(row.rpartition(" ")[2].rstrip("},")) <= 0.98 for row in table)


def counted(name: str, **values: float) -> dict[str, str]:
    """A kernel of Nsight Compute's table."""
    metrics = dict.fromkeys(counters.METRICS, "0") | {counters.STALL.format("wait"): "1"}
    return {"ID": "0", "Kernel Name": name} | metrics | {k: f"{v:,}" for k, v in values.items()}


def profile_log(kernels: Iterable[dict[str, str]]) -> list[str]:
    lines = io.StringIO()
    columns = ["ID", "Kernel Name", *counters.METRICS]
    table = csv.DictWriter(lines, columns, quoting=csv.QUOTE_ALL)
    table.writeheader()
    table.writerow(dict.fromkeys(columns, "") | {counters.TIME: "ns", counters.READ: "byte"})
    table.writerows(kernels)
    return ["==PROF== Connected to process 1\n", *lines.getvalue().splitlines(keepends=True)]


def test_counters_of_a_step_are_its_kernels_together():
    barrier = counters.STALL.format("barrier")
    marker = counted("void erfinv_kernel<float>(int)")
    traffic = {counters.READ: 2_000_000, counters.WRITTEN: 1_000_000}
    copy = counted("void neg_kernel(int)", **{counters.TIME: 2000, counters.DRAM: 80}, **traffic)
    forward = counted("void first(int)", **{counters.TIME: 3000, counters.READ: 1_500_000})
    second = counted("void second(int)", **{counters.TIME: 1000, counters.DRAM: 40, barrier: 3})
    second[counters.SPECIAL] = "20"
    log = profile_log([marker, copy, marker, forward, marker, forward, second])
    rows = counters.rows([Case("one", (4, 64, 64, 64), 32, "float32")], log)
    assert [row["step"] for row in rows] == list(counters.STEPS)
    assert [row["us"] for row in rows] == [2.0, 3.0, 4.0]
    assert rows[0]["dram"] == 80 and rows[2]["dram"] == 10, "weighted by time"
    assert rows[2]["special"] == 5
    assert rows[1]["read"] == rows[2]["read"] == 1.5
    assert [row["least"] for row in rows] == [4.19, 4.19, 12.58]
    # `wait` is all there is in the first kernel, and a quarter of it in the second.
    stalls = rows[2]["stalls"]
    assert list(stalls)[:2] == ["wait", "barrier"] and stalls["wait"] == 57
    assert rows[2]["kernels"] == 2
    rendered = render_readme.counters({"rows": rows})
    for text in (rows[0]["name"], "fwd+bwd", "special functions %", "wait 57%"):
        assert text in rendered
    # 3 MB take elementwise 2 us.
    assert "fwd | float32 | 3 | 1 | 1.5 | 4.19 |" in rendered


@pytest.mark.parametrize(
    ("log", "why"),
    [(["==ERROR== no permission\n"], "no table"), (profile_log([]), "0 steps"), ([], "no table")],
    ids=["refused", "nothing ran", "empty"],
)
def test_counters_that_are_not_there_are_an_error(log, why):
    with pytest.raises(ValueError, match=why):
        counters.rows([SMALL], log)


def test_tune_without_nvcc_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="set CUDA_HOME"):
        tune.nvcc()


@pytest.mark.skipif(tune.find_nvcc() is None, reason="there is no nvcc")
def test_tune_compiles(tmp_path):
    compiler = [tune.nvcc(), "-std=c++20", "-arch=sm_90", f"-I{results.ROOT}", "-c"]
    source, target = results.ROOT / "tools" / "tune.cu", tmp_path / "tune.o"
    subprocess.run([*compiler, str(source), "-o", str(target)], check=True)
    assert target.exists()
