"""What the commands of ``mla-jax`` compute; how they print is ``show``'s."""
