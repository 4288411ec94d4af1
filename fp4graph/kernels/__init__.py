"""Hand-written kernels of the plain quantizer: the one that a spec describes without any technique.

They compute the same bits as :mod:`fp4graph.numerics`, in one pass over the tensor. What techniques change is left to
the tensor code, which Inductor compiles. The engine calls :mod:`fp4graph.kernels.operators`.
"""
