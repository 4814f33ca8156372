"""``triton_lib.call`` on numpy's memory, by Triton's interpreter: needs ``TRITON_INTERPRET=1``.

Triton decides when it is imported, so the tests that use this are files of their own
(``*_interpreted.py``), which ``in_a_process`` runs. The interpreter knows no products of bfloat16.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import imports
from tests.pallas.experts import missing

__all__ = ["GARBAGE", "INTERPRETER", "all_pass", "call", "in_a_process"]

INTERPRETER = missing("triton", "torch")
GARBAGE = 2**30


def call(kernel, *args, out, grid, warps, stages, aliases=None, registers=None, **constants):
    """Results begin as NaN, indices as garbage; those with an alias as what is changed."""
    arrays = [np.array(x) for x in jax.tree.leaves(args) if not isinstance(x, int)]
    shapes, form = jax.tree.flatten(out)
    place = {result: arrays[given] for given, result in (aliases or {}).items()}
    results = [
        place[i] if i in place else np.full(s.shape, _rubbish(s.dtype), s.dtype)
        for i, s in enumerate(shapes)
    ]
    rest = iter(arrays)
    given = jax.tree.map(lambda x: x if isinstance(x, int) else _tensor(next(rest)), args)
    outs = jax.tree.unflatten(form, map(_tensor, results))
    with mock.patch.object(np, "matmul", _matmul):
        kernel[(grid,)](*given, *(outs if isinstance(out, tuple) else (outs,)), **constants)
    return jax.tree.unflatten(form, map(jnp.asarray, results))


def _matmul(x, y, *, dtype=None, whole=np.matmul):
    """The interpreter's product, summed in float64 and rounded once.

    numpy's float32 product of a row may depend on the row's place among the others: with OpenBLAS's
    kernels for AVX2 it does.
    """
    return whole(x, y, dtype=np.float64).astype(np.result_type(x, y) if dtype is None else dtype)


def _tensor(x):
    """The same memory as torch has it, which knows e4m3 by another name."""
    import torch

    if x.dtype == jnp.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def _rubbish(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    return min(GARBAGE, jnp.iinfo(dtype).max)


def in_a_process(name):
    """Run a file beside this one under the interpreter; all of its tests must pass."""
    version = importlib.metadata.version("triton")
    if (
        tuple(map(int, version.split(".")[:2])) < (3, 7)
        and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
    ):
        pytest.skip(f"the interpreter of triton {version} cannot run with numpy {np.__version__}")
    all_pass(Path(__file__).with_name(name), TRITON_INTERPRET="1")


def all_pass(file, *options, **environment):
    """All tests of a file that ``options`` leave in pass in a process, and none is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-W", "ignore", *options, str(file)],
        cwd=imports.ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]
