"""Command line: python -m gn_override [report | explain SHAPE --groups G ... | demo]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gn_override",
        description="Channels-last group normalisation for PyTorch. Without a command: report.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("report", help="versions, switch, dispatcher, calls")

    explain = commands.add_parser("explain", help="where one call goes, and why")
    explain.add_argument("shape", help="N x C x sizes, for example 2x320x64x64")
    explain.add_argument("--groups", type=int, required=True, help="number of groups")
    explain.add_argument("--dtype", default="float32", help="fp32, fp64, fp16 or bf16")
    explain.add_argument("--param-dtype", help="of weight and bias; default: --dtype")
    explain.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if any")
    explain.add_argument("--activation", default="identity", help="fused with the norm: silu, ...")
    explain.add_argument("--backward", action="store_true", help="the backward of the call")
    explain.add_argument(
        "--layout", choices=("channels_last", "contiguous"), default="channels_last"
    )

    demo = commands.add_parser("demo", help="real networks with the override off and on")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if any")
    demo.add_argument("--quick", action="store_true", help="small networks, a few seconds")

    options = parser.parse_args(arguments)

    # Each command imports what it needs and no more.
    if options.command == "demo":
        from gn_override import _demo

        return _demo.main(device=options.device, quick=options.quick)
    if options.command == "explain":
        import torch

        from gn_override import _explain

        try:
            dtype = _explain.parse_dtype(options.dtype)
            explanation = _explain.explain_shape(
                _explain.parse_shape(options.shape),
                options.groups,
                device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                dtype=dtype,
                param_dtype=_explain.parse_dtype(options.param_dtype or options.dtype),
                channels_last=options.layout == "channels_last",
                activation=options.activation,
                backward=options.backward,
                measure_copy=True,
            )
        except ValueError as error:
            explain.error(str(error))
        print(explanation)
        return 0

    from gn_override import _report

    print(_report.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
