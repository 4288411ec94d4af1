"""Modules of random statements, as source text: Dynamo traces functions that have a source file."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path

from torch import nn

_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = 32


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.r = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, x, scale=1.0):
        return self.r(F.gelu(self.l(x))) * scale


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.r = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        y = self.l(x)
        torch._dynamo.graph_break()
        return self.r(torch.tanh(y))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o(((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2).reshape(b, t, D))


def attend(x, y):
    return (x @ y.mT).softmax(-1) @ y


@torch.compiler.disable
def disabled(module, x):
    return module(x)


def linear():
    return nn.Linear(D, D)


def matrix(*size):
    return nn.Parameter(torch.randn(*size) / 6)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D, 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
"""
#: Statements of ``__init__`` and of ``forward``: p is a part of the module, a and b are earlier results, all [2, 8, D].
_STATEMENTS = (
    ("p = linear()", "p(a)"),
    ("p = nn.Linear(D, D, bias=False)", "torch.relu(p(a)) + b"),
    ("p = linear()", "p(p(a))"),
    ("p = linear()", "p(input=a)"),
    ("p = linear()", "p.forward(a)"),
    ("p = linear()", "p(a.detach()) + a"),
    ("p = linear()", "p(a[:, :3])[:, :1].expand_as(a) + b"),
    ("p = linear()", "p(a.transpose(0, 1)).transpose(0, 1)"),
    ("p = linear()", "torch.stack([p(x) for x in a.unbind(1)], 1)"),
    ("p = linear()", "a.clone().add_(p(a))"),
    ("p = linear()", "p(a) if self.training else a"),
    ("p = linear()", "disabled(p, a)"),
    ("p = Mlp()", "p(a, scale=0.5)"),
    ("p = Mlp()", "disabled(p, a)"),
    ("p = Attention()", "a + p(b)"),
    ("p = Attention()", "disabled(p, a)"),
    ("p = Breaks()", "p(a)"),
    ("p = Mlp()", "checkpoint(p, a, use_reentrant=False)"),
    ("p = Mlp()", "checkpoint(p, a, use_reentrant=True)"),
    ("p = Mlp()", "checkpoint(lambda x: p(x) + x, a, use_reentrant=False)"),
    ("p = linear()", "checkpoint(lambda x: p(torch.tanh(p(x))), a, use_reentrant=False)"),
    ("p = linear()", "checkpoint(F.linear, a, p.weight, p.bias, use_reentrant=False)"),
    ("", "checkpoint(attend, a, b, use_reentrant=False)"),
    ("p = Breaks()", "checkpoint(p, a, use_reentrant=False)"),
    (
        "p = Attention()",
        "checkpoint(lambda x: checkpoint(p, attend(x, x), use_reentrant=False), a, use_reentrant=False)",
    ),
    ("p = matrix(D, D)", "a @ p"),
    ("p = matrix(D, D)", "a @ p.t()"),
    ("p = matrix(D, D)", "(p @ a.mT).mT"),
    ("p = matrix(D, D)", "torch.einsum('btd,od->bto', a, p)"),
    ("p = matrix(D, D)", "torch.einsum('btd,do->bto', a, p)"),
    ("p = matrix(2, D, D)", "a @ p[0] + b @ p[1].t()"),
    ("p = linear()", "F.linear(a, p.weight)"),
    ("p = linear()", "F.linear(a, p.weight, bias=p.bias) + p(b)"),
    ("p = linear()", "torch.addmm(p.bias, a.reshape(-1, D), p.weight.t()).view(a.shape)"),
    ("p = linear()", "torch.matmul(a, p.weight.mT)"),
    ("p = linear()", "torch.cat([F.linear(a, w) for w in p.weight.chunk(2, 0)], -1)"),
    ("p = linear()", "torch.func.functional_call(p, dict(p.named_parameters()), (a,))"),
    ("p = nn.utils.parametrizations.weight_norm(linear())", "p(a)"),
    ("p = nn.ModuleList([linear(), Scale()])", "F.linear(a, p[0].weight * p[1].scale)"),
    ("", "attend(a, b)"),
    ("", "torch.bmm(torch.bmm(a, b.transpose(1, 2)).softmax(-1), b)"),
    ("", "torch.baddbmm(a, (a @ b.mT) * 0.1, b, alpha=0.5)"),
    ("", "torch.einsum('bij,bjd->bid', torch.einsum('bid,bjd->bij', a, b).softmax(-1), a)"),
    ("p = nn.Linear(D, 2 * D)", "F.silu(p(a).chunk(2, -1)[0]) * b"),
    ("p = nn.Linear(2 * D, D)", "p(torch.cat([a, b], -1))"),
    ("p = nn.Sequential(linear(), nn.ReLU(), linear())", "p(a)"),
    ("p = nn.ModuleList(linear() for _ in range(3))", "sum(layer(a) for layer in p)"),
    ("p = nn.ModuleDict({'x': linear(), 'y': linear()})", "sum(layer(b) for layer in p.values())"),
    ("p = nn.ModuleList([linear(), linear()]); p[1].weight = p[0].weight", "p[1](torch.tanh(p[0](a)))"),
    ("p = nn.LayerNorm(D)", "p(a + b)"),
    ("p = nn.Conv1d(D, D, 1)", "p(a.mT).mT"),
    ("p = nn.MultiheadAttention(D, 2, batch_first=True)", "p(a, b, b, need_weights=False)[0]"),
    ("p = linear()", "F.scaled_dot_product_attention(p(a), b, b)"),
)
#: Lines before a statement.
_BEFORE = ("", "", "", "torch._dynamo.graph_break()", "print(end='')")


def source(seed: int) -> str:
    """Return the text of a file with a class ``Net`` of two to seven random statements."""
    rng = random.Random(seed)
    init, forward, results = list[str](), ["z = torch.tanh(x) * 0.5"], ["x", "z"]
    for number in range(rng.randint(2, 7)):
        made, computed = rng.choice(_STATEMENTS)
        a, b, part = rng.choice(results[-3:]), rng.choice(results), f"self.p{number}"
        names = {"a": a, "b": b, "p": part}
        words = [_renamed(text, names) for text in (made, computed)]
        init += [words[0]] if made else []
        forward += [line for line in (rng.choice(_BEFORE),) if line]
        forward.append(f"h{number} = {words[1]}")
        results.append(f"h{number}")
    init.append("self.head = linear()")
    forward.append(f"return self.head({' + '.join(results[2:][-3:])})")
    return _HEAD + _indented(init) + "\n    def forward(self, x):\n" + _indented(forward)


def _indented(lines: list[str]) -> str:
    return "".join(f"        {line}\n" for line in lines)


def _renamed(text: str, names: dict[str, str]) -> str:
    """Put names in place of the placeholders, which are names of one letter."""
    return re.sub(r"(?<![\w.'])([abp])(?![\w'=])", lambda match: names[match[1]], text)


def module(seed: int, folder: Path) -> type[nn.Module]:
    """Write the file of ``seed`` to ``folder`` and return its class."""
    path = folder / f"random_{seed}.py"
    path.write_text(source(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded  # pickles name it
    spec.loader.exec_module(loaded)
    net: type[nn.Module] = loaded.Net
    return net
