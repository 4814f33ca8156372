"""Strictness for every test: shapes checked at run time, no implicit dtype promotion, seeds."""

import dataclasses
import zlib

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest


def _register_dataclass(cls):
    """A pytree whose unflattening is not construction.

    Transformations fill pytrees with specs and sentinels, which the checked ``__init__`` would
    refuse; real constructions stay checked.
    """
    names = {True: [], False: []}
    for f in dataclasses.fields(cls):
        names[bool(f.metadata.get("static"))].append(f.name)

    def flatten(x):
        key = jax.tree_util.GetAttrKey
        leaves = [(key(n), getattr(x, n)) for n in names[False]]
        return leaves, tuple(getattr(x, n) for n in names[True])

    def unflatten(static, leaves):
        x = object.__new__(cls)
        for n, value in zip(names[True] + names[False], (*static, *leaves), strict=True):
            object.__setattr__(x, n, value)
        return x

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


# Both before the first import of the package, so that all of it is checked.
jaxtyping.install_import_hook("mla_jax", "beartype.beartype")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.tree_util, "register_dataclass", _register_dataclass)
    import mla_jax.metadata.mla
    import mla_jax.ops  # noqa: F401

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
