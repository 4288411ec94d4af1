"""Experts' matrices that indices pick for each token are never multiplied in silent high precision."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError

PRODUCTS = {
    "version": 1,
    "rules": [{"name": "all", "match": {"op": ["linear", "matmul", "grouped"]}, "quantize": {"block": 16}}],
}
LINEAR = {"version": 1, "rules": [{"name": "all", "match": {"op": "linear"}, "quantize": {"block": 16}}]}
PICKS = {
    "w[ids]": lambda w, ids: w[ids],
    "index_select": lambda w, ids: w.index_select(0, ids),
    "second axis": lambda w, ids: w.transpose(0, 1)[:, ids].transpose(0, 1),
    "embedding": lambda w, ids: F.embedding(ids, w.flatten(1)).unflatten(1, (16, 16)),
    "gather": lambda w, ids: w.gather(0, ids[:, None, None].expand(-1, 16, 16)),
}
X, IDS = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1, 1, 3, 0])


class Gathers(nn.Module):
    def __init__(self, pick) -> None:
        super().__init__()
        self.pick = pick
        self.first, self.w = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x, ids):
        return torch.bmm(self.pick(self.w, ids), self.first(x)[..., None])[..., 0]


@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("policy", [PRODUCTS, LINEAR], ids=["products", "linear"])
@pytest.mark.parametrize("name", PICKS)
def test_gathered_matrices_are_refused(name, policy, stance):
    model = fp4graph.apply(Gathers(PICKS[name]), policy, backend="eager")
    expected = pytest.raises(CaptureError, match=r"copy of its expert's matrix.*grouped product")
    with torch.compiler.set_stance(stance), warnings.catch_warnings(action="ignore"), expected:
        model(X, IDS)


class GathersActivations(Gathers):
    def forward(self, x, ids):
        keys = torch.einsum("tk,enk->etn", self.first(x), self.w)  # activations [E, T, N]
        return torch.bmm(self.pick(keys, ids % 4), x[:, :, None]) if self.pick is PICKS["w[ids]"] else keys


def test_gathered_activations_are_a_product_as_any_other():
    policy = {**PRODUCTS, "rules": [{**PRODUCTS["rules"][0], "match": {"op": "matmul"}}]}
    sites = fp4graph.explain(GathersActivations(PICKS["w[ids]"]), policy, (X, IDS)).sites
    assert [site.op for site in sites if site.quantized] == ["matmul"]
