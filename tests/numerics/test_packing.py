"""Packing to bytes and unpacking, bit for bit, for every format and block shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4graph.numerics.formats import ELEMENTS, SCALES
from fp4graph.numerics.packing import pack, unpack
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers import ml_formats
from tests.helpers.floats import any_floats, assert_same_bits
from tests.helpers.training import saved_whole


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_format_round_trips(element, scale):
    x = torch.cat([any_floats((40, 33)), torch.randn(40, 33), torch.zeros(1, 33), torch.full((1, 33), -1e-20)])
    x[3, 4], x[50, 32] = torch.nan, torch.inf
    spec = QuantSpec(element, 16, ScaleSpec(scale, "nearest_even"), "stochastic")
    assert_same_bits(unpack(pack(x, spec, key=1)), fake_quantize(x, spec, key=1))


@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("block", [8, 5, (4, 8), (3, 5), "row", "tensor"])
@pytest.mark.parametrize("element", ["e2m1", "int4", "e3m2"])
def test_every_block_shape_round_trips(element, block, dim, convention):
    x = torch.randn(3, 11, 21, dtype=torch.bfloat16)
    spec = QuantSpec(element, block, ScaleSpec("ue5m3", "nearest_even", convention))
    packed = pack(x, spec, dim)
    assert_same_bits(unpack(packed), fake_quantize(x, spec, dim))
    assert packed.scales.ndim == packed.codes.ndim == x.ndim


def test_the_bytes_of_mxfp4():
    values = torch.tensor([0.0, -0.0, 0.5, -0.5, 1, 1.5, 2, 3, 4, 6, -6, -4, 0, 0, 0, 1] * 2)[None] * 8
    packed = pack(values, QuantSpec())
    assert packed.codes.tolist() == [[0x80, 0x91, 0x32, 0x54, 0x76, 0xEF, 0x00, 0x20] * 2]
    assert packed.scales.tolist() == [[127 + 3]]
    assert packed.nbytes == 17


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2"])
def test_codes_are_the_bit_patterns_of_ml_dtypes(name):
    x = torch.randn(4, 64) * 50
    packed = pack(x, QuantSpec(name, 32, ScaleSpec("fp32", "nearest_even")))
    u = x.reshape(4, 2, 32) / packed.scales[..., None]
    assert packed.scales.dtype == torch.float32
    expected = u.numpy().astype(ml_formats.ELEMENTS[name]).view(np.uint8).reshape(4, 64)
    assert np.array_equal(packed.codes.numpy(), expected)


def test_integers_are_twos_complement():
    spec = QuantSpec("int8", 4, ScaleSpec("e8m0", "ceil"))
    assert pack(torch.tensor([[127.0, -127, 1, -1]]) / 64, spec).codes.tolist() == [[127, 129, 1, 255]]


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *(("e8m0", 0xFF), ("e4m3", 0x7F), ("ue5m3", 0xFF)),
        *(("e8m3", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)),
    ],
)
def test_a_block_with_nan_stores_the_nan_of_its_scale_format(name, stored):
    spec = QuantSpec("e2m1", 4, ScaleSpec(name, "nearest_even"))
    scales = pack(torch.tensor([[torch.nan, 1, 1, 1]]), spec).scales
    assert (scales.tolist() == [[stored]]) if isinstance(stored, int) else scales.isnan().all()
    assert scales.dtype == (torch.uint8 if isinstance(stored, int) else stored)


def test_packed_tensors_can_be_saved():
    packed = pack(torch.randn(8, 64), QuantSpec())
    assert_same_bits(unpack(saved_whole(packed)), unpack(packed))
