"""Reconstruction errors and scale curves against NumPy and ml_dtypes; the figures as commands."""

import ml_dtypes
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fp4graph.lab import reconstruction_error
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.findings import script


@pytest.fixture
def figures(monkeypatch):
    return script("figures", monkeypatch)


def test_the_error_of_nvfp4_by_hand(figures):
    """Encode scales: s = 6/max to E4M3, x → Q(s·x)/s."""
    x = figures.gaussian(8, 64, seed=3)
    blocks = x.numpy().reshape(-1, 16)
    scale = (np.float32(6) / np.abs(blocks).max(1, keepdims=True)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    q = (blocks * scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) / scale
    error = np.abs(q.astype(np.float64) - blocks)
    elementwise, normwise = reconstruction_error(x, QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode")))
    assert elementwise == pytest.approx((error / np.abs(blocks)).mean(), rel=1e-6)
    assert normwise == pytest.approx(np.linalg.norm(error) / np.linalg.norm(blocks), rel=1e-6)


def test_the_softmax_makes_scales_too_small_to_clip(figures):
    """Z = log Σ exp(β·abs(x))/β is above the amax: far above it at β = 1, and by little at β = 320."""
    x = figures.gaussian(16, 64)
    spec = QuantSpec("e2m1", 16, ScaleSpec("fp32", "nearest_even", "encode"))
    blocks = x.numpy().reshape(-1, 16).astype(np.float64)
    z = np.log(np.exp(np.abs(blocks)).sum(1, keepdims=True))
    q = (blocks * 6 / z).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * z / 6
    expected = np.linalg.norm(q - blocks) / np.linalg.norm(blocks)
    assert reconstruction_error(x, spec, beta=1.0)[1] == pytest.approx(expected, rel=1e-3)
    exact = reconstruction_error(x, spec)[1]
    assert reconstruction_error(x, spec, beta=320.0)[1] == pytest.approx(exact, rel=0.02)


def test_zeros_have_no_relative_error():
    x = torch.zeros(2, 32)
    x[0, 0] = 6.0
    assert reconstruction_error(x, QuantSpec("e2m1", 32)) == (0.0, 0.0)


@pytest.mark.long
def test_the_figures(figures, tmp_path, monkeypatch):
    """The default metric is the paper's |X − X̂|/|X| of each element; a row of the table has its mean."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(figures, "gaussian", lambda lines=4, length=256, seed=0: x)
    spec = QuantSpec("e2m1", 16, ScaleSpec("e8m0", "nearest_even", "encode"))
    elementwise, normwise = reconstruction_error(x, spec)

    def drawn(name, *options):
        result = CliRunner().invoke(figures.app, [name, "-o", str(tmp_path / "new"), *options])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "new" / f"{name}.png").stat().st_size > 20_000
        return result.output

    for options, value, formula in (
        ([], elementwise, "mean of |Q(x) − x| / |x|"),
        (["--metric", "normwise"], normwise, "‖Q(x) − x‖ / ‖x‖"),
    ):
        table, _, others = drawn("reconstruction", *options).partition("Figure 12")
        assert formula in table
        row = next(cells for line in table.splitlines() if (cells := line.split())[:1] == ["16"])
        assert row[1] == f"{value:.4g}"
        assert "Figure 15" in others
    assert "+ both" in drawn("decomposition")
