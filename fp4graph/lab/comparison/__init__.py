"""The parts of fp4graph.compare: calling the training, its check and timing, the record, the result and its files."""
