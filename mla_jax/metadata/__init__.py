"""Per-step attention metadata: static-shape pytrees, one compiled program per bucket."""
