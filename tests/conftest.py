"""Strictness for every test: shapes checked at run time, no implicit dtype promotion, seeds."""

import os
import shutil
import tempfile
import zlib

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

import tests.typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_num_cpu_devices", 2)  # for test_sharding

hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=20, print_blob=False, database=None
)
hypothesis.settings.load_profile("suite")

# Shapes and dtypes in signatures are checked in every module imported from here on.
_hook = jaxtyping.install_import_hook("mla_jax", f"{tests.typecheck.__name__}.check_shapes")


IN_TURN = "slow", "whole"
"""Marks of tests of which some runs take a third."""


def pytest_addoption(parser: pytest.Parser) -> None:
    thirds = "all, none, or a number: three numbers in a row take a third of them each"
    for mark in IN_TURN:
        parser.addoption(f"--{mark}", default="all", help=f"of the tests marked {mark}: {thirds}")


def pytest_configure(config: pytest.Config) -> None:
    """Without a CUDA plugin, what XLA compiled is kept for other workers and processes of tests.

    With one, kernels are compiled for a GPU: those that are read have no report of the assembler.
    """
    from tests import aot  # imports the package, after the hook above

    name = "JAX_COMPILATION_CACHE_DIR"
    if aot.cuda() is not None or os.environ.get(name):
        return
    folder = tempfile.mkdtemp(prefix="mla_jax_tests_")
    os.environ |= {name: folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def runs(item: pytest.Item, mark: str, which: str) -> bool:
    """Whether the option of this mark leaves a test in."""
    if which == "all" or item.get_closest_marker(mark) is None:
        return True
    return which != "none" and zlib.crc32(item.nodeid.encode()) % 3 == int(which) % 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where there is no GPU.

    Of those marked ``slow`` the option ``--slow`` takes some, of ``whole`` the option ``--whole``;
    pytest counts the others.
    """
    for mark in IN_TURN:
        which = config.getoption(mark)
        if which not in ("all", "none") and not which.isdecimal():
            raise pytest.UsageError(f"--{mark}: given {which}; allowed: all, none or a number")
        config.hook.pytest_deselected(items=[item for item in items if not runs(item, mark, which)])
        items[:] = [item for item in items if runs(item, mark, which)]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        reason = f"needs an NVIDIA GPU; the backend here is {jax.default_backend()}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``backend`` runs on every registered backend of its module's ``OP``."""
    if "backend" in metafunc.fixturenames:
        from mla_jax.ops import REGISTRY

        metafunc.parametrize("backend", [b.name for b in REGISTRY.of(metafunc.module.OP)])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the name of the test, so that order and selection do not matter."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def our_errors():
    """Turn the run-time shape checks off, so that the library's own refusals are reached."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
