"""Scores of queries against index keys (the lightning indexer of V3.2 and V4)."""
