"""The vectorised sampler is mlx-lm's, row by row, and a row's draw is its own."""

import math
from collections import Counter
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from lanes.lane import Sampling
from lanes.sampler import Sampler, draw_key, xtc_chance

VOCABULARY = 61

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 100.0]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999), st.sampled_from([1e-6, 1e-12])),
    top_k=st.one_of(st.just(0), st.integers(1, VOCABULARY + 3), st.just(2**31 - 1)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    seed=st.integers(0, 2**63 - 1),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.05, 0.1, 0.5]),
    xtc_spared=st.sampled_from([(), (3,), (0, 17, 60)]),
)
rows = st.lists(samplings, min_size=1, max_size=6)
# Drawn examples are the same in every run: a probability that lies within rounding of a limit would fail by chance.
many = settings(max_examples=150, deadline=None, derandomize=True)


def logits_of(num_rows: int, seed: int, vocabulary: int = VOCABULARY) -> mx.array:
    """Continuous: no two tokens are equally likely, so mlx-lm, which breaks ties, has none to break."""
    return 3 * mx.random.normal((num_rows, vocabulary), key=mx.random.key(seed))


def log_probabilities(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def by_mlx_lm(logits: mx.array, sampling: Sampling, position: int = 0) -> mx.array:
    """One row's [1, vocabulary] log-probabilities, filtered in the order in which mlx-lm's make_sampler chains. XTC is
    told to take part or not, for certain."""
    scores = log_probabilities(logits)
    mx.disable_compile()  # these functions compile anew for each value of their setting
    try:
        if 0 < sampling.top_p < 1:
            scores = apply_top_p(scores, sampling.top_p)
        if sampling.min_p:
            scores = apply_min_p(scores, sampling.min_p)
        if xtc_chance(sampling.seed, position) <= sampling.xtc_probability > 0:
            scores = apply_xtc(scores, 1.0, sampling.xtc_threshold, list(sampling.xtc_spared))
        if 0 < sampling.top_k < scores.shape[-1]:
            scores = apply_top_k(scores, sampling.top_k)
    finally:
        mx.enable_compile()
    return scores


@many
@given(settings_of_rows=rows, seed=st.integers(0, 2**31))
def test_each_row_is_filtered_as_by_mlx_lm(settings_of_rows: list[Sampling], seed: int) -> None:
    logits = logits_of(len(settings_of_rows), seed)
    drawing = [row for row, sampling in enumerate(settings_of_rows) if sampling.temperature > 0]
    if not drawing:
        return
    filtered = Sampler(settings_of_rows).filtered(logits[mx.array(drawing)], drawing)
    assert not mx.isnan(filtered).any().item()
    for place, row in enumerate(drawing):
        sampling = settings_of_rows[row]
        expected = by_mlx_lm(logits[row : row + 1], sampling, row)[0]
        assert mx.array_equal(filtered[place], expected), f"row {row}: {sampling}"
        assert (expected > -math.inf).any().item()


@many
@given(settings_of_rows=rows, seed=st.integers(0, 2**31), first=st.integers(0, 10_000))
def test_rows_draw_in_company_as_alone(settings_of_rows: list[Sampling], seed: int, first: int) -> None:
    """And as MLX draws for one row from the key that draw_key() names."""
    logits = logits_of(len(settings_of_rows), seed)
    positions = [first + 7 * row for row in range(len(settings_of_rows))]
    tokens = Sampler(settings_of_rows)(logits, positions)
    assert tokens.dtype == mx.int32
    for row, sampling in enumerate(settings_of_rows):
        token = tokens[row].item()
        own = logits[row : row + 1]
        assert token == Sampler([sampling])(own, [positions[row]])[0].item()
        if sampling.temperature == 0:
            assert token == mx.argmax(own).item()
        else:
            scores = by_mlx_lm(own, sampling, positions[row])[0] / sampling.temperature
            key = mx.array(draw_key(sampling.seed, positions[row]), dtype=mx.uint32)
            assert token == mx.random.categorical(scores, key=key).item()
            assert mx.isfinite(scores[token]).item(), "a token that the filters leave out was drawn"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_everything_off_leaves_the_log_probabilities(dtype: mx.Dtype) -> None:
    logits = logits_of(3, 1).astype(dtype)
    off = [Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=VOCABULARY), Sampling(temperature=2.0, top_p=1.0)]
    filtered = Sampler(off).filtered(logits, range(3))
    assert filtered.dtype == mx.float32
    assert mx.array_equal(filtered, log_probabilities(logits.astype(mx.float32)))


@pytest.mark.parametrize("sampling", [{"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_likeliest_token_always_stays(sampling: dict[str, Any]) -> None:
    logits = logits_of(8, 2)
    tokens = Sampler([Sampling(temperature=1.5, seed=i, **sampling) for i in range(8)])(logits, range(8))
    assert mx.array_equal(tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


@pytest.mark.parametrize("top_p", [1e-40, 1e-46, 1e-300, 5e-324])
def test_a_top_p_below_float32_keeps_the_likeliest_token(top_p: float) -> None:
    """The wire lets every share above 0 pass; in float32 these are 0."""
    logits = logits_of(8, 3)
    tokens = Sampler([Sampling(temperature=1.0, top_p=top_p, seed=i) for i in range(8)])(logits, range(8))
    assert mx.array_equal(tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-37, 1e-38, 1e-45, 1e-300, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature: float) -> None:
    """Over a vocabulary so large that the likeliest token is unlikely, too: scores must not overflow together."""
    logits = mx.concatenate([0.01 * logits_of(4, 4, 20_000), mx.ones((4, 1))], axis=-1)
    tokens = Sampler([Sampling(temperature=temperature, seed=i) for i in range(4)])(logits, range(4))
    assert mx.array_equal(tokens, mx.argmax(logits, axis=-1).astype(mx.int32))


def test_equally_likely_tokens_all_stay() -> None:
    """mlx-lm's top-k keeps k of them by chance of its sort; here none is favoured."""
    logits = mx.array([[2.0, 5.0, 5.0, 5.0, 1.0]])
    filtered = Sampler([Sampling(temperature=1.0, top_k=2)]).filtered(logits, [0])[0]
    assert (filtered > -math.inf).tolist() == [False, True, True, True, False]


def test_a_token_that_is_impossible_is_never_drawn() -> None:
    """A model may mask tokens with minus infinity itself."""
    logits = mx.where(mx.arange(VOCABULARY) % 2 == 0, -mx.inf, logits_of(200, 5))
    mixed = [Sampling(temperature=1 + i % 3, top_p=(1.0, 0.9)[i % 2], top_k=(0, 40)[i % 2], seed=i) for i in range(200)]
    tokens = Sampler(mixed)(logits, [0] * 200)
    assert (tokens % 2 == 1).all().item()


def test_draws_are_distributed_as_the_filtered_probabilities() -> None:
    """Chi-square over 100,000 draws, half of them from neighbouring seeds and half from neighbouring positions."""
    logits = 0.5 * logits_of(1, 6, 40)
    sampling: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "min_p": 0.002, "top_k": 12}
    scores = by_mlx_lm(logits, Sampling(**sampling))[0] / sampling["temperature"]
    expected = cast(list[float], mx.softmax(scores).tolist())
    counts: Counter[int] = Counter()
    batch = 2_500
    for turn in range(40):
        seeds = [0] * batch if turn % 2 else range(turn * batch, (turn + 1) * batch)
        sampler = Sampler([Sampling(**sampling, seed=seed) for seed in seeds])
        positions = range(turn * batch, (turn + 1) * batch) if turn % 2 else [17] * batch
        counts.update(cast(list[int], sampler(mx.broadcast_to(logits, (batch, 40)), positions).tolist()))
    assert counts.total() == 100_000
    possible = [token for token, share in enumerate(expected) if share > 0]
    assert set(counts) <= set(possible)
    assert len(possible) == 12
    statistic = sum((counts[token] - 1e5 * expected[token]) ** 2 / (1e5 * expected[token]) for token in possible)
    # 11 degrees of freedom: right draws exceed 31.3 once in a thousand seeds, and these seeds are fixed.
    assert statistic < 31.3


def test_xtc_takes_part_as_often_as_asked() -> None:
    """Its chances over seeds and over positions, in 20 parts of [0, 1) by chi-square; and none goes with its draw."""
    for pairs in ([(seed, 9) for seed in range(50_000)], [(9, position) for position in range(50_000)]):
        chances = [xtc_chance(*pair) for pair in pairs]
        counts = Counter(int(20 * chance) for chance in chances)
        # 19 degrees of freedom: 43.8 is exceeded once in a thousand.
        assert sum((counts[part] - 2500) ** 2 / 2500 for part in range(20)) < 43.8
        agreeing = sum(
            (draw_key(*pair)[0] >> 31) == (chance >= 0.5) for pair, chance in zip(pairs, chances, strict=True)
        )
        assert abs(agreeing - 25_000) < 370  # 3.3 standard deviations


def test_keys_do_not_collide() -> None:
    seeds = [*range(300), *(2**62 + seed for seed in range(100)), 2**63 - 1]
    keys = [draw_key(seed, position) for seed in seeds for position in range(300)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= word < 2**32 for key in keys for word in key)
    # Neither word alone tells neighbours apart by luck only: both are spread over all of their range.
    for word in (0, 1):
        tops = Counter(key[word] >> 28 for key in keys)
        assert len(tops) == 16
        assert max(tops.values()) < 1.1 * len(keys) / 16


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(1, 2**31))
def test_seed_and_position_make_the_draw(seed: int, position: int) -> None:
    assert draw_key(seed, position) == draw_key(seed, position)
    assert draw_key(seed, position) != draw_key(seed, position - 1)
    assert draw_key(seed, position) != draw_key(seed ^ 1, position)
    assert draw_key(seed + position, 0) != draw_key(seed, position), "a seed's draws are not its neighbour's, shifted"
