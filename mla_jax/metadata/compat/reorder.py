"""Ordering a persistent batch so that decodes come first, by exchanging pairs of rows.

The plan is computed from counts alone; the owner of the batch applies its swaps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Reordering",
    "reorder_batch_to_four_regions",
    "reorder_batch_to_split_decodes_and_prefills",
]


@dataclass(frozen=True, kw_only=True)
class Reordering:
    """Swaps in the order they are made, and the batch after them."""

    order: tuple[int, ...]  # old row of the request that ends at each row
    swaps: tuple[tuple[int, int], ...]

    @property
    def modified(self) -> bool:
        """Whether any request moves."""
        return bool(self.swaps)

    def apply(self, swap_states: Callable[[int, int], object]) -> bool:
        """Make every swap through ``swap_states(i, j)``; true iff any request moved."""
        for i, j in self.swaps:
            swap_states(i, j)
        return self.modified


def _reordering(requests: int, swaps: Sequence[tuple[int, int]]) -> Reordering:
    order = list(range(requests))
    for i, j in swaps:
        order[i], order[j] = order[j], order[i]
    return Reordering(order=tuple(order), swaps=tuple(swaps))


def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int], decode_threshold: int = 1
) -> Reordering:
    """Two regions with the fewest swaps: ``scheduled <= decode_threshold`` first.

    The last misplaced decode changes places with the first misplaced prefill, and so on; rows
    on their side of the boundary never move. Not stable inside a region.
    """
    decode = np.asarray(num_scheduled_tokens) <= decode_threshold
    boundary = int(decode.sum())
    misplaced_prefills = np.flatnonzero(~decode[:boundary])
    misplaced_decodes = boundary + np.flatnonzero(decode[boundary:])[::-1]
    pairs = zip(misplaced_prefills.tolist(), misplaced_decodes.tolist(), strict=True)
    return _reordering(len(decode), list(pairs))


def reorder_batch_to_four_regions(
    num_scheduled_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    num_prompt_tokens: Sequence[int],
    decode_threshold: int = 1,
) -> Reordering:
    """Four regions: decode, short extend, long extend, prefill without context.

    Extends have context; short ones fit ``decode_threshold`` but their prompt is unfinished.
    Misplaced requests fill the misplaced rows, sorted stably by region; others stay. Each cycle
    of that permutation of length ``n`` takes ``n - 1`` swaps.
    """
    scheduled = np.asarray(num_scheduled_tokens)
    computed, prompt = np.asarray(num_computed_tokens), np.asarray(num_prompt_tokens)
    region = np.select(
        [computed == 0, scheduled > decode_threshold, computed < prompt], [3, 2, 1], default=0
    )
    moved = np.flatnonzero(region != np.sort(region))
    by_region = moved[np.argsort(region[moved], kind="stable")]
    return _reordering(len(region), _swaps(by_region.tolist(), moved.tolist()))


def _swaps(sources: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Swaps that bring row ``sources[k]`` to row ``targets[k]``, one cycle after another."""
    goes_to = dict(zip(sources, targets, strict=True))
    swaps = []
    for start in sources:
        target = goes_to[start]
        while target != start:
            swaps.append((start, target))
            goes_to[start] = goes_to[target]
            goes_to[target] = target
            target = goes_to[start]
    return swaps
