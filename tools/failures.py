"""``pytest -p tools.failures``: prints a failure when it happens, not when all tests have run.

A run on a GPU that ends at its limit would otherwise name what failed, and never say why.
"""

LINES = 25
"""Of a failure's text the last ones."""


def pytest_runtest_logreport(report):
    """Called by pytest where results arrive: with pytest-xdist in the process that was started."""
    if report.failed:
        told = report.longreprtext.splitlines()[-LINES:]
        print("\n".join(("", f"-- {report.nodeid} ({report.when})", *told)), flush=True)
