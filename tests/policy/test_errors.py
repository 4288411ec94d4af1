"""Every mistake in a policy is an error with file, line and remedy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp4graph.errors import PluginError, PolicyError
from fp4graph.policy import load_policy
from fp4graph.technique.registry import Registry

RULE = "version: 1\nrules:\n  - match: {op: linear}\n"
#: Tables of wrong policies. A key is the text of a policy in which each row of its table replaces ``…``. A row has a
#: fragment of YAML, then words of the message. ``↵`` ends a line of the fragment; ``#!`` marks the line that the error
#: must name.
REFUSED = {
    "…": r"""
    - version: 1 #! | the policy must be a mapping
    tetrajet #! | the policy must be a mapping
    name: x #!↵default: keep | 'version' | add it
    name: x↵version: 2 #! | version 2 is not supported | reads version 1
    version: '1' #! | version must be a whole number | '1'
    version: true #! | version must be a whole number | true
    version: !!int '-' #! | is not allowed
    version: 1 #!↵name: x | nothing says what to quantize | default: keep
    """,
    "version: 1\n…": r"""
    rules: [ #!↵name: x | not valid YAML | brackets
    rules:↵  - match: {module: *.head} #! | not valid YAML | quote
    --- #!↵version: 1 | not valid YAML
    name: "\U00110000" #! | not valid YAML
    name: "\ud800" #! | surrogate
    name: !!bool abc #! | tag 'tag:yaml.org,2002:bool' is not allowed
    name: ! x #! | is not allowed
    name: !!python/object/apply:os.system [ls] #! | tag | not allowed
    name: !!python/name:os.system x #! | not allowed | runs no code
    name: !!set {a} #! | not allowed
    rules: &a #!↵  <<: *a | contains itself
    rules: &a [*a] #! | contains itself
    expect: {<<: 5} #! | '<<' merges a mapping or a list of mappings
    default:↵  <<: {block: 8}↵  <<: {ties: up} #! | key '<<' is given twice, first on line 3; merge one list
    name: a↵name: b #! | 'name' | twice | line 2
    on: x #! | True | quote it
    rulez: [] #! | unknown key 'rulez' | did you mean 'rules'?
    name: #!↵default: keep | name must have a value
    name: a/../../../b #!↵default: {} | 'a/../../../b' has a slash | use - instead
    name: 'a\b' #!↵default: {} | has a slash
    extends: [a, b] #! | extends must be text
    extends: tetrajett #! | 'tetrajett' | did you mean the shipped policy 'tetrajet'?
    extends: nowhere/p.yaml #! | nowhere/p.yaml | is not a file
    default: high #! | default must be keep, or a quantize block | 'high'
    default:↵  blokc: 3 #! | in default | did you mean 'block'?
    default:↵  operands:↵    forwrad: keep #! | did you mean 'forward'?
    default:↵  block: 16↵  operands: {forward: keep, backward: keep} #! | all six operands are kept
    default: keep↵expect:↵  quantised: {min: 1} #! | did you mean 'quantized'?
    default: keep↵expect:↵  quantized: {least: 1} #! | 'least' | expect.quantized | exactly
    default: keep↵expect:↵  kept:  #!↵    exactly: 1↵    min: 1 | remove one of them
    default: keep↵expect: {kept: {min: 3, max: 2}} #! | no number is in
    default: keep↵expect: {kept: {min: -3}} #! | at least 0
    default: keep↵techniques:↵  - ramp: {steps: 1}↵  - average #! | cannot share a site
    rules: {match: {}} #! | rules must be a list, or {before: [...]}
    rules: #!↵  before:↵  - match: {op: linear}↵    keep: x | 'before' puts | write a list
    rules: #!↵  - {match: {}, keep: x} | no rule quantizes | default: keep
    rules:↵- {name: a, match: {}, keep: x}↵- {name: a, match: {}, keep: x} #!↵default: keep | called 'a' | rename
    """,
    "version: 1\nrules:\n  - …": """
    transformer #! | rules[0] must be a mapping
    keep: why #! | rules[0] has no key 'match'
    match: {} #! | neither keep nor quantize
    match: {}↵    keep: true #! | the reason | as text
    match: {} #!↵    keep: why↵    operands: {forward: keep} | do nothing in a rule that keeps
    match:↵      op: linear↵      modul: x #!↵    keep: a | 'modul' | rules[0].match | did you mean 'module'?
    name: x #!↵    match: {}↵    keep: why↵    quantize: {} | both keep and quantize | give it one
    """,
    "version: 1\nrules:\n  - match: {…} #!\n    keep: x\n": """
    op: norm | linear, matmul, grouped, sdpa, conv | 'norm'
    op: [] | empty op
    module: 3 | must be text, or a list
    module: [] | at least one text
    module: 'layers.[0-11].*' | [0-11] in a glob matches one character, not a range of numbers | first_blocks
    module: [head, 'layers.[!10-12].*'] | [!10-12] in a glob | for the characters [!012]
    module: 'layers.[0-35].*' | for the range write a list of globs | for the characters [01235]
    block: 3 | must be true or false | 3
    first_blocks: 0 | at least 1 | got 0
    last_blocks: 1.0 | a share of them | 1.0
    last_blocks: -0.5 | a share of | -0.5
    block: false, first_blocks: 1 | contradicts
    in_features: big | must be a mapping | 'big'
    in_features: {} | at least one of min
    in_features: {mim: 1} | did you mean 'min'?
    in_features: {min: 2, max: 1} | no number is in
    min_numel: 1.5 | whole number | 1.5
    """,
    RULE + "    …": """
    keep: x↵    required: 'no' #! | must be true or false
    keep: x↵    name: '' #! | must not be empty
    quantise: {} #! | rules[0] | did you mean 'quantize'?
    quantize:↵      element: #! | rules[0].quantize.element must have a value
    quantize:↵      block: 16↵      element: e2m1↵      block: 32 #! | 'block' | line 5
    quantize:↵      scale:↵        roundign: ceil #! | did you mean 'rounding'?
    quantize:↵      scale:↵        rounding: ceil↵        format: e8m00 #! | did you mean 'e8m0'?
    quantize:↵      scale:↵        convention: encode↵        rounding: ceil #! | nearest_even or stochastic
    quantize: {scale: {rounding: ceil,↵        ties: even}} #! | quantize.scale: scale ties 'even' | ceil has no ties
    """,
    RULE + "    quantize: {…} #!\n": """
    elment: e2m1 | did you mean 'element'?
    element: E2M1 | 'E2M1' | did you mean 'e2m1'?
    element: e8m0 | a format of scales | e2m1
    block: 0 | whole number from 1 | got 0
    block: '32' | whole number from 1 | '32'
    block: 32.0 | whole number from 1
    block: true | whole number from 1 | true
    block: 1:20:30 | whole number | '1:20:30'
    block: 032 | whole number | '032'
    block: [1, 2, 3] | a pair
    block: column | row or tensor
    block: 1180591620717411303424 | at most 18 digits
    block: 2147483648 | at most 65,536 elements
    block: [65536, 2] | at most 65,536 elements
    scale: {format: int4} | a format of elements | e8m0
    scale: {format: ue5m3, max: 61441} | not a value of scale format 'ue5m3' | the nearest below is 61440
    scale: {format: fp32, max: 5} | leave max out
    scale: {format: fp32, rounding: floor} | 'floor' makes a power of two | 23 mantissa bits | use nearest_even
    scale: {max: -1} | scale.max must be above 0 | -1
    scale: {rounding: ceiling} | rules[0].quantize.scale.rounding | 'toward_positive' | did you mean 'ceil'?
    rounding: stochastc | did you mean 'stochastic'?
    ties: odd | 'even', 'up' or 'away' | 'odd'
    random_bits: 25 | random_bits must be at most 24 | 25
    random_bits: true | must be a whole number
    from_master: 'yes' | must be true or false
    source: fprop | fprop.input | dgrad.weight and wgrad.input
    """,
    RULE + "    quantize:\n      scale: …": """
    {rounding: ceil} #!↵    operands: {weights: {scale: {format: e4m3}}} | 'ceil' makes | format: e8m0 for powers of two
    {format: e4m3}↵    operands:↵      weights: {scale: {ties: even}} #! | their ties go to even already
    """,
    RULE + "    quantize: {}\n    operands: …": """
    [backward] #! | operands must be a mapping
    {forward: keep, backward: keep} #! | all six operands are kept | keep: with a reason
    ↵      dgrad.wieght: {} #! | unknown operand 'dgrad.wieght' | did you mean 'dgrad.weight'?
    ↵      weights: {element: fp8} #! | 'fp8' | known:
    ↵      backward: #! | must have a value
    ↵      backward: kept #! | rules[0].operands.backward must be keep, fprop, or a quantize block | 'kept'
    ↵      backward:↵        sorce: fprop #! | rules[0].operands.backward | did you mean 'source'?
    ↵      dgrad.weight: {source: fprop}↵      gradients: {source: fprop} #! | dgrad.grad_output | Only dgrad.weight
    """,
    RULE + "    quantize: {}\ntechniques: …": """
    average #! | techniques must be a list
    [3] #! | a technique's name | got 3
    ↵  - avrage #! | 'avrage' | did you mean 'average'?
    ↵  - {average: {}, dither: {}} #! | techniques[0] must be a technique's name
    ↵  - average: [0.9] #! | {name: {option: value}
    ↵  - average↵  - average: {beta: 0.5} #! | listed twice
    ↵  - average:↵      betta: 0.9 #! | unknown option 'betta' | techniques[0].average | did you mean 'beta'?
    ↵  - average:↵      beta: 1.0 #! | beta must be below 1 | got 1.0
    [{average: {beta: high}}] #! | must be a number
    [{dither: {bits: 0}}] #! | bits must be at least 1
    [{dither: {bits: true}}] #! | must be a whole number; got true
    ↵  - dither:↵      scope: forward #! | scope must be 'backward' or 'all' | must be a list
    ↵  - dither:↵      scope:↵        - a↵        - 3 #! | scope[1] must be text
    ↵  - ramp #! | no option 'steps' | add it
    ↵  - ramp: {steps: 3, step: 2} #! | did you mean 'steps'?
    ↵  - average↵  - ramp: {steps: 1} #! | 'ramp' and 'average' cannot share a site | remove one
    ↵  - echo #! | 'echo' requires 'dither' | add it
    """,
    RULE + "    quantize: {}\n    techniques:\n      - …": """
    average↵      - ditherr: {bits: 8} #! | did you mean 'dither'?
    average #!↵techniques:↵  - ramp: {steps: 1} | cannot share a site
    """,
    RULE + "    quantize: {}\nphases:\n  - …": """
    operands: {dgrad: keep} #! | no key 'at'
    at: 0.5 #! | changes something
    at: 0 #!↵    rules: [] | training forwards from 1, or a fraction
    at: 1.0 #!↵    rules: [] | training forwards from 1, or a fraction
    at: true #!↵    rules: [] | training forwards from 1, or a fraction
    at: 5↵    expect: {} #! | unknown key 'expect'
    at: 5↵    operands: {dgard: keep} #! | unknown operand 'dgard'
    at: 5↵    operands: {fprop: keep, backward: keep} #! | all six operands are kept
    at: 5↵    operands: {dgrad: keep} #!↵    rules: []↵    default: keep | do nothing
    at: 5↵    default: keep↵  - at: 5 #!↵    default: keep | begins at 5, and the one above it at 5 | reorder
    at: 5↵    default: keep↵  - at: 0.5↵    default: keep↵  - at: 4 #!↵    default: keep | begins at 4, and
    at: 0.5↵    default: keep↵  - at: 0.25 #!↵    default: keep | begins at 0.25, and the one above it at 0.5
    at: 5↵    techniques: [avrage] #! | did you mean 'average'
    at: 5↵    techniques: [average, {ramp: {steps: 1}}] #! | cannot share a site
    at: 5↵    default: {}↵  - at: 9↵    operands:↵      weights: {element: e2m2} #! | unknown element format 'e2m2'
    """,
}


def repeated(line: str, times: int) -> str:
    """Return ``line`` formatted with each number from 1 to ``times``."""
    return "".join(line.format(n) for n in range(1, times + 1))


#: Wrong policies that do not fit into a row: the text, then words of the message.
ODD = {
    "a tab": ("version: 1\nrules:\n\t- x #!", "not valid YAML", "spaces, not tabs"),
    "a control character": ("version: 1\nname: a\x00b #!\n", "not valid YAML", "remove the character"),
    "a version of YAML without end": (f"%YAML 1.{'9' * 5000} #!\n---\nversion: 1\n", "not valid YAML"),
    "a name without end": ("version: 1\nname: " + "a" * 300 + " #!\n", "name must have at most 200 characters"),
    "a text without end": ("version: 1\ndescription: " + "a" * 5000 + " #!\n", "5,000 characters", "4,096"),
    "a key without end": ("version: 1\n? " + "a" * 300 + " #!\n: x\n", "the key has 300 characters", "200"),
    "a file name without end": ("version: 1\nextends: " + "a" * 4000 + ".yaml #!\n", "cannot be a file"),
    "a number without end": (RULE + f"    quantize: {{block: 0x{'f' * 100_000}}} #!\n", "100,002 characters", "4,096"),
    "nesting": ("version: 1\nrules: " + "[" * 200 + "]" * 200 + " #!\n", "at most 32 levels"),
    "rules without end": ("version: 1\nrules: #!\n" + "- {match: {}, keep: a}\n" * 501, "501 items", "at most 500"),
    "phases without end": (
        "version: 1\ndefault: {}\nphases: #!\n" + repeated("- {{at: {}, rules: []}}\n", 101), "at most 100"
    ),
    "rules times phases": (
        RULE + "    quantize: {}\n" + repeated("  - {{name: r{}, match: {{}}, quantize: {{}}}}\n", 50) + "phases: #!\n"
        + repeated("  - {{at: {}, techniques: [echo]}}\n", 10), "561 rules", "at most 500",
    ),
    "rules ahead times phases": (
        RULE + "    quantize: {}\n" + "phases: #!\n"
        + repeated("  - {{at: {}, rules: {{before: [" + "{{match: {{}}, keep: a}}, " * 9 + "]}}}}\n", 50),
        "501 rules", "at most 500",  # 1 + 50 · (1 + 9)
    ),
}  # fmt: skip


def refusals() -> Iterator[Any]:
    """Yield, for each wrong policy, its text and the words of its error."""
    for place, table in REFUSED.items():
        for row in filter(None, map(str.strip, table.splitlines())):
            fragment, *words = row.split(" | ")
            text = place.replace("…", fragment.replace("↵", "\n"))
            yield pytest.param(text, words, id=fragment.replace("↵", " ").replace(" #!", ""))
    yield from (pytest.param(text, words, id=name) for name, (text, *words) in ODD.items())


@pytest.mark.parametrize(("text", "expected"), [*refusals()])
def test_errors_name_file_line_and_remedy(text: str, expected: list[str], tmp_path: Path, registry: Registry) -> None:
    line = next(number for number, content in enumerate(text.splitlines(), 1) if "#!" in content)
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("#!", ""))
    with pytest.raises(PolicyError) as caught:
        load_policy(path, registry)
    message = str(caught.value)
    assert (caught.value.file, caught.value.line) == (str(path), line), message
    assert message.startswith(f"{path}:{line}: ")
    assert "\n" not in message
    assert [words for words in expected if words not in message] == [], message
    jargon = ("Input should", "validation error", "pydantic", "NoneType", "Section")
    assert [words for words in jargon if words in message] == [], message


LEVELS = "".join(f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
KEYS = ", ".join(f"k{n}: 1" for n in range(2000))
#: Files that are refused as a whole, or at the line where they become too large.
FILES = [
    pytest.param("# nothing\n", r"p.yaml: the file is empty; a policy begins with 'version: 1'", id="empty"),
    pytest.param(b"a\n\x89PNG\xff\xfe", r"p.yaml:2: .*UTF-8", id="an image"),
    pytest.param("[" * 100_000, "nested too deeply", id="nesting without end"),
    pytest.param("version: 1\n" + "# long\n" * 200_000, r"p.yaml: too large: .* 1,048,576 bytes", id="too long"),
    pytest.param(
        "version: 1\nbomb:\n    a0: &a0 x\n" + LEVELS,
        r"p.yaml:9: too large: .* with aliases and merge keys written out", id="aliases that multiply",
    ),
    pytest.param(  # merges 16 million keys
        f"version: 1\nx: &x {{{KEYS}}}\ny: {{<<: [{'*x, ' * 8000}]}}\n", r"p.yaml:3: too large", id="merge keys"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), FILES)
def test_a_file_is_refused_in_seconds(content: str | bytes, message: str, tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = time.process_time()
    with pytest.raises(PolicyError, match=message):
        load_policy(path, registry)
    assert time.process_time() - before < 10


def test_at_most_16_policies_extend_one_another(tmp_path: Path, registry: Registry) -> None:
    for n in range(20):
        (tmp_path / f"{n}.yaml").write_text(f"version: 1\nextends: {n + 1}.yaml\n")
    (tmp_path / "20.yaml").write_text("version: 1\ndefault: {}\n")
    with pytest.raises(PolicyError, match=r"15.yaml:2: more than 16 policies extend one another"):
        load_policy(tmp_path / "0.yaml", registry)
    assert load_policy(tmp_path / "5.yaml", registry).quantizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"rules": [{"match": {"modul": "x"}, "keep": "y"}]},
            r"^unknown key 'modul' in rules\[0\].match; .*'module'\?",
        ),
        ({"default": {"element": "e5m9"}}, r"^default.element: unknown element format 'e5m9'; "),
        (
            {"rules": [{"match": {}, "quantize": {"scale": {"format": "int4"}}}]},
            r"^rules\[0\].quantize.scale.format: 'int4' is a format of elements",
        ),
        ({3: "x"}, "a key is text; got 3"),
        ({"rules": "itself"}, r"^rules\[0\].rules\[0\]...: nested too deeply"),
        ({"rules": [[]] * 200_000}, r"^rules\[\d+\]...: too large"),
        ({"name": "a" * 5000}, "^name: the text has 5,000 characters"),
        ({"description": "\ud800"}, "^description: half of a surrogate"),
        ({"version": 10**30}, "^version: a whole number has at most 18 digits"),
        ({"default": {"block": {32}}}, "^default.block: a policy holds mappings, .* got set"),
        ({"default": {("block",): 3}}, "^default: a key is text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_in_data_names_its_path(data: dict[Any, Any], message: str, registry: Registry) -> None:
    policy: dict[Any, Any] = {"version": 1, **data}
    if data.get("rules") == "itself":
        policy["rules"] = [policy]
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(policy, registry)
    assert (caught.value.file, caught.value.line) == (None, None)


@pytest.mark.parametrize("written", ["2024-13-45", "1:20:30", "010", "="])
def test_scalars_that_only_yaml_1_1_converts_stay_text(written: str, tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nname: {written}\ndefault: keep\n")
    policy = load_policy(path, registry)
    assert policy.name == written
    path.write_text(policy.to_yaml())
    assert load_policy(path, registry) == policy


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("tetrajett", ["no policy 'tetrajett' is shipped", "did you mean the shipped policy 'tetrajet'? fp4graph pol"]),
        ("zzz", ["no policy 'zzz' is shipped", "shipped policies: averis, baseline, bf16, ", "tetrajet-qema"]),
        ("somewhere/mxfp44.yaml", ["mxfp44.yaml' is not a file", "did you mean the shipped policy 'mxfp4'?"]),
        (Path("mxfp4"), ["is not a file", "did you mean the shipped policy 'mxfp4'?"]),
        (Path("/"), ["is a directory"]),
        (3, ["a path, a shipped name, a dict or a Policy; got int"]),
    ],
)
def test_a_missing_policy_is_an_error_with_hints(ref: Any, expected: list[str], registry: Registry) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(ref, registry)
    assert [words for words in expected if words not in str(caught.value)] == []


def test_an_option_that_cannot_be_hashed_is_an_error_of_the_plugin(registry: Registry) -> None:
    with pytest.raises(PluginError, match="declare tuples") as caught:
        load_policy({"version": 1, "default": {}, "techniques": [{"mutable": {"items": [1]}}]}, registry)
    assert caught.value.plugin == "toys"
