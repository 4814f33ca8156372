"""What the documentation says is what the code does."""

import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.config import MLADims, ModelConfig, RopeConfig
from mla_jax.model import weights
from mla_jax.model.presets import PRESETS
from mla_jax.model.weight_table import expected_shapes, num_params
from tests import imports


def blocks(name: str) -> list[str]:
    """The Python examples of a page."""
    page = (imports.ROOT / name).read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


README = blocks("README.md")
PAGES = {
    "metadata": 1,
    "sharding": 2,
    "starting": 1,
    "families": 1,
    "deepseek_v4": 1,
    "serving": 1,
    "numerics": 1,
    "testing": 1,
}
"""Pages of docs/ with examples, and how many."""

COMPILE = {("starting", 0), ("sharding", 0), ("deepseek_v4", 0), ("serving", 0)}
"""Examples that compile several programs."""

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
    command = [sys.executable, "-m", "tools.docs", "--check"]
    done = subprocess.run(command, cwd=imports.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_the_readme_has_its_examples():
    assert len(README) == 3


@pytest.mark.parametrize("source", README, ids=["jit", "flax", "engine"])
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


def test_the_readme_says_how_large_models_are():
    """Weights in 16 bits, of the presets; a card of 80 GB holds those below its size."""
    readme = (imports.ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d,.]+) \| (yes|no)[^|]*\|$", readme, re.MULTILINE)
    found = {name: (float(size.replace(",", "")), fits) for name, size, fits in rows}
    presets = {
        "Youtu (2B)": "YOUTU_2B",
        "V2-Lite": "V2_LITE",
        "GLM-4.7-Flash": "GLM_4_7_FLASH",
        "V2": "V2",
        "V3, R1, V3.2": "V3",
        "Kimi-K2": "KIMI_K2",
    }
    assert set(presets) <= set(found)
    for name, preset in presets.items():
        size = 2 * num_params(PRESETS[preset]) / 1e9
        assert found[name][0] == pytest.approx(size, rel=1e-3, abs=0.5 if size > 99 else 0.05), name
        assert found[name][1] == ("yes" if size < 80 else "no"), name


@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(name, i, marks=[pytest.mark.slow] if (name, i) in COMPILE else [])
        for name, count in PAGES.items()
        for i in range(count)
    ],
)
def test_examples_of_documents_run(name, index, capsys):
    check_prints(blocks(f"docs/{name}.md")[index], capsys)


def test_every_page_with_examples_is_run():
    """Architecture and the kernels' pages show signatures and equations, which are not run."""
    found = {p.stem: len(blocks(f"docs/{p.name}")) for p in (imports.ROOT / "docs").glob("*.md")}
    assert {name: n for name, n in found.items() if n and name != "architecture"} == PAGES


LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
DOCUMENTS = [*imports.ROOT.glob("*.md"), *(imports.ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(imports.ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


NAMED = re.compile(r"`((?:mla_jax|tests|docs|tools|benchmarks)/[\w/]+\.\w+)`")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(imports.ROOT)))
def test_named_files_exist(page):
    assert not [
        name for name in NAMED.findall(page.read_text()) if not (imports.ROOT / name).exists()
    ]


def check_prints(source, capsys):
    """Run a block: it prints what the comments behind its prints say."""
    exec(compile(source, "example", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out.strip().splitlines()
    promised = re.findall(r"^print\(.*\)  # (.*)$", source, flags=re.MULTILINE)
    assert printed
    assert not promised or printed == promised
