"""Train a small channels-last network with the override off and on, and compare the losses.

    python tools/convergence.py --output convergence-cpu          # some minutes
    python tools/convergence.py --device cuda --output convergence-h200
    python tools/convergence.py --from benchmarks/results/convergence-cpu.json \
        --plot docs/convergence-cpu.svg

The task is made up: say which of ten smooth patterns is in a noisy image, new images at every
step. A run is a ResNet with GroupNorm from a seed. Of each dtype (bfloat16: network and images in
it) there are stock runs from two seeds, and a run with the override on from the first seed, which
sees the same images. Losses are smoothed over WINDOW steps. It is good if ours is never further
from the stock run of its seed than the two stock runs are from each other at most, and ends below
half of the loss of guessing.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import progress
import results
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gn_override
from gn_override import _picture

CLASSES = 10
SIZE = 16
BATCH = 32
WINDOW = 20
DTYPES = ("float32", "bfloat16")
# (name, override on, seed)
RUNS = (("stock", False, 0), ("stock, another seed", False, 1), ("gn_override", True, 0))


class Block(nn.Module):
    """A residual block with the norms before the convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        Block(32),
        nn.Conv2d(32, 48, 2, stride=2),
        Block(48),
        nn.GroupNorm(8, 48),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    ).to(memory_format=torch.channels_last)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch and its labels: the pattern of a class, which is always the same, under noise."""
    fixed = torch.Generator().manual_seed(2)
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=fixed)
    patterns = F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear")
    label = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return patterns[label] * 0.4 + noise, label


def train(device: str, dtype: str, on: bool, seed: int, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    net = network().to(device, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    with gn_override._switched(on):
        torch.ops.gn_override.reset_counters()
        for _ in range(steps):
            image, label = images(generator)
            image = image.to(device, getattr(torch, dtype), memory_format=torch.channels_last)
            loss = F.cross_entropy(net(image).float(), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ours = sum(gn_override.report().calls.values())
    norms = sum(isinstance(module, nn.GroupNorm) for module in net.modules())
    assert ours == 2 * norms * steps * on, f"{ours} calls by our kernels"
    return losses


def smooth(losses: list[float]) -> list[float]:
    """The mean of each WINDOW steps that follow each other."""
    return [
        sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, len(losses) - WINDOW + 1, WINDOW)
    ]


def verdict(curves: dict[str, list[float]]) -> dict[str, Any]:
    """Of the losses of RUNS: the largest differences, smoothed, and whether they are good."""
    stock, other, ours = (smooth(curves[name]) for name, *_ in RUNS)
    between_seeds = max(abs(a - b) for a, b in zip(stock, other, strict=True))
    to_stock = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    return {
        "between two seeds": round(between_seeds, 4),
        "ours to stock": round(to_stock, 4),
        "last loss": round(ours[-1], 4),
        "good": to_stock <= between_seeds and ours[-1] < math.log(CLASSES) / 2,
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """The smoothed curves, a panel for each dtype. Needs matplotlib, of the extra `plot`."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = list(zip(("-", ":", "--"), (_picture.INK, _picture.LOSS, _picture.GAIN), strict=True))
    with matplotlib.rc_context(_picture.STYLE):
        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.patch.set_alpha(0)
        panels = figure.subplots(1, len(content["rows"]), sharey=True, squeeze=False)[0]
        for panel, row in zip(panels, content["rows"], strict=True):
            panel.patch.set_alpha(0)
            for (name, losses), (style, colour) in zip(row["losses"].items(), lines, strict=True):
                curve = smooth(losses)
                at = [WINDOW * (i + 0.5) for i in range(len(curve))]
                panel.plot(at, curve, style, color=colour, label=name)
            panel.set_title(row["dtype"], fontsize=9)
            panel.set_xlabel("step")
        panels[0].set_ylabel(f"loss, mean of {WINDOW} steps")
        panels[0].legend(frameon=False)
        machine = content.get("gpu") or content["cpu"]
        _picture.save(figure, f"{machine}, torch {content['torch']}, {content['commit']}", path)


def main() -> int:
    parser = results.Parser(__doc__, again=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=300, help="default %(default)s")
    parser.add_argument("--plot", type=_picture.path, help="picture to draw")
    arguments = parser.parse_args()
    if arguments.steps < WINDOW:
        parser.error(f"--steps is less than the {WINDOW} that are smoothed over")

    if arguments.source:
        content = arguments.content
    else:
        rows = []
        with progress.Progress(len(DTYPES) * len(RUNS)) as bar:
            for dtype in DTYPES:
                losses = {}
                for name, on, seed in RUNS:
                    bar.step(f"{dtype}, {name}")
                    run = train(arguments.device, dtype, on, seed, arguments.steps)
                    losses[name] = [round(loss, 4) for loss in run]
                rows.append({"dtype": dtype} | verdict(losses) | {"losses": losses})
        content = results.machine(arguments.device) | {"steps": arguments.steps, "rows": rows}
        if arguments.output:
            print(results.write(arguments.output, content, arguments.folder))
    for row in content["rows"]:
        print(", ".join(f"{key} {value}" for key, value in row.items() if key != "losses"))
    if arguments.plot:
        draw(content, arguments.plot)
    return int(not all(row["good"] for row in content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
