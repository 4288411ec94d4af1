"""The JSON schema that editors read accepts policies that load, and reports common mistakes."""

from __future__ import annotations

import re

import jsonschema
import pytest
import yaml

from fp4graph.policy import load_policy
from fp4graph.policy.editor import json_schema
from fp4graph.technique.registry import default_registry
from tests.docs.blocks import of_language
from tests.helpers.policies import one_rule

REGISTRY = default_registry()
SCHEMA = json_schema(REGISTRY)
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def test_the_schema_is_valid():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", sorted(REGISTRY.policies))
def test_the_schema_accepts_shipped_policies(name):
    VALIDATOR.validate(yaml.safe_load(REGISTRY.policies[name].read_text("utf-8")))


@pytest.mark.parametrize("block", [b for b in of_language("yaml") if "# error: " not in b.text], ids=str)
def test_the_schema_accepts_policies_of_the_pages(block):
    policy = yaml.safe_load(block.text)
    # Other blocks are specifications of sweeps, or use a format or technique of a plugin that is not installed.
    if "parameters" not in policy and not {"e1m2", "mse_scale"} & {*re.findall(r"\w+", block.text)}:
        VALIDATOR.validate(policy)


MISTAKES = {
    "a misspelt key": (one_rule(rule=[]), "$"),
    "no match": (one_rule(rules=[{"quantize": {}}]), "$.rules"),
    "an unknown operand": (one_rule(operands={"fprop.wieght": "keep"}), "$.rules"),
    "an unknown element": (one_rule(quantize={"element": "e2m2"}), "$.rules"),
    "an unknown technique": (one_rule(techniques=["hadmard"]), "$.techniques[0]"),
    "an unknown option": (one_rule(techniques=[{"hadamard": {"blok": 16}}]), "$.techniques[0]"),
    "a predicate of another type": (one_rule(match={"first_blocks": "one"}), "$.rules"),
    "a key without a value": (one_rule(description=None), "$.description"),
    "a block of size 0": (one_rule(quantize={"block": 0}), "$.rules"),
    "a block of a word and a number": (one_rule(quantize={"block": ["tensor", 3]}), "$.rules"),
    "a share above 1": (one_rule(match={"first_blocks": 1.5}), "$.rules"),
    "the last 0 blocks": (one_rule(match={"last_blocks": 0}), "$.rules"),
    "a later version": (one_rule(version=2), "$.version"),
    "a rule that neither quantizes nor keeps": (one_rule(rules=[{"match": {}}]), "$.rules"),
    "a rule that quantizes and keeps": (one_rule(rules=[{"match": {}, "keep": "x", "quantize": {}}]), "$.rules"),
    "a phase at a share above 1": (one_rule(phases=[{"at": 1.5, "operands": {"forward": "keep"}}]), "$.phases[0].at"),
    "a technique without its required option": (one_rule(techniques=["out_control"]), "$.techniques[0]"),
}
LEGAL = {
    "a block of two sizes": one_rule(quantize={"block": [16, 16]}),
    "a technique without a value": one_rule(techniques=[{"hadamard": None}]),
    "an option of null": one_rule(techniques=[{"dampen": {"strength": 0.1, "total_steps": None}}]),
    "a number of blocks and a share of them": one_rule(match={"first_blocks": 1, "last_blocks": 0.15}),
    "exact sizes": one_rule(match={"in_features": 64, "out_features": {"exactly": 64}}),
}


@pytest.mark.parametrize("data", LEGAL.values(), ids=LEGAL)
def test_the_schema_accepts_policies_that_load(data):
    load_policy(data)
    VALIDATOR.validate(data)


@pytest.mark.parametrize(("data", "path"), MISTAKES.values(), ids=MISTAKES)
def test_the_schema_reports_a_mistake_at_its_path(data, path):
    assert [error.json_path for error in VALIDATOR.iter_errors(data)] == [path]
