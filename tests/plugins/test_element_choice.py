"""element_choice: its two spellings in a policy, its complexity, and lists of elements that are refused."""

from __future__ import annotations

import pytest

import fp4graph
from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.plan import plan_site
from fp4graph.numerics.formats import E2M1, E3M0, INT4
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers.policies import NVFP4, loaded, one_rule
from tests.plugins.layer import SET, Layer


def specs_of(policy):
    return dict(plan_site(Layer(None, 64, 48).site, policy.rules[0]).specs)


def load(*techniques, quantize=SET, **more):
    return fp4graph.load_policy(one_rule(*techniques, quantize=quantize, **more))


def test_a_list_and_the_technique_are_one_quantizer_and_cost_the_same() -> None:
    listed, declared = load(), loaded("element_choice", {}, quantize=NVFP4)
    assert specs_of(listed) == specs_of(declared)
    assert listed.complexity == declared.complexity == load("element_choice").complexity == 0.5
    assert listed.fingerprint != declared.fingerprint  # which covers the spelling
    some = loaded("element_choice", {"operands": ["gradients"], "selector": "amax"}, quantize=NVFP4)
    chosen = {operand for operand, spec in specs_of(some).items() if spec.others}
    assert chosen == {Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT}
    assert specs_of(some)[Operand.DGRAD_GRAD_OUTPUT].selector == "amax"


def test_the_technique_adds_to_a_list() -> None:
    spec = specs_of(loaded("element_choice", {"others": ["int4", "e3m0"]}, quantize=SET))[Operand.FPROP_INPUT]
    assert spec.elements == (E2M1, INT4, E3M0)


def test_exceptions_replace_the_list_and_its_selector() -> None:
    policy = load(
        quantize=SET | {"selector": "mae"},
        operands={
            "gradients": {"element": "e2m1"}, "fprop.weight": {"selector": "amax"},
            "wgrad.input": {"element": ["int4", "e2m1"]},
        },
    )  # fmt: skip
    specs = specs_of(policy)
    assert [(s.elements, s.selector) for s in specs.values()] == [
        ((E2M1, INT4), "mae"), ((E2M1, INT4), "amax"), ((E2M1,), None), ((E2M1, INT4), "mae"), ((E2M1,), None),
        ((INT4, E2M1), "mse"),
    ]  # fmt: skip
    assert fp4graph.load_policy(policy.to_data()) == policy
    assert policy.to_data()["rules"][0]["quantize"]["element"] == ["e2m1", "int4"]


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        (NVFP4 | {"selector": "mse"},
         r"rules\[0\]\.quantize: selector 'mse' chooses between elements, but element names only e2m1"),
        (SET | {"selector": "rms"}, r"rules\[0\]\.quantize\.selector must be 'mse', 'mae' or 'amax'; got 'rms'"),
        (NVFP4 | {"element": ["e2m1", "e4m3"]}, r"rules\[0\]\.quantize: .* must have codes of one width"),
        (NVFP4 | {"element": ["e2m1", "e5m9"]}, r"rules\[0\]\.quantize\.element: unknown element format 'e5m9'"),
        (NVFP4 | {"element": ["e2m1", "e8m0"]}, r"rules\[0\]\.quantize\.element: 'e8m0' is a format"),
        (NVFP4 | {"element": []}, r"rules\[0\]\.quantize\.element must be text, or a list of at least one text"),
    ],
)  # fmt: skip
def test_a_list_without_a_meaning_is_refused(quantize, message) -> None:
    with pytest.raises(PolicyError, match=f"^{message}"):
        load(quantize=quantize)


def test_a_scale_of_a_whole_expert_is_refused() -> None:
    policy = loaded("element_choice", {}, quantize=NVFP4 | {"block": "tensor"}, op="grouped")
    with pytest.raises(CaptureError, match=r"a choice between elements cannot act on fprop\.input of experts"):
        plan_site(SiteView("experts", "grouped", 64, 48, 48 * 64), policy.rules[0])
