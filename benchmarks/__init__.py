"""Measurements on a GPU: each suite checks before it times. See ``benchmarks/run.py``."""
