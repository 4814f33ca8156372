"""Strictness for every test: shapes checked at run time, no implicit dtype promotion, seeds."""

import zlib

import jaxtyping

# Before the first import of the package, so that all its functions and dataclasses are checked.
jaxtyping.install_import_hook("mla_jax", "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)
hypothesis.settings.register_profile(
    "mla_jax", derandomize=True, deadline=None, max_examples=20, database=None
)
hypothesis.settings.load_profile("mla_jax")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(items):
    if any(i.get_closest_marker("gpu") for i in items) and jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_generate_tests(metafunc):
    """A test that takes ``backend`` runs on every registered backend of its module's ``OP``."""
    if "backend" in metafunc.fixturenames:
        from mla_jax.ops import REGISTRY

        metafunc.parametrize("backend", [b.name for b in REGISTRY.of(metafunc.module.OP)])


@pytest.fixture
def rng(request):
    """A generator seeded by the name of the test, so that order and selection do not matter."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def our_errors():
    """Turn the run-time shape checks off, so that the library's own refusals are reached."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
