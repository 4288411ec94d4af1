"""Statistics of quantized operands, measured while a model trains."""
