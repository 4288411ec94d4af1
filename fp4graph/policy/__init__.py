"""Policies: which sites of a model are quantized and how, as data."""

from fp4graph.policy.load import PolicyRef, load_policy
from fp4graph.policy.match import Match, Range
from fp4graph.policy.policy import Decision, Expect, Phase, Policy, Rule, Specs, check_modules

__all__ = [
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
]
