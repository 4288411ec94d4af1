"""A script written like nanoGPT's train.py and sample.py."""

import math

import pytest
import torch

import fp4graph
from tests.clients import tiny


def gpt():
    return tiny.gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def batch(step):
    start = torch.randint(0, 64, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(17)) % 64
    return {"input_ids": tokens, "labels": tokens}


def train(path, steps, *, resume=False, order="apply, compile"):
    """Train as train.py does, with the two lines of ``fp4graph``."""
    checkpoint = torch.load(path, weights_only=False) if resume else None
    model = gpt()
    if checkpoint:
        model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in checkpoint["model"].items()})
    if order == "apply, compile":
        fp4graph.apply(model, "tetrajet", backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    raw_model = model
    if order != "plain":
        model = torch.compile(model, backend="eager")
    if order == "compile, apply":
        fp4graph.apply(model, "tetrajet", backend="eager")
    if order != "plain":
        fp4graph.prepare_optimizer(model, optimizer)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses = []
    for step in range(checkpoint["iter_num"] if checkpoint else 0, steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 10))
        loss = model(**batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": steps}, path)
    return model, losses


def sample(model):
    return model.eval().generate(torch.tensor([[1]]), max_new_tokens=20, min_new_tokens=20, do_sample=True)


@pytest.mark.parametrize("order", ["apply, compile", pytest.param("compile, apply", marks=pytest.mark.exhaustive)])
def test_train_resume_sample(order, tmp_path, products, policy_warnings):
    model, losses = train(tmp_path / "whole.pt", 6, order=order)
    assert losses[-1] < losses[0]
    assert set(products.values()) == {6}
    assert len(products) == 2 * 4
    train(tmp_path / "ckpt.pt", 3, order=order)
    _, rest = train(tmp_path / "ckpt.pt", 6, resume=True, order=order)
    assert rest == losses[3:]
    assert not policy_warnings()

    plain = gpt()  # sample.py
    state = torch.load(tmp_path / "ckpt.pt", weights_only=False)["model"]
    plain.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state.items()})
    products.clear()
    torch.manual_seed(1)
    tokens = sample(model)
    assert tokens.shape == (1, 21)
    assert set(products.values()) == {20}  # generate() calls the model
    torch.manual_seed(1)
    assert torch.equal(tokens, sample(fp4graph.apply(plain, "tetrajet", backend="eager")))


def test_losses_do_not_depend_on_the_order_of_apply_and_compile(tmp_path):
    orders = ("apply, compile", "compile, apply", "plain")
    one, other, plain = (train(tmp_path / "ckpt.pt", 4, order=order)[1] for order in orders)
    assert one == other
    assert one != plain
    assert one == pytest.approx(plain, rel=0.1)
