"""A benchmark in several processes with one card each: ``--processes 4``."""

import argparse
import socket
import subprocess
import sys

import jax

__all__ = ["add_options", "enter", "free_port"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, help="of one card each")
    parser.add_argument(
        "--process", type=int, nargs=2, metavar=("NUMBER", "PORT"), help=argparse.SUPPRESS
    )


def enter(given: argparse.Namespace, module: str) -> None:
    """Become one of the processes. The one that was called starts them, waits and ends."""
    if given.process is not None:
        number, port = given.process
        jax.distributed.initialize(f"localhost:{port}", given.processes, number, [number])
    elif given.processes > 1:
        sys.exit(_apart(given.processes, module))


def _apart(processes: int, module: str) -> int:
    """This command in so many processes; the largest of what they return."""
    command, port = [sys.executable, "-m", module, *sys.argv[1:], "--process"], str(free_port())
    running = [subprocess.Popen([*command, str(i), port]) for i in range(processes)]
    return max(abs(process.wait()) for process in running)


def free_port() -> int:
    """One of this host that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
