"""A trial of ``card_trials``: routed experts that choose for themselves.

The first product of a small step's experts waits for the kernel that chooses them. Here each of its
programs makes the choice of all tokens again, from the router's logits, and does not wait. The
kernel that chooses runs beside it, for ``down`` and the weights. For choices by softmax alone, as
V2-Lite's. A step of V2-Lite takes longer with one request and less long with eight: not in use
(docs/log/served_step.md).
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

from mla_jax.pallas.grouped_matmul import kernels_triton as products
from mla_jax.pallas.router import kernels_triton as router
from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["Choosing", "gate_up"]

_sums, _swiglu = products._gate_up_sums, products._swiglu


@jit
def gate_up(
    x, gate, up, logits, real, tokens, out,
    SIZES: tl.constexpr, LIMIT: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``kernels_triton.gate_up`` with ``TOGETHER``, of the choice that ``choose`` would make.

    ``SIZES`` are experts, a power of two, choices, hidden and width. An expert belongs to the first
    pair that chose it, and programs to pairs as there.
    """
    EXPERTS: tl.constexpr = SIZES[0]
    TOPK: tl.constexpr = SIZES[1]
    WIDTH: tl.constexpr = SIZES[3]
    ROWS: tl.constexpr = TILE[0]
    BLOCKS: tl.constexpr = WIDTH // TILE[2]
    NONE: tl.constexpr = 1 << 30
    t, c = tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    there = t < tokens
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for piece in tl.static_range(PIECES):
        at = logits + (piece * tokens + t)[:, None] * EXPERTS + c[None, :]
        total += tl.load(at, mask=there[:, None], other=0.0)
    is_real = tl.load(real + t, mask=there, other=0) != 0
    left = tl.exp(total - tl.max(total, 1)[:, None])
    number = tl.full((ROWS, EXPERTS), -1, tl.int32)  # of the choice that an expert is
    for k in tl.static_range(TOPK):
        most = tl.max(left, 1)
        best = tl.min(tl.where(left == most[:, None], c[None, :], EXPERTS), 1)
        hit = c[None, :] == best[:, None]
        number = tl.where(hit & is_real[:, None], k, number)
        left = tl.where(hit, -1.0, left)
    leader = tl.min(tl.where(number >= 0, t[:, None] * TOPK + number, NONE), 0)
    last = tl.max(tl.where(leader < NONE, leader, -1), 0)
    block = tl.program_id(0) % BLOCKS
    column = block * TILE[2] + tl.arange(0, TILE[2])
    n = tl.program_id(0) // BLOCKS
    while n <= last:
        e = tl.min(tl.where(leader == n, c, EXPERTS), 0)
        if e < EXPERTS:
            g, u = _sums(x, gate, up, e, block, t, there, SIZES, ROWS, TILE)
            own = tl.max(tl.where(c[None, :] == e, number, -1), 1)
            to = out + (t * TOPK + own).to(tl.int64)[:, None] * WIDTH + column[None, :]
            h = _swiglu(g, u, LIMIT).to(out.dtype.element_ty)
            tl.store(to, h, mask=(own >= 0)[:, None])
        n += TOPK


class Choosing:
    """In place of ``triton_lib.call``: remembers a choice, and gives the experts its logits."""

    def __init__(self, call: Any):
        self._call, self._choice = call, None

    def __call__(self, kernel: Any, *args: Any, **facts: Any) -> Any:
        if kernel is router.choose:
            groups, each, topk, _ = facts["SIZES"]
            plain = facts["METHOD"] == "greedy" and groups == 1 and each & (each - 1) == 0
            self._choice = (args, (each, topk), facts["PIECES"]) if plain else None
        elif kernel is products.gate_up and facts["TOGETHER"] and self._choice is not None:
            (logits, _, real, tokens), sizes, pieces = self._choice
            if facts["SIZES"][:2] == sizes:
                self._choice = None
                facts = {k: v for k, v in facts.items() if k not in ("PAIRS", "TOGETHER")}
                x, gate, up, *_ = args
                return self._call(
                    gate_up, x, gate, up, logits, real, tokens, PIECES=pieces, **facts
                )
        return self._call(kernel, *args, **facts)
