"""Gradient checkpointing that is switched on repeatedly.

transformers then adds another hook to the embedding and removes none; fp4graph drops the repeated hooks, for each of
which Dynamo would recompile.
"""

import pytest
import torch

import fp4graph
from fp4graph.model.runtime import runtime_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_switching_checkpointing_on_again_compiles_nothing(llama):
    model, tokens = fp4graph.apply(llama(), "tetrajet", backend="eager"), torch.arange(24)[None]
    captured = runtime_of(model).capture.sites
    counts = []
    for _ in range(3):
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
        model(input_ids=tokens).logits.sum().backward()
        counts.append(len(captured))
    assert counts[0] == counts[2] > 0
    assert len(model.get_input_embeddings()._forward_hooks) == 1
