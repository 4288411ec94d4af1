"""Hand-written kernels of quantizers, one ordered list of them, and the operators of torch that they are behind.

They compute the same bits as :mod:`fp4graph.numerics`, in one pass over the tensor. What techniques change is left to
the tensor code, which Inductor compiles. :mod:`fp4graph.kernels.rows` is the list that lowering asks.
"""
