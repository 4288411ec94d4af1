"""A script like nanoGPT's train.py and sample.py, written anew."""

import math
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph

pytestmark = pytest.mark.long


@dataclass
class Config:
    vocab_size = 64
    block_size = 16
    n_layer = 2
    n_head = 2
    n_embd = 64


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)]
        return self.c_proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            logits, _ = self(tokens[:, -self.config.block_size :])
            tokens = torch.cat([tokens, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        return tokens


def batch(step):
    start = torch.randint(0, 64, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(17)) % 64
    return tokens[:, :-1], tokens[:, 1:]


def train(path, policy, steps, *, resume=False, order="apply, compile"):
    """train.py: the two lines are those with ``fp4graph``."""
    torch.manual_seed(0)
    checkpoint = torch.load(path, weights_only=False) if resume else None
    model = GPT(Config(**checkpoint["model_args"]) if checkpoint else Config())
    if checkpoint:
        state = {name.removeprefix("_orig_mod."): value for name, value in checkpoint["model"].items()}
        model.load_state_dict(state if policy == "tetrajet" else fp4graph.strip(state))
    if order == "apply, compile":
        fp4graph.apply(model, policy, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    raw_model = model
    if order != "plain":
        model = torch.compile(model, backend="eager")
    if order == "compile, apply":
        fp4graph.apply(model, policy, backend="eager")
    if order != "plain":
        fp4graph.prepare_optimizer(model, optimizer)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses = []
    for step in range(checkpoint["iter_num"] if checkpoint else 0, steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 10))
        _, loss = model(*batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    entries = {"optimizer": optimizer.state_dict(), "model_args": asdict(Config()), "iter_num": steps}
    torch.save({"model": raw_model.state_dict(), **entries}, path)
    return model, losses


@pytest.mark.parametrize("order", ["apply, compile", "compile, apply"])
def test_train_resume_sample(order, tmp_path, products, said):
    model, losses = train(tmp_path / "whole.pt", "tetrajet", 6, order=order)
    assert losses[-1] < losses[0]
    assert set(products.values()) == {6}
    assert len(products) == 2 * 4
    train(tmp_path / "ckpt.pt", "tetrajet", 3, order=order)
    _, rest = train(tmp_path / "ckpt.pt", "tetrajet", 6, resume=True, order=order)
    assert rest == losses[3:]
    assert not said()

    plain = GPT(Config())  # sample.py
    state = torch.load(tmp_path / "ckpt.pt", weights_only=False)["model"]
    plain.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state.items()})
    assert plain.eval().generate(torch.tensor([[1]]), 20).shape == (1, 21)

    products.clear()
    torch.manual_seed(1)
    tokens = model.eval().generate(torch.tensor([[1]]), 20)
    assert set(products.values()) == {20}  # its own method, which calls the model
    torch.manual_seed(1)
    assert torch.equal(tokens, fp4graph.apply(plain, "tetrajet", backend="eager").generate(torch.tensor([[1]]), 20))


def test_orders_are_the_same_and_the_policy_is_felt(tmp_path):
    orders = ("apply, compile", "compile, apply", "plain")
    one, other, plain = (train(tmp_path / "ckpt.pt", "tetrajet", 4, order=order)[1] for order in orders)
    assert one == other
    assert one != plain
    assert one == pytest.approx(plain, rel=0.1)


def test_state_of_techniques_is_stripped(tmp_path):
    train(tmp_path / "ckpt.pt", "tetrajet-qema", 2)
    state = torch.load(tmp_path / "ckpt.pt", weights_only=False)["model"]
    with pytest.raises(RuntimeError, match="_fp4graph"):
        GPT(Config()).load_state_dict(state)
    GPT(Config()).load_state_dict(fp4graph.strip(state))
