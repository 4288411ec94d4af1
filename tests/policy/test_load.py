"""From a reference to a policy: files, shipped names, data; and what ``extends`` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.policy import load_policy
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.registry import Registry

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


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    path = tmp_path / "parent.yaml"
    path.write_text(PARENT)
    return path


def child(parent: Path, text: str) -> Path:
    path = parent.parent / "child.yaml"
    path.write_text(f"version: 1\nextends: parent.yaml\n{text}")
    return path


def test_a_policy_is_itself(registry: Registry) -> None:
    policy = load_policy("mxfp4", registry)
    assert load_policy(policy, registry) is policy


def test_path_text_and_data_agree(parent: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parent.parent)
    policy = load_policy(parent, registry)
    assert policy.file == str(parent)
    assert load_policy("parent.yaml", registry) == policy
    assert load_policy("./parent.yaml", registry) == policy
    assert load_policy(policy.to_yaml() and parent.read_text() and str(parent), registry) == policy


def test_a_shipped_name_wins_over_a_file_of_that_name(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mxfp4").write_text("version: 1\nname: mine\ndefault: keep\n")
    assert load_policy("mxfp4", registry).name == "mxfp4"
    assert load_policy("./mxfp4", registry).name == "mine"


def test_a_name_is_the_files_stem_where_none_is_given(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\ndefault: keep\n")
    assert load_policy(path, registry).name == "mine"
    assert load_policy({"version": 1, "default": "keep"}, registry).name == "unnamed"


def test_a_baseline_quantizes_nothing(registry: Registry) -> None:
    policy = load_policy({"version": 1, "default": "keep"}, registry)
    assert not policy.quantizes
    assert policy.complexity == 0


def test_plugins_ship_policies(tmp_path: Path) -> None:
    path = tmp_path / "house-recipe.yaml"
    path.write_text("version: 1\nextends: mxfp4\ndescription: ours\n")

    class Recipes:
        @hookimpl
        def fp4graph_policies(self) -> list[Path]:
            return [path]

    registry = Registry(plugins=[("recipes", Recipes())], entry_point_group=None)
    policy = load_policy("house-recipe", registry)
    assert policy.name == "house-recipe"
    assert policy.rules == load_policy("mxfp4", registry).rules


def test_rules_know_where_they_stand(parent: Path, registry: Registry) -> None:
    rule = load_policy(parent, registry).rules[0]
    assert (rule.file, rule.line) == (str(parent), 7)


def test_a_child_without_more_is_its_parent_by_another_name(parent: Path, registry: Registry) -> None:
    inherited, original = load_policy(child(parent, ""), registry), load_policy(parent, registry)
    assert inherited.name == "child"
    assert inherited.description == ""  # which would describe another policy
    assert inherited.fingerprint == original.fingerprint
    assert inherited.rules[0].file == str(parent)
    assert inherited != original


def test_rules_are_replaced_if_given(parent: Path, registry: Registry) -> None:
    policy = load_policy(child(parent, "rules:\n  - {name: two, match: {}, quantize: {}}\n"), registry)
    assert [rule.name for rule in policy.rules] == ["two"]


KEEP = "{name: mine, match: {module: head}, keep: sensitive}"


def test_rules_before_go_ahead_of_inherited_ones(parent: Path, registry: Registry) -> None:
    path = child(parent, f"rules:\n  before:\n    - {KEEP}\n")
    policy = load_policy(path, registry)
    original = load_policy(parent, registry)
    assert [(rule.name, rule.file, rule.line) for rule in policy.rules] == [
        ("mine", str(path), 5),
        ("one", str(parent), 7),
    ]
    assert policy.rules[1] == original.rules[0]
    assert policy.fingerprint != original.fingerprint
    again = load_policy(yaml.safe_load(policy.to_yaml()), registry)
    assert (again, again.fingerprint) == (policy, policy.fingerprint)


def test_rules_before_at_several_levels_and_in_a_phase(parent: Path, registry: Registry) -> None:
    path = child(parent, f"rules: {{before: [{KEEP}]}}\n")
    grandchild = parent.parent / "grandchild.yaml"
    grandchild.write_text(
        "version: 1\nextends: child.yaml\nrules: {before: [{name: first, match: {}, quantize: {block: 8}}]}\n"
        "phases:\n  - {at: 5, rules: {before: [{name: late, match: {}, keep: the end}]}}\n"
        "  - {at: 9, rules: [{name: alone, match: {}, keep: the end}], default: keep}\n"
    )
    policy = load_policy(grandchild, registry)
    assert [rule.name for rule in policy.rules] == ["first", "mine", "one"]
    assert [rule.file for rule in policy.rules] == [str(grandchild), str(path), str(parent)]
    phases = [[rule.name for rule in phase.policy.rules] for phase in policy.phases]
    assert phases == [["late", "first", "mine", "one"], ["alone"]]
    assert load_policy(yaml.safe_load(policy.to_yaml()), registry) == policy


def test_an_own_rule_with_an_inherited_name_is_to_blame(parent: Path, registry: Registry) -> None:
    path = child(parent, "rules:\n  before:\n    - {name: one, match: {op: linear}, keep: mine}\n")
    with pytest.raises(PolicyError, match=r"child.yaml:5: two rules are called 'one', the other in .*parent.yaml:7; "):
        load_policy(path, registry)


def test_a_mistake_in_rules_before_is_located(parent: Path, registry: Registry) -> None:
    path = child(parent, "rules:\n  before:\n    - match: {}\n      kep: mine\n")
    with pytest.raises(PolicyError, match=r"child.yaml:6: unknown key 'kep' in rules.before\[0\]"):
        load_policy(path, registry)


@pytest.mark.parametrize("rules", [f"[{KEEP}]", "[]"])
def test_own_rules_that_only_keep_are_no_silent_baseline(rules: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nextends: tetrajet\nrules: {rules}\n")
    with pytest.raises(PolicyError, match=r"p.yaml:3: no rule quantizes, .* replace those of 'tetrajet'; .*before: "):
        load_policy(path)
    path.write_text(f"version: 1\nextends: tetrajet\nrules: {rules}\ndefault: keep\n")  # copied from shipped policies
    with pytest.raises(PolicyError, match=r"p.yaml:1: expected .*no rule .*inherited from .*tetrajet.yaml:28"):
        load_policy(path)
    path.write_text(f"version: 1\nextends: tetrajet\nrules: {rules}\ndefault: keep\nexpect: {{kept: {{min: 0}}}}\n")
    assert not load_policy(path).ever_quantizes  # all of it said
    path.write_text(f"version: 1\nextends: bf16\nrules: {rules}\n")
    assert not load_policy(path).ever_quantizes  # as the parent, which says so


def test_a_rule_for_everything_is_no_silent_baseline(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nextends: tetrajet\nrules:\n  before: [{name: all, match: {}, keep: why}]\n")
    with pytest.raises(PolicyError, match=r"p.yaml:3: a rule without a match keeps every site.*default: keep"):
        load_policy(path)
    path.write_text("version: 1\nrules: [{match: {}, keep: why}, {match: {op: linear}, quantize: {element: e2m1}}]\n")
    assert not load_policy(path).ever_quantizes


def test_rules_that_keep_beside_an_inherited_default_that_quantizes(parent: Path, registry: Registry) -> None:
    assert load_policy(child(parent, f"rules: [{KEEP}]\n"), registry).quantizes


def test_techniques_of_a_policy_that_quantizes_nothing(registry: Registry) -> None:
    with pytest.warns(PolicyWarning, match="no rule quantizes, so average has no effect here"):
        load_policy({"version": 1, "default": "keep", "techniques": ["average"]}, registry)
    phases = [{"at": 5, "default": {}}]
    load_policy({"version": 1, "default": "keep", "techniques": ["average"], "phases": phases}, registry)


def test_an_inherited_expectation_names_the_policy_that_inherits_it(parent: Path, registry: Registry) -> None:
    path = child(parent, "")
    with pytest.raises(PolicyError, match=r"child.yaml:1: .*found 0 of 3.*inherited from .*parent.yaml:11\)"):
        load_policy(path, registry).expect.check(0, 3)
    with pytest.raises(PolicyError, match=r"parent.yaml:11: .*found 0 of 3.*expectation$"):
        load_policy(parent, registry).expect.check(0, 3)


def test_default_description_and_expect_are_replaced(parent: Path, registry: Registry) -> None:
    policy = load_policy(child(parent, "default: keep\ndescription: mine\nexpect: {kept: 1}\n"), registry)
    assert policy.default.keep is not None
    assert policy.description == "mine"
    assert policy.expect.quantized is None
    assert policy.expect.kept is not None


def test_techniques_are_appended_and_namesakes_replaced_in_their_place(parent: Path, registry: Registry) -> None:
    policy = load_policy(child(parent, "techniques:\n  - echo\n  - average: {beta: 0.9}\n"), registry)
    assert [technique.name for technique in policy.techniques] == ["average", "dither", "echo"]
    assert policy.techniques[0].beta == 0.9  # type: ignore[attr-defined]


def test_three_generations(parent: Path, registry: Registry) -> None:
    child(parent, "techniques: [echo]\n")
    grandchild = parent.parent / "deeper" / "grandchild.yaml"
    grandchild.parent.mkdir()
    grandchild.write_text("version: 1\nextends: ../child.yaml\ntechniques: [{average: {beta: 0.1}}]\n")
    policy = load_policy(grandchild, registry)
    assert [technique.name for technique in policy.techniques] == ["average", "dither", "echo"]


def test_data_extends_a_shipped_policy(registry: Registry) -> None:
    policy = load_policy({"version": 1, "name": "x", "extends": "mxfp4", "default": {"block": 16}}, registry)
    assert policy.rules == load_policy("mxfp4", registry).rules
    assert policy.default.quantizes


def test_a_parent_error_is_the_parents(parent: Path, registry: Registry) -> None:
    parent.write_text(PARENT.replace("beta: 0.5", "beta: 1.5"))
    with pytest.raises(PolicyError, match="beta must be below 1") as caught:
        load_policy(child(parent, ""), registry)
    assert (caught.value.file, caught.value.line) == (str(parent), 9)


def test_a_parent_rule_that_is_replaced_is_checked_all_the_same(parent: Path, registry: Registry) -> None:
    parent.write_text(PARENT.replace("name: one", "nam: one"))
    with pytest.raises(PolicyError, match="did you mean 'name'") as caught:
        load_policy(child(parent, "rules: []\n"), registry)
    assert (caught.value.file, caught.value.line) == (str(parent), 7)


def test_a_conflict_across_files_is_the_childs(parent: Path, registry: Registry) -> None:
    path = child(parent, "techniques:\n  - ramp: {steps: 1}\n")
    with pytest.raises(PolicyError, match="'ramp' and 'average' cannot share a site") as caught:
        load_policy(path, registry)
    assert (caught.value.file, caught.value.line) == (str(path), 4)


def test_a_circle(parent: Path, registry: Registry) -> None:
    path = child(parent, "")
    parent.write_text("version: 1\n\nextends: ./child.yaml\n")
    with pytest.raises(PolicyError, match=r"circle: child\.yaml → parent\.yaml → child\.yaml; extend") as caught:
        load_policy(path, registry)
    assert (caught.value.file, caught.value.line) == (str(parent), 3)


def test_itself(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "me.yaml"
    path.write_text("version: 1\nextends: me.yaml\n")
    with pytest.raises(PolicyError, match=r"circle: me\.yaml → me\.yaml") as caught:
        load_policy(path, registry)
    assert caught.value.line == 2


def test_merge_keys_and_aliases_are_yaml(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\ndefault: &base {block: 16, ties: up}\nrules:\n"
        "  - match: {}\n    quantize: {<<: *base, ties: away}\n  - {match: {op: sdpa}, quantize: *base}\n"
    )
    policy = load_policy(path, registry)
    specs = [next(iter(rule.specs.values())) for rule in policy.rules]
    assert [(spec.block, spec.ties) for spec in specs if spec] == [(16, "away"), (16, "up")]


def test_an_alias_is_the_policy_that_it_names() -> None:
    assert load_policy("baseline") == load_policy("bf16")
    assert not load_policy("baseline").quantizes
