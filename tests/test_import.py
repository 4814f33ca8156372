"""Importing the package touches no device and no environment, and exports what it says."""

import ast
import subprocess
import sys

import mla_jax
from tests import imports

ENVIRONMENT_READERS = {"cli"}

SILENT_IMPORT = """
import time
import jax
import flax.nnx
start = time.process_time()
import mla_jax
for name in mla_jax.__all__:
    getattr(mla_jax, name)
seconds = time.process_time() - start
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing mla_jax initialised a backend"
print(seconds)
"""


def test_import_initialises_no_backend_and_is_quick():
    done = subprocess.run(
        [sys.executable, "-c", SILENT_IMPORT],
        cwd=imports.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0  # seconds of a core beyond jax and flax


def environment_reads(source: str) -> list[int]:
    """Lines that touch the process environment or its flags."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


def test_only_the_command_line_reads_the_environment():
    readers = {
        name: lines
        for name, path in imports.modules().items()
        if name not in ENVIRONMENT_READERS and (lines := environment_reads(path.read_text()))
    }
    assert not readers


def test_environment_reads_are_seen():
    assert environment_reads("import os\nx = os.environ['A']\n") == [2]
    assert environment_reads("from os import getenv\ngetenv('A')\n") == [1, 2]
    assert not environment_reads("environment = 1\n")


def test_public_names_exist_and_are_documented():
    for name in mla_jax.__all__:
        value = getattr(mla_jax, name)
        assert isinstance(value, dict) or (value.__doc__ or "").strip(), name
