"""Generates the reference pages from the code: ``python -m fp4graph.commands.reference docs/reference [--check]``.

A technique's page comes from its class: docstring, options, stages, overhead. A policy's page comes from its file and
the resolved policy. ``fp4graph techniques NAME`` and ``fp4graph policies NAME`` print the same text. The text does not
depend on the machine or the order of installation.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic_core import to_jsonable_python

from fp4graph import QuantSpec
from fp4graph.commands import catalogue
from fp4graph.commands.catalogue import COLUMNS, default_of, loadable_policies, one_line, option_fields, weight_of
from fp4graph.policy import Policy
from fp4graph.policy.editor import json_schema
from fp4graph.policy.rule import checked_plan
from fp4graph.technique import OPTIMIZER_STAGES, Technique, gemms_at, operands_at, parts_of
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView

#: The parts of a docstring after the summary: the beginning of each part's first paragraph, and its heading.
PARTS = {
    "Source:": "Source",
    "Stage:": "Stage",
    "Stages:": "Stage",
    "Cost:": "Cost",
    "The complexity weight is ours:": "Complexity weight",
    "Use it": "When to use it",
}

#: Sections of a policy file, by their definition in the JSON schema.
SECTIONS = {
    "PolicySection": "Policy",
    "RuleSection": "Rule",
    "Match": "Match",
    "QuantizeSection": "Quantizer",
    "ScaleSection": "Scale",
    "DefaultSection": "Default",
    "RulesAheadSection": "Rules ahead",
    "PhaseSection": "Phase",
    "ExpectSection": "Expectation",
    "Range": "Range",
}


def technique_page(technique: type[Technique], registry: Registry) -> str:
    """Return the reference page of one technique, Markdown."""
    data = catalogue.technique_data(technique, registry)
    parts = docstring_parts(technique)
    fusable = "fusable" if data["fusable"] else "not fusable"
    facts = {
        "complexity weight": _weights(technique),
        **_weight_doc(technique),
        "overhead": f"compute {data['compute']}, memory {data['memory']}, {fusable}",
        "stages": ", ".join(f"`{stage}`" for stage in data["stages"]) or "none",
        "acts on": _acts_on(technique),
        "conflicts with": _technique_links(data["conflicts"], registry) or "none",
        "requires": _technique_links(data["requires"], registry) or "none",
        "plugin": f"`{data['plugin']}`",
    }
    lines = [f"# {technique.name}", "", parts.pop("Summary", ""), "", *_table(("", ""), facts.items()), ""]
    for heading, text in parts.items():
        lines += [f"## {heading}", "", text, ""]
    rows = []
    for key, option in data["options"].items():
        default = "required" if option["required"] else f"`{_flow(option['default'])}`"
        rows.append((f"`{key}`", option["type"], default, _markdown(option["description"])))
    lines += ["## Options", "", *(_table(("option", "type", "default", "meaning"), rows) if rows else ["None."])]
    lines += ["", "In a policy:", "", "```yaml", *_example(technique), "```", ""]
    users = [name for name, policy in loadable_policies(registry).items() if technique.name in policy.weights]
    links = ", ".join(f"[{name}](../policies/{name}.md)" for name in users)
    lines += ["## Policies that use it", "", f"{links}." if links else "No shipped policy.", ""]
    return _page(lines)


def policy_page(policy: Policy) -> str:
    """Return the reference page of one policy, Markdown."""
    text = Path(policy.file).read_text(encoding="utf-8") if policy.file else ""
    comment, written = _split_comment(text)
    weights = [f"[{name}](../techniques/{name}.md) {weight:g}" for name, weight in sorted(policy.weights.items())]
    lines = [f"# {policy.name}", ""]
    lines += [f"{_markdown(policy.description).removesuffix('.')}.", ""] if policy.description else []
    lines += [f"Ω = {policy.complexity:g}{': ' + ' + '.join(weights) if weights else ', no technique'}.", ""]
    lines += [_comment_prose(comment), ""] if comment else []
    lines += ["## Rules", "", *_rules_lines(policy)]
    for phase in policy.phases:
        lines += [f"## Rules {catalogue.phase_heading(phase)}", "", *_rules_lines(phase.policy)]
    if written:
        lines += ["## YAML", "", "```yaml", written.rstrip(), "```", ""]
    if not written or re.search(r"^extends:", written, re.MULTILINE):
        heading = "## YAML without `extends`" if written else "## YAML"
        lines += [heading, "", "```yaml", policy.to_yaml().rstrip(), "```", ""]
    return _page(lines)


def language_page(registry: Registry) -> str:
    """Return the page of every key of a policy file, Markdown, from the schema that editors read."""
    definitions = json_schema(registry)["definitions"]
    lines = ["# Keys of a policy file", "", "[The policy language](../policy.md) explains them with examples.", ""]
    for name, heading in SECTIONS.items():
        section = definitions[name]
        section = next((part for part in section.get("anyOf", ()) if "properties" in part), section)
        rows = (
            (
                f"`{key}`{', required' if key in section.get('required', ()) else ''}",
                _markdown(_value(value)),
                _markdown(value["description"]),
            )
            for key, value in section["properties"].items()
        )
        lines += [
            f"## {heading}",
            "",
            _markdown(section["description"]),
            "",
            *_table(("key", "value", "meaning"), rows),
            "",
        ]
    return _page(lines)


def _value(schema: Mapping[str, Any]) -> str:
    """Return in words what a key may hold, by its JSON schema."""
    if (reference := schema.get("$ref", "").rpartition("/")[2]) in SECTIONS:
        heading = SECTIONS[reference]
        return f"[{heading}](#{heading.lower().replace(' ', '-')})"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if alternatives := schema.get("anyOf", schema.get("oneOf")):
        words = [_value(alternative) for alternative in alternatives]
        return " or ".join("a list of these" if word == f"a list of {words[0]}" else word for word in words)
    if schema.get("type") == "array":
        return "a pair of numbers" if isinstance(schema["items"], list) else f"a list of {_value(schema['items'])}"
    if schema.get("type") == "object":
        return f"a mapping from operands to {_value(schema['additionalProperties'])}"
    if "exclusiveMaximum" in schema:
        return "a share"
    return {"integer": "a whole number", "number": "a number", "boolean": "`true` or `false`", "string": "text"}.get(
        schema.get("type", ""), "techniques, each a name or `{name: {option: value}}`"
    )


def _rules_lines(policy: Policy) -> list[str]:
    lines: list[str] = []
    for rule in (*policy.rules, policy.default):
        lines += [f"### {_markdown(catalogue.rule_heading(rule))}", ""]
        if rule.keep is not None:
            lines += [f"Kept in high precision: {_markdown(rule.keep)}.", ""]
            continue
        rows = ((*row, *[""] * (len(COLUMNS) - len(row))) for row in catalogue.rule_rows(rule))
        lines += [*_table(COLUMNS, rows), ""]
        if rule.techniques:
            lines += [f"Techniques: `{'`, `'.join(map(catalogue.spelled, rule.techniques))}`.", ""]
    return lines


def index_page(registry: Registry) -> str:
    """Return the page that lists the other pages."""
    note = "Generated from the code by `make docs`; change the docstring, option or policy file, not the page."
    techniques = (
        (f"[{name}](techniques/{name}.md)", _default_weight(cls), docstring_parts(cls).get("Summary", ""))
        for name, cls in sorted(registry.techniques.items())
    )
    policies = (
        (f"[{name}](policies/{name}.md)", f"{p.complexity:g}", ", ".join(sorted(p.weights)), _markdown(p.description))
        for name, p in loadable_policies(registry).items()
    )
    note += " [The keys of a policy file](policy.md); [their JSON schema](policy.schema.json), for editors."
    lines = ["# Reference", "", note, "", "## Techniques", "", *_table(("technique", "Ω", "what it does"), techniques)]
    return _page([*lines, "", "## Policies", "", *_table(("policy", "Ω", "techniques", "what it is"), policies)])


def docstring_parts(technique: type[Technique]) -> dict[str, str]:
    """Return a technique's docstring as Markdown by heading: ``Summary``, ``Definition``, the headings of ``PARTS``."""
    summary, *paragraphs = re.split(r"\n\s*\n", catalogue.docstring(technique))
    parts = {"Summary": [summary]} if summary else {}
    heading = "Definition"
    for paragraph in paragraphs:
        opening = next((opening for opening in PARTS if paragraph.startswith(opening)), None)
        if opening is not None:
            heading = PARTS[opening]
            if opening.endswith(":"):
                paragraph = paragraph.removeprefix(opening).lstrip()
                if re.match(r"(a|[a-z]{2,})\b", paragraph):  # a word, not a symbol
                    paragraph = paragraph[0].upper() + paragraph[1:]
        parts.setdefault(heading, []).append(paragraph)
    return {
        heading: one_line(text) if heading == "Summary" else text
        for heading, of_heading in parts.items()
        if (text := _markdown("\n\n".join(of_heading)))
    }


def _weights(technique: type[Technique]) -> str:
    """Return the weight under the default options, and the options that change it."""
    default = weight_of(technique, {})
    others: dict[str, list[str]] = {}
    for key, field in option_fields(technique).items():
        for value in _choices(field.annotation):
            weight = weight_of(technique, {key: value})
            if weight is not None and weight != default:
                others.setdefault(f"{weight:g}", []).append(f"`{key}: {_flow(to_jsonable_python(value))}`")
    exceptions = [f"{weight} with {' or '.join(names)}" for weight, names in others.items()]
    return "; ".join([_default_weight(technique), *exceptions])


def _weight_doc(technique: type[Technique]) -> dict[str, str]:
    """Return the row for a weight that depends on the options; an empty dict for a constant weight."""
    weight = inspect.getattr_static(technique, "complexity")
    if not isinstance(weight, property):
        return {}
    doc = weight.__doc__ if technique.complexity is not Technique.complexity else None
    return {"weight declared as": _markdown(one_line(doc or "")) or "not documented"}


def _default_weight(technique: type[Technique]) -> str:
    weight = weight_of(technique, {})
    return "by options" if weight is None else f"{weight:g}"


def _choices(annotation: Any) -> list[Any]:
    """Return the values of an enumerable type."""
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    if annotation is bool:
        return [False, True]
    return [value for part in typing.get_args(annotation) for value in _choices(part) if part is not annotation]


def _acts_on(technique: type[Technique]) -> str:
    """Return in words the operands of an unknown linear layer on which a technique acts, with its default options."""
    site = SiteView(None, "linear", None, None, None)
    before = dict.fromkeys(Operand, QuantSpec())
    try:
        default = technique.model_validate({})
        after = checked_plan(default, site, before)
        operands = {o for o in Operand if after[o] != before[o]} | operands_at(default, site)
        operands |= {entry.operand for part in parts_of(default, site) for entry in part.state}
        gemms = gemms_at(default, site)
    except ValueError:  # an option has no default, or the technique refuses the site
        return "depends on options and site"
    words = []
    if operands:
        names = ", ".join(f"`{o}`" for o in Operand if o in operands)
        words.append("all six operands" if operands == set(Operand) else names)
    if gemms:
        words.append("both operands of " + ", ".join(f"`{gemm}`" for gemm in Gemm if gemm in gemms))
    if not words:
        chooses = {*catalogue.stages_of(technique)} - {*OPTIMIZER_STAGES, "loss_scaler"}
        return "depends on options and site" if chooses else "no operand"
    return "; ".join(words) + (" (default options)" if technique.model_fields else "")


def _example(technique: type[Technique]) -> list[str]:
    """Return the lines of a policy with a technique, its options written out."""
    options: dict[str, Any] = {}
    for key, field in option_fields(technique).items():
        if field.is_required():
            options[key] = to_jsonable_python(field.examples[0]) if field.examples else "..."
        elif default_of(field) is not None:
            options[key] = default_of(field)
    entries = [*sorted(technique.requires), {technique.name: options} if options else technique.name]
    return ["techniques:", *(f"  - {_flow(entry, brackets=False)}" for entry in entries)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _technique_links(names: Iterable[str], registry: Registry) -> str:
    return ", ".join(f"[{name}]({name}.md)" if name in registry.techniques else f"`{name}`" for name in names)


def _flow(value: Any, *, brackets: bool = True) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()
    text = text.removesuffix("\n...").strip()
    return text if brackets or not text.startswith("{") else text[1:-1]


def _markdown(text: str) -> str:
    """Return a docstring's prose as Markdown; special characters outside code are escaped."""
    blocks = [
        block if block.startswith("    ") else re.sub(r"(``.+?``|`.+?`)|(\*|<(?=[\w/!]))", _escape, block, flags=re.S)
        for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks).strip("\n")


def _escape(match: re.Match[str]) -> str:
    code, special = match.groups()
    return f"`{code.strip('`')}`" if code else f"\\{special}"


def _split_comment(text: str) -> tuple[str, str]:
    """Split a YAML file into its leading comment, without comment signs, and the remaining text."""
    lines = text.splitlines()
    end = len(list(itertools.takewhile(lambda line: line.startswith("#"), lines)))
    return "\n".join(line[1:].removeprefix(" ").rstrip() for line in lines[:end]), "\n".join(lines[end:]).strip("\n")


def _comment_prose(comment: str) -> str:
    """Return a comment block as Markdown; indented lines, which are tables, keep their columns."""
    parts = []
    for is_table, group in itertools.groupby(comment.splitlines(), lambda line: line.startswith("  ")):
        lines = list(group)
        parts.append("\n".join(["```text", *lines, "```"] if is_table else map(_markdown, lines)))
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).strip("\n")


def _page(lines: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def pages(registry: Registry) -> dict[str, str]:
    """Return every page, by its path in the reference's folder."""
    return {
        "README.md": index_page(registry),
        "policy.md": language_page(registry),
        "policy.schema.json": json.dumps(json_schema(registry), indent=1, ensure_ascii=False) + "\n",
        **{f"techniques/{name}.md": technique_page(cls, registry) for name, cls in sorted(registry.techniques.items())},
        **{f"policies/{name}.md": policy_page(policy) for name, policy in loadable_policies(registry).items()},
    }


def differences(directory: Path, expected: Mapping[str, str]) -> list[str]:
    """Return a line for each page under ``directory`` that differs from the expected pages."""
    present = {path.relative_to(directory).as_posix(): path.read_text("utf-8") for path in _written(directory)}
    lines = [f"missing: {name}" for name in expected if name not in present]
    lines += [f"stale: {name}" for name, text in expected.items() if present.get(name, text) != text]
    return lines + [f"superfluous: {name}" for name in sorted(present) if name not in expected]


def _written(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.suffix in (".md", ".json")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with ``--check`` list the outdated ones. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fp4graph.commands.reference", description="Write reference pages.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is outdated")
    options = parser.parse_args(arguments)
    registry = catalogue.shipped_registry()
    failures = [str(failure) for failure in registry.failures.values()]
    missing = registry.policies.keys() - loadable_policies(registry).keys()
    failures += [f"policy {name!r} cannot be loaded" for name in sorted(missing)]
    for failure in failures:
        print(f"left out: {failure}", file=sys.stderr)
    expected = pages(registry)
    if options.check:
        outdated = differences(options.directory, expected)
        for line in [*outdated, "run: make docs"] if outdated else []:
            print(line)
        return 1 if outdated or failures else 0
    for path in _written(options.directory):
        path.unlink()
    for name, text in expected.items():
        path = options.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
