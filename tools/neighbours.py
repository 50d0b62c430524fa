"""What is next to the group norms of a compiled model, and whether it only moves a tensor.

generated() asks Inductor's scheduler while it compiles: of every kernel that it generates, what the
kernel reads, writes and computes. launched() looks at a profile, which also has the kernels that
libraries launch inside a call, such as cuDNN's nchwToNhwc.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config, ir

import gn_override  # noqa: F401  (defines the operators)

NORMS = (
    torch.ops.aten.native_group_norm.default,
    torch.ops.gn_override.group_norm_act.default,
)
_MOVES = {"load", "store", "output"}  # what a kernel does that computes nothing
_OURS = "gn_override::"
_LAYOUT_KERNEL = re.compile(
    r"nchwToNhwc|nhwcToNchw|convertTensor|tensorTransform|[tT]ransposeK|direct_copy|Memcpy DtoD"
)


def _is_copy(node: Any) -> bool:
    """Whether Inductor generates the node as a copy; a part of a concatenation is none."""
    body = getattr(node, "_body", None)
    in_place = isinstance(node.node.get_layout(), ir.NonOwningLayout) if body else False
    return body is not None and not in_place and set(body.op_counts) == _MOVES


def _count(scheduled: Sequence[Any]) -> Counter[str]:
    """Of one graph that Inductor has scheduled: calls of the kernels, copies, copies at norms."""
    makers = {
        buffer.get_name(): node
        for group in scheduled
        for node in group.get_nodes()
        for buffer in node.get_outputs()
    }
    reads = {name: {read.name for read in node.read_writes.reads} for name, node in makers.items()}
    copies = {name for name, node in makers.items() if _is_copy(node)}
    norms = {
        name for name, node in makers.items() if getattr(node.node, "op_overload", None) in NORMS
    }
    results = {
        name
        for name, node in makers.items()
        if isinstance(node.node, ir.MultiOutput) and reads[name] & norms
    }
    at_norms = {name for norm in norms for name in copies & reads[norm]}
    at_norms |= {name for name in copies if reads[name] & results}
    for name in sorted(at_norms):
        buffer = makers[name].node
        print(f"copy at a norm: {buffer.get_layout()} of {reads[name]}", file=sys.stderr)
    return Counter(norms=len(norms), copies=len(copies), copies_at_norms=len(at_norms))


def generated(step: Callable[[], object]) -> dict[str, int]:
    """Run a step that is compiled at its first call, and count what Inductor generates for it.

    Returns:
        graphs, graph_breaks: of Dynamo.
        norms: group norms that are calls of this package's kernels.
        copies: generated kernels that only copy a tensor, into another layout or not.
        copies_at_norms: those of them that write a norm's operand or read its result.

    Raises:
        RuntimeError: there is no such call.
    """
    found: Counter[str] = Counter()

    def look(scheduled: Sequence[Any]) -> Sequence[Any]:
        found.update(_count(scheduled))
        return scheduled

    counters.clear()
    with config.patch(_post_fusion_custom_pass=look, force_disable_caches=True):
        step()
    if not found["norms"]:
        raise RuntimeError("no group norm in the compiled graph is a call of gn_override's kernels")
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    names = ("norms", "copies", "copies_at_norms")
    return {"graphs": graphs, "graph_breaks": breaks} | {name: found[name] for name in names}


def launched(step: Callable[[], object]) -> dict[str, int]:
    """Profile a step on a GPU, and count the kernels that only change a layout: see count()."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    return count([event["name"] for event in sorted(kernels, key=lambda event: event["ts"])])


def count(names: Sequence[str]) -> dict[str, int]:
    """Of the names of kernels, in the order in which they ran.

    Returns:
        kernels: all of them.
        layout_kernels: those that libraries have for changing a layout, and plain copies.
        layout_kernels_at_norms: those of them directly before or after one of ours.

    Raises:
        RuntimeError: none of them is ours.
    """
    ours = [_OURS in name for name in names]
    if not any(ours):
        raise RuntimeError("no kernel of gn_override in the profile")
    layout = [at for at, name in enumerate(names) if _LAYOUT_KERNEL.search(name)]
    at_norms = [at for at in layout if any(ours[max(0, at - 1) : at + 2])]
    beside = [
        name[:100]
        for at, name in enumerate(names)
        if not ours[at] and any(ours[max(0, at - 1) : at + 2])
    ]
    for title, seen in (("next to a norm", beside), ("layout", [names[at][:100] for at in layout])):
        for name, times in Counter(seen).most_common():
            print(f"{title}: {times} x {name}", file=sys.stderr)
    return {
        "kernels": len(names),
        "layout_kernels": len(layout),
        "layout_kernels_at_norms": len(at_norms),
    }
