"""report(): versions, switch, who owns the ops in the dispatcher, and where calls went."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gn_override import _autocast, _library
from gn_override._inductor import is_active

# The dispatch keys that decide where a group normalisation call goes, for each op.
_KEYS = {
    "group_norm": (
        "CPU",
        "CUDA",
        "AutogradCPU",
        "AutogradCUDA",
        "AutocastCPU",
        "AutocastCUDA",
        "CompositeImplicitAutograd",
    ),
    "native_group_norm": ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "Meta"),
    "native_group_norm_backward": ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "Meta"),
}
# Where PyTorch's is wrong after our norm: native/binding/avg_pool.cpp.
_KEYS_OF_POOLS = {"avg_pool2d_backward": ("CUDA",)}

# "CUDA (inactive): registered at FILE:LINE :: (signature) [ boxed ]" of _dispatch_dump, and
# "CUDA: registered at FILE:LINE [kernel]" of _dispatch_dump_table.
_LINE = re.compile(
    r"^(?P<key>\w+)(\[alias\])?(?P<inactive> \(inactive\))?: "
    r"registered at (?P<where>.+?)( ::.*| \[[^\[\]]*\])?$",
    re.MULTILINE,
)
_OURS = re.compile(r"(^|/)native/binding/")
_TORCH = re.compile(r"(^|/)(aten/src/ATen|torch/csrc|site-packages/torch|dist-packages/torch)/")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)")


@dataclass(frozen=True)
class Owner:
    """The kernel that the dispatcher runs for one op and dispatch key."""

    op: str  # without "aten::"
    key: str
    package: str  # "gn_override", "torch", or the package or file that registered on top of both
    where: str  # file:line of the registration
    below: tuple[str, ...]  # file:line of the registrations that it displaced, latest first


@dataclass(frozen=True)
class Report:
    """What is loaded and what it did. ``str()`` of it is meant for people."""

    version: str
    enabled: bool
    inductor: bool  # torch.compile's Inductor leaves calls to our kernels
    autocast: str  # what CUDA autocast makes of half precision: "float32", "preserve"
    torch_built: str  # the torch that the extension was built against
    torch_running: str
    cuda_built: str | None  # CUDA version of that torch; None for a build without CUDA
    cuda_running: str | None
    cuda_architectures: tuple[str, ...]  # compute capabilities built for: "9.0", ...
    backends: tuple[str, ...]  # "cpu", "cuda"
    gpus: tuple[str, ...]  # names and compute capabilities of the visible GPUs
    cpu_instruction_set: str  # what the CPU kernels use on this machine
    kept_bytes: int  # of freed CPU outputs for later ones, those that the system took included
    compiler: str
    owners: tuple[Owner, ...]
    calls: Mapping[str, int]  # "native_group_norm cuda two_pass" -> calls that our kernels ran
    declined: Mapping[str, int]  # "native_group_norm cuda aten: <why>" -> calls left to PyTorch

    def __str__(self) -> str:
        cuda = "no CUDA backend"
        if "cuda" in self.backends:
            cuda = f"CUDA {self.cuda_built} for {' '.join(self.cuda_architectures)}"
        inductor = (
            "leaves calls to these kernels" if self.inductor else "compiles group norms itself"
        )
        autocast = (
            "half precision stays as it is on CUDA"
            if self.autocast == "preserve"
            else "float32 from half precision on CUDA, as PyTorch's"
        )
        kept = f", up to {self.kept_bytes / 1e6:.0f} MB kept for outputs" if self.kept_bytes else ""
        lines = [
            f"gn_override {self.version}: {'on' if self.enabled else 'off'}",
            f"built     torch {self.torch_built}, {cuda}, {self.compiler}",
            f"running   torch {self.torch_running}, CUDA {self.cuda_running or 'none'}",
            f"GPUs      {', '.join(self.gpus) or 'none'}",
            f"CPU       {self.cpu_instruction_set} kernels{kept}",
            f"Inductor  {inductor}",
            f"autocast  {autocast}",
            "",
            "in the dispatcher:",
        ]
        width = max((len(f"{owner.op} {owner.key}") for owner in self.owners), default=0)
        for owner in self.owners:
            name = f"{owner.op} {owner.key}".ljust(width)
            lines.append(f"  {name}  {owner.package.ljust(11)}  {owner.where}")
            lines += [f"  {'':{width}}  over         {where}" for where in owner.below]
        strangers = {owner.package for owner in self.owners} - {"gn_override", "torch"}
        if strangers:
            lines.append(f"  another package takes the calls: {', '.join(sorted(strangers))}")
        for title, counts in (("calls taken:", self.calls), ("calls declined:", self.declined)):
            lines += ["", title]
            lines += [f"  {count:>10}  {name}" for name, count in counts.items()] or ["  none"]
        return "\n".join(lines)


@_library.untraced()
def report() -> Report:
    """The state of the override in this process: versions, switch, dispatcher, counters."""
    built = _library.build_info()
    native = json.loads(torch.ops.gn_override.build_info())
    counters: dict[str, int] = dict(torch.ops.gn_override.counters())
    ours = {name: count for name, count in sorted(counters.items()) if " aten" not in name}
    keys = dict(_KEYS)
    if built["conditions"]["STOCK_DROPS_LAYOUT"] and "cuda" in built["backends"]:
        keys |= _KEYS_OF_POOLS
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            gpus.append(f"{torch.cuda.get_device_name(index)} ({major}.{minor})")
    return Report(
        version=built["version"],
        enabled=torch.ops.gn_override.is_enabled(),
        inductor=is_active(),
        autocast=_autocast.mode(),
        torch_built=built["torch"],
        torch_running=torch.__version__,
        cuda_built=built["torch_cuda"],
        cuda_running=torch.version.cuda,
        cuda_architectures=tuple(built["cuda_archs"]),
        backends=tuple(built["backends"]),
        gpus=tuple(gpus),
        cpu_instruction_set=native.get("cpu_instruction_set", "?"),
        kept_bytes=torch.ops.gn_override.kept_bytes(),
        compiler=native.get("compiler", "?"),
        owners=tuple(owner for op in keys for owner in _owners(op, keys[op])),
        calls=ours,
        declined={name: count for name, count in sorted(counters.items()) if name not in ours},
    )


def _owners(op: str, keys: Sequence[str]) -> list[Owner]:
    """Who runs `op`, key by key, and what each registration displaced."""
    name = f"aten::{op}"
    displaced: dict[str, list[str]] = {}
    active: dict[str, str] = {}
    for match in _LINE.finditer(torch._C._dispatch_dump(name)):
        if match["inactive"]:
            displaced.setdefault(match["key"], []).append(match["where"])
        else:
            active[match["key"]] = match["where"]
    # Alias keys appear in the dump only. What an alias means for a plain key is in the table.
    for match in _LINE.finditer(torch._C._dispatch_dump_table(name)):
        active[match["key"]] = match["where"]
    return [
        Owner(
            op=op,
            key=key,
            package=package_of(active[key]),
            where=active[key],
            below=tuple(displaced.get(key, ())),
        )
        for key in keys
        if key in active
    ]


def package_of(where: str) -> str:
    """The package that a registration at file:line belongs to; else that file:line, for short."""
    path = where.replace("\\", "/")
    if _OURS.search(path) or path.startswith(f"{Path(__file__).parent.as_posix()}/"):
        return "gn_override"
    if _TORCH.search(path):
        return "torch"
    installed = _INSTALLED.search(path)
    if installed:
        return installed[1]
    # It runs from a source tree. No attribute is asked for: lazy modules import what that needs.
    file = where.rpartition(":")[0]
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__dict__", {}).get("__file__") == file:
            return name.partition(".")[0]
    return path.rsplit("/", 1)[-1]
