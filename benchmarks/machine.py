"""What a record says of the machine that measured it."""

import subprocess

__all__ = ["clocks"]


def clocks() -> str:
    """What the driver says of the clocks of every GPU of the machine."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,driver_version"]
    try:
        found = subprocess.check_output([*query, "--format=csv,noheader"], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"
    return "; ".join(found.splitlines())
