"""Rotary layouts and YaRN numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.config import RopeConfig, YarnConfig
from mla_jax.model.rope import cos_sin, rotate

V3 = RopeConfig(
    dim=64, theta=1e4, yarn=YarnConfig(factor=40.0, original=4096, mscale=1.0, mscale_all_dim=1.0)
)


@pytest.mark.parametrize(
    ("interleaved", "expected"), [(True, [-2, 1, 3, 4]), (False, [-3, 2, 1, 4])]
)
def test_layouts(interleaved, expected):
    angle = jnp.array([[jnp.pi / 2, 0.0]], jnp.float32)
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]], jnp.float32)
    got = rotate(x, jnp.cos(angle), jnp.sin(angle), interleaved=interleaved)
    np.testing.assert_allclose(got[0], expected, atol=1e-6)


def test_v3_frequencies_and_factors():
    f = V3.inv_freq()
    assert f.dtype == np.float32
    np.testing.assert_allclose(
        f[[0, 10, 16, 23, 31]], [1, 0.0562341, 0.0055, 3.33380e-5, 3.33380e-6], rtol=1e-5
    )
    assert V3.cos_sin_factor == 1.0
    assert 192**-0.5 * V3.score_factor == pytest.approx(0.1352337788608801, abs=1e-12)


def test_missing_mscale_scales_cos_and_sin():
    bare = RopeConfig(dim=64, theta=1e4, yarn=YarnConfig(factor=40.0, original=4096))
    assert bare.cos_sin_factor == pytest.approx(0.1 * np.log(40) + 1)
    assert bare.score_factor == 1.0
    assert RopeConfig(dim=64, theta=1e4).cos_sin_factor == 1.0


def test_rotation_is_relative():
    rope = RopeConfig(dim=8, theta=1e4)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)

    def score(i, j):
        a = rotate(jnp.asarray(q), *cos_sin(jnp.array([i]), rope), interleaved=True)
        b = rotate(jnp.asarray(k), *cos_sin(jnp.array([j]), rope), interleaved=True)
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
