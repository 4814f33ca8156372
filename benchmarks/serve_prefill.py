"""Prefill end to end beside vLLM: ``benchmarks.serve`` with its prompts timed."""

from benchmarks.serve import METHOD, run
from benchmarks.serve import PREFILLS as CASES

__all__ = ["CASES", "METHOD", "run"]
