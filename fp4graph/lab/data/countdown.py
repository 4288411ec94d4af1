"""Countdown puzzles: reach a target from given numbers by + and -. A program checks every answer.

>>> reward("3,5,7=09:", "7+5-3")
1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement, takewhile

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
#: Different prompts that can be drawn for training.
DIFFERENT = 2195


def reward(prompt: str, completion: str) -> float:
    """Return 1 for an expression with each number of ``prompt`` once that has the target, and 0 for any other text.

    Raises:
        Error: the text is no prompt.
    """
    if not re.fullmatch(r"\d(,\d)*=\d\d:", prompt):
        raise Error(f"{prompt!r} is not a countdown prompt; write the numbers and the target as in '3,5,7=09:'")
    numbers, target = prompt.rstrip(":").split("=")
    terms = [int(term) for term in re.findall(r"[+-]?\d", completion)]
    is_expression = re.fullmatch(r"\d([+-]\d)*", completion) is not None
    is_answer = sorted(map(abs, terms)) == sorted(map(int, numbers.split(","))) and sum(terms) == int(target)
    return float(is_expression and is_answer)


def sets(held_out: bool) -> list[tuple[int, ...]]:
    """Return the sets of numbers to train on, or those held out: every fifth of all 165, in order.

    No held-out puzzle is one of training with its numbers in another order.
    """
    everything = enumerate(combinations_with_replacement(range(1, 10), NUMBERS))
    return [numbers for place, numbers in everything if (place % 5 == 0) == held_out]


def puzzles(count: int, *seeds: int, held_out: bool = False) -> list[tuple[str, str]]:
    """Return prompts such as ``3,5,7=09:``, each with an answer, as a function of the arguments.

    Numbers, their order, and the signs of the answer are uniform; draws with a negative target are repeated.
    """
    random = np.random.default_rng([held_out, *seeds])
    choices = sets(held_out)
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        numbers = choices[random.integers(len(choices))]
        shown, used = (random.permutation(numbers).tolist() for _ in range(2))
        signs = [1, *random.choice([1, -1], NUMBERS - 1).tolist()]
        terms = [sign * number for sign, number in zip(signs, used, strict=True)]
        if sum(terms) >= 0:
            answer = "".join(f"{term:+d}" for term in terms).removeprefix("+")
            drawn.append((f"{','.join(map(str, shown))}={sum(terms):02d}:", answer))
    return drawn


def prompts(count: int, *seeds: int, held_out: bool = False) -> list[str]:
    """Return the prompts of :func:`puzzles`."""
    return [prompt for prompt, _ in puzzles(count, *seeds, held_out=held_out)]


def encode(texts: Iterable[str]) -> Tensor:
    """Return the tokens of equally long texts, int64 ``[texts, characters]``."""
    return torch.tensor([[FIRST + CHARACTERS.index(character) for character in text] for text in texts])


def decode(tokens: Sequence[int]) -> str:
    """Return the text before the first END or PAD."""
    kept = takewhile(lambda token: token >= FIRST, tokens)
    return "".join(CHARACTERS[token - FIRST] for token in kept)
