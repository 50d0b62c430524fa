"""python -m codegen [--check]"""

from __future__ import annotations

import argparse
import sys

from codegen import generate, model


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after an error or, with --check, drift."""
    parser = argparse.ArgumentParser(
        prog="python -m codegen",
        description="Writes native/binding/generated from codegen/group_norm.yaml.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print a diff and fail where the files in the tree differ",
    )
    options = parser.parse_args(arguments)
    try:
        parsed = model.load()
    except model.CodegenError as error:
        print(f"codegen: {error}", file=sys.stderr)
        return 1
    if options.check:
        diff = generate.check(parsed)
        if diff:
            print(diff, end="")
            print("codegen: the generated files are not up to date; run: python -m codegen")
        return 1 if diff else 0
    for path in generate.write(parsed):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
