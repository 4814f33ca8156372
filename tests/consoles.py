"""The console examples of docs/commands.md."""

import doctest
import re

from tests import imports


def consoles() -> list[tuple[list[str], str]]:
    """Arguments of ``mla-jax`` and what the page says it prints."""
    page = (imports.ROOT / "docs" / "commands.md").read_text()
    blocks = re.findall(r"^```console\n\$ mla-jax ([^\n]*)\n(.*?)^```", page, re.M | re.S)
    return [(command.split(), promised) for command, promised in blocks]


def assert_promised(promised: str, printed: str) -> None:
    """``...`` stands for any text; spaces at ends of lines and between columns do not count."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(promised, printed, flags), printed
