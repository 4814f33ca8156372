"""The counts of a step in one array: apart, each of them would cost a kernel."""

from mla_jax.types import Array, Int

__all__ = ["SplitCounts"]


class SplitCounts:
    """What ``split_decodes_and_prefills`` found, read from the first four of ``counts``."""

    counts: Int[Array, "counts"]

    @property
    def num_decodes(self) -> Int[Array, ""]:
        return self.counts[0]

    @property
    def num_prefills(self) -> Int[Array, ""]:
        return self.counts[1]

    @property
    def num_decode_tokens(self) -> Int[Array, ""]:
        return self.counts[2]

    @property
    def num_prefill_tokens(self) -> Int[Array, ""]:
        return self.counts[3]
