"""Engines with the widths of published models on a GPU: kernels, CUDA graphs and batches together.

Tests of kernels see each operation alone, and tests of engines run on a CPU: neither saw steps of
32 decodes that wrote to memory of others (docs/log/step_graphs.md).
"""

import pytest

from benchmarks import step_check


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"engine{i % 3}"))
        for i, name in enumerate(step_check.MODELS)
    ],
)
def test_tokens_of_a_batch_are_those_of_whole_sequences(model):
    """24 requests alone and together, beside whole sequences without a cache."""
    row = step_check.check("default", model)
    assert row["alone_twice"]["bits"] == row["alone_twice"]["of"], row
    assert row["right"], row
