"""Every way in which a policy can be wrong: the error's type, file, line and remedy."""

# ruff: noqa: E501  # one case, one line
from __future__ import annotations

import time
from pathlib import Path

import pytest

from fp4graph.errors import Error, PluginError, PolicyError
from fp4graph.policy import load_policy
from fp4graph.technique.registry import Registry

# `#!` marks the line that the error must name; the strings after the text must be in its message.
RULE = "version: 1\nrules:\n  - match: {op: linear}\n"
WRONG = {
    "tab": ("version: 1\nrules:\n\t- x #!", "not valid YAML", "spaces, not tabs"),
    "bracket": ("version: 1\nrules: [ #!\nname: x\n", "not valid YAML", "brackets"),
    "star is an alias": ("version: 1\nrules:\n  - match: {module: *.head} #!\n", "not valid YAML", "quote"),
    "tag of a scalar": ("version: 1\nname: !!bool abc #!\n", "tag 'tag:yaml.org,2002:bool' is not allowed"),
    "tag of a number": ("version: !!int '-' #!\n", "is not allowed"),
    "tag without a name": ("version: 1\nname: ! x #!\n", "is not allowed"),
    "base 60": (RULE + "    quantize: {block: 1:20:30} #!\n", "whole number", "'1:20:30'"),
    "octal": (RULE + "    quantize: {block: 032} #!\n", "whole number", "'032'"),
    "whole number without end": (RULE + f"    quantize: {{block: {2**70}}} #!\n", "at most 18 digits"),
    "hexadecimal without end": (RULE + f"    quantize: {{block: 0x{'f' * 100_000}}} #!\n", "100,002 characters", "4,096"),
    "block that no memory holds": (RULE + f"    quantize: {{block: {2**31}}} #!\n", "at most 65,536 elements"),
    "pair that no memory holds": (RULE + "    quantize: {block: [65536, 2]} #!\n", "at most 65,536 elements"),
    "name without end": ("version: 1\nname: " + "a" * 300 + " #!\n", "name must have at most 200 characters"),
    "text without end": ("version: 1\ndescription: " + "a" * 5000 + " #!\n", "5,000 characters", "4,096"),
    "key without end": ("version: 1\n? " + "a" * 300 + " #!\n: x\n", "a key of 300 characters", "200"),
    "file name without end": ("version: 1\nextends: " + "a" * 4000 + ".yaml #!\n", "cannot be a file"),
    "half a pair": ('version: 1\nname: "\\ud800" #!\n', "surrogate"),
    "escape out of range": ('version: 1\nname: "\\U00110000" #!\n', "not valid YAML"),
    "yaml version without end": (f"%YAML 1.{'9' * 5000} #!\n---\nversion: 1\n", "not valid YAML"),
    "nesting": ("version: 1\nrules: " + "[" * 200 + "]" * 200 + " #!\n", "at most 32 levels"),
    "merge of itself": ("version: 1\nrules: &a #!\n  <<: *a\n", "contains itself"),
    "merge of a value": ("version: 1\nexpect: {<<: 5} #!\n", "'<<' merges a mapping or a list of mappings"),
    "rules without end": ("version: 1\nrules: #!\n" + "- {match: {}, keep: a}\n" * 501, "501 items", "at most 500"),
    "phases without end": (
        "version: 1\ndefault: {}\nphases: #!\n" + "".join(f"- {{at: {n}, rules: []}}\n" for n in range(1, 102)),
        "at most 100",
    ),
    "rules times phases": (
        RULE
        + "    quantize: {}\n"
        + "".join(f"  - {{name: r{n}, match: {{}}, quantize: {{}}}}\n" for n in range(50))
        + "phases: #!\n"
        + "".join(f"  - {{at: {n}, techniques: [echo]}}\n" for n in range(1, 11)),
        "561 rules",
        "at most 500",
    ),
    "before without extends": (RULE.replace("\n  -", " #!\n  before:\n  -") + "    keep: x\n", "'before' puts", "write a list"),
    "two documents": ("version: 1\n--- #!\nversion: 1\n", "not valid YAML"),
    "control character": ("version: 1\nname: a\x00b #!\n", "not valid YAML", "remove the character"),
    "python tag": ("version: 1\nname: !!python/object/apply:os.system [ls] #!\n", "tag", "not allowed"),
    "python name tag": ("version: 1\nname: !!python/name:os.system x #!\n", "not allowed", "runs no code"),
    "set tag": ("version: 1\nname: !!set {a} #!\n", "not allowed"),
    "alias in itself": ("version: 1\nrules: &a [*a] #!\n", "contains itself"),
    "duplicate key": ("version: 1\nname: a\nname: b #!\n", "'name'", "twice", "line 2"),
    "duplicate nested key": (
        RULE + "    quantize:\n      block: 16\n      element: e2m1\n      block: 32 #!\n",
        "'block'",
        "line 5",
    ),
    "key is a boolean": ("version: 1\non: x #!\n", "True", "quote it"),
    "not a mapping": ("- version: 1 #!\n", "the policy must be a mapping"),
    "just text": ("tetrajet #!\n", "the policy must be a mapping"),
    "no version": ("name: x #!\ndefault: keep\n", "'version'", "add it"),
    "wrong version": ("name: x\nversion: 2 #!\n", "version 2 is not supported", "reads version 1"),
    "version as text": ("version: '1' #!\n", "version must be a whole number", "'1'"),
    "version as truth": ("version: true #!\n", "version must be a whole number", "true"),
    "unknown key": ("version: 1\nrulez: [] #!\n", "unknown key 'rulez'", "did you mean 'rules'?"),
    "unknown key of a rule": (RULE + "    quantise: {} #!\n", "rules[0]", "did you mean 'quantize'?"),
    "unknown key of match": (
        "version: 1\nrules:\n  - match:\n      op: linear\n      modul: x #!\n    keep: a",
        "'modul'",
        "rules[0].match",
        "did you mean 'module'?",
    ),
    "unknown key of quantize": (RULE + "    quantize: {elment: e2m1} #!\n", "did you mean 'element'?"),
    "unknown key of scale": (RULE + "    quantize:\n      scale:\n        roundign: ceil #!\n", "did you mean 'rounding'?"),
    "unknown key of an exception": (
        RULE + "    quantize: {}\n    operands:\n      backward:\n        sorce: fprop #!\n",
        "rules[0].operands.backward",
        "did you mean 'source'?",
    ),
    "unknown key of default": ("version: 1\ndefault:\n  blokc: 3 #!\n", "in default", "did you mean 'block'?"),
    "unknown key of expect": ("version: 1\ndefault: keep\nexpect:\n  quantised: {min: 1} #!\n", "did you mean 'quantized'?"),
    "unknown key of a count": (
        "version: 1\ndefault: keep\nexpect:\n  quantized: {least: 1} #!\n",
        "'least'",
        "expect.quantized",
        "exactly",
    ),
    "unknown key of a size": ("version: 1\nrules:\n  - match: {in_features: {mim: 1}} #!\n    keep: x", "did you mean 'min'?"),
    "key without value": ("version: 1\nname: #!\ndefault: keep\n", "name must have a value"),
    "nested key without value": (RULE + "    quantize:\n      element: #!\n", "rules[0].quantize.element must have a value"),
    "exception without value": (RULE + "    quantize: {}\n    operands:\n      backward: #!\n", "must have a value"),
    "unknown operand": (
        RULE + "    quantize: {}\n    operands:\n      dgrad.wieght: {} #!\n",
        "unknown operand 'dgrad.wieght'",
        "did you mean 'dgrad.weight'?",
    ),
    "unknown operand of default": (
        "version: 1\ndefault:\n  operands:\n    forwrad: keep #!\n",
        "did you mean 'forward'?",
    ),
    "operands is a list": (RULE + "    quantize: {}\n    operands: [backward] #!\n", "operands must be a mapping"),
    "exception is text": (
        RULE + "    quantize: {}\n    operands:\n      backward: kept #!\n",
        "rules[0].operands.backward must be keep, fprop, or a quantize block",
        "'kept'",
    ),
    "unknown element": (RULE + "    quantize: {element: E2M1} #!\n", "'E2M1'", "did you mean 'e2m1'?"),
    "scale as element": (RULE + "    quantize: {element: e8m0} #!\n", "a format of scales", "e2m1"),
    "element as scale": (RULE + "    quantize: {scale: {format: int4}} #!\n", "a format of elements", "e8m0"),
    "unknown scale": (
        RULE + "    quantize:\n      scale:\n        rounding: ceil\n        format: e8m00 #!\n",
        "did you mean 'e8m0'?",
    ),
    "unknown element of an exception": (
        RULE + "    quantize: {}\n    operands:\n      weights: {element: fp8} #!\n",
        "'fp8'",
        "known: ",
    ),
    "max off the grid": (
        RULE + "    quantize: {scale: {format: ue5m3, max: 61441}} #!\n",
        "not a value of scale format 'ue5m3'",
        "the nearest below is 61440",
    ),
    "max of fp32": (RULE + "    quantize: {scale: {format: fp32, max: 5}} #!\n", "leave max out"),
    "max below zero": (RULE + "    quantize: {scale: {max: -1}} #!\n", "scale.max must be above 0", "-1"),
    "encode with floor": (
        RULE + "    quantize:\n      scale:\n        convention: encode\n        rounding: ceil #!\n",
        "nearest_even or stochastic",
    ),
    "powers of two in fp32": (
        RULE + "    quantize: {scale: {format: fp32, rounding: floor}} #!\n",
        "'floor' makes a power of two",
        "fp32 scales have 23 mantissa bits",
        "use nearest_even",
    ),
    "a rule inherited by another format": (
        RULE
        + "    quantize:\n      scale: {rounding: ceil} #!\n"
        + "    operands:\n      weights: {scale: {format: e4m3}}\n",
        "'ceil' makes a power of two",
        "format: e8m0 for powers of two",
    ),
    "scale rounding": (
        RULE + "    quantize: {scale: {rounding: ceiling}} #!\n",
        "rules[0].quantize.scale.rounding",
        "'toward_positive'",
        "did you mean 'ceil'?",
    ),
    "element rounding": (RULE + "    quantize: {rounding: stochastc} #!\n", "did you mean 'stochastic'?"),
    "ties": (RULE + "    quantize: {ties: odd} #!\n", "'even', 'up' or 'away'", "'odd'"),
    "ties of a scale": (
        RULE + "    quantize:\n      scale:\n        rounding: ceil\n        ties: even #!\n",
        "rules[0].quantize.scale: scale ties 'even'",
        "ceil has no ties",
    ),
    "ties of scales with mantissas": (
        RULE + "    quantize:\n      scale: {format: e4m3}\n    operands:\n      weights: {scale: {ties: even}} #!\n",
        "their ties go to even already",
    ),
    "block of zero": (RULE + "    quantize: {block: 0} #!\n", "whole number from 1", "got 0"),
    "block as text": (RULE + "    quantize: {block: '32'} #!\n", "whole number from 1", "'32'"),
    "block as a number": (RULE + "    quantize: {block: 32.0} #!\n", "whole number from 1"),
    "block as truth": (RULE + "    quantize: {block: true} #!\n", "whole number from 1", "true"),
    "block of three sizes": (RULE + "    quantize: {block: [1, 2, 3]} #!\n", "a pair"),
    "block by name": (RULE + "    quantize: {block: column} #!\n", "row or tensor"),
    "too many bits": (RULE + "    quantize: {random_bits: 25} #!\n", "random_bits must be at most 24", "25"),
    "bits as truth": (RULE + "    quantize: {random_bits: true} #!\n", "must be a whole number"),
    "from_master as text": (RULE + "    quantize: {from_master: 'yes'} #!\n", "must be true or false"),
    "fprop of everything": (RULE + "    quantize: {source: fprop} #!\n", "fprop.input", "dgrad.weight and wgrad.input"),
    "fprop of a gradient": (
        RULE + "    quantize: {}\n    operands:\n      dgrad.weight: {source: fprop}\n      gradients: {source: fprop} #!\n",
        "dgrad.grad_output",
        "Only dgrad.weight and wgrad.input",
    ),
    "nothing left to quantize": (
        RULE + "    quantize: {}\n    operands: {forward: keep, backward: keep} #!\n",
        "all six operands are kept",
        "keep: with a reason",
    ),
    "both actions": (
        "version: 1\nrules:\n  - name: x #!\n    match: {}\n    keep: why\n    quantize: {}\n",
        "both keep and quantize",
        "give it one",
    ),
    "no action": ("version: 1\nrules:\n  - match: {} #!\n", "neither keep nor quantize"),
    "keep is no reason": ("version: 1\nrules:\n  - match: {}\n    keep: true #!\n", "the reason", "as text"),
    "keep with operands": (
        "version: 1\nrules:\n  - match: {} #!\n    keep: why\n    operands: {forward: keep}\n",
        "do nothing in a rule that keeps",
    ),
    "rule without match": ("version: 1\nrules:\n  - keep: why #!\n", "rules[0] has no key 'match'"),
    "rule is text": ("version: 1\nrules:\n  - transformer #!\n", "rules[0] must be a mapping"),
    "rules is a mapping": ("version: 1\nrules: {match: {}} #!\n", "rules must be a list, or {before: [...]}"),
    "unknown op": ("version: 1\nrules:\n  - match: {op: norm} #!\n    keep: x\n", "linear, matmul, grouped, sdpa, conv", "'norm'"),
    "no op": ("version: 1\nrules:\n  - match: {op: []} #!\n    keep: x\n", "empty op"),
    "module is a number": ("version: 1\nrules:\n  - match: {module: 3} #!\n    keep: x\n", "must be text, or a list"),
    "no modules": ("version: 1\nrules:\n  - match: {module: []} #!\n    keep: x\n", "at least one text"),
    "block predicate": ("version: 1\nrules:\n  - match: {block: 3} #!\n    keep: x\n", "must be true or false", "3"),
    "first of none": ("version: 1\nrules:\n  - match: {first_blocks: 0} #!\n    keep: x\n", "at least 1", "got 0"),
    "last of all": ("version: 1\nrules:\n  - match: {last_blocks: 1.0} #!\n    keep: x\n", "a share of them", "1.0"),
    "last of less": ("version: 1\nrules:\n  - match: {last_blocks: -0.5} #!\n    keep: x\n", "a share of", "-0.5"),
    "no block and first": (
        "version: 1\nrules:\n  - match: {block: false, first_blocks: 1} #!\n    keep: x\n",
        "contradicts",
    ),
    "size is text": ("version: 1\nrules:\n  - match: {in_features: big} #!\n    keep: x\n", "must be a mapping", "'big'"),
    "empty size": ("version: 1\nrules:\n  - match: {in_features: {}} #!\n    keep: x\n", "at least one of min"),
    "size range": ("version: 1\nrules:\n  - match: {in_features: {min: 2, max: 1}} #!\n    keep: x\n", "no number is in"),
    "fractional minimum": ("version: 1\nrules:\n  - match: {min_numel: 1.5} #!\n    keep: x\n", "whole number", "1.5"),
    "required as text": (RULE + "    keep: x\n    required: 'no' #!\n", "must be true or false"),
    "unnamed rule": (RULE + "    keep: x\n    name: '' #!\n", "must not be empty"),
    "namesakes": (
        "version: 1\ndefault: keep\nrules:\n  - {name: a, match: {}, keep: x}\n  - {name: a, match: {}, keep: x} #!\n",
        "two rules are called 'a'",
        "rename",
    ),
    "default as text": ("version: 1\ndefault: high #!\n", "default must be keep, or a quantize block", "'high'"),
    "nothing said": ("version: 1 #!\nname: x\n", "nothing says what to quantize", "default: keep"),
    "no rule quantizes": ("version: 1\nrules: #!\n  - {match: {}, keep: x}\n", "no rule quantizes", "default: keep"),
    "unknown technique": (RULE + "    quantize: {}\ntechniques:\n  - avrage #!\n", "'avrage'", "did you mean 'average'?"),
    "unknown technique of a rule": (
        RULE + "    quantize: {}\n    techniques:\n      - average\n      - ditherr: {bits: 8} #!\n",
        "did you mean 'dither'?",
    ),
    "technique of two names": (
        RULE + "    quantize: {}\ntechniques:\n  - {average: {}, dither: {}} #!\n",
        "techniques[0] must be a technique's name",
    ),
    "technique is a number": (RULE + "    quantize: {}\ntechniques: [3] #!\n", "a technique's name", "got 3"),
    "techniques is text": (RULE + "    quantize: {}\ntechniques: average #!\n", "techniques must be a list"),
    "options are a list": (RULE + "    quantize: {}\ntechniques:\n  - average: [0.9] #!\n", "{name: {option: value}}"),
    "technique twice": (
        RULE + "    quantize: {}\ntechniques:\n  - average\n  - average: {beta: 0.5} #!\n",
        "listed twice",
    ),
    "unknown option": (
        RULE + "    quantize: {}\ntechniques:\n  - average:\n      betta: 0.9 #!\n",
        "unknown option 'betta'",
        "techniques[0].average",
        "did you mean 'beta'?",
    ),
    "unknown option beside an alias": (
        RULE + "    quantize: {}\ntechniques:\n  - ramp: {steps: 3, step: 2} #!\n",
        "did you mean 'steps'?",
    ),
    "missing option": (RULE + "    quantize: {}\ntechniques:\n  - ramp #!\n", "no option 'steps'", "add it"),
    "option out of range": (
        RULE + "    quantize: {}\ntechniques:\n  - average:\n      beta: 1.0 #!\n",
        "beta must be below 1",
        "got 1.0",
    ),
    "option below range": (RULE + "    quantize: {}\ntechniques: [{dither: {bits: 0}}] #!\n", "bits must be at least 1"),
    "option of wrong type": (RULE + "    quantize: {}\ntechniques: [{average: {beta: high}}] #!\n", "must be a number"),
    "option as truth": (RULE + "    quantize: {}\ntechniques: [{dither: {bits: true}}] #!\n", "must be a number; got true"),
    "option of a union": (
        RULE + "    quantize: {}\ntechniques:\n  - dither:\n      scope: forward #!\n",
        "scope must be 'backward' or 'all'",
        "must be a list",
    ),
    "item of an option": (
        RULE + "    quantize: {}\ntechniques:\n  - dither:\n      scope:\n        - a\n        - 3 #!\n",
        "scope[1] must be text",
    ),
    "conflict": (
        RULE + "    quantize: {}\ntechniques:\n  - average\n  - ramp: {steps: 1} #!\n",
        "'ramp' and 'average' cannot share a site",
        "remove one",
    ),
    "conflict between levels": (
        RULE + "    quantize: {}\n    techniques:\n      - average #!\ntechniques:\n  - ramp: {steps: 1}\n",
        "cannot share a site",
    ),
    "conflict in a baseline": (
        "version: 1\ndefault: keep\ntechniques:\n  - ramp: {steps: 1}\n  - average #!\n",
        "cannot share a site",
    ),
    "requirement": (RULE + "    quantize: {}\ntechniques:\n  - echo #!\n", "'echo' requires 'dither'", "add it"),
    "exactly and more": (
        "version: 1\ndefault: keep\nexpect:\n  kept:  #!\n    exactly: 1\n    min: 1\n",
        "remove one of them",
    ),
    "expect range": ("version: 1\ndefault: keep\nexpect: {kept: {min: 3, max: 2}} #!\n", "no number is in"),
    "expect below zero": ("version: 1\ndefault: keep\nexpect: {kept: {min: -3}} #!\n", "at least 0"),
    "extends is a list": ("version: 1\nextends: [a, b] #!\n", "extends must be text"),
    "extends nothing": ("version: 1\nextends: tetrajett #!\n", "'tetrajett'", "did you mean the shipped policy 'tetrajet'?"),
    "extends a missing file": ("version: 1\nextends: nowhere/p.yaml #!\n", "nowhere/p.yaml", "is not a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_policy(case: str, tmp_path: Path, registry: Registry) -> None:
    text, *expected = WRONG[case]
    line = next(number for number, content in enumerate(text.splitlines(), 1) if "#!" in content)
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("#!", ""))
    with pytest.raises(PolicyError) as caught:
        load_policy(path, registry)
    message = str(caught.value)
    assert (caught.value.file, caught.value.line) == (str(path), line), message
    assert message.startswith(f"{path}:{line}: ")
    assert "\n" not in message
    for words in expected:
        assert words in message, message
    for jargon in ("Input should", "validation error", "pydantic", "NoneType", "Section"):
        assert jargon not in message, message


def test_a_policy_given_as_data_names_the_place_by_path(registry: Registry) -> None:
    with pytest.raises(
        PolicyError, match=r"^unknown key 'modul' in rules\[0\].match; did you mean 'module'\?"
    ) as caught:
        load_policy({"version": 1, "rules": [{"match": {"modul": "x"}, "keep": "y"}]}, registry)
    assert caught.value.file is None
    assert caught.value.line is None


def test_data_with_a_key_that_is_no_text(registry: Registry) -> None:
    with pytest.raises(PolicyError, match="a key is text; got 3"):
        load_policy({"version": 1, 3: "x"}, registry)  # type: ignore[dict-item]


def test_empty_file(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    with pytest.raises(PolicyError, match=r"empty.yaml: the file is empty; a policy begins with 'version: 1'"):
        load_policy(path, registry)


def test_nesting_without_end(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 100_000)
    with pytest.raises(PolicyError, match="nested too deeply"):
        load_policy(path, registry)


def test_aliases_that_multiply_are_no_bomb(tmp_path: Path, registry: Registry) -> None:
    levels = "".join(f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    path = tmp_path / "bomb.yaml"
    path.write_text("version: 1\nbomb:\n    a0: &a0 x\n" + levels)
    with pytest.raises(PolicyError, match=r"bomb.yaml:9: too large: .* with aliases and merge keys written out"):
        load_policy(path, registry)


def test_merge_keys_that_multiply_are_no_bomb(tmp_path: Path, registry: Registry) -> None:
    keys = ", ".join(f"k{n}: 1" for n in range(2000))
    path = tmp_path / "bomb.yaml"
    path.write_text(f"version: 1\nx: &x {{{keys}}}\ny: {{<<: [{'*x, ' * 8000}]}}\n")  # 16 million keys, one by one
    before = time.process_time()
    with pytest.raises(PolicyError, match=r"bomb.yaml:3: too large"):
        load_policy(path, registry)
    assert time.process_time() - before < 10


def test_a_chain_of_extends_ends(tmp_path: Path, registry: Registry) -> None:
    for n in range(20):
        (tmp_path / f"{n}.yaml").write_text(f"version: 1\nextends: {n + 1}.yaml\n")
    (tmp_path / "20.yaml").write_text("version: 1\ndefault: {}\n")
    with pytest.raises(PolicyError, match=r"15.yaml:2: more than 16 policies extend one another"):
        load_policy(tmp_path / "0.yaml", registry)
    assert load_policy(tmp_path / "5.yaml", registry).quantizes


def test_a_file_is_not_read_without_end(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("version: 1\n" + "# long\n" * 200_000)
    with pytest.raises(PolicyError, match=r"long.yaml: too large: .* 1,048,576 bytes"):
        load_policy(path, registry)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rules", "itself", r"^rules\[0\].rules\[0\]...: nested too deeply"),
        ("rules", [[]] * 200_000, r"^rules\[\d+\]...: too large"),
        ("name", "a" * 5000, "^name: a text of 5,000 characters"),
        ("description", "\ud800", "^description: half of a surrogate"),
        ("version", 10**30, "^version: a whole number has at most 18 digits"),
        ("default", {"block": {32}}, "^default.block: a policy holds mappings, .* got set"),
        ("default", {("block",): 3}, "^default: a key is text"),
    ],
)
def test_data_is_bounded_like_a_file(key: str, value: object, message: str, registry: Registry) -> None:
    data: dict[str, object] = {"version": 1}
    data[key] = [data] if value == "itself" else value
    with pytest.raises(PolicyError, match=message):
        load_policy(data, registry)


def test_what_yaml_1_1_reads_otherwise_is_text(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    for written in ("2024-13-45", "1:20:30", "010", "="):
        path.write_text(f"version: 1\nname: {written}\ndefault: keep\n")
        policy = load_policy(path, registry)
        assert policy.name == written
        path.write_text(policy.to_yaml())
        assert load_policy(path, registry) == policy


def test_the_first_of_the_merged_mappings_wins(tmp_path: Path, registry: Registry) -> None:
    """https://yaml.org/type/merge.html: own keys, then earlier mappings of the list. PyYAML's versions disagree."""
    path = tmp_path / "p.yaml"
    path.write_text(
        """
version: 1
default: &a {block: 8, ties: even}
rules:
  - match: {}
    quantize: {<<: [{block: 16, ties: up}, *a], rounding: stochastic}
  - {name: b, match: {}, quantize: {ties: away, <<: *a}}
"""
    )
    quantized = [
        {"block": 16, "ties": "up", "rounding": "stochastic"},
        {"block": 8, "ties": "away"},
    ]
    written = {
        "version": 1,
        "name": "p",
        "default": {"block": 8, "ties": "even"},
        "rules": [{"match": {}, "quantize": quantized[0]}, {"name": "b", "match": {}, "quantize": quantized[1]}],
    }
    merged, plain = load_policy(path, registry), load_policy(written, registry)
    assert merged.to_yaml() == plain.to_yaml()  # says in a few lines where they differ
    assert merged == plain


def test_two_merge_keys_are_an_error(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ndefault:\n  <<: {block: 8}\n  <<: {ties: up}\n")
    with pytest.raises(PolicyError, match=r"p.yaml:4: key '<<' is given twice, first on line 3; merge one list"):
        load_policy(path, registry)


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("tetrajett", ["no policy 'tetrajett' is shipped", "did you mean the shipped policy 'tetrajet'?", "bf16"]),
        ("zzz", ["no policy 'zzz' is shipped", "Shipped policies: averis, baseline, bf16, ", "tetrajet-qema"]),
        (
            "somewhere/mxfp44.yaml",
            ["'somewhere/mxfp44.yaml' is not a file", "did you mean the shipped policy 'mxfp4'?"],
        ),
        (Path("mxfp4"), ["is not a file", "did you mean the shipped policy 'mxfp4'?"]),
        (Path("/"), ["is a directory"]),
    ],
)
def test_missing_policy(ref: str | Path, expected: list[str], registry: Registry) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(ref, registry)
    for words in expected:
        assert words in str(caught.value)


def test_not_text(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "image.yaml"
    path.write_bytes(b"a\n\x89PNG\xff\xfe")
    with pytest.raises(PolicyError, match=r"image.yaml:2: .*UTF-8"):
        load_policy(path, registry)


def test_not_a_reference(registry: Registry) -> None:
    with pytest.raises(PolicyError, match="a path, a shipped name, a dict or a Policy; got int"):
        load_policy(3, registry)  # type: ignore[arg-type]


def test_options_that_cannot_be_hashed_are_the_plugins_fault(registry: Registry) -> None:
    with pytest.raises(PluginError, match="declare tuples") as caught:
        load_policy({"version": 1, "default": {}, "techniques": [{"mutable": {"items": [1]}}]}, registry)
    assert caught.value.plugin == "toys"
    assert isinstance(caught.value, Error)


def test_a_technique_of_a_broken_plugin_names_its_failure() -> None:
    broken = Registry(plugins=[("shiny", object.__new__(_Broken))], entry_point_group=None)
    with pytest.raises(PolicyError, match=r"unknown technique 'shiny' \(plugin 'shiny': .*out of order"):
        load_policy({"version": 1, "default": {}, "techniques": ["shiny"]}, broken)


class _Broken:
    from fp4graph.technique.hookspecs import hookimpl

    @hookimpl
    def fp4graph_techniques(self) -> list[object]:
        raise RuntimeError("out of order")
