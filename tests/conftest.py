"""Checked shapes, strict promotion, a derandomised hypothesis; warnings are errors (pyproject)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

import tests.typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=30, print_blob=False
)
hypothesis.settings.load_profile("suite")

# Shapes and dtypes in signatures are checked in every module imported from here on.
_hook = install_import_hook("mla_jax", f"{tests.typecheck.__name__}.check_functions")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where there is no GPU."""
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a GPU; the backend here is {jax.default_backend()}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
