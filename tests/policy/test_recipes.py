"""The shipped policies, operand by operand, against the papers."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path

import fp4graph_policies
import ml_dtypes
import numpy as np
import pytest
import torch

from fp4graph.graph.plan import plan_site
from fp4graph.numerics.formats import E2M1, E3M0, E4M3, E8M0, E8M3, FP32, INT4, UE5M3, UE5M3_61440
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.product import total
from fp4graph.policy import Match, Rule, load_policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView

FILES = sorted(Path(fp4graph_policies.__file__).parent.glob("*.yaml"))
Q1, Q2, Q3, Q4, Q5, Q6 = Operand
CEIL = QuantSpec(block=32, scale=ScaleSpec(E8M0, "ceil"), ties="up")
FLOOR = QuantSpec(block=32, scale=ScaleSpec(E8M0, "floor"))
#: The design-space paper rounds s = Qmax/Z to nearest (sec. 2 and 3.1); hardware stores S = Z/Qmax.
MX = QuantSpec(block=32, scale=ScaleSpec(E8M0, "nearest_even", "encode"))
NV_ENCODE = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even", "encode"))
NV = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even"))
MXFP8 = QuantSpec(element="e4m3", block=32, scale=ScaleSpec(E8M0, "ceil"))


def stochastic(spec: QuantSpec, **more: object) -> QuantSpec:
    return dataclasses.replace(spec, rounding="stochastic", **more)  # type: ignore[arg-type]


def again(spec: QuantSpec) -> QuantSpec:
    """Stochastic, from what fprop multiplied with."""
    return stochastic(spec, source="fprop")


def block_rule(name: str) -> Rule:
    """The one rule that quantizes: the linears and experts of the blocks, required to be there; all else kept.

    Of tetrajet-v2, whose experts lack OutControl, the one for linears.
    """
    policy = load_policy(name)
    rule, *others = (rule for rule in policy.rules if rule.quantizes)
    ops = [op for each in (rule, *others) for op in each.match.op or ()]
    assert ops == ["linear", "grouped"]
    assert all(each.match == Match(op=each.match.op, block=True) for each in (rule, *others))
    assert rule.required
    assert len(others) == (name == "tetrajet-v2")
    assert policy.default.keep is not None
    with pytest.raises(Exception, match="at least 1 quantized"):
        policy.expect.check(0, 10)
    return rule


def planned(name: str) -> dict[Operand, QuantSpec | None]:
    """Specs after what techniques make of them."""
    return dict(plan_site(SiteView("fc", "linear", 64, 64, 4096), block_rule(name)).specs)


def techniques(name: str) -> dict[str, dict[str, object]]:
    """Options that a policy gives, by technique, in order."""
    return {t.name: t.model_dump(exclude_unset=True) for t in block_rule(name).techniques}


def test_bf16() -> None:
    policy = load_policy("bf16")
    assert not policy.rules
    assert not policy.techniques
    assert not policy.quantizes


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_policy_says_what_it_is(file: Path) -> None:
    """A title, what it reproduces, its complexity; no technique without effect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_policy(file.stem)
    comment = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert policy.name == file.stem
    assert policy.description
    assert "Reproduces:" in comment or file.stem == "bf16"
    said = re.search(r"^# Ω = ([\d.]+)(?:: (.*))?", comment, re.MULTILINE)
    assert said is not None
    assert float(said[1]) == policy.complexity
    summands = re.findall(r"\d\.\d+", said[2] or "")  # one alone goes without its figure
    assert [float(weight) for weight in summands] in ([], sorted_like(summands, policy.weights))


def sorted_like(summands: list[str], weights: dict[str, float]) -> list[float]:
    """``weights`` in the order of ``summands``, if they are the same."""
    return [float(w) for w in summands] if sorted(map(float, summands)) == sorted(weights.values()) else []


def test_all_the_recipes_are_here() -> None:
    names = """bf16 microscaling tetrajet tetrajet-qema tetrajet-dampen tetrajet-freeze tetrajet-qramping
        tetrajet-e3m0 tetrajet-e3m0-weights tetrajet-e3m0-gradients
        tetrajet-q1 tetrajet-q2 tetrajet-q3 tetrajet-q4 tetrajet-q5 tetrajet-q6 tetrajet-no-wq tetrajet-no-wq-aq
        int4-per-tensor mxfp4 nvfp4 ue5m3 e8m3 mxfp4-best nvfp4-best ue5m3-best fp4-all-the-way
        fp4-all-the-way-qaf ue5m3-d50
        mxfp4-round-up nvfp4-te wang-dge mxfp4-rht-sr quartet mxfp4-fprop mxfp4-fprop-dgrad mxfp4-full
        mxfp4-full-hadamard mxfp4-full-rht mxfp4-full-sr mxfp4-rl
        nvfp4-te-4over6 nvfp4-te-last-blocks nvfp4-te-bf16 nvfp4-te-bf16-fprop
        nvfp4-smooth-swiglu quartet-ii tetrajet-v2 averis nvint4 if4 mxfp8 fp8-block"""
    assert {*names.split()} <= {file.stem for file in FILES}


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("microscaling", FLOOR),
        ("mxfp4", MX),
        ("mxfp4-full", FLOOR),
        ("mxfp4-round-up", QuantSpec(block=32, scale=ScaleSpec(E8M0, "toward_positive"))),
        ("mxfp8", MXFP8),
        ("nvfp4", NV_ENCODE),
        ("ue5m3", QuantSpec(block=32, scale=ScaleSpec(UE5M3, "nearest_even", "encode"))),
        ("e8m3", QuantSpec(block=16, scale=ScaleSpec(E8M3, "nearest_even", "encode"))),
        ("int4-per-tensor", QuantSpec(element=INT4, block="tensor", scale=ScaleSpec(FP32, "nearest_even"))),
    ],
)
def test_six_alike(name: str, spec: QuantSpec) -> None:
    assert planned(name) == dict.fromkeys(Operand, spec)
    assert load_policy(name).techniques == ()


@pytest.mark.parametrize(
    ("name", "forward", "gradient"),
    [
        ("tetrajet", E2M1, E2M1),
        ("tetrajet-qema", E2M1, E2M1),
        ("tetrajet-qramping", E2M1, E2M1),
        ("tetrajet-dampen", E2M1, E2M1),
        ("tetrajet-freeze", E2M1, E2M1),
        ("tetrajet-e3m0", E3M0, E3M0),
        ("tetrajet-e3m0-weights", E3M0, E2M1),
        ("tetrajet-e3m0-gradients", E2M1, E3M0),
    ],
)
def test_tetrajet(name: str, forward, gradient) -> None:
    x, dy = dataclasses.replace(CEIL, element=forward), dataclasses.replace(CEIL, element=gradient)
    assert planned(name) == {Q1: x, Q2: x, Q3: stochastic(dy), Q4: again(x), Q5: stochastic(dy), Q6: again(x)}


@pytest.mark.parametrize("which", range(1, 7))
def test_one_quantizer_alone(which: int) -> None:
    """TetraJet Table 1. With Q1 alone wgrad reads its output, with Q2 alone dgrad does, and nothing else is touched."""
    operand = list(Operand)[which - 1]
    rule = block_rule(f"tetrajet-q{which}")
    spec = CEIL if which < 3 else stochastic(CEIL)
    assert dict(rule.specs) == {**dict.fromkeys(Operand), operand: spec}
    assert set(rule.reuses) == {1: {Q6}, 2: {Q4}}.get(which, set())


def test_without_forward_quantizers() -> None:
    """Table 6: without Q2, and without Q1 and Q2."""
    q3 = stochastic(CEIL)
    assert planned("tetrajet-no-wq") == {Q1: CEIL, Q2: None, Q3: q3, Q4: q3, Q5: q3, Q6: again(CEIL)}
    assert planned("tetrajet-no-wq-aq") == {Q1: None, Q2: None, Q3: q3, Q4: q3, Q5: q3, Q6: q3}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("source", ["original", "fprop"])
@pytest.mark.parametrize("scale", ["floor", "ceil"])
def test_the_eight_cells_of_table_5_are_three_switches(rounding: str, source: str, scale: str) -> None:
    rule = {
        "match": {"op": ["linear", "grouped"], "block": True},
        "quantize": {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": scale}},
        "operands": {
            "backward": {"rounding": rounding},
            "dgrad.weight": {"source": source},
            "wgrad.input": {"source": source},
        },
    }
    if (rounding, source, scale) == ("stochastic", "fprop", "ceil"):
        rule["quantize"]["ties"] = "up"  # type: ignore[index]
    specs = load_policy({"version": 1, "name": "cell", "rules": [rule]}).rules[0].specs
    corner = {("nearest", "original", "floor"): "microscaling", ("stochastic", "fprop", "ceil"): "tetrajet"}
    known = corner.get((rounding, source, scale))
    if known is not None:
        assert dict(specs) == planned(known)
    assert specs[Q4].rounding == rounding
    assert specs[Q4].source == specs[Q6].source == source
    assert {spec.scale.rounding for spec in dict(specs).values()} == {scale}


def test_qema_extends_tetrajet() -> None:
    policy = load_policy("tetrajet-qema")
    assert techniques("tetrajet-qema") == {"q_ema": {"beta": 0.998}}
    assert policy.rules[0].techniques == policy.techniques
    assert policy.fingerprint != load_policy("tetrajet").fingerprint


def test_qramping_extends_tetrajet() -> None:
    assert techniques("tetrajet-qramping")["q_ramping"] == {
        "t_update": 1251,
        "n_max": 1221,
        "t0": 30,
        "k1": 16,
        "k2": 5,
    }


def test_dampen_and_freeze_as_nagel_et_al_configure_them() -> None:
    """For the 90 epochs of 1251 steps that the paper trains."""
    steps = {"total_steps": 90 * 1251, "start": 0.25}
    assert techniques("tetrajet-dampen") == {"dampen": {"strength": 0.01, **steps}}
    freezing = {"momentum": 0.001, "threshold": 0.1, "final_threshold": 0.01}
    assert techniques("tetrajet-freeze") == {"freeze": {**freezing, **steps}}


def test_the_best_of_the_design_space() -> None:
    assert planned("mxfp4-best") == planned("mxfp4")
    assert techniques("mxfp4-best")["hadamard"] == {"scope": "all", "block": 32, "kind": "random"}
    noisy = stochastic(NV_ENCODE)
    intel = {Q1: NV_ENCODE, Q2: NV_ENCODE, Q3: noisy, Q4: NV_ENCODE, Q5: noisy, Q6: noisy}
    assert planned("nvfp4-best") == intel
    assert techniques("nvfp4-best")["tensor_scaling"] == {"headroom": 0.5}
    to_one = QuantSpec(block=32, scale=ScaleSpec(UE5M3, "nearest_even", "encode", "to_one"))
    noisy = stochastic(to_one)
    assert planned("ue5m3-best") == {Q1: to_one, Q2: to_one, Q3: noisy, Q4: to_one, Q5: noisy, Q6: noisy}
    assert techniques("ue5m3-best")["tensor_scaling"] == {"headroom": 0.5}
    for name in ("mxfp4-best", "nvfp4-best", "ue5m3-best"):
        assert techniques(name)["stable_spam"] == {}
        assert load_policy(name).complexity == 1.5


def wide() -> torch.Tensor:
    """Blocks of many sizes, no maximum a power of two."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 128, generator=generator) * torch.randn(64, 1, generator=generator).mul(4).exp2()


def e2m1(u: np.ndarray) -> np.ndarray:
    return u.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def quantized(name: str, x: torch.Tensor) -> np.ndarray:
    program = plan_site(SiteView("fc", "linear", 64, 64, 4096), block_rule(name)).program.operand(Q2)
    return total(program(x)).double().numpy()


def test_mxfp4_is_ocps_rule_but_for_powers_of_two() -> None:
    """s = 6/amax to the nearest power of two: with 4·S < amax < 8·S, S = 1/s, as under 2^(floor(log2 amax) - 2)."""
    x = wide()
    blocks = x.double().numpy().reshape(-1, 32)
    decode = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    expected = (e2m1(blocks / decode) * decode).reshape(x.shape)
    for name in ("mxfp4", "mxfp4-full", "microscaling"):
        np.testing.assert_array_equal(quantized(name, x), expected)
    x = torch.zeros(1, 32)
    x[0, 0] = 4.0  # 6/4 = 1.5 is a tie and becomes 2, OCP has s = 1
    x[0, 1] = 0.76
    assert quantized("mxfp4", x)[0, :2].tolist() == [3.0, 0.75]
    assert quantized("mxfp4-full", x)[0, :2].tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("name", "block", "largest"), [("nvfp4-best", 16, 448), ("ue5m3-best", 32, 114688)])
def test_tensor_scales_of_the_design_space(name: str, block: int, largest: float) -> None:
    """Eq. 2 with sec. 3.1's normalized scale, s = g·6/m_p / (6·max·0.5): from 2/max up."""
    x = wide()
    lowest = 2.0**-9 if largest == 448 else 2.0**-17
    blocks = x.double().numpy().reshape(-1, block)
    m = np.abs(blocks).max(1, keepdims=True)
    gamma = m.max() / (6 * largest * 0.5)
    ideal = gamma * 6 / m
    assert ideal.min() == pytest.approx(2 / largest)
    step = 2.0 ** np.maximum(np.floor(np.log2(ideal)) - 3, np.log2(lowest))  # three mantissa bits, then subnormals
    scale = np.minimum(np.round(ideal / step) * step, largest)
    expected = (e2m1(blocks / gamma * scale) / scale * gamma).reshape(x.shape)
    np.testing.assert_allclose(quantized(name, x), expected, rtol=2e-6)


def test_fp4_all_the_way() -> None:
    nearest = dataclasses.replace(NV, scale=ScaleSpec(E4M3, "nearest_even", zero="to_one"))
    noisy = stochastic(nearest)
    assert planned("fp4-all-the-way") == {Q1: nearest, Q2: nearest, Q3: noisy, Q4: nearest, Q5: noisy, Q6: noisy}
    assert techniques("fp4-all-the-way")["tensor_scaling"] == {"headroom": 0.5}


def test_fp4_all_the_way_ends_with_an_exact_backward() -> None:
    (phase,) = load_policy("fp4-all-the-way-qaf").phases
    assert phase.at == 0.95
    (before,), (after,) = load_policy("fp4-all-the-way").rules, phase.policy.rules
    assert dict(after.specs) == {**dict(before.specs), Q3: None, Q4: None, Q5: None, Q6: None}
    assert set(after.reuses) == {Q4, Q6}  # the backward of what fprop multiplied with


def test_ue5m3_d50() -> None:
    x = QuantSpec(block=16, scale=ScaleSpec(UE5M3_61440, "nearest_even", zero="to_one"))
    w, dy = dataclasses.replace(x, block=(16, 16)), stochastic(x, random_bits=8)
    assert planned("ue5m3-d50") == {Q1: x, Q2: w, Q3: dy, Q4: w, Q5: dy, Q6: x}
    # One scale of all experts, too: the policy holds it beside the weight.
    assert techniques("ue5m3-d50")["tensor_scaling"] == {"target": 448.0, "hold_steps": 50, "granularity": "all"}


def test_nvfp4_te() -> None:
    w, dy = dataclasses.replace(NV, block=(16, 16)), stochastic(NV)
    assert planned("nvfp4-te") == {Q1: NV, Q2: w, Q3: dy, Q4: w, Q5: dy, Q6: NV}
    used = techniques("nvfp4-te")
    assert used["hadamard"] == {"scope": ("wgrad",), "block": 16, "kind": "random", "resample": "never"}
    assert used["tensor_scaling"] == {}
    first, last, _ = load_policy("nvfp4-te").rules
    assert (first.match.first_blocks, last.match.last_blocks) == (1, 1)
    assert first.keep
    assert last.keep


def test_nvfp4_te_4over6() -> None:
    assert planned("nvfp4-te-4over6") == planned("nvfp4-te")
    used = techniques("nvfp4-te-4over6")
    assert used["tensor_scaling"] == {"target": 256.0, "gradient_target": 448.0}
    assert used["four_over_six"] == {"measure": "mae", "operands": ("inputs", "weights")}
    assert "hadamard" not in used


def test_last_shares() -> None:
    kept, _ = load_policy("nvfp4-te-last-blocks").rules
    assert kept.match.last_blocks == 0.15
    assert kept.keep
    assert planned("nvfp4-te-last-blocks") == planned("nvfp4-te")
    assert techniques("nvfp4-te-last-blocks") == techniques("nvfp4-te")
    for name in ("nvfp4-te-bf16", "nvfp4-te-bf16-fprop"):
        policy, (phase,) = load_policy(name), load_policy(name).phases
        assert policy.rules == load_policy("nvfp4-te").rules
        assert phase.at == 0.85
        if name == "nvfp4-te-bf16":
            assert not phase.policy.quantizes
        else:
            assert [o for o, spec in phase.policy.rules[-1].specs.items() if spec is None] == [Q1, Q2]


def test_nvfp4_smooth_swiglu() -> None:
    spec = dataclasses.replace(NV_ENCODE, scale=dataclasses.replace(NV_ENCODE.scale, zero="to_one"))
    random = stochastic(spec)
    assert planned("nvfp4-smooth-swiglu") == {Q1: spec, Q2: spec, Q3: random, Q4: spec, Q5: random, Q6: random}
    best = techniques("nvfp4-best")
    assert techniques("nvfp4-smooth-swiglu") == {**best, "smooth_swiglu": {}}


def test_quartet_ii() -> None:
    spec = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even", zero="to_one"), ties="away")
    read = dataclasses.replace(spec, source="fprop")
    assert planned("quartet-ii") == {Q1: spec, Q2: spec, Q3: spec, Q4: read, Q5: spec, Q6: read}
    assert techniques("quartet-ii") == {
        "hadamard": {"scope": "backward", "block": 128, "kind": "random"},
        "tensor_scaling": {"target": 256.0, "operands": ("forward",)},
        "four_over_six": {"operands": ("forward",)},
        "ms_eden": {},
    }


def test_tetrajet_v2() -> None:
    dy, read = stochastic(NV), again(NV)
    assert planned("tetrajet-v2") == {Q1: NV, Q2: NV, Q3: dy, Q4: read, Q5: dy, Q6: read}
    whole = {
        "hadamard": {"scope": "backward", "block": 16, "kind": "random"},
        "tensor_scaling": {"granularity": 128},
        "osci_reset": {"start": 15000},
    }
    assert techniques("tetrajet-v2") == {**whole, "out_control": {"mode": "wait"}}
    policy = load_policy("tetrajet-v2")
    measuring, splitting = policy.phases
    assert (measuring.at, splitting.at) == (500, 550)  # steps 501 to 550 measure
    options = {"mode": "measure"}, {"mode": "split", "channels": 0.1}
    for phase, own in zip((measuring, splitting), options, strict=True):
        linears, experts = phase.policy.rules
        assert linears.specs == experts.specs == policy.rules[0].specs
        used = [{t.name: t.model_dump(exclude_unset=True) for t in rule.techniques} for rule in (linears, experts)]
        assert used == [{**whole, "out_control": own}, whole]
    apart = plan_site(SiteView("fc", "linear", 640, 64, 40960), splitting.policy.rules[0]).program.apart
    assert apart.count == 64
    read = dataclasses.replace(MXFP8, source="fprop")
    assert [apart.program.operand(o).spec for o in (Q1, Q2, Q5, Q6)] == [MXFP8, MXFP8, MXFP8, read]
    assert not any(apart.program.operand(o).parts for o in (Q1, Q2, Q5, Q6))


def test_mxfp8_shares_a_scale_among_32() -> None:
    """Beside 450, S = 2 and the smallest E4M3 value is 2^-8: half of it goes to even, to 0. 450/2 rounds to 224."""
    x = torch.full((1, 64), 2.0**-9)
    x[0, 0] = 450.0
    assert quantized("mxfp8", x)[0].tolist() == [448.0, *[0.0] * 31, *[2.0**-9] * 32]


def test_fp8_block() -> None:
    tile = QuantSpec(element="e4m3", block=128, scale=ScaleSpec(FP32))
    w = dataclasses.replace(tile, block=(128, 128))
    assert planned("fp8-block") == {Q1: tile, Q2: w, Q3: tile, Q4: w, Q5: tile, Q6: tile}


def test_averis() -> None:
    assert planned("averis") == dict.fromkeys(Operand, NV)
    assert techniques("averis") == {"tensor_scaling": {}, "mean_split": {}}


def test_nvint4() -> None:
    x = dataclasses.replace(NV, element=INT4)
    w, dy = dataclasses.replace(x, block=(16, 16)), stochastic(x)
    assert planned("nvint4") == {Q1: x, Q2: w, Q3: dy, Q4: w, Q5: dy, Q6: x}
    assert techniques("nvint4")["stochastic_rounding"] == {"operands": ("gradients",), "range_guard": 1.0625}


def test_if4() -> None:
    """IF4's sets of elements in all six operands; the rest is nvint4's."""
    x = dataclasses.replace(NV, others=(INT4,))
    assert (x.elements, x.selector) == ((E2M1, INT4), "mse")
    w, dy = dataclasses.replace(x, block=(16, 16)), stochastic(x)
    assert planned("if4") == {Q1: x, Q2: w, Q3: dy, Q4: w, Q5: dy, Q6: x}
    assert techniques("if4") == techniques("nvint4")
    assert load_policy("if4").complexity == load_policy("nvint4").complexity + 0.5


def test_wang_dge() -> None:
    """X and W alone are quantized, by lines along K with exact scales; the backward reads what fprop multiplied."""
    x = QuantSpec(block="row", scale=ScaleSpec(FP32, "nearest_even"))
    assert planned("wang-dge") == {**dict.fromkeys(Operand), Q1: x, Q2: x}
    assert set(block_rule("wang-dge").reuses) == {Q4, Q6}
    used = techniques("wang-dge")
    assert used["step_gradient"] == {"kind": "dge", "operands": ("fprop.weight",), "k": 5.0}
    assert used["outlier_clamp"]["residual"] is True


def test_mxfp4_rht_sr() -> None:
    noisy = stochastic(FLOOR)
    assert planned("mxfp4-rht-sr") == {Q1: None, Q2: None, Q3: noisy, Q4: noisy, Q5: noisy, Q6: noisy}
    used = techniques("mxfp4-rht-sr")
    assert used["hadamard"] == {"scope": "backward", "block": 64, "kind": "random"}
    assert used["stochastic_rounding"]["range_guard"] == 0.75


def test_quartet() -> None:
    noisy = stochastic(FLOOR)
    assert planned("quartet") == {Q1: FLOOR, Q2: FLOOR, Q3: noisy, Q4: again(FLOOR), Q5: noisy, Q6: again(FLOOR)}
    used = techniques("quartet")
    assert used["hadamard"] == {"scope": "all", "block": 32, "kind": "random_backward"}
    assert used["step_gradient"] == {"kind": "clip"}
    assert used["stochastic_rounding"]["range_guard"] == 0.75


def test_one_gemm_after_another() -> None:
    off = dict.fromkeys(Operand)
    assert planned("mxfp4-fprop") == {**off, Q1: FLOOR, Q2: FLOOR}
    assert planned("mxfp4-fprop-dgrad") == {**off, Q1: FLOOR, Q2: FLOOR, Q3: FLOOR, Q4: FLOOR}
    assert not block_rule("mxfp4-fprop").reuses
    assert techniques("mxfp4-full-hadamard")["hadamard"]["kind"] == "deterministic"
    assert techniques("mxfp4-full-rht")["hadamard"]["kind"] == "random"
    noisy = stochastic(FLOOR)
    assert planned("mxfp4-full-sr") == {Q1: FLOOR, Q2: FLOOR, Q3: noisy, Q4: FLOOR, Q5: noisy, Q6: noisy}
    for name in ("mxfp4-full-hadamard", "mxfp4-full-rht"):
        assert planned(name) == dict.fromkeys(Operand, FLOOR)


def test_mxfp4_rl() -> None:
    assert planned("mxfp4-rl") == dict.fromkeys(Operand, FLOOR)
    used = techniques("mxfp4-rl")
    assert used["macro_block_scaling"] == {"block": 128}
    assert used["outlier_fallback"] == {"fraction": 0.1, "operands": ("forward",)}
    noise = used["adaptive_quantization_noise"]
    assert (noise["sigma_start"], noise["sigma_end"], noise["stages"]) == (1e-2, 5e-4, 10)
