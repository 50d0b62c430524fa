"""Memory of large CPU outputs: what is kept when they are freed, for whom, and when not."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mappings
import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from torch.profiler import ProfilerActivity, profile

import gn_override

MB = 1 << 20
LEAST = 32 * MB  # from here on glibc takes each block from the system
ROOM = os.sysconf("SC_PHYS_PAGES") // 16 * os.sysconf("SC_PAGE_SIZE")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="nothing is kept elsewhere"),
    pytest.mark.skipif(ROOM < 8 * LEAST, reason="this machine has too little memory"),
    pytest.mark.skipif(
        os.environ.get("GN_OVERRIDE_KEEP_MEMORY") == "0", reason="nothing is kept, as asked for"
    ),
    pytest.mark.skipif(
        any(resource.getrlimit(of)[0] >= 0 for of in (resource.RLIMIT_AS, resource.RLIMIT_DATA)),
        reason="nothing is kept where the address space is limited",
    ),
]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Each test begins and ends without."""
    with gn_override.disabled():
        assert kept() == 0
    yield
    with gn_override.disabled():
        assert kept() == 0


def kept() -> int:
    return torch.ops.gn_override.kept_bytes()


def make_input(megabytes: int = 32) -> torch.Tensor:
    X = torch.randn(1, 64, megabytes * 64, 64)
    assert X.nbytes == megabytes * MB
    return X.to(memory_format=torch.channels_last)


def of_bytes(count: int) -> torch.Tensor:
    """A result with so many bytes; no page of them is touched."""
    Y = norm(torch.randn(1, 4, 2, 2).to(memory_format=torch.channels_last))
    Y.untyped_storage().resize_(count)
    return Y


def norm(X: torch.Tensor) -> torch.Tensor:
    return F.group_norm(X, 4)


def run_here(tmp_path: Path, *lines: str, **environ: str) -> str:
    """What a program prints that has X, norm and kept, in a process of its own."""
    start = (
        "import os, resource, torch, gn_override",
        "from torch.nn.functional import group_norm",
        "torch.set_num_threads(1)  # its pool does not survive a fork",
        "kept = torch.ops.gn_override.kept_bytes",
        "X = torch.randn(1, 64, 2048, 64).to(memory_format=torch.channels_last)",
        "norm = lambda: group_norm(X, 4)",
    )
    return run_python("-c", "\n".join(start + lines), cwd=tmp_path, **environ).stdout


def lent(area: tuple[int, int]) -> int:
    """Bytes of the memory at these addresses that the system may take when it likes."""
    return 1024 * sum(int(fields["LazyFree"].split()[0]) for _, fields in mappings.areas(*area))


def area_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_serves_the_next_output_of_its_size():
    X = make_input()
    first = norm(X)
    expected, area = first.clone(), area_of(first)
    del first
    assert kept() == gn_override.report().kept_bytes == X.nbytes
    assert "kernels, up to 34 MB kept for outputs\n" in str(gn_override.report())
    again = norm(X)
    assert area_of(again) == area
    assert kept() == 0
    assert "kept" not in str(gn_override.report())
    assert torch.equal(again, expected)


def test_gradients_are_served_too():
    X = make_input().requires_grad_()
    gamma = torch.randn(64, requires_grad=True)
    addresses, gradients = [], []
    for _ in range(2):
        Y = F.group_norm(X, 4, gamma)
        (dX,) = torch.autograd.grad(Y.square().sum(), X)
        addresses.append({Y.data_ptr(), dX.data_ptr()})
        gradients.append(dX.clone())
        del Y, dX
        assert kept() == 2 * X.nbytes
    assert addresses[0] == addresses[1]
    assert torch.equal(*gradients)


def test_what_lives_is_not_handed_out():
    X = make_input()
    results = [norm(X) for _ in range(3)]
    view = results[0][:, 3:5, 7]
    assert len({Y.data_ptr() for Y in results}) == 3
    del results
    assert kept() == 2 * X.nbytes
    assert norm(X).data_ptr() != view.untyped_storage().data_ptr()
    del view
    assert kept() == 3 * X.nbytes


def test_only_for_as_many_bytes():
    X, larger = make_input(32), make_input(40)
    norm(larger)
    assert kept() == larger.nbytes
    Y = norm(X)
    assert kept() == larger.nbytes
    del Y
    assert kept() == larger.nbytes + X.nbytes


def test_from_32_MB_on():
    """What is smaller stays with malloc."""
    for count, expected in ((LEAST - 1, 0), (LEAST, LEAST)):
        Y = of_bytes(count)
        del Y
        assert kept() == expected


def test_the_system_may_have_it():
    """It does not count where memory runs short; and it is safe from the first write on."""
    X = make_input()
    Y = norm(X)
    area = area_of(Y)
    assert lent(area) == 0
    del Y
    assert lent(area) > 0.9 * X.nbytes
    Y = norm(X)
    assert area_of(Y) == area
    assert lent(area) == 0


def test_a_sixteenth_of_the_memory_at_most():
    outputs = [of_bytes(ROOM // 5 + more) for more in range(7)]
    sizes = [Y.untyped_storage().nbytes() for Y in outputs]
    while outputs:
        del outputs[0]
    fit = next(count for count in range(1, 8) if sum(sizes[-count - 1 :]) > ROOM)
    assert kept() == sum(sizes[-fit:])  # the latest
    Y = of_bytes(ROOM + 1)
    before = kept()
    del Y
    assert kept() == before


def test_off():
    """Switching off gives all back; what is freed then, or was made then, is not kept."""
    X = make_input()
    norm(X)
    before = norm(X)
    assert kept() == 0
    norm(X)
    assert kept() == X.nbytes
    with gn_override.disabled():
        assert kept() == 0
        del before
        assert kept() == 0
        during = gn_override.functional.group_norm(X, 4, activation="silu")
    del during
    assert kept() == 0


def test_a_mapping_that_is_given_back_is_gone():
    X = make_input(64)
    Y = norm(X)
    begin, _ = area_of(Y)
    del Y
    middle = begin + 32 * MB, begin + 32 * MB + 1
    assert list(mappings.areas(*middle))
    with gn_override.disabled():
        assert not list(mappings.areas(*middle))


def test_not_by_request(tmp_path):
    for value, expected in (("0", 0), ("1", LEAST)):
        program = "norm(); print(gn_override.report().calls, kept())"
        printed = run_here(tmp_path, program, GN_OVERRIDE_KEEP_MEMORY=value)
        assert printed == f"{{'native_group_norm cpu channels_last': 1}} {expected}\n"


def memory_events(X: torch.Tensor, made_before: bool) -> list[int]:
    """What the profiler is told of a norm's result that comes and goes, in MB."""
    Y = F.group_norm(X, 4) if made_before else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        Y = F.group_norm(X, 4) if Y is None else Y
        del Y
    counts = [round(event.self_cpu_memory_usage / MB) for event in seen.events()]
    return [count for count in counts if count]


@pytest.mark.parametrize("made_before", [False, True])
def test_profilers_see_what_they_see_in_pytorch(made_before):
    X = make_input()
    with gn_override.disabled():
        stock = memory_events(X, made_before)
    assert stock == ([] if made_before else [32, -32])
    norm(X)
    assert kept() == X.nbytes
    assert memory_events(X, made_before) == stock


def test_poison_is_not_evaded(poison):
    """Where PyTorch is to fill new memory, all memory is new."""
    norm(make_input())
    assert kept() == 0
    poison.value = False
    norm(make_input())
    assert kept() == LEAST


def test_from_several_threads():
    """Each has what is its own, and in the end as many blocks are there as were in use at once."""
    inputs = [make_input() for _ in range(4)]
    expected = [norm(X) for X in inputs]
    right = []

    def run(X: torch.Tensor, expected: torch.Tensor) -> None:
        for _ in range(6):
            right.append(torch.equal(norm(X), expected))

    threads = [
        threading.Thread(target=run, args=both) for both in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 24 and all(right)
    assert 0 < kept() <= 4 * LEAST


def test_a_fork_ends_the_keeping_of_what_was_there(tmp_path):
    """The system could not have pages that two processes share."""
    printed = run_here(
        tmp_path,
        "norm(); before = norm(); norm()",
        "assert kept() == X.nbytes",
        "child = os.fork()",
        "assert kept() == 0",
        "expected = before.sum()",
        "del before",
        "assert kept() == 0",
        "after = norm()",
        "assert after.sum() == expected",
        "del after",
        "assert kept() == X.nbytes",
        "if child: assert os.waitpid(child, 0)[1] == 0; print('both')",
        "else: os._exit(0)",
    )
    assert printed == "both\n"


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_not_where_addresses_are_counted(tmp_path, limit):
    printed = run_here(
        tmp_path,
        "before = norm(); norm()",
        "assert kept() == X.nbytes",
        f"resource.setrlimit(resource.{limit}, (1 << 45, 1 << 45))",
        "del before",
        "print(kept() == X.nbytes)",
        "with gn_override.disabled(): print(kept())",
        "norm(); print(kept())",
    )
    assert printed.split() == ["True", "0", "0"]


def test_storages_do_what_they_do_in_pytorch():
    X = make_input()
    expected = norm(X).clone()

    def use() -> None:
        lazy = norm(X)
        other = torch._lazy_clone(lazy)
        assert other.untyped_storage()._cdata != lazy.untyped_storage()._cdata
        lazy.zero_()  # which makes the copy
        assert torch.equal(other, expected)

        grown = norm(X)
        grown.untyped_storage().resize_(2 * X.nbytes)
        assert torch.equal(grown, expected)
        grown.untyped_storage().resize_(0)
        grown.untyped_storage().resize_(X.nbytes)
        assert torch.equal(grown.copy_(X), X)

        shared = norm(X).share_memory_()
        assert shared.is_shared()
        alike = (
            shared,
            torch.from_numpy(norm(X).numpy()),
            torch.from_dlpack(norm(X)),
            copy.deepcopy(norm(X)),
            pickle.loads(pickle.dumps(norm(X))),
        )
        assert all(torch.equal(Y, expected) for Y in alike)

    use()
    first = kept()
    assert first > X.nbytes
    use()
    assert kept() == first  # nothing is lost
