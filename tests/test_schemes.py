"""Every CUDA scheme on shapes that make it do all it can, whatever the policy would choose.

The policy is pinned to a scheme and a geometry; results meet the suite's bound, repeat bit for bit,
and are the same from a CUDA graph that is replayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import torch
from reference import (
    RESULTS,
    Inputs,
    Results,
    assert_parity,
    expect_calls,
    make_inputs,
    native,
)
from shapes import LARGER_THAN_CHIP, Case

import gn_override  # noqa: F401  (loads the extension)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poison")]

MANY_TILES = Case("many_tiles", (2, 1040, 7, 5), 26)
CASES = (
    Case("d10", (5, 40, 13, 11), 4),
    Case("vectors_of_two", (3, 6, 9, 31), 3),
    MANY_TILES,
    Case("one_group", (3, 96, 17, 9), 1),
    Case("group_each", (3, 96, 17, 9), 96),
    Case("samples", (17, 16, 7, 5), 2),  # more than blocks of a cluster
    Case("few_pixels", (2, 512, 4, 3), 16),  # some threads have none
    # What does not fit stays in the L2 cache as far as it goes: copies of 16, of 8 or 4, and of 4
    # bytes with a cache policy.
    LARGER_THAN_CHIP,
    Case("larger_than_chip_pairs", (6, 46, 251, 257), 23),
    Case("larger_than_chip_odd", (6, 33, 251, 257), 3),
)

# (scheme, columns, blocks of a cluster or samples of a wave, threads); 0 leaves it open. Samples of
# a wave: all, so that what does not fit is read again; one, so that waves follow each other; two,
# so that the last of five samples has a wave to itself.
PINS = (
    *(("registers", 0, 0, threads) for threads in (64, 160, 640)),  # four, two, one pixel a thread
    *(("resident", 0, blocks, 0) for blocks in (1, 2, 4, 8, 16)),
    ("resident", 0, 4, 96),
    *(("cooperative", 0, samples, 0) for samples in (0, 1, 2)),
    ("two_pass", 0, 0, 0),
)
all_pins = pytest.mark.parametrize(
    "pins", PINS, ids=lambda pins: "-".join(str(pin) for pin in pins if pin)
)

DTYPES = {
    "float": (torch.float32, None),
    "double": (torch.float64, None),
    "half": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16-float": (torch.bfloat16, torch.float32),
}


@pytest.fixture
def pin() -> Iterator[None]:
    """torch.ops.gn_override.pin_plans, undone afterwards."""
    yield torch.ops.gn_override.pin_plans
    torch.ops.gn_override.pin_plans("", 0, 0, 0)


def rules(inputs: Inputs) -> set[str]:
    """The rules that take forward and backward."""
    i = inputs
    return {
        json.loads(torch.ops.gn_override.explain(i.X, i.gamma, i.beta, i.groups, backward))["rule"]
        for backward in (False, True)
    }


def case_of(scheme: str) -> Case:
    """One of CASES that the scheme takes in every dtype that it takes."""
    return MANY_TILES if scheme == "registers" else CASES[0]


def kept(inputs: Inputs) -> set[int]:
    """Pixels that a thread keeps, forward and backward."""
    i = inputs
    plans = (
        json.loads(torch.ops.gn_override.explain(i.X, i.gamma, i.beta, i.groups, backward))["plan"]
        for backward in (False, True)
    )
    return {int(re.search(r"pixels_kept=(\d+)", plan).group(1)) for plan in plans}


def fits(scheme: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether the scheme has some plan of one of CASES: copies have no less than 4 bytes."""
    copied = dtype.itemsize * (1 + (case.C % 2 == 0)) >= 4
    return copied and (scheme == "cooperative" or not case.name.startswith("larger_than_chip"))


def test_registers_take_groups_of_whole_vectors(pin):
    """What test_scheme skips of them: which cases they take, with how many pixels a thread."""
    taken = {}
    for threads in (64, 160, 640):
        pin("registers", 0, 0, threads)
        for case in CASES:
            inputs = make_inputs(case, "cuda", torch.bfloat16)
            if rules(inputs) == {"registers"}:
                taken[case.name, threads] = kept(inputs)
    assert {name for name, _ in taken} == {"many_tiles", "samples", "few_pixels"}
    assert set().union(*taken.values()) == {1, 2, 4}


def assert_same_bits(these: Results, those: Results) -> None:
    for name in RESULTS:
        this, that = getattr(these, name), getattr(those, name)
        assert this is that is None or torch.equal(this, that), name


@all_pins
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_scheme(pin, dtypes, case, pins):
    inputs = make_inputs(case, "cuda", *dtypes)
    pin(*pins)
    if rules(inputs) != {pins[0]}:
        pytest.skip(f"no {pins[0]} plan of such a geometry")
    with expect_calls("cuda", True, True):
        ours = native(inputs)
    assert_parity(ours, inputs)
    assert_same_bits(native(inputs), ours)


@pytest.mark.parametrize("scheme", ["registers", "resident", "cooperative", "two_pass"])
def test_graph_replay(pin, scheme):
    inputs = make_inputs(case_of(scheme), "cuda", torch.bfloat16)
    pin(scheme, 0, 0, 0)
    assert rules(inputs) == {scheme}
    eager = native(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = native(inputs)
    for _ in range(3):
        for name in RESULTS:
            getattr(captured, name).fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, eager)


def test_unknown_scheme_is_refused():
    known = "registers, resident, cooperative, two_pass"
    for name in ("fast", "aten", "channels_last"):
        with pytest.raises(ValueError, match=f'{known} or "" for any, got "{name}"'):
            torch.ops.gn_override.pin_plans(name, 0, 0, 0)


@pytest.mark.parametrize(
    "pin",
    [
        ("resident", -1, 0, 0),
        ("resident", 0, -1, 0),
        ("cooperative", 0, 0, 415),
        ("cooperative", 0, 0, 544),
        ("registers", 0, 0, 672),
        ("", 0, 0, -32),
    ],
    ids=str,
)
def test_geometries_that_no_kernel_has_are_refused(pin):
    with pytest.raises(ValueError, match=r"whole warps of at most \d+ threads"):
        torch.ops.gn_override.pin_plans(*pin)


@pytest.mark.parametrize("scheme", ["resident", "cooperative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_scheme_takes_most_shapes(pin, scheme, dtype):
    """What test_scheme skips is not all there is: some geometry of the scheme takes each case."""
    for case in CASES:
        inputs = make_inputs(case, "cuda", dtype)
        pin(scheme, 0, 0, 0)
        assert (rules(inputs) == {scheme}) == fits(scheme, case, dtype), case.name
