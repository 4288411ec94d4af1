"""``load_policy`` takes files, shipped names and data, and merges a policy onto the policy that it extends."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.registry import Registry
from tests.helpers.techniques import offering

PARENT = """
version: 1
name: parent
description: the parent
default: {block: 64}
rules:
  - {name: one, match: {op: linear}, quantize: {block: 16}}
techniques:
  - average: {beta: 0.5}
  - dither
expect: {quantized: {min: 2}}
"""
CHILD = "version: 1\nextends: parent.yaml\n"
KEEP = "{name: mine, match: {module: head}, keep: sensitive}"


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return written(tmp_path / "parent.yaml", PARENT)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def child(parent: Path, text: str) -> Path:
    return written(parent.with_name("child.yaml"), CHILD + text)


def places(policy: Policy) -> list[tuple[str, str | None, int | None]]:
    return [(rule.name, rule.file, rule.line) for rule in policy.rules]


def names(policy: Policy) -> list[str]:
    return [rule.name for rule in policy.rules]


def test_references_to_a_file(parent: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped name has precedence over a file of that name."""
    monkeypatch.chdir(parent.parent)
    policy = load_policy(parent, registry)
    assert load_policy(policy, registry) is policy
    assert (policy.file, places(policy)) == (str(parent), [("one", str(parent), 7)])
    for ref in ("parent.yaml", "./parent.yaml", str(parent)):
        assert load_policy(ref, registry) == policy
    written(parent.with_name("mxfp4"), "version: 1\nname: mine\ndefault: keep\n")
    assert [load_policy(ref, registry).name for ref in ("mxfp4", "./mxfp4")] == ["mxfp4", "mine"]


def test_a_policy_without_a_name_has_the_stem_of_its_file(tmp_path: Path, registry: Registry) -> None:
    assert load_policy(written(tmp_path / "mine.yaml", "version: 1\ndefault: keep\n"), registry).name == "mine"
    unnamed = load_policy({"version": 1, "default": "keep"}, registry)
    assert (unnamed.name, unnamed.quantizes, unnamed.complexity) == ("unnamed", False, 0)


def test_plugins_ship_policies(tmp_path: Path) -> None:
    path = written(tmp_path / "house-recipe.yaml", "version: 1\nextends: mxfp4\ndescription: house\n")
    registry = Registry([("recipes", offering(policies=[path]))], entry_point_group=None)
    policy = load_policy("house-recipe", registry)
    assert (policy.name, policy.rules) == ("house-recipe", load_policy("mxfp4").rules)


def test_an_alias_is_the_policy_that_it_names() -> None:
    assert load_policy("baseline") == load_policy("bf16")


def test_a_child_without_changes_is_its_parent_with_another_name(parent: Path, registry: Registry) -> None:
    inherited, original = load_policy(child(parent, ""), registry), load_policy(parent, registry)
    assert (inherited.name, inherited.description) == ("child", "")  # the description is not inherited
    assert inherited.fingerprint == original.fingerprint
    assert inherited.rules[0].file == str(parent)
    assert inherited != original


def test_keys_of_a_child_replace_inherited_keys(parent: Path, registry: Registry) -> None:
    text = "rules:\n  - {name: two, match: {}, quantize: {}}\ndefault: keep\ndescription: mine\nexpect: {kept: 1}\n"
    policy = load_policy(child(parent, text), registry)
    assert (names(policy), policy.description, policy.default.quantizes) == (["two"], "mine", False)
    assert policy.expect.quantized is None
    assert policy.expect.kept is not None
    assert load_policy(child(parent, f"rules: [{KEEP}]\n"), registry).quantizes  # by the inherited default


def test_rules_before_are_put_ahead_of_inherited_rules(parent: Path, registry: Registry) -> None:
    path = child(parent, f"rules:\n  before:\n    - {KEEP}\n")
    policy, original = load_policy(path, registry), load_policy(parent, registry)
    assert places(policy) == [("mine", str(path), 5), ("one", str(parent), 7)]
    assert policy.rules[1] == original.rules[0]
    assert policy.fingerprint != original.fingerprint
    again = load_policy(yaml.safe_load(policy.to_yaml()), registry)
    assert (again, again.fingerprint) == (policy, policy.fingerprint)


def test_rules_before_at_several_levels_and_in_a_phase(parent: Path, registry: Registry) -> None:
    path = child(parent, f"rules: {{before: [{KEEP}]}}\n")
    grandchild = written(
        parent.with_name("grandchild.yaml"),
        "version: 1\nextends: child.yaml\nrules: {before: [{name: first, match: {}, quantize: {block: 8}}]}\n"
        "phases:\n  - {at: 5, rules: {before: [{name: late, match: {}, keep: the end}]}}\n"
        "  - {at: 9, rules: [{name: alone, match: {}, keep: the end}], default: keep}\n",
    )
    policy = load_policy(grandchild, registry)
    assert places(policy) == [("first", str(grandchild), 3), ("mine", str(path), 3), ("one", str(parent), 7)]
    assert [names(phase.policy) for phase in policy.phases] == [["late", "first", "mine", "one"], ["alone"]]
    assert load_policy(yaml.safe_load(policy.to_yaml()), registry) == policy
    assert f"\nname: {policy.name}\n" in policy._repr_html_()


def test_rules_before_are_ahead_of_the_rules_of_inherited_phases_too(parent: Path, registry: Registry) -> None:
    written(
        parent,
        PARENT + "phases:\n  - {at: 5, rules: [{name: two, match: {}, quantize: {}}]}\n  - {at: 6, default: keep}\n"
        "  - {at: 7, rules: {before: [{name: late, match: {module: x}, keep: the end}]}}\n",
    )
    policy = load_policy(child(parent, f"rules: {{before: [{KEEP}]}}\n"), registry)
    expected = [["mine", "two"], ["mine", "one"], ["mine", "late", "one"]]
    assert [names(phase.policy) for phase in policy.phases] == expected
    assert {places(phase.policy)[0] for phase in policy.phases} == {("mine", str(parent.with_name("child.yaml")), 3)}
    assert load_policy(yaml.safe_load(policy.to_yaml()), registry) == policy


def test_techniques_are_appended_and_namesakes_replaced_in_their_place(parent: Path, registry: Registry) -> None:
    path = child(parent, "techniques:\n  - echo\n  - average: {beta: 0.9}\n")
    text = "version: 1\nextends: ../child.yaml\ntechniques: [{average: {beta: 0.1}}]\n"
    for ref, beta in ((path, 0.9), (written(parent.parent / "deeper" / "grandchild.yaml", text), 0.1)):
        policy = load_policy(ref, registry)
        assert [technique.name for technique in policy.techniques] == ["average", "dither", "echo"]
        assert policy.techniques[0].beta == beta  # type: ignore[attr-defined]


def test_data_extends_a_shipped_policy(registry: Registry) -> None:
    policy = load_policy({"version": 1, "name": "x", "extends": "mxfp4", "default": {"block": 16}}, registry)
    assert (policy.rules, policy.default.quantizes) == (load_policy("mxfp4", registry).rules, True)


#: Text of the child, a replacement in the text of the parent, and the error.
NONE = ("", "")
CIRCLE = "version: 1\n\nextends: ./child.yaml\n"
MISTAKES = [
    ("", ("beta: 0.5", "beta: 1.5"), r"parent.yaml:9: .*beta must be below 1"),
    ("rules: []\n", ("name: one", "nam: one"), r"parent.yaml:7: .*did you mean 'name'"),
    (
        "rules:\n  before:\n    - match: {}\n      kep: mine\n", NONE,
        r"child.yaml:6: unknown key 'kep' in rules.before\[0\]",
    ),
    (
        "rules:\n  before:\n    - {name: one, match: {op: linear}, keep: mine}\n", NONE,
        r"child.yaml:5: two rules are called 'one', the other in .*parent.yaml:7; ",
    ),
    ("techniques:\n  - ramp: {steps: 1}\n", NONE, r"child.yaml:4: .*'ramp' and 'average' cannot share a site"),
    ("", (PARENT, CIRCLE), r"parent.yaml:3: .*circle: child\.yaml → parent\.yaml → child\.yaml; extend"),
    ("", (PARENT, CIRCLE.replace("child", "parent")), r"parent.yaml:3: .*: child.yaml → parent.yaml → parent.yaml; "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "change", "message"), MISTAKES)
def test_an_error_names_the_file_of_the_mistake(
    text: str, change: tuple[str, str], message: str, parent: Path, registry: Registry
) -> None:
    written(parent, PARENT.replace(*change))
    with pytest.raises(PolicyError, match=f"^{parent.parent}/{message}"):
        load_policy(child(parent, text), registry)


def test_the_error_of_an_inherited_expectation_names_both_policies(parent: Path, registry: Registry) -> None:
    with pytest.raises(PolicyError, match=r"child.yaml:1: .*found 0 of 3.*inherited from .*parent.yaml:11\)"):
        load_policy(child(parent, ""), registry).expect.check(0, 3)
    with pytest.raises(PolicyError, match=r"parent.yaml:11: .*found 0 of 3.*expectation$"):
        load_policy(parent, registry).expect.check(0, 3)


REPLACED = r"p.yaml:3: no rule quantizes, .* replace those of 'tetrajet'; .*before: "
INHERITED = r"p.yaml:1: expected .*no rule .*inherited from .*tetrajet.yaml:28"
EVERYTHING = r"p.yaml:3: a rule without a match keeps every site.*default: keep"
SAID = "default: keep\nexpect: {kept: {min: 0}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"extends: tetrajet\nrules: [{KEEP}]", REPLACED),
        ("extends: tetrajet\nrules: []", REPLACED),
        (f"extends: tetrajet\nrules: [{KEEP}]\ndefault: keep", INHERITED),  # the line that shipped policies have
        ("extends: tetrajet\nrules: []\ndefault: keep", INHERITED),
        ("extends: tetrajet\nrules:\n  before: [{name: all, match: {}, keep: why}]", EVERYTHING),
        *((f"extends: tetrajet\nrules: {rules}\n{SAID}", None) for rules in (f"[{KEEP}]", "[]")),
        *((f"extends: bf16\nrules: {rules}", None) for rules in (f"[{KEEP}]", "[]")),
        ("rules: [{match: {}, keep: why}, {match: {op: linear}, quantize: {element: e2m1}}]", None),
    ],
)
def test_a_policy_that_quantizes_nothing_must_say_so(text: str, message: str | None, tmp_path: Path) -> None:
    path = written(tmp_path / "p.yaml", f"version: 1\n{text}\n")
    if message is None:
        assert not load_policy(path).ever_quantizes
    else:
        with pytest.raises(PolicyError, match=message):
            load_policy(path)


def test_techniques_of_a_policy_that_quantizes_nothing_are_warned_of(registry: Registry) -> None:
    data = {"version": 1, "default": "keep", "techniques": ["average"]}
    with pytest.warns(PolicyWarning, match="no rule quantizes, so average has no effect here"):
        load_policy(data, registry)
    load_policy({**data, "phases": [{"at": 5, "default": {}}]}, registry)


def test_merge_keys_and_aliases_follow_yaml(tmp_path: Path, registry: Registry) -> None:
    """https://yaml.org/type/merge.html: a mapping's own keys win, then those of earlier mappings in the list. PyYAML's
    versions disagree."""
    text = """
version: 1
default: &a {block: 8, ties: even}
rules:
  - match: {}
    quantize: {<<: [{block: 16, ties: up}, *a], rounding: stochastic}
  - {name: b, match: {}, quantize: {ties: away, <<: *a}}
  - {name: c, match: {op: sdpa}, quantize: *a}
"""
    base = {"block": 8, "ties": "even"}
    rules = [
        {"match": {}, "quantize": {"block": 16, "ties": "up", "rounding": "stochastic"}},
        {"name": "b", "match": {}, "quantize": {"block": 8, "ties": "away"}},
        {"name": "c", "match": {"op": "sdpa"}, "quantize": base},
    ]
    merged = load_policy(written(tmp_path / "p.yaml", text), registry)
    plain = load_policy({"version": 1, "name": "p", "default": base, "rules": rules}, registry)
    assert merged.to_yaml() == plain.to_yaml()  # a failure shows the lines that differ
    assert merged == plain
