"""Command line: python -m gn_override [report | demo | bench | explain SHAPE ... | doctor]."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_EPILOG = """\
examples:
  python -m gn_override                      what is loaded, and who owns the operators
  python -m gn_override demo --quick         two networks with the override off and on
  python -m gn_override bench --plot b.svg   the kernels on this machine
  python -m gn_override explain 2x320x64x64 --groups 32 --dtype bf16
  python -m gn_override doctor               what is wrong, and how to mend it

exit status: 0 all is well; 1 demo or bench found a wrong result or a call that ran elsewhere, or
has no such device, or doctor found something; 2 wrong arguments; 130 interrupted.
"""
_DEVICE = "default: the GPU if any"


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m gn_override",
        description="Channels-last group normalisation for PyTorch. Without a command: report.",
        epilog=_EPILOG,
        formatter_class=style,
    )
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str, *examples: str) -> argparse.ArgumentParser:
        lines = "\n".join(f"  python -m gn_override {name} {e}".rstrip() for e in examples)
        made = commands.add_parser(
            name,
            help=text,
            description=text,
            parents=[as_json],
            epilog=f"examples:\n{lines}",
            formatter_class=style,
        )
        made.set_defaults(parser=made)
        return made

    command("report", "versions, switch, dispatcher, calls", "", "--json")

    demo = command("demo", "real networks with the override off and on", "--quick", "--device cpu")
    demo.add_argument("--device", choices=("cpu", "cuda"), help=_DEVICE)
    demo.add_argument("--quick", action="store_true", help="small networks")

    bench = command(
        "bench", "our kernels beside a copy and PyTorch's own", "", "--seconds 0.1", "--plot b.svg"
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help=_DEVICE)
    bench.add_argument(
        "--seconds", type=float, default=1.0, help="of measuring a row; default %(default)s"
    )
    bench.add_argument("--plot", metavar="FILE", help="draw the speed-ups: FILE.svg or FILE.png")

    explain = command(
        "explain",
        "where one call goes, and why",
        "2x320x64x64 --groups 32 --dtype bf16",
        "1x128x1024x1024 --groups 32 --dtype fp16 --device cuda --backward",
        "64x256x56x56 --groups 32 --activation relu",
    )
    explain.add_argument("shape", help="N x C x sizes, for example 2x320x64x64")
    explain.add_argument("--groups", type=int, required=True, help="number of groups")
    explain.add_argument("--dtype", default="float32", help="fp32, fp64, fp16 or bf16")
    explain.add_argument("--param-dtype", help="of weight and bias; default: --dtype")
    explain.add_argument("--device", choices=("cpu", "cuda"), help=_DEVICE)
    explain.add_argument(
        "--activation", default="identity", help="fused: relu, silu, gelu or gelu_tanh"
    )
    explain.add_argument("--backward", action="store_true", help="the backward of the call")
    explain.add_argument(
        "--layout",
        choices=("channels_last", "contiguous"),
        default="channels_last",
        help="of the input; default %(default)s",
    )

    doctor = command(
        "doctor",
        "what is wrong with the installation, and how to mend it",
        "",
        "--import flag_gems",
    )
    doctor.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this too, as your program does: may it take the operators?",
    )
    return parser


def to_json(value: Any) -> str:
    """The dataclasses of report(), explain() and demo as JSON, with their properties."""

    def plain(part: Any) -> Any:
        if dataclasses.is_dataclass(part):
            properties = [n for n, v in vars(type(part)).items() if isinstance(v, property)]
            names = [field.name for field in dataclasses.fields(part)] + properties
            return {name: getattr(part, name) for name in names}
        if isinstance(part, Mapping):
            return dict(part)
        raise TypeError(f"{type(part).__name__} is no JSON")

    return json.dumps(value, default=plain, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    options = _parser().parse_args(arguments)

    # Each command imports what it needs and no more.
    if options.command == "doctor":
        from gn_override import _doctor

        if not all(options.modules):
            options.parser.error("--import: the name of a module")
        return _doctor.main(modules=options.modules, as_json=options.json)
    if options.command == "demo":
        from gn_override import _demo

        return _demo.main(device=options.device, quick=options.quick, as_json=options.json)
    if options.command == "bench":
        from gn_override import _bench, _picture

        try:
            plot = None if options.plot is None else _picture.path(options.plot)
        except argparse.ArgumentTypeError as error:
            options.parser.error(f"--plot: {error}")
        if not 0 < options.seconds < math.inf:
            options.parser.error("--seconds: more than 0, and finite")
        return _bench.main(
            device=options.device, seconds=options.seconds, plot=plot, as_json=options.json
        )
    if options.command == "explain":
        import torch

        from gn_override import _explain

        try:
            dtype = _explain.parse_dtype(options.dtype)
            param_dtype = dtype
            if options.param_dtype is not None:
                param_dtype = _explain.parse_dtype(options.param_dtype)
            explanation = _explain.explain_shape(
                _explain.parse_shape(options.shape),
                options.groups,
                device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                dtype=dtype,
                param_dtype=param_dtype,
                channels_last=options.layout == "channels_last",
                activation=options.activation,
                backward=options.backward,
                measure_copy=True,
            )
        except ValueError as error:
            options.parser.error(str(error))
        print(to_json(explanation) if options.json else explanation)
        return 0

    from gn_override import _report

    report = _report.report()
    print(to_json(report) if options.json else report)
    return 0


def run() -> int:
    """main() for a shell: any stdout will do, of any encoding or closed, and output that nobody
    reads any more ends it without a traceback, as Ctrl-C does."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(run())
