"""PEFT: adapters on a quantized base, their files, and generation through a PeftModel."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.clients import tiny

peft = pytest.importorskip("peft", reason="needs fp4graph[clients]")

pytestmark = pytest.mark.long
TOKENS = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(3))


def adapted(base):
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, config)


def trained(model, applied, steps=2):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.AdamW(trainable, lr=1e-2))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
@pytest.mark.parametrize("applied", ["the PeftModel", "its base"])
def test_adapters_train_generate_and_load(policy, applied, tmp_path, products, said, moved):
    model = adapted(tiny.qwen3())
    inner = model if applied == "the PeftModel" else model.get_base_model()
    fp4graph.apply(inner, policy, backend="eager")
    changed = moved(model)
    losses = trained(model, inner)
    assert losses[1] < losses[0]
    assert changed() == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert runtime_of(inner).count == 2
    assert len(products) == 14  # the base layers; adapters stay in high precision
    assert set(products.values()) == {2}

    prompt = TOKENS[:, :6]
    generate = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "min_new_tokens": 8}
    tokens = model.eval().generate(input_ids=prompt, **generate)
    assert set(products.values()) == {2 + 8}
    # PeftModel.generate calls the model inside, not itself.
    assert len(said()) == (1 if applied == "the PeftModel" else 0)

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 2 * 3 * 2
    assert all("lora_" in name and "fp4graph" not in name for name in saved)
    again = peft.PeftModel.from_pretrained(tiny.qwen3(), tmp_path).eval()
    before = model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())
    fp4graph.apply(again.get_base_model(), policy, backend="eager")
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        torch.testing.assert_close(again(input_ids=TOKENS).logits, expected, rtol=0, atol=0)
    assert torch.equal(again.generate(input_ids=prompt, **generate), tokens)


def test_adapters_that_come_later_are_refused_until_the_policy_is_applied_again():
    base = fp4graph.apply(tiny.qwen3(), "tetrajet", backend="eager")
    model = adapted(base)
    with pytest.raises(fp4graph.CaptureError, match=r"added to the model after .* call fp4graph\.apply"):
        model(input_ids=TOKENS)
    fp4graph.apply(base, "tetrajet", backend="eager")
    trained(model, base)
