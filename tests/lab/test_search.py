"""The search: exact against brute force; its policies give the chosen formats; a kill loses no score."""

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

import fp4graph
from fp4graph.lab.candidates import Candidates, solve, total
from fp4graph.lab.linears import bits_per_element, bits_per_weight, call_of, fp4_flops, groups_of
from fp4graph.lab.policy_writer import Treatment, written
from fp4graph.lab.search import search
from fp4graph.lab.sensitivity import Score
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.technique.operands import GROUPS, Gemm
from fp4graph.technique.site import BlockPosition
from tests.helpers.commands import run
from tests.helpers.processes import PATIENCE, python

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "bf16")
LEAVES = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out", "mlp.0", "mlp.2")
NAMES = [f"blocks.{block}.{leaf}" for block in range(2) for leaf in LEAVES]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(2 * x)  # v is a sibling by its name alone
        return self.out(torch.softmax(q @ k.mT, -1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(32, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model_of(depth=2):
    torch.manual_seed(0)
    return Model(depth).eval()


def loss(model, batch):
    return F.cross_entropy(model(batch), torch.arange(len(batch)) % 8)


def batches(count=2):
    return [torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def scores_of(model, seed, formats=FORMATS[:3]):
    """Return random scores for every linear but the head."""
    generator = random.Random(seed)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head"]
    return [
        Score(f"{name}, {gemm}", (name,), tuple(map(str, GROUPS[gemm])), fmt, generator.random(), 0.0)
        for fmt in formats for name in names for gemm in Gemm
    ]  # fmt: skip


@pytest.mark.parametrize("quantile", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("kind", ["one", "two", "forbidden"])
def test_knapsack_is_exact_on_12_sites_and_3_formats(kind, quantile):
    generator = np.random.default_rng(int(1000 * quantile) + len(kind))
    costs, use, other = (generator.exponential(size=(12, 3)) for _ in range(3))

    def sums(table):  # [3¹²]: of every choice of one option in each row
        return functools.reduce(np.add.outer, table).ravel()

    allowed = generator.random((12, 3)) < (0.7 if kind == "forbidden" else 1)
    allowed[:, 0] = True
    limits = [(use, quantile), (other, 0.3)][: 2 if kind == "two" else 1]
    limits = [(table, float(np.quantile(sums(table), share))) for table, share in limits]
    feasible = sums(~allowed) == 0
    for table, most in limits:
        feasible &= sums(table) <= most
    choice = solve(costs, allowed, limits)
    assert (choice is not None) == feasible.any()
    if choice is not None:
        assert feasible[np.ravel_multi_index(choice, (3,) * 12)]
        assert total(costs, choice) == pytest.approx(sums(costs)[feasible].min(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "by"),
    [
        ({"bits": 5.0}, ("site", "gemm")),
        pytest.param({"fp4_flops": 0.6}, ("site",), marks=pytest.mark.long),
        pytest.param({"bits": 7.0, "fp4_flops": 0.4}, ("site",), marks=pytest.mark.long),
    ],
)
def test_search_is_exact_against_brute_force(bounds, by):
    """All choices are tried. Each of two blocks has four groups: q with k and v, out, and both linears of the MLP."""
    model, formats = model_of(), ("nvfp4", "mxfp8", "bf16")
    scores = scores_of(model, 3, formats[:2])
    found = search(model, loss, batches(1), formats=formats, by=by, scores=scores, simplify=False, **bounds)
    parts = [["attn.q_proj", "attn.k_proj", "attn.v_proj"], ["attn.out"], ["mlp.0"], ["mlp.2"]]
    groups = [[f"blocks.{n}.{name}" for name in part] for n in range(2) for part in parts]
    assert [list(each.modules) for each in found.choices] == groups
    size = 2 * [3 * 32 * 32, 32 * 32, 32 * 64, 32 * 64]
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "bf16": 16.0}
    # The linears on 4·8 tokens, the two products of attention in each block, and the head on 4 rows.
    whole = 3 * (2 * 32 * sum(size) + 2 * 2 * 2 * 4 * 8 * 8 * 32 + 2 * 4 * 32 * 8)
    gemms = ("fprop",) if "gemm" in by else ("fprop", "dgrad", "wgrad")  # bits leave dgrad and wgrad exact
    cost = {(fmt, number): sum(s.increase for s in scores if s.policy == fmt and s.sites[0] in group
                               and s.operands[0].split(".")[0] in gemms)
            for fmt in formats for number, group in enumerate(groups)}  # fmt: skip
    results = {}
    for choice in itertools.product(formats, repeat=8):
        used = sum(n * bits[fmt] for n, fmt in zip(size, choice, strict=True)) / sum(size)
        share = sum(len(gemms) * 2 * 32 * n for n, fmt in zip(size, choice, strict=True) if fmt == "nvfp4") / whole
        if used <= bounds.get("bits", np.inf) + 1e-9 and share >= bounds.get("fp4_flops", 0.0) - 1e-9:
            results[choice] = sum(cost[fmt, number] for number, fmt in enumerate(choice)), used, share
    best = min(results, key=lambda choice: results[choice][0])
    assert tuple(each.formats[0] for each in found.choices) == best
    assert found.predicted == pytest.approx(results[best][0])
    reached = dict(zip(("bits", "fp4_flops"), results[best][1:], strict=True))
    assert {each.name: each.reached for each in found.budgets} == pytest.approx({key: reached[key] for key in bounds})


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_policy_gives_every_operand_what_was_chosen(seed, tmp_path):
    model, formats = model_of(3), (*FORMATS, "tetrajet")
    candidates = Candidates.of(model, loss, batches()[0], formats, apart=True)
    generator = np.random.default_rng(seed)
    pool = generator.integers(4, size=(3, 3))  # three treatments; the format with techniques takes whole sites
    pool[0] = 4 if seed % 2 else 3
    rows = pool[generator.integers(3, size=len(candidates.groups))]
    if seed > 1:  # alike for one kind of layer in all blocks
        kinds = [group[0].split(".", 2)[2] for group in candidates.groups]
        rows = np.array([pool[sorted(set(kinds)).index(kind) % 3] for kind in kinds])
    file = tmp_path / "policy.yaml"
    choice = np.array([candidates.options.tolist().index(row.tolist()) for row in rows])
    file.write_text(candidates.text(choice, np.zeros(candidates.allowed.shape), "some", "x", ["why"]))
    policy = fp4graph.load_policy(file)
    expected = {m: row for group, row in zip(candidates.groups, rows, strict=True) for m in group}
    specs = {name: dict(fp4graph.load_policy(name).rules[0].specs) for name in formats if name != "bf16"}
    for site in fp4graph.explain(model, policy, (batches()[0],)).sites:
        for operand, spec in site.operands.items():
            column = expected[site.module][list(Gemm).index(operand.gemm)] if site.module in expected else 3
            assert spec == specs.get(formats[column], {}).get(operand), (site.module, operand)
    assert len(policy.rules) <= 3
    if seed > 1:
        assert len(file.read_text().splitlines()) < 40
    assert run("check", file).code == 0


def test_block_ranges_are_written_as_globs():
    names = [f"blocks.{n}.{part}" for n in range(12) for part in ("attn.qkv", "mlp.0", "mlp.2")]
    some = {f"blocks.{n}.mlp.0": 0.25 for n in (2, 3, 4, 10, 11)}
    fp4, fp8 = (dataclasses.replace(fp4graph.load_policy(name).rules[0], name=name) for name in ("nvfp4", "mxfp8"))
    others = Treatment(fp4, {name: 0.0 for name in names if name not in some})
    blocks = {f"blocks.{n}": BlockPosition("blocks.*", n, 12) for n in range(12)}
    ops = dict.fromkeys([*names, "head"], ("linear",))
    text = written("x", "y", ["why"], [others, Treatment(fp8, some)], ops=ops, blocks=blocks, bases={})
    first, last = yaml.safe_load(text)["rules"]
    assert sorted(first["match"]["module"]) == ["blocks.1[01].mlp.0", "blocks.[2-4].mlp.0"]
    assert last["match"] == {"op": "linear", "block": True}
    assert '"blocks.[2-4].mlp.0"  # +0.75' in text


def test_siblings_experts_and_tied_layers_are_grouped():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            pairs = (nn.ModuleDict({"w1": nn.Linear(4, 4), "w2": nn.Linear(4, 4)}) for _ in range(2))
            self.experts = nn.ModuleList(pairs)
            self.a, self.b, self.far, self.tied = (nn.Linear(4, 4) for _ in range(4))
            self.tied.weight = self.far.weight

        def forward(self, x):
            for expert in self.experts:
                x = x + expert["w2"](expert["w1"](x))
            return self.a(x) + self.b(x) + self.tied(self.far(x + 1))

    model = Experts()
    call = call_of(model, lambda m, x: m(x).sum(), torch.ones(2, 4))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert groups_of(model, names, call.inputs) == (
        ("experts.0.w1", "experts.1.w1"), ("experts.0.w2", "experts.1.w2"), ("a", "b"), ("far", "tied"),
    )  # fmt: skip


def test_bits_per_element_count_the_scales():
    specs = {
        4.25: QuantSpec(), 4.5: QuantSpec(block=16, scale=ScaleSpec("e4m3")), 8.25: QuantSpec(element="e4m3"),
        8 + 32 / 128**2: QuantSpec(element="e4m3", block=(128, 128), scale=ScaleSpec("fp32")),
        4 + 32 / 64: QuantSpec(block="row", scale=ScaleSpec("fp32")), 4: QuantSpec(block="tensor"),
    }  # fmt: skip
    assert [bits_per_element(spec, 64) for spec in specs.values()] == [*specs]
    assert bits_per_element(None, 64) == 16


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.twice = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32)), Twice()

    def forward(self, x):
        return self.twice(x @ self.a.T + x @ self.b.T)


class Twice(nn.Linear):
    def __init__(self):
        super().__init__(32, 32)

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize(
    ("model", "inputs", "high", "bits"),
    [
        (Raw(), [(4, 32)], "twice", (2 * 4.25 + 16) / 3),
        (nn.MultiheadAttention(32, 2, batch_first=True), [(2, 4, 32)] * 3, "out_proj", (3 * 4.25 + 16) / 4),
        (nn.MultiheadAttention(32, 2, kdim=32, vdim=32), [(2, 4, 32)] * 3, "out_proj", (3 * 4.25 + 16) / 4),
    ],
    ids=["raw parameters", "one parameter", "three parameters"],
)
def test_matrices_of_one_shape_in_one_module_all_count_and_each_once(model, inputs, high, bits):
    rules = [{"match": {"module": high}, "keep": "high"}, {"match": {"op": "linear"}, "quantize": {"block": 32}}]
    inputs = tuple(map(torch.randn, inputs))
    sites = fp4graph.explain(model, {"version": 1, "rules": rules}, inputs).sites
    assert bits_per_weight(sites) == pytest.approx(bits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a finite budget"),
        ({"bits": 3.0}, "bits per weight at most 3; the nearest is 4.25"),
        ({"fp4_flops": 0.99}, "FLOPs in FP4 at least 0.99; the nearest is 0.9"),
        ({"bits": 5, "formats": ("nvfp5", "bf16")}, "no policy 'nvfp5' is shipped.*did you mean"),
        ({"bits": 5, "formats": ("nvfp4-best", "bf16")}, "techniques of the whole model"),
        ({"bits": 5, "formats": ("nvfp4-te", "bf16")}, "format 'nvfp4-te' fits no site"),
        ({"bits": 5, "batches": [batches()[0] * float("nan")]}, "loss of batch 0 is nan"),
        ({"bits": 5, "batches": []}, "no batches"),
        ({"keep": True, "bits": 6}, "leave keep out"),
        ({"formats": ("fp4-all-the-way-qaf", "bf16"), "bits": 6}, "is not a uniform format: it has phases"),
        (
            {
                "scores": [
                    Score("a", ("blocks.0.attn.out",), (operand,), "nvfp4", 0.0, 0.0)
                    for operand in ("fprop.input", "fprop.weight")
                ],
                "bits": 6,
            },
            "two scores of fprop of blocks.0.attn.out",
        ),
        (
            {
                "scores": [Score("fprop", tuple(NAMES), ("fprop.input",), name, 0.0, 0.0) for name in FORMATS[:3]],
                "bits": 6,
            },
            r"the score of 'fprop' is that of 12 modules; measure by \('site', 'gemm'\)",
        ),
        ({"overhead": 1.2, "formats": FORMATS[:2], "cost": lambda p: 1.5}, "overhead at most 1.2; the nearest is 1.5"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(fp4graph.Error, match=message):
        search(model_of(), loss, **{"formats": FORMATS, "batches": batches(1), **options})


def test_estimates_replace_measurements():
    model, options = model_of(), {"formats": ("mxfp4", "bf16"), "bits": 6, "exact": False}
    found = search(model, loss, batches(1), **options)
    assert found.predicted == pytest.approx(sum(each.increase for each in found.choices))
    estimated = {score.unit: score.estimate for score in found.scores}
    assert math.isfinite(found.measured)
    out = next(each for each in found.choices if each.modules == ("blocks.0.mlp.0",))
    assert out.increase == (estimated["blocks.0.mlp.0, fprop"] if out.formats[0] == "mxfp4" else 0.0)


def squared(model, batch):
    return model(batch).square().mean()


@pytest.mark.slow
def test_scores_of_another_loss_are_not_used_again(tmp_path):
    options = {"formats": ("nvfp4", "bf16"), "bits": 6, "folder": tmp_path}
    first, again = (search(model_of(), loss, batches(1), **options) for _ in range(2))
    assert again.text == first.text
    with pytest.raises(fp4graph.Error, match="scores of another model, loss, batches or formats"):
        search(model_of(), squared, batches(1), **options)


def test_scores_of_an_earlier_version_are_told_from_those_of_another_model(tmp_path):
    (tmp_path / "scores.jsonl").write_text('{"format": "fp4graph.search", "version": 2, "of": "5004d292"}\n')
    with pytest.raises(fp4graph.Error, match="was not written by this version of fp4graph; give another folder"):
        search(model_of(), loss, batches(1), formats=("nvfp4", "bf16"), bits=6, folder=tmp_path)


class Loss:
    def __call__(self, model, batch):
        return loss(model, batch)


@pytest.mark.long
def test_scores_of_a_loss_that_is_an_object_are_used_again(tmp_path):
    """In another process the object has another address."""
    losses = Loss(), Loss()
    first, again = (
        search(model_of(), each, batches(1), formats=("nvfp4", "bf16"), bits=6, folder=tmp_path) for each in losses
    )
    assert again.text == first.text


@pytest.mark.long
def test_the_command_writes_a_policy_that_check_accepts(tmp_path):
    here, file = "tests.lab.test_search", tmp_path / "mine.yaml"
    words = ["search", "--model", f"{here}:model_of", "--loss", f"{here}:loss", "--batches", f"{here}:batches",
             "--formats", "nvfp4, bf16", "--by", "site, gemm", "--bits", "8", "--output", str(file)]  # fmt: skip
    assert run(*words).code == 0
    assert fp4graph.load_policy(file).name == "mine"
    assert run("check", file).code == 0
    assert f"{file} already exists; give another --output" in run(*words).err.replace("\n", " ")
    assert "has no 'none'" in run("search", "--model", f"{here}:none", *words[3:-1], tmp_path / "other.yaml").err


@pytest.mark.long
def test_complexity_and_measured_overhead_bind():
    model = model_of()
    costly = [dataclasses.replace(s, increase=s.increase + 1) for s in scores_of(model, 0, ("nvfp4",))]
    scores = [*costly, *scores_of(model, 1, ("tetrajet",))]
    formats = ("nvfp4", "tetrajet")
    free = search(model, loss, batches(1), formats=formats, complexity=0.5, scores=scores)
    assert {each.formats for each in free.choices} == {("tetrajet",) * 3}
    assert ">tetrajet</td>" in free._repr_html_()
    bound = search(model, loss, batches(1), formats=formats, complexity=0.4, scores=scores)
    assert {each.formats for each in bound.choices} == {("nvfp4",) * 3}

    def cost(policy):  # a mixture of formats costs more than a linear interpolation of its formats' costs
        sites = fp4graph.explain(model, policy, (batches(1)[0],)).sites
        specs = [spec for site in sites for spec in site.operands.values() if spec is not None]
        return 1.1 + 0.9 * (sum(spec.element.name == "e2m1" for spec in specs) / len(specs)) ** 0.5

    cheap = [dataclasses.replace(s, increase=0.0) for s in scores_of(model, 0, ("nvfp4",))]
    scores = [*cheap, *scores_of(model, 1, ("mxfp8",))]
    found = search(model, loss, batches(1), formats=("nvfp4", "mxfp8"), overhead=1.4, cost=cost, scores=scores)
    assert 1.1 < found.budgets[0].reached == cost(found.policy) <= 1.4


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("times", [2, 20])
def test_a_killed_search_goes_on(times, tmp_path):
    script = (
        "import tests.lab.test_search as t, fp4graph, sys\n"
        "found = fp4graph.search(t.model_of(), t.loss, t.batches(), formats=t.FORMATS, bits=6, folder=sys.argv[1])\n"
        "found.save(sys.argv[1] + '/policy.yaml')\n"
    )
    folder, kills, seen = tmp_path / "search", 0, []
    file, environment = folder / "scores.jsonl", {**os.environ, "OMP_NUM_THREADS": "1"}
    while not (folder / "policy.yaml").exists():
        process = subprocess.Popen(python("-c", script, folder), env=environment)
        start = time.monotonic()
        while process.poll() is None and time.monotonic() - start < PATIENCE:
            whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
            if kills < times and len(whole) > len(seen) + 50 // times:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                with file.open("ab") as torn:
                    torn.write(b'{"unit": "bl')
                break
            time.sleep(0.01)
        else:
            assert process.wait() == 0
        whole = file.read_bytes().split(b"\n")[:-1]
        assert whole[: len(seen)] == seen
        seen = whole
    assert kills == times
    units = [(line["policy"], line["unit"]) for line in map(json.loads, seen[1:])]
    assert len(units) == len({*units}) == 3 * 8 * 3  # q, k and v are measured together
    again = search(model_of(), loss, batches(), formats=FORMATS, bits=6, folder=folder)
    assert (folder / "policy.yaml").read_text() == again.text
    with pytest.raises(fp4graph.Error, match="holds scores of another model"):
        search(model_of(1), loss, batches(), formats=FORMATS, bits=6, folder=folder)


class Own(nn.Module):
    """Two blocks with an einsum that is decomposed where a rule quantizes it, and attention with its own weight."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.attn = nn.Parameter(torch.randn(32, 32) / 6), nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x):
            x = x + torch.einsum("...i,oi->...o", x, self.w)
            return x + self.attn(x, x, x)[0]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Own.Block() for _ in range(2)))

    def forward(self, x):
        return self.blocks(x).mean(1)


@pytest.mark.long
def test_formats_may_come_in_any_order():
    """A format that keeps an einsum does not decompose it."""
    texts = []
    for formats in (("mxfp4", "bf16"), ("bf16", "mxfp4")):
        model = Own().eval()
        candidates = Candidates.of(model, loss, batches()[0], formats, apart=True)
        (option,) = np.flatnonzero((candidates.options == formats.index("mxfp4")).all(1))
        choice = np.full(len(candidates.groups), option)
        texts.append(candidates.text(choice, np.zeros(candidates.allowed.shape), "all", "", ()))
        policy = fp4graph.load_policy(yaml.safe_load(texts[-1]))
        candidates.check(model, policy, choice)
        sites = fp4graph.explain(model, policy, (batches()[0],)).sites
        assert sum(site.quantized for site in sites) == 6
        assert -total(candidates.uses["fp4_flops"], choice) == pytest.approx(fp4_flops(sites))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_scores_of_another_mode_or_of_other_arrays_are_not_used_again(tmp_path):
    def converted(model, batch):
        return loss(model, torch.from_numpy(batch))

    def scored(model, change=0.0):
        data = torch.stack(batches(4)).flatten(0, 1).numpy()  # more numbers than repr shows
        data[8] += change
        options = {"formats": ("mxfp4", "bf16"), "bits": 6, "exact": False, "folder": tmp_path}
        return search(model, converted, [data], **options).scores

    first = scored(model_of())
    assert repr(scored(model_of())) == repr(first)  # NaN does not equal itself
    frozen = model_of()
    frozen.head.requires_grad_(False)
    for model, change in ((model_of().train(), 0.0), (frozen, 0.0), (model_of(), 1.0)):
        with pytest.raises(fp4graph.Error, match="scores of another model, loss, batches or formats"):
            scored(model, change)
