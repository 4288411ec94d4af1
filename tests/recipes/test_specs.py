"""The specs and options of the shipped policies; test_values.py compares their values."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp4graph.graph.plan import plan_site
from fp4graph.numerics.formats import E3M0, E4M3, E8M0, E8M3, FP32, INT4, UE5M3, UE5M3_61440
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy import Match, Rule, load_policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import Registry, default_registry
from fp4graph.technique.site import SiteView
from tests.recipes.shipped import POLICIES

Q1, Q2, Q3, Q4, Q5, Q6 = Operand
Specs = tuple[QuantSpec | None, ...]

CEIL = QuantSpec(block=32, scale=ScaleSpec(E8M0, "ceil"), ties="up")
FLOOR = QuantSpec(block=32, scale=ScaleSpec(E8M0, "floor"))
NV = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even"))
NV_ONE = replace(NV, scale=ScaleSpec(E4M3, "nearest_even", zero="to_one"))
#: The design-space paper rounds encode scales s = Qmax/Z to nearest (sec. 2 and 3.1); hardware stores S = Z/Qmax.
MX = QuantSpec(block=32, scale=ScaleSpec(E8M0, "nearest_even", "encode"))
NV_ENCODE = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even", "encode"))
NV_ENCODE_ONE = replace(NV_ENCODE, scale=ScaleSpec(E4M3, "nearest_even", "encode", "to_one"))
UE5M3_ONE = QuantSpec(block=32, scale=ScaleSpec(UE5M3, "nearest_even", "encode", "to_one"))
D50 = QuantSpec(block=16, scale=ScaleSpec(UE5M3_61440, "nearest_even", zero="to_one"))
MXFP8 = QuantSpec(element="e4m3", block=32, scale=ScaleSpec(E8M0, "ceil"))
MX_CEIL = replace(MXFP8, element="e2m1")
TILE = QuantSpec(element="e4m3", block=128, scale=ScaleSpec(FP32))
UNIFORM = QuantSpec(element=INT4, block=16, scale=ScaleSpec(FP32, "nearest_even"))
AWAY = replace(NV_ONE, ties="away")
ROW = QuantSpec(block="row", scale=ScaleSpec(FP32, "nearest_even"))
CEIL_E3M0 = replace(CEIL, element=E3M0)


def sr(spec: QuantSpec) -> QuantSpec:
    return replace(spec, rounding="stochastic")


def read(spec: QuantSpec) -> QuantSpec:
    """Quantize the dequantized fprop operand instead of the original."""
    return replace(spec, source="fprop")


def alike(spec: QuantSpec) -> Specs:
    return (spec,) * 6


def doubly(x: QuantSpec, dy: QuantSpec) -> Specs:
    """Quantize the backward's operands stochastically, W and X from the dequantized fprop operands."""
    return x, x, sr(dy), read(sr(x)), sr(dy), read(sr(x))


def intel(spec: QuantSpec) -> Specs:
    """Round gradients, and the input in wgrad, stochastically."""
    return spec, spec, sr(spec), spec, sr(spec), sr(spec)


def nvidia(spec: QuantSpec, dy: QuantSpec | None = None, side: int = 16) -> Specs:
    """Quantize weights by square blocks, and round gradients stochastically unless ``dy`` says otherwise."""
    dy, w = dy or sr(spec), replace(spec, block=(side, side))
    return spec, w, dy, w, dy, spec


def alone(which: int, spec: QuantSpec) -> Specs:
    return *(None,) * (which - 1), spec, *(None,) * (6 - which)


#: The specs of the six operands after techniques have changed them.
SPECS: dict[str, Specs] = {
    "averis": alike(NV),
    "e8m3": alike(QuantSpec(block=16, scale=ScaleSpec(E8M3, "nearest_even", "encode"))),
    "fp4-all-the-way": intel(NV_ONE),
    "fp8-block": nvidia(TILE, TILE, 128),
    "if4": nvidia(replace(NV, others=(INT4,), selector="mse")),
    "int4-per-tensor": alike(QuantSpec(element=INT4, block="tensor", scale=ScaleSpec(FP32, "nearest_even"))),
    "microscaling": alike(FLOOR),
    "mxfp4": alike(MX),
    "mxfp4-best": alike(MX),
    "mxfp4-fprop": (FLOOR, FLOOR, None, None, None, None),
    "mxfp4-fprop-dgrad": (FLOOR, FLOOR, FLOOR, FLOOR, None, None),
    "mxfp4-full": alike(FLOOR),
    "mxfp4-full-hadamard": alike(FLOOR),
    "mxfp4-full-rht": alike(FLOOR),
    "mxfp4-full-sr": intel(FLOOR),
    "mxfp4-rht-sr": (None, None, *[sr(FLOOR)] * 4),
    "mxfp4-w4a16-experts": alone(2, MX_CEIL),
    "mxfp4-rl": alike(FLOOR),
    "mxfp4-round-up": alike(QuantSpec(block=32, scale=ScaleSpec(E8M0, "toward_positive"))),
    "mxfp8": alike(MXFP8),
    "mxfp8-bf16": (MXFP8, MXFP8, None, None, None, None),
    "mxfp8-nvfp4": (MXFP8, MXFP8, sr(NV), read(NV), sr(NV), NV),
    "nvfp4": alike(NV_ENCODE),
    "nvfp4-best": intel(NV_ENCODE),
    "nvfp4-mxfp8-experts": (NV, NV, MXFP8, read(MXFP8), MXFP8, read(MXFP8)),
    "nvfp4-rl": (NV, NV, None, None, None, None),
    "nvfp4-qad-lsq": (NV, NV, None, None, None, None),
    "nvfp4-smooth-swiglu": intel(NV_ENCODE_ONE),
    **dict.fromkeys(("nvfp4-te", "nvfp4-te-4over6", "nvfp4-te-last-blocks"), nvidia(NV)),
    "nvfp4-w4a16": alone(2, NV),
    "nvint4": nvidia(replace(NV, element=INT4)),
    "quartet": doubly(FLOOR, FLOOR),
    "quartet-ii": (AWAY, AWAY, AWAY, read(AWAY), AWAY, read(AWAY)),
    **{name: doubly(CEIL, CEIL) for name in ("tetrajet", "tetrajet-qema", "tetrajet-qramping")},
    **{name: doubly(CEIL, CEIL) for name in ("tetrajet-dampen", "tetrajet-freeze")},
    "tetrajet-e3m0": doubly(CEIL_E3M0, CEIL_E3M0),
    "tetrajet-e3m0-weights": doubly(CEIL_E3M0, CEIL),
    "tetrajet-e3m0-gradients": doubly(CEIL, CEIL_E3M0),
    **{f"tetrajet-q{which}": alone(which, CEIL if which < 3 else sr(CEIL)) for which in range(1, 7)},
    # Table 6 of the TetraJet paper: without Q2, and without Q1 and Q2.
    "tetrajet-no-wq": (CEIL, None, sr(CEIL), sr(CEIL), sr(CEIL), read(sr(CEIL))),
    "tetrajet-no-wq-aq": (None, None, *[sr(CEIL)] * 4),
    "tetrajet-v2": doubly(NV, NV),
    "ue5m3": alike(QuantSpec(block=32, scale=ScaleSpec(UE5M3, "nearest_even", "encode"))),
    "ue5m3-best": intel(UE5M3_ONE),
    "ue5m3-d50": nvidia(D50, replace(sr(D50), random_bits=8)),
    "ufp4": (UNIFORM, UNIFORM, sr(UNIFORM), UNIFORM, sr(UNIFORM), UNIFORM),
    "wang-dge": (ROW, ROW, None, None, None, None),
}
#: Operands of the backward that read dequantized fprop operands: wgrad.input reads Q1, and dgrad.weight reads Q2.
REUSES = {
    "tetrajet-q1": {Q6},
    **{name: {Q4} for name in ("tetrajet-q2", "nvfp4-w4a16", "mxfp4-w4a16-experts")},
    **{name: {Q4, Q6} for name in ("wang-dge", "nvfp4-rl", "nvfp4-qad-lsq", "mxfp8-bf16")},
}
ROTATED = {"hadamard": {"scope": ("wgrad",), "block": 16, "kind": "random", "resample": "never"}, "tensor_scaling": {}}
HALF = {"tensor_scaling": {"headroom": 0.5}}
SPAM: dict[str, Any] = {"stable_spam": {}}
GUARDED = {"stochastic_rounding": {"operands": ("backward",), "range_guard": 0.75}}
INT_GUARDED = {"stochastic_rounding": {"operands": ("gradients",), "range_guard": 1.0625}}
EPOCHS = {"total_steps": 90 * 1251, "start": 0.25}  # the schedule of Nagel et al. for the TetraJet paper's 90 epochs
RAMPING = {"t_update": 1251, "n_max": 1221, "t0": 30, "k1": 16, "k2": 5}
FREEZING = {"momentum": 0.001, "threshold": 0.1, "final_threshold": 0.01, **EPOCHS}
NOISE = {"sigma_start": 1e-2, "sigma_end": 5e-4, "stages": 10, "steps_per_stage": 20, "rollout": True}
V2 = {
    "hadamard": {"scope": "backward", "block": 16, "kind": "random"},
    "tensor_scaling": {"granularity": 128},
    "osci_reset": {"start": 15000},
}
#: Techniques with the options that a policy gives; stochastic rounding only where it has a guard.
TECHNIQUES: dict[str, dict[str, dict[str, Any]]] = {
    "averis": {"tensor_scaling": {}, "mean_split": {}},
    "fp4-all-the-way": HALF,
    "if4": {**ROTATED, **INT_GUARDED},
    "mxfp4-best": {"hadamard": {"scope": "all", "block": 32, "kind": "random"}, **SPAM},
    "mxfp4-full-hadamard": {"hadamard": {"scope": "all", "block": 32, "kind": "deterministic"}},
    "mxfp4-full-rht": {"hadamard": {"scope": "all", "block": 32, "kind": "random"}},
    "mxfp4-rht-sr": {"hadamard": {"scope": "backward", "block": 64, "kind": "random"}, **GUARDED},
    "mxfp4-rl": {
        "macro_block_scaling": {"block": 128},
        "outlier_fallback": {"fraction": 0.1, "operands": ("forward",)},
        "adaptive_quantization_noise": NOISE,
    },
    "mxfp8-nvfp4": {**ROTATED, "tensor_scaling": {"operands": ("backward",)}},
    "nvfp4-best": {**HALF, **SPAM},
    "nvfp4-mxfp8-experts": {"tensor_scaling": {"input_granularity": "row", "operands": ("forward",)}},
    "nvfp4-rl": {
        "tensor_scaling": {"target": 256.0, "input_granularity": "row", "share": "siblings", "operands": ("forward",)},
        "four_over_six": {"measure": "mae", "operands": ("forward",)},
    },
    "nvfp4-qad-lsq": {
        "tensor_scaling": {"operands": ("forward",), "share": "siblings"},
        "learned_scale": {"init": "mse", "lr_factor": 10.0},
    },
    "nvfp4-smooth-swiglu": {**HALF, **SPAM, "smooth_swiglu": {}},
    "nvfp4-te": ROTATED,
    "nvfp4-te-4over6": {
        "tensor_scaling": {"target": 256.0, "gradient_target": 448.0},
        "four_over_six": {"measure": "mae", "operands": ("inputs", "weights")},
    },
    "nvfp4-te-last-blocks": ROTATED,
    "nvfp4-w4a16": {"tensor_scaling": {"operands": ("fprop.weight",), "share": "siblings"}},
    "nvint4": {**ROTATED, **INT_GUARDED},
    "quartet": {
        "hadamard": {"scope": "all", "block": 32, "kind": "random_backward"},
        "step_gradient": {"kind": "clip"},
        **GUARDED,
    },
    "quartet-ii": {
        "hadamard": {"scope": "backward", "block": 128, "kind": "random"},
        "tensor_scaling": {"target": 256.0, "operands": ("forward",)},
        "four_over_six": {"operands": ("forward",)},
        "ms_eden": {},
    },
    "tetrajet-dampen": {"dampen": {"strength": 0.01, **EPOCHS}},
    "tetrajet-freeze": {"freeze": FREEZING},
    "tetrajet-qema": {"q_ema": {"beta": 0.998}},
    "tetrajet-qramping": {"q_ramping": RAMPING},
    "tetrajet-v2": {**V2, "out_control": {"mode": "wait"}},
    "ue5m3-best": {**HALF, **SPAM},
    # All experts share one scale too, which the policy keeps beside the weight.
    "ue5m3-d50": {"tensor_scaling": {"target": 448.0, "hold_steps": 50, "granularity": "all"}},
    "ufp4": {"hadamard": {"scope": "all", "block": 16, "kind": "random"}},
    "wang-dge": {
        "step_gradient": {"kind": "dge", "operands": ("fprop.weight",), "k": 5.0},
        "outlier_clamp": {"quantile": 0.99, "residual": True, "operands": ("fprop.input",)},
    },
}
#: Policies that begin as another policy, which is the value, and differ in a later phase.
PHASED = {"fp4-all-the-way-qaf": "fp4-all-the-way", "nvfp4-te-bf16": "nvfp4-te", "nvfp4-te-bf16-fprop": "nvfp4-te"}


def options(rule: Rule) -> dict[str, dict[str, Any]]:
    return {t.name: t.model_dump(exclude_unset=True) for t in rule.techniques}


def test_every_policy_has_its_specs() -> None:
    assert {*SPECS, *PHASED, "bf16"} == {*POLICIES}
    bf16 = load_policy("bf16")
    assert (bf16.rules, bf16.techniques, bf16.quantizes) == ((), (), False)


@pytest.mark.parametrize("name", SPECS)
def test_specs_and_techniques(name: str) -> None:
    """Rules quantize the linears and experts of blocks, or experts alone; the default keeps all other sites."""
    policy = load_policy(name)
    rule, *others = (rule for rule in policy.rules if rule.quantizes)
    # tetrajet-v2 has a rule for experts without out_control, nvfp4-mxfp8-experts one for linears in another format.
    assert len(others) == (name in ("tetrajet-v2", "nvfp4-mxfp8-experts"))
    ops = [op for each in (rule, *others) for op in each.match.op or ()]
    first = "grouped" if name.endswith("-experts") else "linear"
    assert ops == ["grouped"] if name == "mxfp4-w4a16-experts" else sorted(ops) == ["grouped", "linear"]
    assert ops[0] == first
    assert all(each.match == Match(op=each.match.op, block=True) for each in (rule, *others))
    assert rule.required
    assert policy.default.keep is not None
    with pytest.raises(Exception, match="at least 1 quantized"):
        policy.expect.check(0, 10)
    planned = plan_site(SiteView("fc", first, 64, 64, 4096), rule).specs
    assert dict(planned) == dict(zip(Operand, SPECS[name], strict=True))
    assert set(rule.reuses) == REUSES.get(name, set())
    expected = {"stochastic_rounding": options(rule).get("stochastic_rounding"), **TECHNIQUES.get(name, {})}
    assert {"stochastic_rounding": None, **options(rule)} == expected


@pytest.mark.parametrize("path", sorted(Registry(entry_point_group=None).policies.values()), ids=lambda path: path.stem)
def test_every_policy_states_its_source_and_complexity_and_loads_without_a_warning(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_policy(path.stem)
    comment = "".join(line for line in path.read_text("utf-8").splitlines(keepends=True) if line.startswith("#"))
    assert policy.name == path.stem
    assert policy.file == str(default_registry().policies[path.stem])
    assert policy.description
    assert "Reproduces:" in comment or path.stem == "bf16"
    stated = re.search(r"^# Ω = ([\d.]+)(?:: (.*))?", comment, re.MULTILINE)
    assert stated is not None
    assert float(stated[1]) == policy.complexity
    terms = [float(term) for term in re.findall(r"\d\.\d+", stated[2] or "")]  # a single term has no number
    assert not terms or sorted(terms) == sorted(policy.weights.values())


def test_policies_keep_the_blocks_of_their_papers() -> None:
    first, last, _ = load_policy("nvfp4-te").rules
    assert (first.match.first_blocks, last.match.last_blocks) == (1, 1)
    share, _ = load_policy("nvfp4-te-last-blocks").rules
    assert share.match.last_blocks == 0.15
    assert all(rule.keep for rule in (first, last, share))


@pytest.mark.parametrize(
    ("name", "at", "kept"),
    [
        ("fp4-all-the-way-qaf", 0.95, {Q3, Q4, Q5, Q6}),
        ("nvfp4-te-bf16-fprop", 0.85, {Q1, Q2}),
        ("nvfp4-te-bf16", 0.85, set(Operand)),
    ],
)
def test_the_last_phase_keeps_operands_in_high_precision(name: str, at: float, kept: set[Operand]) -> None:
    before = load_policy(PHASED[name])
    (phase,) = load_policy(name).phases
    assert phase.at == at
    assert load_policy(name).rules == before.rules
    assert phase.policy.quantizes == (kept != set(Operand))
    if phase.policy.quantizes:
        rule = phase.policy.rules[-1]
        assert dict(rule.specs) == {**before.rules[-1].specs, **dict.fromkeys(kept)}
        assert set(rule.reuses) == kept & {Q4, Q6}  # the backward reads the dequantized fprop operands


def test_tetrajet_v2_measures_before_it_splits() -> None:
    policy = load_policy("tetrajet-v2")
    assert [phase.at for phase in policy.phases] == [500, 550]  # steps 501 to 550 measure
    modes = {"mode": "measure"}, {"mode": "split", "channels": 0.1}
    for phase, mode in zip(policy.phases, modes, strict=True):
        linears, experts = phase.policy.rules
        assert linears.specs == experts.specs == policy.rules[0].specs
        assert [options(rule) for rule in (linears, experts)] == [{**V2, "out_control": mode}, V2]
    apart = plan_site(SiteView("fc", "linear", 640, 64, 40960), policy.phases[-1].policy.rules[0]).program.apart
    assert apart.count == 64
    operands = [apart.program.operand(o) for o in (Q1, Q2, Q5, Q6)]
    assert [operand.spec for operand in operands] == [MXFP8, MXFP8, MXFP8, read(MXFP8)]
    assert not any(operand.parts for operand in operands)
