"""Golden vectors: decoding, comparing entry by entry, and judging refusals.

A file holds ``{"cases": [{"name", "rev", "in", "out"}, …]}``; arrays are objects with ``dtype``,
``shape`` and ``data`` or ``b64``; ``{"raises": …}`` in place of an output means a refusal.
"""

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

type Case = dict[str, object]
type Check = Callable[[Case], str | None]

REFUSALS = (ValueError, NotImplementedError)
"""What the library raises when it refuses; anything else is a failure of ours."""


def load(path: Path) -> list[Case]:
    """The cases of one file, plain or gzipped, not decoded."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)["cases"]


def decode(value):
    """Array objects become numpy arrays, the strings inf, -inf and nan become floats."""
    if isinstance(value, Mapping):
        if {"dtype", "shape"} <= value.keys():
            return _array(value)
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _array(value: Mapping) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, value["dtype"], None) or value["dtype"])
    if "b64" in value:
        flat = np.frombuffer(base64.b64decode(value["b64"]), dtype)
    else:
        data = [float(x) if isinstance(x, str) else x for x in value["data"]]
        flat = np.array(data, dtype)
    return flat.reshape(value["shape"])


def compare(want, got, *, where: str = "out", rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """None if every entry of ``want`` is in ``got`` and equal, else the first difference.

    Integers, booleans and bytes compare exactly (of any width: slots are 64 bits wide in the
    files and 32 here); floats by ``|got - want| <= atol + rtol |want|`` with infinities and NaNs
    in the same places. ``got`` may have entries that ``want`` does not specify.
    """
    if isinstance(want, Mapping):
        return _compare_mapping(want, got, where, rtol, atol)
    if want is None or got is None:
        return None if want is got else f"{where}: given {_show(got)}, expected {_show(want)}"
    if isinstance(want, str) or isinstance(got, str):
        return None if want == got else f"{where}: given {got!r}, expected {want!r}"
    if isinstance(want, Sequence) and any(isinstance(x, Mapping | Sequence) for x in want):
        got = list(got) if isinstance(got, np.ndarray) else got
        if not isinstance(got, Sequence) or len(got) != len(want):
            return f"{where}: given {_show(got)}, expected {len(want)} entries"
        pairs = enumerate(zip(want, got, strict=True))
        checks = (compare(w, g, where=f"{where}[{i}]", rtol=rtol, atol=atol) for i, (w, g) in pairs)
        return next((c for c in checks if c), None)
    return _compare_arrays(np.asarray(want), np.asarray(got), where, rtol, atol)


def _compare_mapping(want, got, where, rtol, atol) -> str | None:
    if not isinstance(got, Mapping):
        return f"{where}: given {_show(got)}, expected entries {sorted(want)}"
    for key, value in want.items():
        if key not in got:
            return f"{where}.{key}: our API has no such entry"
        found = compare(value, got[key], where=f"{where}.{key}", rtol=rtol, atol=atol)
        if found:
            return found
    return None


def _compare_arrays(want, got, where, rtol, atol) -> str | None:
    if want.shape != got.shape:
        return f"{where}: shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return None
    if _kind(want) != _kind(got):
        return f"{where}: {got.dtype} values, expected {want.dtype}"
    if _kind(want) == "float":
        w, g = want.astype(np.float64), got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(g - w) <= atol + rtol * np.abs(w)
        same = np.where(
            np.isfinite(w) & np.isfinite(g), near, (w == g) | (np.isnan(w) & np.isnan(g))
        )
    else:
        same = want == got
    if np.all(same):
        return None
    at = tuple(int(i) for i in np.argwhere(~np.asarray(same))[0]) if want.ndim else ()
    wrong = int(np.sum(~np.asarray(same)))
    return f"{where}{list(at) if at else ''}: given {got[at]}, expected {want[at]} ({wrong} differ)"


def _kind(a: np.ndarray) -> str:
    if a.dtype.kind in "iu":
        return "int"
    return {"b": "bool"}.get(a.dtype.kind, "float")


def _show(value) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def judge(
    want, run: Callable[[], object], *, where: str = "out", rtol: float = 0.0, atol: float = 0.0
) -> str | None:
    """Compare ``run()`` with ``want``; where ``want`` is a refusal, ``run`` must refuse."""
    refuses = isinstance(want, Mapping) and set(want) == {"raises"}
    try:
        got = run()
    except REFUSALS as refusal:
        return None if refuses else f"{where}: refused ({refusal}), expected a result"
    if refuses:
        return f"{where}: given {_show(got)}, expected a refusal ({want['raises']})"
    return compare(want, got, where=where, rtol=rtol, atol=atol)
