"""A user's program that takes every public name: `mypy --strict` reads it, a test runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gn_override
import gn_override.functional
import gn_override.nn


@gn_override.disabled()
def stock(x: Tensor) -> Tensor:
    y: Tensor = nn.GroupNorm(4, 16)(x)
    return y


def main() -> None:
    version: str = gn_override.__version__
    gn_override.disable()
    gn_override.enable()
    on: bool = gn_override.is_enabled()
    gn_override.set_inductor(True)
    gn_override.set_autocast("float32")

    x: Tensor = torch.randn(2, 16, 5, 3).to(memory_format=torch.channels_last)
    with gn_override.enabled():
        y: Tensor = stock(x)
    fused = gn_override.nn.GroupNorm(4, 16, activation="silu", device="cpu", dtype=torch.float32)
    z: Tensor = fused.forward(x)
    z = gn_override.functional.group_norm(x, 4, fused.weight, fused.bias, activation="relu")

    explanation: gn_override.Explanation = gn_override.explain(x, 4, backward=True)
    declined: list[gn_override.Declined] = list(explanation.declined)
    reasons: list[str] = [text for row in declined for text in row.failed]
    served: bool = explanation.served
    explanation = gn_override.explain(fused, input=x)

    report: gn_override.Report = gn_override.report()
    calls: int = sum(report.calls.values())
    owners: list[gn_override.Owner] = list(report.owners)
    packages: list[str] = [owner.package for owner in owners]

    fusion: gn_override.Fusion = gn_override.fuse(nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()))
    pairs: list[gn_override.FusedPair] = list(fusion.fused)
    skipped: list[gn_override.SkippedNorm] = list(fusion.skipped)
    print(version, on, y.shape, z.shape, reasons, served, calls, packages, len(pairs), len(skipped))


if __name__ == "__main__":
    main()
