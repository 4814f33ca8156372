"""What the documentation says is what the code does."""

import json
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.commands.fit import Settings, fit
from mla_jax.config import MLADims, ModelConfig, RopeConfig
from mla_jax.model import weights
from mla_jax.model.presets import PRESETS
from mla_jax.model.weight_table import expected_shapes
from tests import imports


def blocks(name: str) -> list[str]:
    """The Python examples of a page."""
    page = (imports.ROOT / name).read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


README = blocks("README.md")
DOCS = imports.ROOT / "docs"
PAGES = sorted(str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md"))
"""Every page: ``metadata``, ``kernels/indexer``, …"""

EXAMPLES = [(name, i) for name in PAGES for i in range(len(blocks(f"docs/{name}.md")))]
SHOWN_ELSEWHERE = {"README", "commands", "performance", "step_time"}
"""Pages without an example of their own: the index, one whose console examples
tests/test_commands.py runs, and two of measurements. So are diaries, ``log/…``."""

COMPILE = {("starting", 0), ("sharding", 0), ("deepseek_v4", 0), ("serving", 0), ("serving", 1)}
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


@pytest.mark.slow
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


def test_the_readme_says_how_long_starting_takes():
    """Of V2-Lite's widths and 27 layers, from the newest results of the suite ``start``."""
    file = max((imports.ROOT / "benchmarks" / "results").glob("nvidia_h200_start_*.json"))
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    row = rows["v2_lite_27l_start"]
    readme = " ".join((imports.ROOT / "README.md").read_text().split())
    pattern = r"ready in (\S+) s with nothing compiled before, and in (\S+) s with stored programs"
    cold, warm = re.search(pattern, readme).groups()
    assert (cold, warm) == (f"{row['cold_s']:.0f}", f"{row['warm_s']:.1f}")


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
        "V3, R1": "V3",
        "V3.2": "V3_2",
        "GLM-5": "GLM_5",
        "Kimi-K2": "KIMI_K2",
        "V4-Flash": "V4_FLASH",
        "V4-Pro": "V4_PRO",
    }
    assert set(presets) == set(found)
    for name, preset in presets.items():
        size = fit(Settings(config=PRESETS[preset]), memory=1e12).weights / 1e9
        assert found[name][0] == round(size, 1 if size < 100 else 0), name
        assert found[name][1] == ("yes" if size < 80 else "no"), name


@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(*example, marks=[pytest.mark.slow] if example in COMPILE else [])
        for example in EXAMPLES
    ],
)
def test_examples_of_documents_run(name, index, capsys):
    check_prints(blocks(f"docs/{name}.md")[index], capsys)


def explained() -> list[str]:
    return [name for name in PAGES if name not in SHOWN_ELSEWHERE and not name.startswith("log/")]


@pytest.mark.parametrize("name", explained())
def test_every_page_has_an_example_and_says_its_limits(name):
    page = (DOCS / f"{name}.md").read_text()
    assert blocks(f"docs/{name}.md"), "no example that runs"
    assert "\n## Limits\n" in page


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("kernels/")])
def test_pages_of_kernels_have_their_sections(name):
    """The definition, what bounds the kernel, its schedule as a diagram, what was measured, …"""
    page = (DOCS / f"{name}.md").read_text()
    wanted = ["Example", "Definition", "Bound", "Schedule", "Measured", "Limits", "What remains"]
    found = [title for title in re.findall(r"^## (.+)$", page, re.MULTILINE) if title in wanted]
    assert found == wanted
    section = page.partition("\n## Definition\n")[2].partition("\n## ")[0]
    assert "<!-- definition " in section and "```py\ndef " in section
    schedule = page.partition("\n## Schedule\n")[2].partition("\n## ")[0]
    assert "```mermaid\n" in schedule
    assert "<!-- measured " in page.partition("\n## Measured\n")[2].partition("\n## ")[0]


def test_the_index_lists_every_page_with_a_sentence():
    index = (DOCS / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[[^\]]+\]\((\S+)\.md\) \| (\S.*\.) \|$", index, re.MULTILINE))
    logs = set(re.findall(r"\]\((log/\S+)\.md\)", index))
    assert set(rows) | logs == set(PAGES) - {"README"}


LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
DOCUMENTS = [*imports.ROOT.glob("*.md"), *(imports.ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(imports.ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """What a page's headings are called in links, as GitHub derives it."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page))
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(imports.ROOT)))
def test_links_to_headings_lead_to_one(page):
    text = page.read_text()
    dead = []
    for file, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", text):
        if "://" in file or (file and not file.endswith(".md")):
            continue
        there = (page.parent / file).read_text() if file else text
        dead += [f"{file}#{anchor}"] * (anchor not in anchors(there))
    assert not dead


def broken_tables(text: str) -> list[str]:
    """Lines of tables that GitHub does not show as such, outside of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    broken, table = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table]
            ruled = len(table) > 1 and re.fullmatch(r"\|(\s*:?-{3,}:?\s*\|)+", table[1])
            broken += [table[0]] * (not ruled)
            broken += [row for row, n in zip(table, cells, strict=True) if n != cells[0]]
        table = []
    return broken


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(imports.ROOT)))
def test_tables_parse(page):
    assert not broken_tables(page.read_text())


def test_these_rules_can_fail():
    good = "| a | b |\n|---|---|\n| 1 | `x \\| y` |\n"
    assert not broken_tables(good)
    assert broken_tables(good + "\n| 2 | 3 |\n") == ["| 2 | 3 |"]  # a blank line ends a table
    assert broken_tables(good + "| 2 |\n") == ["| 2 |"]
    assert not broken_tables("```\n| no | table |\n```\n")
    assert anchors("# Cache formats\n## `bf16`: 1152 bytes") == {"cache-formats", "bf16-1152-bytes"}
    with pytest.raises(AssertionError):
        check_prints("print(1 + 1)  # 3", FakeCapture("2\n"))


class FakeCapture:
    """Stands for ``capsys`` of an example that printed this."""

    def __init__(self, out: str):
        self.out = out

    def readouterr(self) -> "FakeCapture":
        return self


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
