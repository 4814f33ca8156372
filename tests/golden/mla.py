"""Golden checks of the batch functions and of the metadata common to all MLA layers."""

from tests.golden.common import Check

CHECKS: dict[str, Check] = {}
