"""Search spaces: those of the design-space and TetraJet papers, custom spaces, and errors in spaces."""

import dataclasses
import itertools
import random
import re
from pathlib import Path

import pytest

import fp4graph.lab.sweeps
from fp4graph.errors import PolicyError
from fp4graph.graph.plan import plan_site
from fp4graph.lab.sweeps.space import load_space, parse_space
from fp4graph.lab.sweeps.space_schema import RUN_KEYS
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy import load_policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.lab.test_score import QUANTIZED

ROWS = [row for row in QUANTIZED if row["scale"] in ("E8M0", "E4M3")]
Q1, Q2, Q3, Q4, Q5, Q6 = Operand
#: The shipped spaces beside design-space, and their sizes.
SHIPPED = {
    "e8m3": 3 * 2 * 2 * 2 * 2 * 3 * 3, "ue5m3": 3 * 2 * 2 * 2 * 2 * 3 * 3, "tetrajet-backward": 2**3,
    "tetrajet-qema": 10, "tetrajet-qramping": 10,
}  # fmt: skip

SWITCH = {"False": "without", "True": "with"}
BACKWARD = dict.fromkeys(("IntelFP4_exact", "IntelfP4_exact", "IntFP4_exact"), "backward")
NEAREST = {"TiesToEven": "nearest", "TowardPositive": "up", "Stochastic": "stochastic", "N/A": "nearest"}
#: How the paper's tables spell the choices of Table 10: column, parameter, cell to label.
SPELLED = {
    "scale": ("scale format", {"E8M0": "e8m0", "E4M3": "e4m3"}),
    "max_grad": ("max approximation", {"STE": "ste"}),
    "round_mode": ("scale rounding", NEAREST),
    "quant_grad": ("step gradient", {"STE": "ste", "baseline": "dge", "spline": "spline"}),
    "optimiser": ("optimizer", {"Adam": "adam", "StableSPAM": "stablespam", "StablesPAM": "stablespam"}),
    "loss_scaling": ("loss scaling", SWITCH),
    "tensor_scaling": ("tensor scaling", SWITCH),
    "tensor_grad": ("tensor scale gradient", {"N/A": None, "ignore": "ignore", "absmax": "absmax"}),
    "hadamard": ("hadamard", {"N/A": "none", "None_exact": "none", "all_exact": "all", "backward_exact": "backward"}),
    "sr": ("stochastic rounding", {"None_exact": "none", "all_activation_exact": "activations", **BACKWARD}),
}

#: Rows whose columns and complexity points contradict each other, as the golden file says.
CONTRADICTORY = [row for row in ROWS if "complexity points" in row["misprint"]]


def spelled(row, space):
    """Return the choices of a row for the parameters of a space that the row has a cell for."""
    names = {parameter.name for parameter in space.parameters}
    cells = {name: labels[row[cell].replace(".", "_")] for cell, (name, labels) in SPELLED.items() if name in names}
    return {name: label for name, label in cells.items() if label is not None}


def points(row):
    return float(row["complexity_points"].replace(",", "."))


def policy_of(space, chosen):
    return space.configuration(chosen).policy


def specs(policy):
    """Return the six specs of the policy's one quantizing rule, as its techniques change them."""
    (rule,) = (rule for rule in policy.rules if rule.quantizes)
    return dict(plan_site(SiteView("fc", "linear", 64, 64, 4096), rule).specs)


def test_table_10_has_as_many_configurations_as_its_conditions_leave(table10):
    count = 0
    for _format, smooth, _rounding, _step in itertools.product("ab", ("ste", "soft", "hybrid", "absmax"), "abc", "abc"):
        scale_gradients = 1 if smooth == "ste" else 3
        tensor = 1 + (3 if smooth == "ste" else 2)  # without a tensor scale, and with one: ignore, absmax, STE
        optimizer, loss_scaling, rounding, hadamard = 2, 2, 3, 3
        count += scale_gradients * tensor * optimizer * loss_scaling * rounding * hadamard
    assert count == 20_088
    assert table10.size() == count
    assert table10.size(limit=1000) == 1000


@pytest.mark.slow
def test_assignments_are_distinct_have_distinct_keys_and_are_those_that_the_space_contains(table10):
    every = [tuple(assignment.items()) for assignment in table10.assignments()]
    assert len(set(every)) == len(every)
    keys = [table10.configuration(dict(assignment)).key for assignment in every[::101]]
    assert len(set(keys)) == len(keys) == 199
    assert load_space("design-space").configuration(dict(every[505])).key == keys[5]
    assert all(table10.contains(dict(assignment)) for assignment in every[::97])
    plain = dict(every[0])
    for name, label in (("tensor scale gradient", "absmax"), ("hadamard", "some"), ("colour", "red")):
        assert not table10.contains({**plain, name: label}), name
    assert not table10.contains({name: label for name, label in plain.items() if name != "hadamard"})
    smooth = {**plain, "max approximation": "absmax", "scale gradient": "ste", "tensor scaling": "with"}
    assert table10.contains({**smooth, "tensor scale gradient": "absmax"})
    assert not table10.contains({**smooth, "tensor scale gradient": "ste"})


def test_rows_of_the_papers_tables_are_configurations_of_the_printed_complexity(table10):
    assert len(ROWS) == 75
    deviant = []
    for row in ROWS:
        chosen = spelled(row, table10)
        if not table10.contains(chosen):
            # Only one row has a scale gradient beside an STE scale, where the scale gradient does nothing.
            assert row["scale_grad"] == "spline"
        if policy_of(table10, chosen).complexity + 1.5 * (row["scale_grad"] == "spline") != points(row):
            deviant.append(row)
    assert deviant == CONTRADICTORY


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no effect here:fp4graph.PolicyWarning")
def test_every_drawn_configuration_is_possible_and_counts_what_table_9_says(table10):
    """Ω from the labels alone, by the table's weights."""
    generator = random.Random(0)
    for _ in range(150):
        chosen = table10.draw(generator)
        assert table10.contains(chosen)
        configuration = table10.configuration(chosen)
        assert configuration.error is None
        complexity = (
            3.0 * (chosen["max approximation"] != "ste")
            + 3.0 * (chosen.get("tensor scale gradient", "ignore") != "ignore")
            + 2.0 * (chosen["step gradient"] != "ste")
            + 1.0 * (chosen["hadamard"] != "none")
            + 1.5 * (chosen.get("scale gradient", "ste") != "ste")
            + 0.5 * (chosen["stochastic rounding"] != "none")
            + 0.5 * (chosen["tensor scaling"] == "with")
            + 0.5 * (chosen["loss scaling"] == "with")
            + 0.5 * (chosen["optimizer"] == "stablespam")
            + 0.25 * (chosen["scale rounding"] == "stochastic")
        )
        assert configuration.policy.complexity == complexity
        # A trial trains the policy that its document is loaded to.
        assert load_policy(configuration.document).fingerprint == configuration.policy.fingerprint
        assert configuration.policy.name == f"design-space: {configuration.summary}"


def test_the_plain_configurations_are_the_shipped_pure_policies(table10):
    for configuration, shipped in zip(table10.first()[2:], ("mxfp4", "nvfp4"), strict=True):
        assert (configuration.kind, configuration.policy.complexity) == ("pure", 0)
        (rule,) = [rule for rule in configuration.policy.rules if rule.quantizes]
        assert rule.specs == load_policy(shipped).rules[0].specs
    baselines = table10.first()[:2]
    shown = [(b.kind, b.summary, b.policy.complexity, b.policy.quantizes) for b in baselines]
    assert shown == [("baseline", "Adam", 0, False), ("baseline", "StableSPAM", 0.5, False)]


def test_options_that_depend_on_several_choices(table10):
    plain = next(iter(table10.assignments()))

    def options(technique, **chosen):
        taken = {**plain, **{name.replace("_", " "): label for name, label in chosen.items()}}
        policy = table10.configuration(taken).policy
        return next(t for t in policy.techniques if t.name == technique).model_dump()

    for scale, headroom, block in (("e8m0", 1.0, 32), ("e4m3", 0.5, 16)):
        more = {"scale_format": scale, "tensor_scaling": "with", "tensor_scale_gradient": "ignore"}
        assert options("tensor_scaling", **more)["headroom"] == headroom
        for scope in ("all", "backward"):
            rotated = options("hadamard", scale_format=scale, hadamard=scope)
            assert (rotated["scope"], rotated["block"]) == (scope, block)


SPACES = Path(fp4graph.lab.sweeps.__file__).with_name("spaces").glob("*.yaml")


@pytest.mark.parametrize("name", sorted({path.stem for path in SPACES} - {"design-space"}))
def test_every_configuration_is_a_policy(name):
    space = load_space(name)
    assert space.size() == SHIPPED[name]
    assignments = list(space.assignments())
    for assignment in assignments if len(assignments) <= 10 else random.Random(0).sample(assignments, 25):
        configuration = space.configuration(assignment)
        assert configuration.error is None
        assert load_policy(configuration.document).fingerprint == configuration.policy.fingerprint


@pytest.mark.parametrize(("name", "table", "count"), [("e8m3", "7", 6), ("ue5m3", "8", 34)])
def test_printed_rows_are_configurations_of_the_printed_complexity(name, table, count):
    space = load_space(name)
    plain = next(iter(space.assignments()))
    assert specs(policy_of(space, plain)) == specs(load_policy(name))
    rows = [row for row in QUANTIZED if (row["table"], row["scale_corrected"]) == (table, name.upper())]
    assert len(rows) == count
    for row in rows:
        chosen = {**plain, **spelled(row, space), "underflow": row["nan_mode"]}
        assert space.contains(chosen)
        policy = policy_of(space, chosen)
        (rule,) = (rule for rule in policy.rules if rule.quantizes)
        assert {spec.scale.zero for spec in rule.specs.values() if spec} == {row["nan_mode"]}
        if "complexity points" not in row["misprint"]:
            assert policy.complexity == points(row)


def test_the_best_recipe_of_table_8_is_the_shipped_one():
    space = load_space("ue5m3")
    best = {"underflow": "to_one", "optimizer": "stablespam", "tensor scaling": "with"}
    best["stochastic rounding"] = "backward"
    policy, shipped = policy_of(space, {**next(iter(space.assignments())), **best}), load_policy("ue5m3-best")
    assert specs(policy) == specs(shipped)
    assert set(policy.techniques) == set(shipped.techniques)


def test_the_cells_of_tetrajets_table_5_have_their_specs():
    space = load_space("tetrajet-backward")
    cells = {tuple(chosen.values()): specs(policy_of(space, chosen)) for chosen in space.assignments()}
    switches = [
        ("stochastic", "deterministic"), ("double quantization", "microscaling"), ("truncation-free", "microscaling"),
    ]  # fmt: skip
    assert list(cells) == list(itertools.product(*switches))
    for (backward, source, scale), cell in cells.items():
        x = QuantSpec(block=32, scale=ScaleSpec("e8m0", "ceil" if scale == "truncation-free" else "floor"), ties="up")
        dy = dataclasses.replace(x, rounding="nearest" if backward == "deterministic" else "stochastic")
        again = dataclasses.replace(dy, source="fprop" if source == "double quantization" else "original")
        assert cell == {Q1: x, Q2: x, Q3: dy, Q4: again, Q5: dy, Q6: again}
    assert cells[tuple(first for first, _ in switches)] == specs(load_policy("tetrajet"))
    microscaling = specs(load_policy("microscaling"))
    ties_up = {operand: dataclasses.replace(spec, ties="up") for operand, spec in microscaling.items()}
    assert cells[tuple(second for _, second in switches)] == ties_up


TABLE_9, TABLE_8 = {0.993, 0.995, 0.997, 0.998, 0.999, 0.9995}, {0.9983, 0.9972, 0.999, 0.9975, 0.998}


@pytest.mark.parametrize(
    ("name", "technique", "options", "rows"),
    [
        ("tetrajet-qema", "q_ema", ("beta",), [(beta,) for beta in sorted(TABLE_8 | TABLE_9)]),
        ("tetrajet-qramping", "q_ramping", ("k1", "k2"),
         [(16, 3), (16, 4), (16, 5), (16, 6), (16, 7), (16, 8), (8, 5), (12, 5), (20, 5)]),
    ],
)  # fmt: skip
def test_the_hyperparameters_of_tetrajets_tables_8_to_10(name, technique, options, rows):
    space = load_space(name)
    policies = [policy_of(space, assignment) for assignment in space.assignments()]
    chosen = [[t for t in policy.techniques if t.name == technique] for policy in policies]
    values = [tuple(getattr(each[0], option) for option in options) if each else None for each in chosen]
    assert values == [None, *rows]


CUSTOM = """\
version: 1
name: custom
base: mxfp4
family: recipe
baselines:
  slow: {run: {lr: 0.001}}
  fast: {run: {lr: 0.01}}
parameters:
  recipe:
    choices:
      plain: {}
      double: {title: twice, operands: {wgrad.input: {source: fprop}, dgrad.weight: {source: fprop}}}
  weights:
    choices:
      now: {}
      averaged: {techniques: [{q_ema: {beta: 0.99}}]}
      ramped: {techniques: [{q_ramping: {t_update: 100, n_max: 4}}]}
  also averaged: {choices: {"no": {}, "yes": {techniques: [{q_ema: {beta: 0.999}}]}}}
  lr: {choices: {low: {run: {lr: 0.001}}, high: {run: {lr: 0.01}}}}
also:
  - when: {recipe: double, weights: [averaged, ramped]}
    quantize: {ties: up}
"""


@pytest.fixture(scope="module")
def custom():
    return parse_space(CUSTOM, "custom.yaml")


def test_a_custom_space_changes_a_shipped_policy(custom):
    assert custom.size() == 2 * 3 * 2 * 2
    assert [(c.kind, c.family, *c.run.values()) for c in custom.first()] == [
        ("baseline", "slow", 0.001), ("baseline", "fast", 0.01), ("pure", "plain", 0.001), ("pure", "double", 0.001),
    ]  # fmt: skip
    chosen = {"recipe": "double", "weights": "averaged", "also averaged": "no", "lr": "high"}
    configuration = custom.configuration(chosen)
    assert configuration.summary == "twice, weights averaged, lr high"
    assert configuration.run == {"lr": 0.01}
    specs = {str(operand): spec for operand, spec in configuration.policy.rules[0].specs.items()}
    assert {name for name, spec in specs.items() if spec.source == "fprop"} == {"wgrad.input", "dgrad.weight"}
    assert {spec.ties for spec in specs.values()} == {"up"}
    now = custom.configuration({**chosen, "weights": "now"}).policy
    assert {spec.ties for spec in now.rules[0].specs.values()} == {"even"}


def test_a_combination_that_is_impossible_is_refused_and_the_rest_is_not(custom):
    refused = [a for a in custom.assignments() if custom.configuration(a).error is not None]
    assert refused == [a for a in custom.assignments() if (a["weights"], a["also averaged"]) == ("ramped", "yes")]
    configuration = custom.configuration(refused[0])
    assert configuration.policy is None
    assert re.match(r"custom\.yaml:\d+: (?=.*q_ramping).*q_ema", str(configuration.error))
    assert len({custom.configuration(a).key for a in refused}) == 4  # keys tell refused ones apart too


def test_assignments_that_give_the_same_training_have_one_key(custom):
    """The later q_ema replaces the earlier one, so the choice of the earlier has no effect."""
    chosen = {"recipe": "plain", "weights": "now", "also averaged": "yes", "lr": "low"}
    changed = ({}, {"weights": "averaged"}, {"lr": "high"})
    key, twice, other = (custom.configuration({**chosen, **more}).key for more in changed)
    assert key == twice != other


ELEMENTS = "parameters: {element: {choices: {fp4: {}, int4: {quantize: {element: int4}}}}}\n"


def test_a_combination_without_effect_is_refused():
    text = """\
version: 1
base:
  rules: [{match: {op: linear}, quantize: {scale: {rounding: floor}}}]
parameters:
  rounding: {choices: {down: {}, up: {quantize: {scale: {rounding: ceil}}}}}
  gradient: {choices: {ste: {}, clip: {techniques: [{step_gradient: {kind: clip}}]}}}
"""
    space = parse_space(text, "s.yaml")
    refusals = {tuple(a.values()): space.configuration(a).error for a in space.assignments()}
    assert [pair for pair, refusal in refusals.items() if refusal] == [("up", "clip")]
    assert "has no effect" in str(refusals["up", "clip"])
    assert space.first()[0].summary == "bf16"  # the space defines no baseline
    assert [c.family for c in space.first()] == ["bf16", "all"]


def test_a_configuration_to_which_no_family_is_open_is_of_the_family_all():
    conditional = "{e2m1: {when: {size: small}}, e3m0: {when: {size: small}, quantize: {element: e3m0}}}"
    sizes = "size: {choices: {small: {}, large: {quantize: {block: 64}}}}"
    space = parse_space(
        f"{V1}base: mxfp4\nfamily: f\nparameters:\n  {sizes}\n  f: {{choices: {conditional}}}\n", "s.yaml"
    )
    assert [space.configuration(a).family for a in space.assignments()] == ["e2m1", "e3m0", "all"]


def test_the_text_of_a_space_contains_its_base(tmp_path):
    phases = "phases: [{at: 0.5, rules: [{match: {}, quantize: {block: 8}}]}]"
    (tmp_path / "mine.yaml").write_text(f"version: 1\nextends: nvfp4\n{phases}\n")
    written = tmp_path / "space.yaml"
    written.write_text(f"version: 1\nbase: mine.yaml\n{ELEMENTS}")
    space = load_space(written)
    again = parse_space(space.text, "elsewhere")
    assert again.digest == space.digest
    for assignment in space.assignments():
        assert again.configuration(assignment).key == space.configuration(assignment).key
    policy = space.configuration({"element": "int4"}).policy
    elements = {s.element.name for p in (policy, policy.phases[0].policy) for s in p.rules[0].specs.values() if s}
    assert elements == {"int4"}  # in the phase too
    (tmp_path / "mine.yaml").write_text("version: 1\nextends: mxfp4\n")
    assert load_space(written).digest != space.digest


def test_choices_change_rules_that_a_phase_adds_and_a_new_scale_format_drops_the_old_maximum():
    base = "{default: {}, phases: [{at: 0.5, rules: {before: [{match: {}, quantize: {block: 8}}]}}]}"
    space = parse_space(f"version: 1\nbase: {base}\n{ELEMENTS}", "s.yaml")
    (rule,) = space.configuration({"element": "int4"}).policy.phases[0].policy.rules
    assert {(spec.element.name, spec.block) for spec in rule.specs.values() if spec} == {("int4", 8)}
    base = "{default: {scale: {format: ue5m3, max: 61440}}}"
    parameters = "parameters: {scale: {choices: {ue5m3: {}, e4m3: {quantize: {scale: {format: e4m3}}}}}}"
    space = parse_space(f"version: 1\nbase: {base}\n{parameters}\n", "s.yaml")
    policies = [*(c.policy for c in space.first()[1:]), space.configuration({"scale": "e4m3"}).policy]
    assert [policy.default.specs.six[0].scale.format.max for policy in policies] == [61440, 448]


V1 = "version: 1\n"
A = "parameters: {x: {choices: {a: {}}}}\n"
X = V1 + "base: mxfp4\nparameters:\n  x:\n"
ONE = X + "    choices:\n      a: {}\n"
B = ONE + "      b:"
Y = ONE + "  y:"
# `#!` marks the line that the error must name; the strings after the text must be in its message.
WRONG = {
    "empty": ("#!", "the file is empty", "version: 1"),
    "tab": (V1 + "base: mxfp4\nparameters:\n\tx: #!\n", "spaces, not tabs"),
    "unknown key": (ONE + "famly: x #!\n", "unknown key 'famly'", "did you mean 'family'?"),
    "unknown key of a choice": (B + " {quantise: {}} #!\n", "did you mean 'quantize'?"),
    "unknown key of quantize": (B + " {quantize: {elment: int4}} #!\n", "did you mean 'element'?"),
    "no version": ("base: mxfp4 #!\n" + A, "'version'"),
    "another version": ("version: 2 #!\nbase: mxfp4\n" + A, "reads version 1"),
    "no base": ("version: 1 #!\n" + A, "'base'"),
    "no parameters": (V1 + "base: mxfp4\nparameters: {} #!\n", "parameters"),
    "no choices": (V1 + "base: mxfp4\nparameters:\n  x: {choices: {}} #!\n", "choices"),
    "choice without value": (B + " #!\n", "must be a mapping"),
    "label is a truth": (V1 + "base: mxfp4\nparameters:\n  x: {choices: {on: {}}} #!\n", "quote it"),
    "unknown base": (V1 + "base: mxfp44 #!\n" + A, "'mxfp4'"),
    "base that quantizes nothing": (V1 + "base: bf16 #!\n" + A, "quantizes nothing"),
    "base with a mistake": (V1 + "base:\n  default:\n    elemnt: e2m1 #!\n" + A, "did you mean 'element'?"),
    "base that extends": (V1 + "base:\n  extends: mxfp4 #!\n" + A, "takes no 'extends'"),
    "unknown technique": (B + " {techniques: [q_emma]} #!\n", "'q_emma'", "did you mean 'q_ema'?"),
    "unknown option": (B + "\n        techniques:\n          - q_ema: {bta: 1} #!\n", "did you mean 'beta'?"),
    "unknown format": (B + " {quantize: {scale: {format: e8m00}}} #!\n", "did you mean 'e8m0'?"),
    "unknown operand": (B + " {operands: {forwrad: keep}} #!\n", "forward"),
    "always impossible": (
        B + " {techniques: [q_ema, {q_ramping: {t_update: 99, n_max: 4}}]} #!\n",
        "choice 'b' of 'x' is impossible in the only combination with it", "q_ramping",
    ),
    "impossible with every other choice": (
        B + " {techniques: [{tensor_scaling_gradient: {kind: ste}}]} #!\n  y: {choices: {a: {}, b: {title: t}}}\n",
        "impossible in each of 2 combinations tried", "tensor_scaling",
    ),
    "unknown setting": (B + " {run: {learning_rate: 1}} #!\n", "'learning_rate'"),
    "setting of the sweep": (B + " {run: {steps: 3}} #!\n", "'steps'", "known: "),
    "bad setting": (B + "\n        run: {lr: -1} #!\n", "lr must be a positive number"),
    "setting that is no truth": (B + " {run: {autocast: fp16}} #!\n", "autocast must be true or false; got 'fp16'"),
    "options that are no mapping": (
        B + "\n        run: {optimizer_options: 3} #!\n", "optimizer_options must be a mapping; got 3",
    ),
    "condition on nothing": (Y + "\n    when: {z: a} #!\n    choices: {a: {}}\n", "'z'", "not an earlier parameter"),
    "condition on a later parameter": (
        X + "    when: {y: a} #!\n    choices: {a: {}}\n  y: {choices: {a: {}}}\n", "not an earlier parameter",
    ),
    "condition on no label": (
        Y + "\n    when: {x: aa} #!\n    choices: {a: {}}\n", "no choice 'aa'", "did you mean 'a'?",
    ),
    "condition that is a number": (Y + "\n    when: {x: 3} #!\n    choices: {a: {}}\n", "label of a choice"),
    "condition that never holds": (
        B + " {}\n  y:\n    when: {x: a}\n    choices:\n      c: {}\n      d: {when: {x: b}} #!\n", "never hold",
    ),
    "family without parameter": (ONE + "family: z #!\n", "is not a parameter", "known: x"),
    "family with a condition": (
        Y + " {when: {x: a}, choices: {a: {}}}\nfamily: y #!\n", "a parameter without a condition",
    ),
    "also without condition": (ONE + "also:\n  - {quantize: {ties: up}} #!\n", "add 'when'"),
    "also impossible": (
        B + " {}\n  y: {choices: {a: {}, b: {}}}\n"
        "also:\n  - when: {x: b, y: b}\n    techniques: [{q_ema: {beta: 2}}] #!\n",
        "this entry of also is impossible in the only combination with it", "beta",
    ),
    "baseline that quantizes": (
        ONE + "baselines: #!\n  a: {quantize: {ties: up}}\n", "baseline 'a' quantizes nothing", "remove quantize",
    ),
    "baseline of an unknown technique": (
        ONE + "baselines:\n  a: {techniques: [stable_spamm]} #!\n", "did you mean 'stable_spam'?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_in_spaces_name_the_line(case, tmp_path):
    text, *words = WRONG[case]
    path = tmp_path / "space.yaml"
    path.write_text(text.replace("#!", "") if text.strip("#! \n") else "\n", encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        load_space(path)
    error = caught.value
    assert error.file == str(path)
    if text.strip("#! \n"):
        assert error.line == text[: text.index("#!")].count("\n") + 1, str(error)
    for word in words:
        assert word in str(error), str(error)


def test_a_space_that_is_unknown_or_unreadable_is_an_error(tmp_path):
    with pytest.raises(PolicyError, match=r"'designspace' is neither .* did you mean 'design-space'"):
        load_space("designspace")
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # \xff\n")
    with pytest.raises(PolicyError, match=r"latin\.yaml: cannot be read"):
        load_space(tmp_path / "latin.yaml")


def test_the_documented_space_loads_and_its_page_states_sizes_and_settings(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    space = parse_space(written, "docs/sweeps.md")
    assert space.size() == 2 * (2 + 2) * 2
    assert [space.configuration(a).error for a in space.assignments()] == [None] * 16
    assert f"{load_space('design-space').size():,} configurations" in page
    (settings,) = re.findall(r"\| `run` \| settings of the training: (.*?) \|", page)
    assert settings.split(", ") == list(RUN_KEYS)
