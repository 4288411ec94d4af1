"""Hand-written kernels that quantize operands, the ordered list of the kernels, and the torch operators that run them.

A kernel computes the same bits as :mod:`fp4graph.numerics`, in one pass over the tensor. Stages that techniques change
run as tensor code, which Inductor compiles. Lowering chooses a kernel from the list in :mod:`fp4graph.kernels.rows`.
"""
