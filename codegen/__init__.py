"""Generates the operator registration of gn_override from codegen/group_norm.yaml.

Run ``python -m codegen`` in the root of the repository to write
native/binding/generated, ``python -m codegen --check`` to compare only.
"""
