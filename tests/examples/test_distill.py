"""examples/distill.py: its divergence is right, and distillation brings a quantized student nearer to its teacher."""

import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill.py"


@pytest.mark.slow
def test_the_divergence_is_that_of_the_distributions():
    divergence = runpy.run_path(str(EXAMPLE))["divergence"]
    student, teacher = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.0, 1.0, -1.0]])
    for temperature in (1.0, 4.0):
        s, t = (np.exp(logits.double().numpy()[0] / temperature) for logits in (student, teacher))
        s, t = s / s.sum(), t / t.sum()
        expected = temperature**2 * float((t * np.log(t / s)).sum())
        # fp32's logarithms and sums of three terms
        assert math.isclose(divergence(student, teacher, temperature).item(), expected, rel_tol=1e-5)


@pytest.mark.long
def test_distillation_brings_the_student_nearer(example):
    printed = example(
        "distill.py", "--backend=eager", "--policy=int4-per-tensor", "--seeds=1", "--teacher-steps=150", "--steps=60"
    )
    rows = {name.strip(): list(map(float, rest.split())) for name, rest in re.findall(r"^(\D{16})(.*)$", printed, re.M)}
    assert list(rows) == ["teacher", "quantized alone", "fine-tuned", "distilled"]
    divergence = {name: figures[2] for name, figures in rows.items()}
    assert divergence["teacher"] == 0
    assert divergence["distilled"] < divergence["quantized alone"]
