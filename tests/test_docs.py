"""What the documentation says is what the code does."""

import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.config import MLADims, ModelConfig, RopeConfig
from mla_jax.model import weights
from mla_jax.model.weight_table import expected_shapes
from tests import imports

BLOCKS, METADATA, SHARDING = (
    re.findall(
        r"^```python\n(.*?)^```", (imports.ROOT / name).read_text(), re.MULTILINE | re.DOTALL
    )
    for name in ("README.md", "docs/metadata.md", "docs/sharding.md")
)

TINY = ModelConfig(
    family="deepseek_v2",
    vocab=64,
    hidden=32,
    layers=1,
    dims=MLADims(heads=2, rank=16, nope=8, rope=4, v=8, q_rank=None),
    rope=RopeConfig(dim=4, theta=10000.0),
    mlp=48,
    moe=None,
    sparse_layers=(False,),
    eps=1e-6,
    max_positions=4096,
)


def test_generated_documents_are_up_to_date():
    command = [sys.executable, "tools/docs.py", "--check"]
    done = subprocess.run(command, cwd=imports.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_the_readme_has_its_examples():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("source", BLOCKS, ids=["jit", "flax", "engine"])
def test_readme_examples_run(source, tmp_path, monkeypatch, capsys):
    """Each block on its own; a tiny folder stands in for the checkpoint that it names."""
    draw = np.random.default_rng(0).standard_normal
    leaves = {
        path: jnp.asarray(draw(shape), jnp.float32) / 8
        for path, (shape, _) in expected_shapes(TINY).items()
    }
    weights.save(tmp_path / "DeepSeek-V2-Lite", TINY, leaves)
    monkeypatch.chdir(tmp_path)
    check_prints(source, capsys)


@pytest.mark.parametrize("source", METADATA + SHARDING, ids=["metadata", "sharding"])
def test_examples_of_documents_run(source, capsys):
    check_prints(source, capsys)


def check_prints(source, capsys):
    """Run a block: it prints what the comments behind its prints say."""
    exec(compile(source, "example", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out.strip().splitlines()
    promised = re.findall(r"^print\(.*\)  # (.*)$", source, flags=re.MULTILINE)
    assert printed
    assert not promised or printed == promised
