"""Shipped policies with random mistakes: each loads or is an error with a place, within seconds."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp4graph.errors import PolicyError
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.registry import default_registry

TEXTS = [path.read_text() for path in sorted(default_registry().policies.values())]
#: YAML of values that are wrong in almost every place.
ODD = (
    "9" * 30, "9" * 5000, f"0x{'f' * 20_000}", str(2**62), "-1", "0", "1.5", ".nan", "-.inf", "1.0e+400", "1e-3", "010",
    "1:20:30", "2024-13-45", "null", "~", "true", "no", "''", "a" * 5000, "{}", "[]", "[[]]", "{a: {b: [1]}}",
    "!!int abc", "!!python/name:os.system", "!x y", "*nowhere", "&here", "<<", "{<<: 5}", "[" * 50, '"\\ud800"',
    '"\\U00110000"', '"\\0"', "keep", "fprop", "e2m1", "row", "[4, 4]", "[99999999, 99999999]", "hadamard", "nvfp4",
    "\t", "@", "%YAML 1." + "9" * 5000, "\u202e", "\x07", "{before: []}", "rules: {before: [{match: {}, keep: x}]}",
)  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """Return the text of a policy with one to three mistakes."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        line, other = lines[at], chance.choice(chance.choice(TEXTS).splitlines())
        words = [*re.finditer(r"[\w.-]+", line)]
        kind = chance.randrange(8)
        if kind == 0:
            lines[at : at + 1] = [] if len(lines) > 1 else [other]
        elif kind == 1:
            lines.insert(at, chance.choice([line, other]))
        elif kind == 2:
            lines[at] = " " * chance.randrange(9) + line.lstrip()
        elif kind == 3 and line:
            cut = chance.randrange(len(line))
            lines[at] = line[:cut] + chance.choice(["", *":,{}[]&*!#|>'\"%-?\x00\ufeff\ud800"]) + line[cut + 1 :]
        elif kind == 4:
            del lines[at + 1 :]
        elif words:  # the most frequent mistake replaces a word
            word = chance.choice(words)
            shipped = re.findall(r"[\w.-]+", other)
            new = chance.choice(ODD) if kind > 5 or not shipped else chance.choice(shipped)
            lines[at] = line[: word.start()] + new + line[word.end() :]
    return "\n".join(lines)


def mutated_data(text: str, chance: random.Random) -> dict[str, Any]:
    """Return a policy as data with one to three mistakes. No file could have some of them."""
    data = yaml.safe_load(text)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice([*places(data)])
        values = [*places(copy.deepcopy(yaml.safe_load(chance.choice(TEXTS))))]
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice(["odd", 3, None, "x" * 999, ("a",), key])] = holder.pop(key)
        elif kind == 2:
            holder[key] = chance.choice([data, holder])  # a container that contains itself
        elif kind == 3:
            odd = [10**30, -(2**70), float("nan"), {1}, b"x", object, 1j, "\ud800", [[]] * 200_000]
            holder[key] = chance.choice(odd)
        else:
            other, other_key = chance.choice(values)
            holder[key] = other[other_key]
        data = data or {"version": 1}
    return data


def places(data: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield every mapping or list with each of its keys or indices."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        if depth < 8:
            yield from places(value, depth + 1)


def check(seed: int, path: Path) -> None:
    chance = random.Random(seed)
    text = chance.choice(TEXTS)
    source: Path | dict[str, Any] = path
    if seed % 3:
        path.write_bytes(mutated(text, chance).encode("utf-8", "surrogatepass"))
    else:
        source = mutated_data(text, chance)
    before = time.process_time()
    found: Policy | PolicyError
    try:
        found = load_policy(source)
    except PolicyError as error:
        found = error
    if isinstance(found, Policy):
        assert load_policy(yaml.safe_load(found.to_yaml())) == found
    else:
        located = found.file is not None and (found.line is not None or "is empty" in found.message)
        assert located or isinstance(source, dict), found
        assert len(found.message) < 2500  # no message repeats a document
    assert time.process_time() - before < 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(50, 1000, 50))])
def test_every_mutation_loads_or_is_a_located_error(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        check(seed, tmp_path / "p.yaml")
