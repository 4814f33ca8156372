"""Inputs of hyper-connections, and the truth about them in float64."""

import jax.numpy as jnp
import numpy as np

from tests.cases import draw

ROUNDS, EPS, NORM_EPS = 20, 1e-6, 1e-5


def inputs(rng, tokens, n, hidden, *, dtype="bfloat16"):
    """``(streams, proj, scale, bias)`` in numpy."""
    out = (2 + n) * n
    return (
        draw(rng, tokens, n, hidden, dtype=dtype),
        draw(rng, n, hidden, out, std=(n * hidden) ** -0.5),
        np.asarray([0.7, 1.3, -0.4], np.float32),
        draw(rng, out),
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def truth(streams, proj, scale, bias):
    """Token by token."""
    found = []
    n = streams.shape[1]
    w = proj.astype(np.float64).reshape(-1, proj.shape[-1])
    for s in streams.astype(np.float64):
        z = s.ravel() / np.sqrt((s**2).mean() + NORM_EPS) @ w
        pre = sigmoid(scale[0] * z[:n] + bias[:n]) + EPS
        post = 2 * sigmoid(scale[1] * z[n : 2 * n] + bias[n : 2 * n])
        m = np.exp((scale[2] * z[2 * n :] + bias[2 * n :]).reshape(n, n))
        m = m / m.sum(1, keepdims=True) + EPS
        for i in range(ROUNDS):
            m = m if i == 0 else m / (m.sum(1, keepdims=True) + EPS)
            m = m / (m.sum(0, keepdims=True) + EPS)
        found.append((pre @ s, post, m))
    return [np.stack(x) for x in zip(*found, strict=True)]


def judge(got, given, *, atol):
    """Against the truth; ``atol`` of what is read, the others are float32."""
    x, post, matrix = (np.asarray(y, np.float64) for y in got)
    want = truth(*given[:4])
    if len(given) > 4:
        scale = np.sqrt((want[0] ** 2).mean(1, keepdims=True) + NORM_EPS)
        want[0] = given[4].astype(np.float64) * want[0] / scale
    np.testing.assert_allclose(x, want[0], rtol=2**-7 if atol > 1e-4 else 1e-5, atol=atol)
    np.testing.assert_allclose(post, want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(matrix, want[2], rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-4)


def arrays(given):
    return tuple(map(jnp.asarray, given))
