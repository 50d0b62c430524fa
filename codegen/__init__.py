"""What is made from codegen/group_norm.yaml.

generate     the operator registration of gn_override: run ``python -m codegen`` in the root of the
             repository to write native/binding/generated, ``python -m codegen --check`` to compare
upstream     the same kernels as a change of PyTorch: tools/stage_upstream.py makes the branch
"""
