"""The hash is uniform, its streams are unrelated, and its bits are the same in every process; normal variates made from
these bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph.numerics import noise
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.noise import Noise, derive, gaussian, hash_bits, make_key, mix
from tests.helpers.processes import python, run

N = 1 << 14
INDEX = torch.arange(N, dtype=torch.int32)


def related_keys() -> dict[str, torch.Tensor]:
    """Keys as a training run makes them, each with one change: seed, site, salt, step or rank."""
    base = make_key(0)
    keys = {f"seed {seed}": make_key(seed) for seed in range(4)}
    keys |= {f"site {name}": make_key(0, name) for name in ("a", "b", "ab")}
    keys |= {f"salt {salt}": derive(base, salt) for salt in range(6)}
    keys |= {f"block salt {salt}": derive(base, salt + 2**16) for salt in range(3)}
    keys |= {f"step {k}": mix(base, torch.tensor([k, 0], dtype=torch.int32)) for k in range(5)}
    keys |= {f"rank {k}": mix(base, torch.tensor([0, k], dtype=torch.int32)) for k in range(1, 4)}
    keys |= {"mixed": mix(base, make_key(1)), "mixed the other way": mix(make_key(1), base)}
    keys |= {"mixed with itself": mix(base, base), "twice": mix(mix(base, make_key(1)), make_key(1))}
    return keys


def test_every_bit_and_byte_is_uniform():
    for key in related_keys().values():
        bits = hash_bits(key, INDEX)
        for shift in range(0, 32, 4):
            counts = torch.bincount((bits.long() >> shift) & 0xF, minlength=16)
            chi2 = ((counts - N / 16) ** 2 / (N / 16)).sum().item()
            assert abs(chi2 - 15) < 6 * (2 * 15) ** 0.5


def test_streams_are_neither_correlated_nor_permutations_of_each_other():
    streams = {name: hash_bits(key, INDEX) for name, key in related_keys().items()}
    table = torch.stack([*streams.values()]).double()
    correlation = torch.corrcoef(table)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / N**0.5
    for lag in (1, 2, 32):
        lagged = torch.corrcoef(torch.cat([table[:, :-lag], table[:, lag:]]))[: len(table), len(table) :]
        assert lagged.abs().max() < 5.5 / N**0.5
    words = torch.cat(list(streams.values()))
    assert len(words.unique()) > len(words) - 100  # two streams of the same words would lose 16384


@pytest.mark.parametrize("pair", [([7, 5], [8, 5]), ([5, 7], [5, 8]), ([0, 1], [1, 0])])
def test_streams_of_raw_keys_that_are_close_are_unrelated(pair):
    """``make_key`` gives no such keys. Even so, neither stream of bits reorders the other."""
    a, b = (hash_bits(torch.tensor(key, dtype=torch.int32), INDEX) for key in pair)
    assert not torch.equal(a.sort().values, b.sort().values)
    assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1]) < 5.5 / N**0.5


@pytest.mark.slow
def test_avalanche():
    """A flipped bit of the index, of either word of the key, or of a word mixed into the key flips half of the output's
    bits."""
    key = make_key("avalanche")
    base = hash_bits(key, INDEX)

    def flipped(bits):
        changed = (bits ^ base).long() & 0xFFFFFFFF
        return sum(((changed >> i) & 1).double().mean().item() for i in range(32)) / 32

    for bit in range(32):
        mask = torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
        assert abs(flipped(hash_bits(key, INDEX ^ mask)) - 0.5) < 0.01
        for word in (0, 1):
            other = key.clone()
            other[word] ^= mask
            assert abs(flipped(hash_bits(other, INDEX)) - 0.5) < 0.01
            change = torch.zeros(2, dtype=torch.int32)
            change[word] ^= mask
            assert abs(flipped(hash_bits(mix(key, change), INDEX)) - 0.5) < 0.01


def test_mixed_and_derived_keys_are_distinct():
    key, counters = make_key(1), [torch.tensor([k, 0], dtype=torch.int32) for k in range(500)]
    made = [made for k, c in enumerate(counters) for made in (mix(key, c), derive(key, k), mix(c, key))]
    assert len({tuple(other.tolist()) for other in made}) == 1500
    assert torch.cat(made).unique().numel() > 2990


@pytest.mark.process
def test_keys_are_pinned_and_distinguish_their_parts():
    """A resumed run draws by these numbers: changing them changes every run."""
    assert make_key(0).tolist() == [628784176, 1532565806]
    assert hash_bits(make_key(0), INDEX[:3]).tolist() == [-649457248, 280669434, -208420219]
    parts = (1,), ("1",), (1, 1), (11,), ("a", "b"), ("ab",), ("a", "", "b"), (), (-1,), (2**70,)
    assert len({tuple(make_key(*part).tolist()) for part in parts}) == len(parts)
    code = "from fp4graph.numerics.noise import make_key; print(make_key(3, 'x').tolist())"
    assert run(python("-c", code)).strip() == str(make_key(3, "x").tolist())
    with pytest.raises(TypeError, match="int and str"):
        make_key(1.5)


def test_an_element_draws_the_same_bits_however_it_is_blocked():
    x = torch.randn(6, 40)
    noises = [
        Noise(make_key(1), Blocking(x.shape, b, d), x.device) for b in (16, (2, 8), "row", "tensor") for d in (0, 1)
    ]
    joined = [noise.blocking.join(noise.bits().expand(noise.blocking.layout)) for noise in noises]
    assert all(torch.equal(bits, joined[0]) for bits in joined)
    assert not torch.equal(noises[0].bits(1), noises[0].bits(0))
    assert not torch.equal(noises[0].block_bits(1), noises[0].block_bits(0))
    # With one element per block, a block has the index of its element, and yet other bits.
    single = Noise(make_key(1), Blocking((64,), 1), x.device)
    assert (single.bits() != single.block_bits()).all()


@pytest.mark.parametrize("word", [0, 1, 7, 65_539, 2**31 - 1, -1, -(2**31)])
def test_keys_computed_in_pythons_integers_are_those_of_tensors(word, monkeypatch):
    keys = [make_key("any", n) for n in range(50)]
    keys += [torch.tensor(pair, dtype=torch.int32) for pair in ([0, 0], [-1, -1], [2**31 - 1, -(2**31)])]
    other = torch.tensor([word, ~word], dtype=torch.int32)
    at_once = [(derive(key, word), mix(key, other)) for key in keys]
    monkeypatch.setattr(noise, "_readable", lambda key: False)
    for key, (derived, mixed) in zip(keys, at_once, strict=True):
        assert derived.dtype == mixed.dtype == torch.int32
        assert torch.equal(derived, derive(key, word))
        assert torch.equal(mixed, mix(key, other))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_trace_records_the_derivation_and_not_its_result(mode):
    def both(key):
        return mix(derive(key, 3), key)

    traced = make_fx(both, tracing_mode=mode)(make_key("traced with"))
    assert torch.equal(traced(make_key("run with")), both(make_key("run with")))


# ------------------------------------------------------------------ normal variates

COUNT = 1 << 20
MANY = torch.arange(COUNT, dtype=torch.int32)


def words(key: torch.Tensor, index: int) -> list[int]:
    index = torch.tensor([index], dtype=torch.int32)
    bits = [int(hash_bits(derive(key, salt), index)) & 0xFFFFFFFF for salt in range(6)]
    return [word for b in bits for word in (b & 0xFFFF, b >> 16)]


def test_a_normal_variate_is_the_sum_of_twelve_words_exactly():
    key = make_key("gaussian")
    expected = [(sum(words(key, i)) - 12 * 65535 / 2) / 65536 for i in range(200)]
    z = gaussian(key, MANY[:200])
    assert z.dtype is torch.float32
    assert z.tolist() == expected


@pytest.mark.slow
def test_moments_and_tails_of_normal_variates_within_the_error_of_sampling():
    for seed in range(3):
        z = gaussian(make_key(seed), MANY).double()
        assert abs(z.mean()) < 5 / math.sqrt(COUNT)
        assert abs(z.var() - 1) < 5 * math.sqrt(1.9 / COUNT)  # the variance of z² is the kurtosis of z less 1
        assert abs((z**3).mean()) < 5 * math.sqrt(15 / COUNT)
        assert abs((z**4).mean() - 2.9) < 5 * math.sqrt(85 / COUNT)  # a normal variate's 3 is 11 standard errors away
        for bound, mass in ((1, 0.32157), (2, 0.044578), (3, 0.0020159)):
            assert abs((z.abs() > bound).double().mean() - mass) < 5 * math.sqrt(mass / COUNT)
        assert 4 < z.abs().max() < 6


@pytest.mark.slow
def test_normal_variates_of_other_keys_and_indices_are_independent():
    base = make_key(0)
    keys = [base, make_key(1), derive(base, 0), derive(base, 1), derive(base, 6)]
    table = torch.stack([gaussian(key, MANY[: COUNT >> 3]) for key in keys]).double()
    table = torch.cat([table, table[:1].roll(1), table[:1].roll(32)])
    for power in (1, 2):
        correlation = torch.corrcoef(table**power)
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5 / math.sqrt(COUNT >> 3)


@pytest.mark.inductor
@pytest.mark.compiler
def test_compiled_code_draws_the_same_normal_variates():
    key = make_key("compiled")
    assert torch.equal(torch.compile(gaussian)(key, MANY[:5000]), gaussian(key, MANY[:5000]))
