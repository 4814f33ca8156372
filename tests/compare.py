"""Judging attention: a float64 truth, and how far honest low precision is from it."""

import ml_dtypes
import numpy as np

F64 = np.dtype(np.float64)


def attention(q, k, v, seen, *, scale, dtype=F64):
    """``(out, lse)`` of plain softmax attention, by numpy, per head.

    ``q [n, heads, d]``, ``k``, ``v`` ``[m, heads, ...]`` or ``[m, ...]`` when shared by heads.
    Operands and probabilities are rounded to ``dtype``; sums are float32 (float64 for the truth).
    """
    acc = np.float64 if dtype == F64 else np.float32
    q, k, v = (x.astype(dtype).astype(acc) for x in (q, k, v))
    if k.ndim == 2:
        k, v = (np.broadcast_to(x[:, None], (len(x), q.shape[1], x.shape[1])) for x in (k, v))
    s = acc(scale) * np.einsum("nhd,mhd->nhm", q, k)
    s = np.where(seen[:, None], s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    empty = total == 0
    p = np.where(empty, 0, p / np.where(empty, 1, total)).astype(dtype).astype(acc)
    out = np.einsum("nhm,mhd->nhd", p, v)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(total) + np.where(empty, 0, top))[..., 0]
    return out.astype(dtype), lse


def judge(state, case, parts, *, lse_rounding=0.0):
    """A state over all tokens against truth and honest error of ``parts`` (``q, k, v, seen``).

    Infinities and NaNs must match in place; then the largest error may be twice that of the
    same maths in the case's dtype. Tokens behind the parts must be ``(0, -inf)``. ``lse_rounding``
    of the largest lse is allowed besides: float32 has no more digits of scores that are far apart.
    """
    low = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    truth = [attention(*p, scale=case.scale) for p in parts]
    honest = [attention(*p, scale=case.scale, dtype=low) for p in parts]
    (out, lse), (h_out, h_lse) = (
        tuple(np.concatenate(x) for x in zip(*side, strict=True)) for side in (truth, honest)
    )
    n = len(out)
    got, got_lse = (np.asarray(x).astype(np.float64) for x in (state.out, state.lse))
    assert state.lse.dtype == np.float32
    assert not got[n:].any() and np.isneginf(got_lse[n:]).all(), "padding is not (0, -inf)"
    within(got[:n], out, h_out, floor=1e-6)
    largest = np.abs(lse[np.isfinite(lse)]).max(initial=0.0)
    within(got_lse[:n], lse, h_lse, floor=1e-5 + lse_rounding * largest)


def within(got, truth, honest, *, floor, factor=2.0):
    """``max |got - truth| <= factor * max |honest - truth| + floor``, non-finites in place."""
    got, truth, honest = (np.asarray(x).astype(np.float64) for x in (got, truth, honest))
    assert got.shape == truth.shape, (got.shape, truth.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(got[~finite], truth[~finite])
    assert np.isfinite(got[finite]).all(), "not finite where the truth is"
    honest_error = np.max(np.abs(honest[finite] - truth[finite]), initial=0.0)
    error = np.max(np.abs(got[finite] - truth[finite]), initial=0.0)
    allowed = factor * honest_error + floor
    assert error <= allowed, f"error {error:.3g} above {allowed:.3g}"


def same_bits(a, b):
    """Two states, equal bit for bit."""
    for x, y in ((a.out, b.out), (a.lse, b.lse)):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def close_states(a, b, *, atol=2e-6):
    """Two float32 states, equal up to rounding."""
    for x, y in ((a.out, b.out), (a.lse, b.lse)):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=2e-6, atol=atol
        )
