"""Convolutions as products: what a rule with ``op: conv`` quantizes, and how."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.contractions import convolution
from fp4graph.model.runtime import runtime_of
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.training import applied, assert_equal, stances, uncompiled

# Torch warns that it pads a copy of the input for an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
SPEC = quantizer(16)
CONV = one_rule(quantize=SPEC, op="conv")
CASES = {
    "plain": ((2, 4, 7, 6), (6, 4, 3, 3), {}),
    "stride and padding": ((2, 4, 7, 6), (6, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    "same": ((2, 4, 7, 6), (6, 4, 2, 3), {"padding": "same"}),
    "valid": ((2, 4, 7, 6), (6, 4, 2, 3), {"padding": "valid"}),
    "dilation": ((1, 3, 9, 9), (5, 3, 3, 3), {"dilation": 2, "padding": 1}),
    "groups": ((3, 6, 5, 5), (4, 3, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise": ((2, 4, 6, 6), (8, 1, 3, 3), {"groups": 4}),
    "one image": ((4, 7, 6), (6, 4, 3, 3), {}),
    "one axis": ((2, 4, 9), (6, 4, 3), {"stride": 2, "padding": 1}),
    "one axis, groups": ((2, 4, 9), (6, 2, 3), {"groups": 2, "dilation": (2,)}),
}
EMPTY = {"no image, groups": ((0, 6, 5, 5), (4, 3, 3, 3), {"groups": 2})}


def factors(case: str, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, w, options = (CASES | EMPTY)[case]
    function = F.conv1d if len(w) == 3 else F.conv2d
    made = (torch.randn(shape, generator=generator, dtype=dtype) for shape in (x, w, (w[0],)))
    return function, [t.requires_grad_() for t in made], options


@pytest.mark.parametrize("case", [*CASES, *EMPTY])
def test_a_convolution_is_a_product_of_patches(case):
    function, (x, w, b), options = factors(case, torch.float64)
    expected = function(x, w, b, **options)
    y = convolution(x, w, b, **options)
    dy = torch.randn_like(expected)
    # fp64: the two differ by the order of sums of at most 40 terms of size 1.
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(z, (x, w, b), dy) for z in (y, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case != "one image"])
def test_the_result_has_the_dtype_and_the_layout_of_torchs(case):
    function, tensors, options = factors(case)
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = (convolve(*tensors, **options) for convolve in (function, convolution))
    assert (y.dtype, y.stride()) == (expected.dtype, expected.stride())


class Flattens(nn.Module):
    """A convolutional network that flattens by ``view``, as LeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 3 * 3, 4)

    def forward(self, x):
        return self.head(F.max_pool2d(self.conv(x).relu(), 2).view(x.shape[0], -1))


@uncompiled
@stances
def test_a_view_of_the_result_is_possible_where_torchs_is(stance):
    with torch.compiler.set_stance(stance):
        assert applied(Flattens(), CONV)(IMAGES).shape == (2, 4)


def by_hand(x, w, b, dy, options):
    """Compute y, dX and dW of a quantized convolution, one patch at a time: every sum runs over explicit indices.

    The rows of each operand lie along the contraction axis and are quantized in blocks of 16. fprop sums over input
    channels and places of the kernel, dgrad over the group's output channels, wgrad over images and output places.
    """
    groups, axes = options.get("groups", 1), w.dim() - 2
    spec = fp4graph.load_policy(CONV).rules[0].specs.six[0]

    def each(value):
        return [value] * axes if isinstance(value, int) else list(value) * (axes // len(value))

    def quantized(rows):
        return fp4graph.fake_quantize(rows, spec)

    stride, dilation, kernel = each(options.get("stride", 1)), each(options.get("dilation", 1)), w.shape[2:]
    padding = options.get("padding", 0)
    if padding == "same":
        before = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    else:
        before = each(0 if padding == "valid" else padding)
    places = list(itertools.product(range(x.shape[0]), *(range(n) for n in dy.shape[2:])))
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    per_group, out_group = w.shape[1], w.shape[0] // groups
    for g in range(groups):
        ins, outs = range(g * per_group, (g + 1) * per_group), slice(g * out_group, (g + 1) * out_group)
        taps = [(c, *k) for c in ins for k in itertools.product(*(range(n) for n in kernel))]

        def at(place, tap, ins=ins):
            along = zip(place[1:], stride, tap[1:], dilation, before, strict=True)
            where = [o * s + k * d - p for o, s, k, d, p in along]
            inside = all(0 <= i < n for i, n in zip(where, x.shape[2:], strict=True))
            return (place[0], tap[0], *where) if inside else None

        values = [[x[i] if (i := at(place, tap)) else torch.zeros(()) for tap in taps] for place in places]
        patches = torch.stack([torch.stack(row) for row in values])
        kernels = w[outs].reshape(out_group, -1)
        gradients = torch.stack([dy[(place[0], outs, *place[1:])] for place in places])
        products = quantized(patches) @ quantized(kernels).T
        back = quantized(gradients) @ quantized(kernels.T.contiguous()).T
        dw[outs] = (quantized(gradients.T.contiguous()) @ quantized(patches.T.contiguous()).T).reshape(w[outs].shape)
        for row, place in enumerate(places):
            y[(place[0], outs, *place[1:])] = products[row] + b[outs]
            for column, tap in enumerate(taps):
                if (i := at(place, tap)) is not None:
                    dx[i] += back[row, column]
    return y, dx, dw


class Convolves(nn.Module):
    def __init__(self, w, b, options) -> None:
        super().__init__()
        kind = nn.Conv1d if w.dim() == 3 else nn.Conv2d
        channels = w.shape[1] * options.get("groups", 1)
        self.conv = kind(channels, w.shape[0], tuple(w.shape[2:]), **options)
        self.conv.load_state_dict({"weight": w.detach(), "bias": b.detach()})

    def forward(self, x):
        return self.conv(x)


@uncompiled
@pytest.mark.parametrize(
    ("case", "stance", "backend"),
    [
        *((case, stance, "eager") for case in CASES if case != "one image" for stance in ("default", "force_eager")),
        *(
            pytest.param(case, "default", "inductor", marks=pytest.mark.long)
            for case in ("stride and padding", "groups")
        ),
    ],
)
def test_all_six_operands_are_quantized_as_by_hand(case, stance, backend):
    function, (x, w, b), options = factors(case)
    dy = torch.randn(function(x, w, b, **options).shape, generator=torch.Generator().manual_seed(1))
    model = applied(Convolves(w, b, options), CONV, backend=backend)
    with torch.compiler.set_stance(stance):
        y = model(x)
    dx, dw = torch.autograd.grad(y, (x, model.conv.weight), dy)
    with torch.no_grad():
        expected = by_hand(x, w, b, dy, options)
    # Operands are equal to the bit; sums of up to 80 products of size 10 run in another order.
    for result, reference in zip((y, dx, dw), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-4)


class ByName(nn.Conv2d):
    def forward(self, input):
        return F.conv2d(input, weight=self.weight, bias=self.bias, groups=self.groups)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 16, 3, padding=1), ByName(16, 16, 3, groups=4)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.deep(F.relu(self.stem(x))).mean((2, 3)))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("ops", [["conv", "linear"], ["linear"]], ids=str)
def test_a_rule_asks_for_convolutions_by_name(ops):
    """The FLOPs are those of the convolution, whether it is quantized or not."""
    sites = fp4graph.explain(Small(), one_rule(match={"op": ops}), (IMAGES,)).sites
    assert {site.module: (site.op, site.quantized, site.flops) for site in sites} == {
        "stem": ("conv", "conv" in ops, 2 * 128 * 27 * 16),
        "deep": ("conv", "conv" in ops, 2 * 72 * 36 * 16),
        "head": ("linear", True, 2 * 2 * 16 * 4),
    }
    assert all("op: conv" in site.reason for site in sites if not site.quantized)


@uncompiled
@stances
def test_a_convolution_of_a_size_that_no_rule_matches_is_kept(stance):
    match = {"op": ["conv", "linear"], "in_features": {"min": 30}}
    model = applied(Small(), one_rule(quantize=SPEC, match=match, default="keep"))
    with torch.compiler.set_stance(stance):
        model(IMAGES)
    quantized = {site.module: site.quantized for site in runtime_of(model).sites}
    assert quantized == {"stem": False, "deep": True, "head": False}  # K of 27, 36 and 16


@pytest.mark.slow
def test_noise_differs_by_forward_and_repeats_by_seed():
    noisy, models = one_rule(op="conv", quantize=SPEC | {"rounding": "stochastic"}), []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(applied(Small(), noisy, seed=5))
    first, second = ([model(IMAGES) for _ in range(2)] for model in models)
    assert not torch.equal(*first)
    assert_equal(first, second)


def test_techniques_on_weights_are_refused_by_name():
    with pytest.raises(CaptureError, match=r"technique q_ema .*convolutions"):
        applied(Small(), one_rule("q_ema", op="conv"))
    model = Small()
    model.a, model.b, model.c = (model.deep for _ in range(3))
    with pytest.raises(CaptureError, match=r"^deep \(also a, b and 1 more\): .*technique q_ema"):
        applied(model, one_rule("q_ema", match={"op": "conv", "module": "deep"}))


def test_a_convolution_of_three_axes_is_kept():
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(2), nn.Conv1d(4, 4, 1))
    sites = fp4graph.explain(model, CONV, (torch.randn(1, 2, 4, 4, 4),)).sites
    assert {site.module: site.quantized for site in sites} == {"0": False, "2": True}
