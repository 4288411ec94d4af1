"""Hand-written kernels of the plain quantizer, the one that a spec describes without any technique.

They compute what :mod:`fp4graph.numerics` computes, bit for bit, in one pass over the tensor; everything that
techniques change is left to the tensor code, which Inductor compiles.
"""
