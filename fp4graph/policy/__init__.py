"""Policies: which sites of a model are quantized and how, as data."""

from fp4graph.policy.load import ALIASES, PolicyRef, load_policy, shipped_policies
from fp4graph.policy.match import Match, Range
from fp4graph.policy.policy import Expect, Phase, Policy, check_modules
from fp4graph.policy.rule import CLOSING, DEFAULT_INDEX, KEPT, NAMED_ROLES, Decision, Rule, Specs, plan_specs

__all__ = [
    "ALIASES",
    "CLOSING",
    "DEFAULT_INDEX",
    "KEPT",
    "NAMED_ROLES",
    "Decision",
    "Expect",
    "Match",
    "Phase",
    "Policy",
    "PolicyRef",
    "Range",
    "Rule",
    "Specs",
    "check_modules",
    "load_policy",
    "plan_specs",
    "shipped_policies",
]
