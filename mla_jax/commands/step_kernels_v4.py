"""What the layers of DeepSeek V4 move and multiply in a step.

Attention of a token over ``r`` rows of width ``d`` that are key and value at once, ``H`` heads::

    bytes = r row + 4 H d                          FLOPs = 4 H r d

where ``r`` is the window's rows and, of a layer of ratio ``m``, those of the ``n / m`` complete
states that it sees: the ``index_topk`` selected ones of the overlapping ratio, all of the disjoint
one. A prefill reads each row once. Values and gates of a pool are float32; every token writes them
to its ring, and one of ``m`` tokens reads a whole ring and writes a state.
"""

from collections.abc import Iterator

from mla_jax.commands.step_kernels import Case, Kernel, Step, product, routed
from mla_jax.config_v4 import V4Config

__all__ = ["layers_v4"]


def layers_v4(step: Step, c: V4Config) -> Iterator[tuple[Kernel, Case]]:
    """All layers, kernel by kernel."""
    yield from _streams(step, c)
    yield from _projections(step, c)
    for ratio in sorted(set(c.compress_ratios)):
        if ratio:
            yield from _pools(step, c, ratio)
        if ratio == c.overlapping:
            yield from _selection(step, c)
        yield _attention(step, c, ratio), None
    yield from routed(step, c.layers)


def _streams(step: Step, c: V4Config) -> Iterator[tuple[Kernel, Case]]:
    """Hyper-connections around both parts of a layer: ``count`` streams read, mixed, written."""
    n = c.streams.count
    numbers, rows = (2 + n) * n, 2 * step.tokens * c.hidden
    mixing = Kernel(
        name="mixing of streams",
        calls=2 * c.layers,
        weights=4 * n * c.hidden * numbers,
        activations=rows * (3 * n + 2),
        flops=2 * step.tokens * n * c.hidden * (numbers + n + 2),
    )
    yield mixing, None


def _projections(step: Step, c: V4Config) -> Iterator[tuple[Kernel, Case]]:
    n, wide = c.layers, c.heads * c.dim
    yield product(step, "query latent", n, c.hidden, c.q_rank), None
    yield product(step, "queries", n, c.q_rank, wide), None
    yield product(step, "row", n, c.hidden, c.dim), None
    made = 2 * step.tokens * (2 * wide + c.dim)
    row = step.tokens * step.row_bytes("window")
    yield Kernel(name="norm, rotate and write", calls=n, cache=row, activations=made), None
    groups = Kernel(
        name="output of groups",
        calls=n,
        weights=2 * wide * c.out_rank,
        activations=2 * step.tokens * (wide + c.out_groups * c.out_rank),
        flops=2 * step.tokens * wide * c.out_rank,
    )
    yield groups, None
    yield product(step, "output", n, c.out_groups * c.out_rank, c.hidden), None


def _pools(step: Step, c: V4Config, ratio: int) -> Iterator[tuple[Kernel, Case]]:
    """Values and gates of the tokens, and the states of groups that are complete."""
    overlap, layers = ratio == c.overlapping, c.layers_of(ratio)
    width = (2 * (c.dim + c.index_dim)) if overlap else c.dim  # of values, and of gates
    yield product(step, f"values and gates, {ratio}", layers, c.hidden, 2 * width), None
    states, ring = step.row_bytes(f"states_{ratio}"), step.row_bytes(f"open_{ratio}")
    if overlap:
        states += step.row_bytes("index_keys")
    span = ratio * (1 + overlap)
    groups = step.tokens / ratio
    moved = step.tokens * ring + groups * (span * ring + states)
    kernel = Kernel(
        name=f"states of {ratio} tokens",
        calls=layers,
        cache=moved,
        activations=8 * step.tokens * width,
    )
    yield kernel, None


def _selection(step: Step, c: V4Config) -> Iterator[tuple[Kernel, Case]]:
    layers, wide = c.layers_of(c.overlapping), c.index_heads * c.index_dim
    yield product(step, "index queries", layers, c.q_rank, wide), None
    yield product(step, "index head weights", layers, c.hidden, c.index_heads, w=4), None
    states = step.context // c.overlapping
    decode = step.phase == "decode"
    scored = step.tokens * (states if decode else states / 2)
    kernel = Kernel(
        name="select top-k",
        calls=layers,
        cache=step.batch * states * step.row_bytes("index_keys"),
        activations=step.tokens * (2 * wide + 4 * c.index_heads + 4 * c.index_topk),
        flops=2 * scored * wide,
    )
    yield kernel, None


def _attention(step: Step, c: V4Config, ratio: int) -> Kernel:
    """Window and states in one softmax."""
    scopes = [("window", c.window, 1)]
    if ratio:
        most = c.index_topk if ratio == c.overlapping else step.context
        scopes.append((f"states_{ratio}", most, ratio))
    pairs, cache = 0, 0.0
    for name, most, each in scopes:
        seen = _seen(step, most, each)
        rows = seen if step.phase == "decode" else step.tokens // each
        pairs, cache = pairs + seen, cache + rows * step.row_bytes(name)
    return Kernel(
        name=f"attention, ratio {ratio}" if ratio else "attention, window",
        calls=c.layers_of(ratio),
        cache=cache,
        activations=4 * step.tokens * c.heads * c.dim,
        flops=4 * pairs * c.heads * c.dim,
    )


def _seen(step: Step, most: int, ratio: int) -> int:
    """Pairs of a token and a row of ``ratio`` tokens that it sees, of which there are ``most``."""
    if step.phase == "decode":
        return step.tokens * min(most, step.context // ratio)
    groups = step.context // ratio
    short = min(most, groups)  # ratio tokens see k rows, for each k below it; all others see short
    return step.batch * (
        ratio * (short * (short - 1) // 2) + short * (step.context - ratio * short + 1)
    )
