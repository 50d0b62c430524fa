"""What the build asks of the installed PyTorch; setup.py turns each answer into a macro."""

from __future__ import annotations

from pathlib import Path

from codegen import model


def evaluate(path: Path = model.SOURCE, torch: model.Definitions | None = None) -> dict[str, bool]:
    """The conditions of the YAML file, each answered for the installed PyTorch.

    Compile with ``-DGN_OVERRIDE_<name>=<0 or 1>`` for each. Raises model.CodegenError where the
    file asks for something that the installed PyTorch does not have.
    """
    torch = torch or model.installed_torch()
    formulas = torch.derivative_formulas
    return {
        condition.name: any(
            condition.contains in formula for formula in formulas[condition.derivative_of]
        )
        for condition in model.load(path, torch).conditions
    }
