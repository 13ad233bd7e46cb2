"""The lineage cache: bounded, exact, and cheap to extend."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from store.cache import LineageCache

STEPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 50), st.booleans()), max_size=40)


def ids(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.randrange(2**32) for _ in range(count)], np.uint32)


@given(STEPS, st.integers(0, 20_000))
def test_what_is_held_is_right_and_within_bounds(steps, bound):
    rng, cache = random.Random(1), LineageCache(bound)
    truth: dict[str, np.ndarray] = {}
    for n, (pick, size, root) in enumerate(steps):
        name, run, digest = str(n), ids(rng, size), bytes([n % 7]) * 16
        parent = None if root or not truth else list(truth)[pick % len(truth)]
        if parent is None:
            truth[name] = run
            cache.put("tree", name, digest, run)
        else:
            truth[name] = np.concatenate([truth[parent], run])
            extended = cache.extend("tree", parent, name, digest, [run[: size // 2], run[size // 2 :]])
            assert extended is None or np.array_equal(extended, truth[name])
        assert cache.cost <= bound
        for known, tokens in truth.items():
            held = cache.get("tree", known)
            assert held is None or np.array_equal(held, tokens)
            assert cache.get("another tree", known) is None
        for known, held in cache.held("tree", [bytes([k]) * 16 for k in range(7)], 8).items():
            assert np.array_equal(held, truth[known])
    assert len(cache) <= len(truth)


def test_a_conversation_shares_one_buffer_and_old_lineages_stay_as_they_were():
    rng, cache = random.Random(1), LineageCache(1 << 20)
    cache.put("tree", "0", b"0" * 16, ids(rng, 100))
    lineages = [cache.get("tree", "0")]
    copies = [lineages[0].copy()]
    for n in range(1, 100):
        lineages.append(cache.extend("tree", str(n - 1), str(n), b"0" * 16, [ids(rng, 100)]))
        copies.append(lineages[-1].copy())
    assert all(np.array_equal(lineage, copy) for lineage, copy in zip(lineages, copies, strict=True))
    assert not any(lineage.flags.writeable for lineage in lineages)
    assert cache.cost < 3 * lineages[-1].nbytes + 100 * 400


def test_the_least_recently_used_conversation_goes_first():
    rng, cache = random.Random(1), LineageCache(3 * 4_000 + 3 * 300)
    for name in ("a", "b", "c"):
        cache.put("tree", name, b"0" * 16, ids(rng, 1000))
    cache.get("tree", "a")
    cache.put("tree", "d", b"0" * 16, ids(rng, 1000))
    assert [name for name in "abcd" if cache.get("tree", name) is not None] == ["a", "c", "d"]
