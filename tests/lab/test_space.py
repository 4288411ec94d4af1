"""Search spaces: Table 10 of the design-space paper, spaces of one's own, and what is wrong with some."""

# ruff: noqa: E501  # one case, one line
import csv
import itertools
import random
import re
from pathlib import Path

import pytest

from fp4graph.errors import PolicyError
from fp4graph.lab.sweeps.space import load_space, parse_space
from fp4graph.lab.sweeps.space_schema import RUN_KEYS
from fp4graph.policy import load_policy

with (Path(__file__).parents[1] / "golden" / "design_space.csv").open(encoding="utf-8", newline="") as file:
    ROWS = [row for row in csv.DictReader(file) if row["kind"] == "quantized" and row["scale"] in ("E8M0", "E4M3")]

#: How the paper's tables spell the choices of Table 10: column, parameter, cell to label.
SPELLED = {
    "scale": ("scale format", {"E8M0": "e8m0", "E4M3": "e4m3"}),
    "max_grad": ("max approximation", {"STE": "ste"}),
    "round_mode": (
        "scale rounding",
        {"TiesToEven": "nearest", "TowardPositive": "up", "Stochastic": "stochastic", "N/A": "nearest"},
    ),
    "quant_grad": ("step gradient", {"STE": "ste", "baseline": "dge", "spline": "spline"}),
    "optimiser": ("optimizer", {"Adam": "adam", "StableSPAM": "stablespam", "StablesPAM": "stablespam"}),
    "loss_scaling": ("loss scaling", {"False": "without", "True": "with"}),
    "tensor_scaling": ("tensor scaling", {"False": "without", "True": "with"}),
    "tensor_grad": ("tensor scale gradient", {"N/A": None, "ignore": "ignore", "absmax": "absmax"}),
    "hadamard": ("hadamard", {"N/A": "none", "None_exact": "none", "all_exact": "all", "backward_exact": "backward"}),
    "sr": (
        "stochastic rounding",
        {"None_exact": "none", "all_activation_exact": "activations"}
        | dict.fromkeys(("IntelFP4_exact", "IntelfP4_exact", "IntFP4_exact"), "backward"),
    ),
}

#: Rows whose columns and complexity points contradict each other, as the golden file says.
CONTRADICTORY = [row for row in ROWS if "complexity points" in row["misprint"]]


@pytest.fixture(scope="module")
def table10():
    return load_space("design-space")


def test_table_10_has_as_many_configurations_as_its_conditions_leave():
    count = 0
    for _format, smooth, _rounding, _step in itertools.product("ab", ("ste", "soft", "hybrid", "absmax"), "abc", "abc"):
        scale_gradients = 1 if smooth == "ste" else 3
        tensor = 1 + (3 if smooth == "ste" else 2)  # without a tensor scale, and with one: ignore, absmax, STE
        optimizer, loss_scaling, rounding, hadamard = 2, 2, 3, 3
        count += scale_gradients * tensor * optimizer * loss_scaling * rounding * hadamard
    assert count == 20_088
    space = load_space("design-space")
    assert space.size() == count
    assert space.size(limit=1000) == 1000


@pytest.mark.slow
def test_assignments_are_distinct_and_are_those_that_the_space_contains(table10):
    every = [tuple(assignment.items()) for assignment in table10.assignments()]
    assert len(set(every)) == len(every)
    assert all(table10.contains(dict(assignment)) for assignment in every[::97])
    plain = dict(every[0])
    assert not table10.contains({**plain, "tensor scale gradient": "absmax"})  # there is no tensor scale
    assert not table10.contains({**plain, "hadamard": "some"})
    assert not table10.contains({**plain, "colour": "red"})
    assert not table10.contains({name: label for name, label in plain.items() if name != "hadamard"})
    smooth = {**plain, "max approximation": "absmax", "scale gradient": "ste", "tensor scaling": "with"}
    assert table10.contains({**smooth, "tensor scale gradient": "absmax"})
    assert not table10.contains({**smooth, "tensor scale gradient": "ste"})


def test_rows_of_the_papers_tables_are_configurations_of_the_printed_complexity(table10):
    assert len(ROWS) == 75
    deviant = []
    for row in ROWS:
        chosen = {}
        for column, (parameter, labels) in SPELLED.items():
            label = labels[row[column].replace(".", "_")]
            if label is not None:
                chosen[parameter] = label
        if not table10.contains(chosen):
            # The one row of a scale gradient beside an STE scale, where it does nothing.
            assert row["scale_grad"] == "spline"
        configuration = table10.configuration(chosen)
        points = float(row["complexity_points"].replace(",", "."))
        expected = configuration.policy.complexity + (1.5 if row["scale_grad"] == "spline" else 0)
        if expected != points:
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
        assert configuration.policy is not None
        weights = (
            3.0 * (chosen["max approximation"] != "ste"),
            3.0 * (chosen.get("tensor scale gradient", "ignore") != "ignore"),
            2.0 * (chosen["step gradient"] != "ste"),
            1.0 * (chosen["hadamard"] != "none"),
            1.5 * (chosen.get("scale gradient", "ste") != "ste"),
            0.5 * (chosen["stochastic rounding"] != "none"),
            0.5 * (chosen["tensor scaling"] == "with"),
            0.5 * (chosen["loss scaling"] == "with"),
            0.5 * (chosen["optimizer"] == "stablespam"),
            0.25 * (chosen["scale rounding"] == "stochastic"),
        )
        assert configuration.policy.complexity == sum(weights)
        # What a trial trains is the dict, loaded once more.
        assert load_policy(configuration.document).fingerprint == configuration.policy.fingerprint
        assert configuration.policy.name == f"design-space: {configuration.summary}"


def test_the_plain_configurations_are_the_shipped_pure_policies(table10):
    for configuration, shipped in zip(table10.first()[2:], ("mxfp4", "nvfp4"), strict=True):
        assert (configuration.kind, configuration.policy.complexity) == ("pure", 0)
        (rule,) = [rule for rule in configuration.policy.rules if rule.quantizes]
        assert rule.specs == load_policy(shipped).rules[0].specs
    baselines = table10.first()[:2]
    assert [(b.kind, b.summary, b.policy.complexity, b.policy.quantizes) for b in baselines] == [
        ("baseline", "Adam", 0, False),
        ("baseline", "StableSPAM", 0.5, False),
    ]


def test_what_depends_on_several_choices(table10):
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


@pytest.mark.slow
def test_keys_tell_configurations_apart(table10):
    every = itertools.islice(table10.assignments(), 0, None, 101)
    configurations = [table10.configuration(assignment) for assignment in every]
    assert len({c.key for c in configurations}) == len(configurations) == 199
    again = load_space("design-space")
    assert again.configuration(configurations[5].assignment).key == configurations[5].key


OWN = """\
version: 1
name: own
base: mxfp4
family: recipe
baselines:
  slow: {run: {lr: 0.001}}
  fast: {run: {lr: 0.01}}
parameters:
  recipe:
    choices:
      plain: {}
      double:
        title: twice
        operands: {wgrad.input: {source: fprop}, dgrad.weight: {source: fprop}}
  weights:
    choices:
      now: {}
      averaged: {techniques: [{q_ema: {beta: 0.99}}]}
      ramped: {techniques: [{q_ramping: {t_update: 100, n_max: 4}}]}
  also averaged:
    choices:
      "no": {}
      "yes": {techniques: [{q_ema: {beta: 0.999}}]}
  lr:
    choices:
      low: {run: {lr: 0.001}}
      high: {run: {lr: 0.01}}
also:
  - when: {recipe: double, weights: [averaged, ramped]}
    quantize: {ties: up}
"""


def test_a_space_over_a_shipped_policy():
    space = parse_space(OWN, "own.yaml")
    assert space.size() == 2 * 3 * 2 * 2
    assert [(c.kind, c.family, dict(c.run)) for c in space.first()] == [
        ("baseline", "slow", {"lr": 0.001}),
        ("baseline", "fast", {"lr": 0.01}),
        ("pure", "plain", {"lr": 0.001}),
        ("pure", "double", {"lr": 0.001}),
    ]
    chosen = {"recipe": "double", "weights": "averaged", "also averaged": "no", "lr": "high"}
    configuration = space.configuration(chosen)
    assert configuration.summary == "twice, weights averaged, lr high"
    assert configuration.run == {"lr": 0.01}
    specs = {str(operand): spec for operand, spec in configuration.policy.rules[0].specs.items()}
    assert {name for name, spec in specs.items() if spec.source == "fprop"} == {"wgrad.input", "dgrad.weight"}
    assert {spec.ties for spec in specs.values()} == {"up"}
    assert {spec.ties for spec in space.configuration({**chosen, "weights": "now"}).policy.rules[0].specs.values()} == {
        "even"
    }


def test_a_combination_that_is_impossible_is_refused_and_the_rest_is_not():
    space = parse_space(OWN, "own.yaml")
    refused = [a for a in space.assignments() if space.configuration(a).error is not None]
    assert refused == [a for a in space.assignments() if (a["weights"], a["also averaged"]) == ("ramped", "yes")]
    configuration = space.configuration(refused[0])
    assert configuration.policy is None
    assert re.match(r"own\.yaml:\d+: .*q_ramping.*q_ema|own\.yaml:\d+: .*q_ema.*q_ramping", str(configuration.error))
    assert len({space.configuration(a).key for a in refused}) == 4  # keys tell refused ones apart too


def test_choices_that_come_to_the_same_training_have_one_key():
    """The later q_ema replaces the earlier, whatever it was."""
    space = parse_space(OWN, "own.yaml")
    chosen = {"recipe": "plain", "weights": "now", "also averaged": "yes", "lr": "low"}
    twice = {**chosen, "weights": "averaged"}
    assert space.configuration(chosen).key == space.configuration(twice).key
    assert space.configuration(chosen).key != space.configuration({**chosen, "lr": "high"}).key


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
    assert space.first()[0].summary == "bf16"  # without baselines of its own
    assert [c.family for c in space.first()] == ["bf16", "all"]


def test_the_text_of_a_space_needs_no_other_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "version: 1\nextends: nvfp4\nphases: [{at: 0.5, rules: [{match: {}, quantize: {block: 8}}]}]\n"
    )
    written = tmp_path / "space.yaml"
    written.write_text(
        "version: 1\nbase: mine.yaml\nparameters:\n  element: {choices: {fp4: {}, int4: {quantize: {element: int4}}}}\n"
    )
    space = load_space(written)
    again = parse_space(space.text, "elsewhere")
    assert again.digest == space.digest
    for assignment in space.assignments():
        assert again.configuration(assignment).key == space.configuration(assignment).key
    policy = space.configuration({"element": "int4"}).policy
    elements = {s.element.name for p in (policy, policy.phases[0].policy) for s in p.rules[0].specs.values() if s}
    assert elements == {"int4"}  # in its phase too
    (tmp_path / "mine.yaml").write_text("version: 1\nextends: mxfp4\n")
    assert load_space(written).digest != space.digest


def test_rules_that_a_phase_puts_first_are_overlaid():
    text = """\
version: 1
base:
  default: {}
  phases: [{at: 0.5, rules: {before: [{match: {}, quantize: {block: 8}}]}}]
parameters:
  element: {choices: {fp4: {}, int4: {quantize: {element: int4}}}}
"""
    policy = parse_space(text, "s.yaml").configuration({"element": "int4"}).policy
    (rule,) = policy.phases[0].policy.rules
    assert {(spec.element.name, spec.block) for spec in rule.specs.values() if spec} == {("int4", 8)}


def test_a_scales_maximum_goes_with_its_format():
    text = """\
version: 1
base:
  default: {scale: {format: ue5m3, max: 61440}}
parameters:
  scale: {choices: {ue5m3: {}, e4m3: {quantize: {scale: {format: e4m3}}}}}
"""
    space = parse_space(text, "s.yaml")
    maxima = [c.policy.default.specs.six[0].scale.format.max for c in space.first()[1:]]
    chosen = space.configuration({"scale": "e4m3"}).policy
    assert maxima == [61440]
    assert chosen.default.specs.six[0].scale.format.max == 448


BASE = "version: 1\nbase: mxfp4\n"
ONE = BASE + "parameters:\n  x:\n    choices:\n      a: {}\n"
# `#!` marks the line that the error must name; the strings after the text must be in its message.
WRONG = {
    "empty": ("#!", "the file is empty", "version: 1"),
    "tab": (BASE + "parameters:\n\tx: #!\n", "spaces, not tabs"),
    "unknown key": (ONE + "famly: x #!\n", "unknown key 'famly'", "did you mean 'family'?"),
    "unknown key of a choice": (ONE + "      b: {quantise: {}} #!\n", "did you mean 'quantize'?"),
    "unknown key of quantize": (ONE + "      b: {quantize: {elment: int4}} #!\n", "did you mean 'element'?"),
    "no version": ("base: mxfp4 #!\nparameters: {x: {choices: {a: {}}}}\n", "'version'"),
    "another version": ("version: 2 #!\nbase: mxfp4\nparameters: {x: {choices: {a: {}}}}\n", "reads version 1"),
    "no base": ("version: 1 #!\nparameters: {x: {choices: {a: {}}}}\n", "'base'"),
    "no parameters": ("version: 1\nbase: mxfp4\nparameters: {} #!\n", "parameters"),
    "no choices": (BASE + "parameters:\n  x: {choices: {}} #!\n", "choices"),
    "choice without value": (ONE + "      b: #!\n", "must be a mapping"),
    "label is a truth": (BASE + "parameters:\n  x: {choices: {on: {}}} #!\n", "quote it"),
    "unknown base": ("version: 1\nbase: mxfp44 #!\nparameters: {x: {choices: {a: {}}}}\n", "'mxfp4'"),
    "base that quantizes nothing": ("version: 1\nbase: bf16 #!\nparameters: {x: {choices: {a: {}}}}\n", "quantizes nothing"),
    "base with a mistake": (
        "version: 1\nbase:\n  default:\n    elemnt: e2m1 #!\nparameters: {x: {choices: {a: {}}}}\n",
        "did you mean 'element'?",
    ),
    "base that extends": (
        "version: 1\nbase:\n  extends: mxfp4 #!\nparameters: {x: {choices: {a: {}}}}\n",
        "takes no 'extends'",
    ),
    "unknown technique": (ONE + "      b: {techniques: [q_emma]} #!\n", "'q_emma'", "did you mean 'q_ema'?"),
    "unknown option": (ONE + "      b:\n        techniques:\n          - q_ema: {bta: 1} #!\n", "did you mean 'beta'?"),
    "unknown format": (ONE + "      b: {quantize: {scale: {format: e8m00}}} #!\n", "did you mean 'e8m0'?"),
    "unknown operand": (ONE + "      b: {operands: {forwrad: keep}} #!\n", "forward"),
    "always impossible": (
        ONE + "      b: {techniques: [q_ema, {q_ramping: {t_update: 99, n_max: 4}}]} #!\n",
        "choice 'b' of 'x' is impossible in the only combination with it",
        "q_ramping",
    ),
    "impossible with every other choice": (
        ONE + "      b: {techniques: [{tensor_scaling_gradient: {kind: ste}}]} #!\n  y: {choices: {a: {}, b: {title: t}}}\n",
        "impossible in each of 2 combinations tried",
        "tensor_scaling",
    ),
    "unknown setting": (ONE + "      b: {run: {learning_rate: 1}} #!\n", "'learning_rate'"),
    "setting of the sweep": (ONE + "      b: {run: {steps: 3}} #!\n", "'steps'", "known: "),
    "bad setting": (ONE + "      b:\n        run: {lr: -1} #!\n", "lr must be a positive number"),
    "condition on nothing": (
        ONE + "  y:\n    when: {z: a} #!\n    choices: {a: {}}\n", "'z'", "not an earlier parameter"
    ),
    "condition on a later parameter": (
        BASE + "parameters:\n  x:\n    when: {y: a} #!\n    choices: {a: {}}\n  y: {choices: {a: {}}}\n",
        "not an earlier parameter",
    ),
    "condition on no label": (ONE + "  y:\n    when: {x: aa} #!\n    choices: {a: {}}\n", "no choice 'aa'", "did you mean 'a'?"),
    "condition that is a number": (ONE + "  y:\n    when: {x: 3} #!\n    choices: {a: {}}\n", "label of a choice"),
    "condition that never holds": (
        ONE + "      b: {}\n  y:\n    when: {x: a}\n    choices:\n      c: {}\n      d: {when: {x: b}} #!\n",
        "never hold",
    ),
    "family without parameter": (ONE + "family: z #!\n", "is not a parameter", "known: x"),
    "family with a condition": (
        ONE + "  y: {when: {x: a}, choices: {a: {}}}\nfamily: y #!\n",
        "a parameter without a condition",
    ),
    "also without condition": (ONE + "also:\n  - {quantize: {ties: up}} #!\n", "add 'when'"),
    "also impossible": (
        ONE + "      b: {}\n  y: {choices: {a: {}, b: {}}}\n"
        "also:\n  - when: {x: b, y: b}\n    techniques: [{q_ema: {beta: 2}}] #!\n",
        "this entry of also is impossible in the only combination with it",
        "beta",
    ),
    "baseline that quantizes": (
        ONE + "baselines: #!\n  a: {quantize: {ties: up}}\n", "baseline 'a' quantizes nothing", "remove quantize"
    ),
    "baseline of an unknown technique": (
        ONE + "baselines:\n  a: {techniques: [stable_spamm]} #!\n", "did you mean 'stable_spam'?"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_spaces(case, tmp_path):
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


def test_a_space_that_is_not_there(tmp_path):
    with pytest.raises(PolicyError, match=r"'designspace' is neither .* did you mean 'design-space'"):
        load_space("designspace")
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # \xff\n")
    with pytest.raises(PolicyError, match=r"latin\.yaml: cannot be read"):
        load_space(tmp_path / "latin.yaml")


def test_the_documented_space_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    space = parse_space(written, "docs/sweeps.md")
    assert space.size() == 2 * (2 + 2) * 2
    assert [space.configuration(a).error for a in space.assignments()] == [None] * 16
    assert f"{load_space('design-space').size():,} configurations" in page
    (settings,) = re.findall(r"\| `run` \| settings of the training: (.*?) \|", page)
    assert settings.split(", ") == list(RUN_KEYS)
