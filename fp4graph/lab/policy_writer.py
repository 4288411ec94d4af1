"""Writes a policy as a person would: few rules, globs for many modules, and comments that say what each line costs."""

from __future__ import annotations

import glob
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from fp4graph.graph.blocks import block_of, upwards
from fp4graph.policy import Match, Rule, dump
from fp4graph.policy.dump import BaseFormats
from fp4graph.technique.site import BlockPosition

_WIDTH = 118


class Treatment(NamedTuple):
    """The rule that a set of modules shares, without its predicates, and the predicted loss increase of each module."""

    rule: Rule
    modules: Mapping[str, float]


def written(
    name: str, description: str, header: Sequence[str], treatments: Sequence[Treatment], *,
    ops: Mapping[str, Collection[str]], blocks: Mapping[str, BlockPosition], bases: BaseFormats,
) -> str:  # fmt: skip
    """Return the text of a policy that gives each module its treatment and keeps every other module.

    Among the treatments whose modules all are in blocks, the one that needs the most globs becomes the last rule, which
    matches all blocks; the other rules precede it, with globs for their modules alone. If the kept modules need the
    most globs, no rule matches all blocks. ``header`` has the paragraphs of the comment at the top; ``ops`` has the
    kinds of operation ("linear", "grouped") of every module that a rule may match.
    """
    outside = {module: 0.0 for module in ops if not any(module in each.modules for each in treatments)}
    others = [Treatment(Rule(name="others", keep="no format fits"), outside)] if outside else []
    covers = [(part, dict(_cover(set(part.modules), ops, blocks))) for part in (*treatments, *others)]
    inside = {module for module in ops if block_of(module, blocks) is not None}
    general = [each for each in covers if not each[0].rule.quantizes or inside.issuperset(each[0].modules)]
    last, _ = max(general, key=lambda each: (len(each[1]), len(each[0].modules)), default=(None, {}))
    general_last = last.rule.quantizes if last else False
    rules: list[str] = []
    for part, globs in sorted(covers, key=lambda each: len(each[1])):
        if part is not last and (part.rule.quantizes or (general_last and not inside.isdisjoint(part.modules))):
            rules += _rule(part, globs, ops, bases)
    if last and general_last:
        rules += _rule(last, {}, ops, bases)
    lines = [f"# {line}".rstrip() for paragraph in header for line in textwrap.wrap(paragraph, _WIDTH) or [""]]
    lines += ["version: 1", f"name: {_flow(name)}", f"description: {_flow(description)}", "default: keep"]
    lines += ["rules:", *rules, "expect: {quantized: {min: 1}}"] if rules else []
    return "\n".join(lines) + "\n"


def _rule(
    part: Treatment, globs: Mapping[str, set[str]], ops: Mapping[str, Collection[str]], bases: BaseFormats
) -> Iterator[str]:
    """Yield the lines of a rule for ``globs``, each with its loss increase; an empty ``globs`` matches all blocks."""
    kinds = sorted({op for module in part.modules for op in ops[module]}, reverse=True)
    op = _flow(kinds[0] if len(kinds) == 1 else kinds)
    yield f"  - name: {_flow(part.rule.name)}  # {sum(part.modules.values()):+.3g}"
    if globs:
        yield from ("    match:", f"      op: {op}", "      module:")
        width = max(map(len, globs)) + 2
        for pattern, covered in globs.items():
            quoted = f'"{pattern}"'
            yield f"        - {quoted:{width}}  # {sum(part.modules[module] for module in covered):+.3g}"
    else:
        yield f"    match: {{op: {op}, block: true}}"
    for key, value in dump.rule_data(part.rule, (), bases).items():
        line = f"    {key}: {_flow(value)}"
        if key in ("name", "match"):
            continue
        if len(line) > _WIDTH and isinstance(value, dict):
            yield from (f"    {key}:", *(f"      {name}: {_flow(each)}" for name, each in value.items()))
        else:
            yield line


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _cover(
    modules: set[str], all_modules: Collection[str], blocks: Mapping[str, BlockPosition]
) -> Iterator[tuple[str, set[str]]]:
    """Cover exactly ``modules`` with few globs by greedy set cover; yield each glob with the modules that it adds."""
    exact = {
        each: fitting
        for each in dict.fromkeys(_candidates(modules, all_modules, blocks))
        if (fitting := {name for name in all_modules if Match(module=(each,)).names(name)}) and fitting <= modules
    }
    left = set(modules)
    while left:
        best = max(exact, key=lambda each: (len(exact[each] & left), -len(each)))
        yield best, exact[best] & left
        left -= exact[best]


def _candidates(modules: set[str], all_modules: Collection[str], blocks: Mapping[str, BlockPosition]) -> Iterator[str]:
    """Yield globs that may match only ``modules``: names, layer kinds and parts of blocks, in all blocks or a range."""
    #: The modules at each block number, by stack, suffix of the block's name after its number, and tail.
    numbered: defaultdict[tuple[str, str, str], defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in all_modules:
        block = next((each for each in upwards(name) if each in blocks), "")
        tails = [glob.escape(name[len(block) :].lstrip("."))]
        tails += [f"{each}.*" for each in upwards(tails[0]) if each and each != tails[0]] + ["*"]
        stack, _, suffix = blocks[block].stack.partition("*") if block else ("", "", "")
        number = block.removeprefix(stack).removesuffix(suffix)  # digits only if the block has one number
        for tail in tails:
            if name in modules:
                yield f"*.{tail}" if block and tail != "*" else tail
            if number.isdigit():
                numbered[stack, suffix, tail][int(number)].add(name)
        if name in modules:
            yield glob.escape(name)
    for (stack, suffix, tail), by_number in numbered.items():
        numbers = sorted(number for number, names in by_number.items() if names <= modules)
        for decade, in_decade in itertools.groupby(numbers, lambda number: number // 10):
            digits = _digits("".join(str(number % 10) for number in in_decade))
            yield f"{stack}{decade or ''}{digits}{suffix}.{tail}"


def _digits(digits: str) -> str:
    """Return ascending digits as a glob: "3", "[0-4]" or "[125]"."""
    if len(digits) == 1:
        return digits
    run = len(digits) > 2 and int(digits[-1]) - int(digits[0]) == len(digits) - 1
    return f"[{digits[0]}-{digits[-1]}]" if run else f"[{digits}]"
