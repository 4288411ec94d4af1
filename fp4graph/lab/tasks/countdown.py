"""Reinforcement learning with a verifiable reward: a small LLaMA that solves countdown puzzles.

A puzzle gives numbers, and a target to reach by + and -. A program checks every answer.

>>> reward("3,5,7=09:", "7+5-3")
1.0
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, count, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from fp4graph.errors import Error
from fp4graph.lab.data.loading import Batch, InMemory
from fp4graph.lab.tasks.language import llama
from fp4graph.lab.tasks.task import Problem, Recipe, Settings, Task
from fp4graph.model.evaluation import evaluating

#: The count of numbers in a puzzle; each number is a digit from 1 to 9.
NUMBERS = 3
#: All characters of texts. Token 0 pads, token 1 ends a completion, the other tokens are the characters in order.
CHARACTERS = "0123456789+-,=:"
PAD, END, FIRST = 0, 1, 2
VOCABULARY = FIRST + len(CHARACTERS)
#: The numbers of tokens in a prompt, and in a shortest answer with its END.
PROMPT, ANSWER = 2 * NUMBERS + 3, 2 * NUMBERS
#: The number of different training prompts.
DIFFERENT = 2195
#: Positions of the model: the most tokens that its key-value cache holds.
POSITIONS = 32
#: The most tokens of a completion: one more than the shortest answer with its END.
COMPLETION = ANSWER + 1
#: Held-out puzzles of a validation.
VALIDATED = 128
#: Steps, batch and learning rate of the supervised start.
WARM_UP, WARM_UP_BATCH, WARM_UP_LR = 200, 64, 3e-3
#: Distinguishes the seeds of the supervised start, of training and of validation.
_WARM_UP, _TRAINING, _VALIDATION = range(3)

#: Called with a prompt and a completion.
Reward = Callable[[str, str], float]


def reward(prompt: str, completion: str) -> float:
    """Return 1 for an expression that uses each number of ``prompt`` once and equals the target, and 0 otherwise.

    Raises:
        Error: ``prompt`` is not a prompt.
    """
    if not re.fullmatch(r"\d(,\d)*=\d\d:", prompt):
        raise Error(f"{prompt!r} is not a countdown prompt; write the numbers and the target as in '3,5,7=09:'")
    numbers, target = prompt.rstrip(":").split("=")
    terms = [int(term) for term in re.findall(r"[+-]?\d", completion)]
    is_expression = re.fullmatch(r"\d([+-]\d)*", completion) is not None
    is_answer = sorted(map(abs, terms)) == sorted(map(int, numbers.split(","))) and sum(terms) == int(target)
    return float(is_expression and is_answer)


def sets(held_out: bool) -> list[tuple[int, ...]]:
    """Return the sets of numbers to train on, or the held-out sets: every fifth of all 165 sets, in order.

    No held-out puzzle is a permutation of a training puzzle.
    """
    everything = enumerate(combinations_with_replacement(range(1, 10), NUMBERS))
    return [numbers for place, numbers in everything if (place % 5 == 0) == held_out]


def puzzles(count: int, *seeds: int, held_out: bool = False) -> list[tuple[str, str]]:
    """Return prompts such as ``3,5,7=09:``, each with an answer; equal arguments give equal puzzles.

    Numbers, their order, and the signs of the answer are uniform; draws with a negative target are repeated.
    """
    random = np.random.default_rng([held_out, *seeds])
    choices = sets(held_out)
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        numbers = choices[random.integers(len(choices))]
        in_prompt, in_answer = (random.permutation(numbers).tolist() for _ in range(2))
        signs = [1, *random.choice([1, -1], NUMBERS - 1).tolist()]
        terms = [sign * number for sign, number in zip(signs, in_answer, strict=True)]
        if sum(terms) >= 0:
            answer = "".join(f"{term:+d}" for term in terms).removeprefix("+")
            drawn.append((f"{','.join(map(str, in_prompt))}={sum(terms):02d}:", answer))
    return drawn


def prompts(count: int, *seeds: int, held_out: bool = False) -> list[str]:
    """Return the prompts of :func:`puzzles`."""
    return [prompt for prompt, _ in puzzles(count, *seeds, held_out=held_out)]


def encode(texts: Iterable[str]) -> Tensor:
    """Return the tokens of texts of equal length, int64 ``[texts, characters]``."""
    return torch.tensor([[FIRST + CHARACTERS.index(character) for character in text] for text in texts])


def decode(tokens: Sequence[int]) -> str:
    """Return the text before the first END or PAD."""
    kept = takewhile(lambda token: token >= FIRST, tokens)
    return "".join(CHARACTERS[token - FIRST] for token in kept)


def rewards_of(reward: Reward, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the reward of each completion; raise an Error if one is NaN or infinite."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        rewards.append(float(reward(prompt, completion)))
        if not math.isfinite(rewards[-1]):
            name = getattr(reward, "__qualname__", repr(reward))
            raise Error(
                f"the reward function {name} returned {rewards[-1]} for the completion {completion!r} of the prompt "
                f"{prompt!r}; advantages need a finite number for every completion"
            )
    return rewards


def advantages(rewards: Tensor) -> Tensor:
    """Return A = (r − mean)/(std + 1e-4) over each group, in the shape of ``rewards`` ``[groups, completions]``.

    A group of equal rewards has A = 0. Source: Shao et al. 2024, "DeepSeekMath", sec. 4.1.2; the addend is TRL's.
    """
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


@lru_cache(maxsize=8)  # a comparison trains many times from one start
def started(seed: int, steps: int = WARM_UP) -> Any:
    """Return a LLaMA of 2 blocks and 108,992 parameters that solves some puzzles, as GRPO needs. Train only copies.

    The model was trained with ``steps`` steps of AdamW in high precision, the first tenth a warm-up, on the
    cross-entropy of an answer's tokens. Equal arguments give equal models.
    """
    tokens = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = llama(64, 192, 2, 4, VOCABULARY, max_position_embeddings=POSITIONS, **tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LR, weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = WARM_UP_LR * min(1.0, 10 * (step + 1) / steps)
        drawn = puzzles(WARM_UP_BATCH, seed, _WARM_UP, step)
        prompts, answers = map(encode, zip(*drawn, strict=True))
        answers = torch.cat([answers, torch.full((len(answers), 1), END)], 1)
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
        cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


class Countdown(Problem):
    """On-policy policy gradient with group-relative advantages on countdown puzzles.

    A sample is a prompt, with G = ``group`` completions of at most ``completion`` tokens. The model generates them in
    evaluation mode, with a key-value cache, from Gumbel noise that is part of the batch: argmax(logits + noise) is a
    draw from softmax(logits), so that a step is a function of the weights and the batch. With A the
    :func:`advantages` of the rewards and o_i the tokens of completion i, END included, a prompt's loss has the gradient
    of

        −(1/G)·Σ_i A_i·(1/|o_i|)·Σ_t log p(o_it | prompt, o_i<t).

    The value of the loss is the share of completions without reward. Validation puzzles are distinct and fixed, and
    their sets of numbers never occur in training. Training follows ``warm_up`` supervised steps.

    Source: GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3 and 21) with one update for each rollout, so that the ratio to
    the old policy is 1 and never clipped, and without the KL penalty. The task is this project's.

    Raises:
        Error: the group has one completion, or a rollout is longer than the cache; in :meth:`measure`, a reward is not
            finite.
    """

    def __init__(
        self, settings: Settings, group: int = 8, completion: int = COMPLETION, warm_up: int = WARM_UP,
        reward: Reward = reward,
    ) -> None:  # fmt: skip
        if group < 2:
            raise Error(f"group is {group}; it must be at least 2, because advantages compare completions of a prompt")
        if (room := POSITIONS - PROMPT) < completion:
            tokens = PROMPT + completion
            raise Error(
                f"a rollout of {tokens} tokens (a prompt of {PROMPT}, a completion of up to {completion}) is "
                f"longer than the key-value cache: the model has {POSITIONS} positions; shorten the completion to "
                f"{room} tokens"
            )
        self.group, self.completion, self.reward = group, completion, reward
        self.samples, self.tokens_per_sample = DIFFERENT, group * (PROMPT + completion)
        texts = list(dict.fromkeys(prompts(8 * VALIDATED, _VALIDATION, held_out=True)))[:VALIDATED]
        super().__init__(settings, None, InMemory(encode(texts), self._noise(VALIDATED, True, _VALIDATION)))
        self.model = copy.deepcopy(started(settings.seed, warm_up))

    def batches(self, start: int) -> Iterator[Batch]:
        for number in count(start):
            key = self.seed, _TRAINING, number
            yield encode(prompts(self.batch_size, *key)), self._noise(self.batch_size, False, *key)

    def _noise(self, size: int, *seeds: int) -> Tensor:
        """Return Gumbel noise, fp32 ``[size, group, completion, VOCABULARY]``."""
        shape = size, self.group, self.completion, VOCABULARY
        noise = np.random.default_rng([*seeds, 1]).gumbel(size=shape)
        return torch.from_numpy(noise.astype(np.float32))

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        prompts, noise = batch
        prompts, noise = prompts.repeat_interleave(self.group, 0), noise.flatten(0, 1)
        tokens, logits = rollout(model, prompts, noise)
        texts = [list(map(decode, side.tolist())) for side in (prompts, tokens)]
        rewards = torch.tensor(rewards_of(self.reward, *texts), device=tokens.device).view(-1, self.group)
        failed = 1 - rewards.mean(1)
        if not model.training:
            entropy = mean_entropy(logits, before_end(tokens)).view(-1, self.group)
            return {"loss": failed, "reward": rewards.mean(1), "entropy": entropy.mean(1)}
        chosen, mask = log_probs(model, prompts, tokens)
        mean_log_prob = (chosen * mask).sum(1) / mask.sum(1)
        surrogate = -(advantages(rewards) * mean_log_prob.view(-1, self.group)).mean(1)
        return {"loss": failed + surrogate - surrogate.detach()}


@torch.no_grad()
def rollout(model: Any, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Generate completions of ``prompts`` ``[n, prompt]``, in evaluation mode, with a key-value cache.

    ``noise``, fp32 ``[n, completion, vocabulary]``, is added to the logits before each argmax. Returns tokens
    ``[n, completion]``, with PAD after an END, and their logits, fp32 ``[n, longest, vocabulary]``, up to the END of
    the longest completion.
    """
    from transformers import LogitsProcessorList

    completion, prompt = noise.shape[1], prompts.shape[1]

    def perturb(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.float() + noise[:, ids.shape[1] - prompt]

    with evaluating(model):
        generated = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), logits_processor=LogitsProcessorList([perturb]),
            max_new_tokens=completion, do_sample=False, use_cache=True, return_dict_in_generate=True,
            output_logits=True, eos_token_id=END, pad_token_id=PAD,
        )  # fmt: skip
    tokens = generated.sequences[:, prompt:]
    logits = torch.stack(generated.logits, 1).float()
    return nn.functional.pad(tokens, (0, completion - tokens.shape[1]), value=PAD), logits


def before_end(tokens: Tensor) -> Tensor:
    """Return 1 for every token up to and including the first END, and 0 after it: fp32 in the shape of tokens."""
    ended = (tokens == END).cumsum(1) - (tokens == END).int()
    return (ended == 0).float()


def mean_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean entropy of each completion's distributions in nats, fp32 ``[n]``.

    ``logits`` are ``[n, longest, vocabulary]``; ``mask`` ``[n, completion]`` is 1 for tokens of the completion.
    """
    logs, mask = log_softmax(logits, -1), mask[:, : logits.shape[1]]
    return (-(logs.exp() * logs).sum(-1) * mask).sum(1) / mask.sum(1)


def log_probs(model: nn.Module, prompts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each of ``tokens`` ``[n, completion]``, and the mask of :func:`before_end`."""
    logits = model(input_ids=torch.cat([prompts, tokens], 1), use_cache=False).logits
    logits = logits[:, prompts.shape[1] - 1 : -1].float()
    chosen = (log_softmax(logits, -1) * one_hot(tokens, logits.shape[-1])).sum(-1)
    return chosen, before_end(tokens)


COUNTDOWN = Task(
    "reinforcement", "countdown",
    "GRPO of a LLaMA of 2 blocks on countdown puzzles, 8 rollouts per prompt, after a supervised start",
    Recipe(lr=1e-3, batch_size=32, steps=400, optimizer="adamw", schedule="cosine", warmup=0.05, clip=1.0,
           validations=8),
    Countdown, source="this project; the objective of Shao et al. 2024, on policy", embedded=True,
)  # fmt: skip
TASKS = (COUNTDOWN,)
