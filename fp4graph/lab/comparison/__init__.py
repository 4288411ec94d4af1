"""The parts of fp4graph.compare: calls, checks and times the training; keeps the record, the result and its files."""
