"""Countdown puzzles: answers are checked against Python's own arithmetic, and no held-out puzzle is in training."""

from collections import Counter, defaultdict
from itertools import product
from math import factorial, prod

import pytest

from fp4graph.errors import Error
from fp4graph.lab.tasks import countdown

#: All expressions of three digits and two signs, with what Python makes of them.
EXPRESSIONS = {
    text: eval(text)
    for text in (f"{a}{s}{b}{t}{c}" for a, s, b, t, c in product("123456789", "+-", "123456789", "+-", "123456789"))
}


def digits(text):
    return tuple(sorted(int(character) for character in text if character.isdigit()))


def test_an_answer_solves_exactly_the_puzzle_of_its_digits_and_value():
    expected = {text for text, value in EXPRESSIONS.items() if digits(text) == (3, 5, 7) and value == 9}
    assert (
        {text for text in EXPRESSIONS if countdown.reward("7,3,5=09:", text)}
        == expected
        == {"7+5-3", "5+7-3", "7-3+5", "5-3+7"}
    )


@pytest.mark.parametrize(
    "text", ["", "9", "+7+5-3", "7+5-3+", "7+5--3", "75-3", "7+5-3=", "7 +5-3", "4+5", "9+3-3", "7+5-3-0", "7+5-3\n"]
)
def test_what_is_no_answer_has_no_reward(text):
    assert countdown.reward("3,5,7=09:", text) == 0.0
    assert countdown.reward("3,5,7=09:", "7+5-3") == 1.0


def test_puzzles_have_answers_and_are_functions_of_their_arguments():
    drawn = countdown.puzzles(500, 3, 4)
    for prompt, answer in drawn:
        numbers, target = prompt.split("=")
        assert f"{EXPRESSIONS[answer]:02d}:" == target
        assert digits(answer) == digits(numbers)
        assert len(prompt) == countdown.PROMPT
        assert len(answer) + 1 == countdown.ANSWER
    assert drawn == countdown.puzzles(500, 3, 4)
    assert drawn[:20] != countdown.puzzles(20, 3, 5)
    assert len({prompt for prompt, _ in drawn}) > 300
    with pytest.raises(Error, match="'3,5=9:' is not a countdown prompt; write"):
        countdown.reward("3,5=9:", "")


def test_no_held_out_set_of_numbers_is_trained_on():
    kept, held_out = (set(countdown.sets(held_out=out)) for out in (False, True))
    assert not kept & held_out
    assert len(kept) + len(held_out) == 165  # ways to choose 3 of 9 digits with repetition
    assert len(held_out) == 33
    for out, own in ((False, kept), (True, held_out)):
        assert {digits(text.split("=")[0]) for text in countdown.prompts(300, 0, held_out=out)} <= own


def test_an_epoch_counts_every_prompt_once():
    totals = defaultdict(set)
    for text, value in EXPRESSIONS.items():
        if value >= 0:
            totals[digits(text)].add(value)
    orders = {numbers: factorial(3) // prod(map(factorial, Counter(numbers).values())) for numbers in totals}
    assert (
        sum(orders[numbers] * len(totals[numbers]) for numbers in countdown.sets(held_out=False)) == countdown.DIFFERENT
    )


def test_texts_go_through_tokens_and_back():
    tokens = countdown.encode([countdown.CHARACTERS, countdown.CHARACTERS[::-1]])
    assert sorted(tokens[0].tolist()) == list(range(countdown.FIRST, countdown.VOCABULARY))
    assert [countdown.decode(row) for row in tokens.tolist()] == [countdown.CHARACTERS, countdown.CHARACTERS[::-1]]
    for stop in (countdown.PAD, countdown.END):
        assert countdown.decode([2, 3, stop, 4]) == "01"
