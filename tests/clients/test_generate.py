"""``generate`` of transformers after a step of training: few graphs, and the tokens of the uncompiled model."""

import pytest
import torch

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.clients import tiny
from tests.helpers.steps import descend
from tests.helpers.training import prepared


def trained(make):
    torch.manual_seed(0)
    model = fp4graph.apply(make(), "tetrajet", backend="eager")
    tokens = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    descend(lambda: model(input_ids=tokens, labels=tokens).loss, prepared(model), 1)
    return model.eval()


def generated(model, length=5, padding=0, **options):
    tokens = torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(length))
    tokens[0, :padding] = 0
    torch.manual_seed(1)
    return model.generate(tokens, attention_mask=(tokens != 0).long(), max_new_tokens=12, min_new_tokens=12, **options)


def graphs(model):
    """Return a list that grows by one with each graph compiled."""
    capture, seen = runtime_of(model).capture, []
    inner = capture._inner
    capture._inner = lambda graph, inputs: seen.append(graph) or inner(graph, inputs)
    return seen


@pytest.mark.parametrize("make", [tiny.gpt2, pytest.param(tiny.qwen3, marks=pytest.mark.exhaustive)])
def test_generate_compiles_few_graphs_and_gives_the_tokens_of_the_uncompiled_model(make, products, policy_warnings):
    model, uncompiled = trained(make), trained(make)
    compiled = graphs(model)

    layers = 4 if make is tiny.gpt2 else 7
    for most, calls in (
        # a graph for prompts and one for tokens, and again when lengths change
        (4, [{}, {"do_sample": True}, {"length": 9}, {"length": 7, "do_sample": True, "top_k": 5}]),
        (2, [{"num_beams": 2}]),  # another batch size
        # masks of padding
        (3, [{"length": 9, "padding": 3}, {"length": 8, "padding": 1, "do_sample": True}]),
        (2, [{"cache_implementation": "static"}]),  # another kind of cache
        (0, [{"length": 6}, {"length": 10, "padding": 2}, {"num_beams": 2, "length": 8}]),  # no new graph
    ):
        known = len(compiled)
        for options in calls:
            products.clear()
            tokens = generated(model, **options)
            assert sum(products.values()) == 12 * 2 * layers
            products.clear()
            with torch.compiler.set_stance("force_eager"):
                assert torch.equal(tokens, generated(uncompiled, **options))
            assert sum(products.values()) == 12 * 2 * layers
        assert len(compiled) <= known + most, calls
    ran_uncompiled, *again = policy_warnings()
    assert "force_eager" in ran_uncompiled  # the stance of the uncompiled model
    assert all("compiles again and again" in text and "size" in text for text in again)  # of lengths 5, 1 and 9


def test_the_quantized_model_generates_other_tokens_than_the_plain_one(products):
    model = trained(tiny.qwen3)
    quantized = generated(model)
    products.clear()
    with fp4graph.bypass(model):
        assert not torch.equal(quantized, generated(model))
    assert not products
