"""The values of element and scale formats: pinned, and equal to those of ml_dtypes and gfloat."""

from __future__ import annotations

import math

import gfloat.formats as gfloat_formats
import ml_dtypes
import numpy as np
import pytest
from gfloat import decode_float

import fp4graph.formats as public
from fp4graph.numerics.formats import ELEMENTS, SCALES, ElementFormat, ScaleFormat, element_format, scale_format
from tests.helpers import ml_formats


def test_fp4_values_are_pinned():
    assert public.E2M1.values() == (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert public.E3M0.values() == (-16, -8, -4, -2, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 2, 4, 8, 16)
    assert public.INT4.values() == tuple(range(-7, 8))
    assert public.INT8.values() == tuple(i / 64 for i in range(-127, 128))


@pytest.mark.parametrize("name", ml_formats.ELEMENTS)
def test_element_codes_are_those_of_ml_dtypes(name):
    element = element_format(name)
    codes = np.arange(1 << (element.code_bits - 1), dtype=np.uint8)
    decoded = codes.view(ml_formats.ELEMENTS[name]).astype(np.float64)
    assert tuple(decoded[np.isfinite(decoded)]) == element.magnitudes()
    if element.nan_code is not None:
        assert math.isnan(decoded[element.nan_code])


def test_int8_codes_are_those_of_gfloat():
    codes = (decode_float(gfloat_formats.format_info_ocp_int8, code).fval for code in range(128))
    assert tuple(codes) == element_format("int8").magnitudes()


@pytest.mark.parametrize(
    ("name", "top", "smallest", "count"),
    [
        ("e8m0", 2.0**127, 2.0**-127, 255),
        ("e4m3", 448.0, 2.0**-9, 127),
        ("ue5m3", 114688.0, 2.0**-17, 255),
        ("ue5m3_61440", 61440.0, 2.0**-17, 248),
        ("e8m3", 1.875 * 2.0**127, 2.0**-129, 255 * 8),
        ("bf16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), 2.0**-133, 255 * 128),
    ],
)
def test_scale_values_are_pinned(name, top, smallest, count):
    scale = scale_format(name)
    values = scale.values()
    assert values[-1] == scale.max == top
    assert scale.min == smallest == next(value for value in values if value > 0)
    assert len(values) == count
    assert list(values) == sorted(values)
    assert (values[0] == 0) == (name != "e8m0")


@pytest.mark.parametrize(("name", "dtype"), ml_formats.SCALES.items())
def test_scale_codes_are_those_of_ml_dtypes(name, dtype):
    scale = scale_format(name)
    codes = np.arange(len(scale.values()), dtype=np.uint8)
    assert tuple(codes.view(dtype).astype(np.float64)) == scale.values()
    assert scale.nan_code is not None
    assert np.isnan(np.array([scale.nan_code], np.uint8).view(dtype).astype(np.float64))


def test_emax_is_floor_log2_of_max():
    emax = {name: element.emax for name, element in ELEMENTS.items()}
    assert emax == {"e2m1": 2, "e3m0": 4, "int4": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15, "int8": 0}


def test_formats_are_hashable_data():
    assert len({*ELEMENTS.values(), *SCALES.values()}) == len(ELEMENTS) + len(SCALES)
    assert public.E4M3 is SCALES["e4m3"]
    assert public.UE5M3.with_max(61440) == public.UE5M3_61440


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: element_format("e2m1x"), "did you mean 'e2m1'"),
        (lambda: scale_format("E8M0"), "did you mean 'e8m0'"),
        (lambda: scale_format("zzzzzz"), "known: "),
        (lambda: public.UE5M3.with_max(1000.5), "not a value"),
        (lambda: ElementFormat("odd", 2, 1, bias=1, max=5.0), "not one of its values"),
        (lambda: ScaleFormat("odd", 4, 0, bias=7, max=256.0), "has_zero must be False"),
        (lambda: ScaleFormat("odd", 8, 3, bias=128, max=1.0), "smallest value, 7.347e-40, .* got bias=128"),
        (lambda: ScaleFormat("odd", 8, 3, bias=125, max=1.0), "smallest value, 5.877e-39, .* got bias=125"),
        (public.FP32.values, "too many"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_and_inconsistent_formats_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
