"""Countdown puzzles: reach a target from given numbers by + and -. A program checks every answer.

>>> puzzle = Puzzle((3, 5, 7), 9)
>>> puzzle.prompt
'3,5,7=09:'
>>> solves(puzzle, "7+5-3")
True
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations, product, takewhile
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fp4graph.errors import Error

#: Numbers in a puzzle, each a digit from 1 to 9.
NUMBERS = 3
#: Every text is of these characters. Token 0 pads, token 1 ends a completion, the others are the characters in order.
CHARACTERS = "0123456789+-,=:"
PAD, END, FIRST = 0, 1, 2
VOCABULARY = FIRST + len(CHARACTERS)
#: Tokens of a prompt, and of a shortest answer with its END.
PROMPT, ANSWER = 2 * NUMBERS + 3, 2 * NUMBERS

_PROMPT = re.compile(r"(\d(?:,\d)*)=(\d\d):")
_EXPRESSION = re.compile(r"\d(?:[+-]\d)*")


@dataclass(frozen=True)
class Puzzle:
    """Numbers of one digit, and a target from 0 to 99 that an answer reaches with each number once, by + and -."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        """The puzzle as text, such as ``3,5,7=09:``; all prompts of as many numbers are equally long."""
        return f"{','.join(map(str, self.numbers))}={self.target:02d}:"

    @classmethod
    def of(cls, prompt: str) -> Self:
        """Read a prompt; raise an Error if the text is none."""
        found = _PROMPT.fullmatch(prompt)
        if found is None:
            raise Error(f"{prompt!r} is not a countdown prompt; write the numbers and the target as in '3,5,7=09:'")
        return cls(tuple(map(int, found[1].split(","))), int(found[2]))


def solves(puzzle: Puzzle, completion: str) -> bool:
    """Return whether ``completion`` is an expression such as ``7+5-3`` with each number once that has the target."""
    if not _EXPRESSION.fullmatch(completion):
        return False
    terms = [int(term) for term in re.findall(r"[+-]?\d", completion)]
    return sorted(map(abs, terms)) == sorted(puzzle.numbers) and sum(terms) == puzzle.target


def reward(prompt: str, completion: str) -> float:
    """Return 1 for a completion that solves the puzzle of ``prompt``, and 0 for any other."""
    return float(solves(Puzzle.of(prompt), completion))


def sets(held_out: bool) -> list[tuple[int, ...]]:
    """Return the sets of numbers to train on, or those held out: every fifth of all 165, in order.

    No held-out puzzle is one of training with its numbers in another order.
    """
    everything = enumerate(combinations_with_replacement(range(1, 10), NUMBERS))
    return [numbers for place, numbers in everything if (place % 5 == 0) == held_out]


def puzzles(count: int, *seeds: int, held_out: bool = False) -> list[tuple[Puzzle, str]]:
    """Return puzzles, each with an answer, as a function of the arguments.

    Numbers, their order, and the signs of the answer are uniform; draws with a negative target are repeated.
    """
    random = np.random.default_rng([held_out, *seeds])
    choices = sets(held_out)
    found: list[tuple[Puzzle, str]] = []
    while len(found) < count:
        numbers = choices[random.integers(len(choices))]
        given, used = (random.permutation(numbers).tolist() for _ in range(2))
        signs = random.choice([1, -1], NUMBERS - 1)
        terms = [used[0], *(int(sign) * number for sign, number in zip(signs, used[1:], strict=True))]
        if sum(terms) >= 0:
            answer = str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:])
            found.append((Puzzle(tuple(given), sum(terms)), answer))
    return found


def prompts(count: int, *seeds: int, held_out: bool = False) -> list[str]:
    """Return the prompts of :func:`puzzles`."""
    return [puzzle.prompt for puzzle, _ in puzzles(count, *seeds, held_out=held_out)]


def prompts_to_train_on() -> int:
    """Return the number of different prompts that :func:`puzzles` can draw for training."""
    signs = list(product([1, -1], repeat=NUMBERS - 1))
    found = 0
    for numbers in sets(held_out=False):
        orders = set(permutations(numbers))
        totals = {order[0] + int(np.dot(sign, order[1:])) for order in orders for sign in signs}
        found += len(orders) * sum(total >= 0 for total in totals)
    return found


def encode(texts: Iterable[str]) -> Tensor:
    """Return the tokens of equally long texts, int64 ``[texts, characters]``."""
    return torch.tensor([[FIRST + CHARACTERS.index(character) for character in text] for text in texts])


def decode(tokens: Sequence[int]) -> str:
    """Return the text before the first END or PAD."""
    kept = takewhile(lambda token: token >= FIRST, tokens)
    return "".join(CHARACTERS[token - FIRST] for token in kept)
