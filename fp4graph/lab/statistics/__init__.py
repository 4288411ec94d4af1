"""What quantization does to every operand, measured while a model trains."""
