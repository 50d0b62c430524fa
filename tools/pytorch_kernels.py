"""The CUDA kernels of group norm of a PyTorch checkout, beside the torch that runs.

    python tools/bench.py --pytorch CHECKOUT ...
    python tools/sweep.py --pytorch CHECKOUT ...

So PyTorch's newest kernels, which take channels-last tensors as they are, can be measured without a
build of PyTorch: its group_norm_kernel.cu is compiled as an extension (tools/pytorch_kernels.cu),
against the headers of the torch that runs, and called as native_group_norm calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peers
import results
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

sys.path.append(str(results.ROOT))
from codegen.verify import NVCC_FLAGS, find_nvcc

KERNELS = Path("aten", "src", "ATen", "native", "cuda", "group_norm_kernel.cu")


def source(checkout: Path) -> dict[str, str]:
    """What a results file says of the kernels: their file, and git's name for its content."""
    content = (checkout / KERNELS).read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"file": KERNELS.as_posix(), "git blob": blob}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """--pytorch, for benchmarks."""

    def checkout(text: str) -> Path:
        if not (Path(text) / KERNELS).is_file():
            raise argparse.ArgumentTypeError(f"{text} has no {KERNELS.as_posix()}")
        return Path(text)

    parser.add_argument(
        "--pytorch",
        type=checkout,
        metavar="CHECKOUT",
        help="also time the CUDA kernels of this checkout of PyTorch",
    )


def build(checkout: Path) -> None:
    """Compile the checkout's kernels for this machine's GPU, and load them as
    torch.ops.gn_override_pytorch_kernels. Needs nvcc and takes minutes."""
    compiler = find_nvcc()
    if compiler is None:
        raise SystemExit("--pytorch needs nvcc: set CUDA_HOME")
    target = "sm_90"
    if torch.cuda.is_available():
        target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    includes = [str((checkout / KERNELS).resolve().parent), *include_paths()]
    flags = ["-O3", "-std=c++20", "-DAT_PER_OPERATOR_HEADERS", *NVCC_FLAGS]
    flags += ["-shared", "-cudart=shared", "-Xcompiler=-fPIC", f"-arch={target}"]
    flags += [f"-I{path}" for path in includes]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}"]
    libraries += [f"-l{name}" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda")]
    unit = str(Path(__file__).with_suffix(".cu"))
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "kernels.so"))
        subprocess.run([compiler, *flags, unit, *libraries, "-o", library], check=True)
        torch.ops.load_library(library)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
        ops = torch.ops.gn_override_pytorch_kernels
        Y, mean, rstd = ops.forward(X, gamma, beta, G, peers.EPS)
        ctx.save_for_backward(X, mean, rstd, gamma)
        result: Tensor = Y
        return result

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        dX, dgamma, dbeta = torch.ops.gn_override_pytorch_kernels.backward(dY, *ctx.saved_tensors)
        return dX, None, dgamma, dbeta


def norm(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
    """Y of a dense X [N, C, ...], by the kernels that build() has loaded."""
    result: Tensor = _GroupNorm.apply(X, G, gamma, beta)
    return result
