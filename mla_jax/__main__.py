"""``python -m mla_jax`` is ``mla-jax``."""

from mla_jax.cli import main

main()
