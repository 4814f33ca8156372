"""The Triton program of sparse decode; ``triton.py`` says how it is launched.

Imported only where Triton is there: by ``triton.py``, when it runs.
"""

# Triton gives these functions a meaning of its own: arguments are pointers, branches may be static.
# pyright: reportMissingImports=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

from mla_jax.pallas.triton_lib import jit, tl

__all__ = ["attend"]


@jit
def _record_rows(pages, at, inside, like, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Latents and rotary keys of 656-byte records whose first bytes are ``at``."""
    GROUPS: tl.constexpr = RANK // 128
    c = tl.arange(0, RANK)
    byte = tl.load(pages + at[:, None] + c[None, :], mask=inside[:, None], other=0)
    code = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    g = tl.arange(0, GROUPS)
    scales = (pages + at[:, None] + RANK + 4 * g[None, :]).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales, mask=inside[:, None], other=0.0)
    code = tl.reshape(code, (code.shape[0], GROUPS, 128)) * scale[:, :, None]
    latent = tl.reshape(code, (code.shape[0], RANK)).to(like.dtype.element_ty)
    r = tl.arange(0, ROPE)
    ropes = (pages + at[:, None] + RANK + 4 * GROUPS + 2 * r[None, :]).to(
        tl.pointer_type(tl.bfloat16)
    )
    rope = tl.load(ropes, mask=inside[:, None], other=0.0)
    return latent, rope.to(like.dtype.element_ty)


@jit
def _element_rows(pages, at, inside, RANK: tl.constexpr, ROPE: tl.constexpr):
    """The same of rows of elements, which begin at elements ``at``."""
    c = tl.arange(0, RANK)
    r = tl.arange(0, ROPE)
    latent = tl.load(pages + at[:, None] + c[None, :], mask=inside[:, None], other=0.0)
    rope = tl.load(pages + at[:, None] + RANK + r[None, :], mask=inside[:, None], other=0.0)
    return latent, rope


@jit
def attend(
    q, pages, slots, number, out, lse,
    SIZES: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr,
    RECORDS: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token over one piece of its list.

    ``SIZES`` are tokens, heads, rank, rope and keys of a list; ``CACHE`` layers, slots of each and
    elements (or bytes) of a row; ``TILE`` heads of a block, keys of a turn and keys of a piece.
    """
    TOKENS: tl.constexpr = SIZES[0]
    HEADS: tl.constexpr = SIZES[1]
    RANK: tl.constexpr = SIZES[2]
    ROPE: tl.constexpr = SIZES[3]
    KEYS: tl.constexpr = SIZES[4]
    FEW: tl.constexpr = TILE[0]
    STEP: tl.constexpr = TILE[1]
    PIECE: tl.constexpr = TILE[2]
    BLOCKS: tl.constexpr = (HEADS + FEW - 1) // FEW
    pid = tl.program_id(0)
    block = pid % BLOCKS
    token = (pid // BLOCKS) % TOKENS
    piece = pid // (BLOCKS * TOKENS)
    layer = tl.load(number)
    LAYERS: tl.constexpr = CACHE[0]
    SLOTS: tl.constexpr = CACHE[1]
    ROW: tl.constexpr = CACHE[2]
    there = (layer >= 0) & (layer < LAYERS)
    first_row = tl.where(there, layer, 0).to(tl.int64) * SLOTS

    head = block * FEW + tl.arange(0, FEW)
    real = (head < HEADS)[:, None]
    line = (token.to(tl.int64) * HEADS + head)[:, None] * (RANK + ROPE)
    c = tl.arange(0, RANK)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    q_latent = tl.load(q + line + c, mask=real, other=0.0)
    q_rope = tl.load(q + line + RANK + r, mask=real, other=0.0)

    # Lists end in -1 where a token sees few keys: what lies behind the last row costs nothing.
    begin = piece * PIECE
    row = slots + token.to(tl.int64) * KEYS
    k = tl.arange(0, STEP)
    end = begin
    for i in range(begin, tl.minimum(begin + PIECE, KEYS), STEP):
        slot = tl.load(row + i + k, mask=i + k < KEYS, other=-1)
        found = (slot >= 0) & (slot < SLOTS)
        end = tl.maximum(end, tl.max(tl.where(found, i + k + 1, 0)))

    top = tl.full((FEW,), float("-inf"), tl.float32)
    total = tl.zeros((FEW,), tl.float32)
    acc = tl.zeros((FEW, RANK), tl.float32)
    for i in range(begin, end, STEP):
        slot = tl.load(row + i + k, mask=i + k < end, other=-1)
        slot = tl.where(there, slot, -1)
        inside = (slot >= 0) & (slot < SLOTS)
        at = (first_row + tl.where(inside, slot, 0)) * ROW
        if RECORDS:
            latent, rope = _record_rows(pages, at, inside, q, RANK, ROPE)
        else:
            latent, rope = _element_rows(pages, at, inside, RANK, ROPE)
        s = tl.dot(q_latent, latent.T)
        s = tl.dot(q_rope, rope.T, acc=s)
        s = tl.where(inside[None, :], s * (SCALE * 1.4426950408889634), float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc=acc * shrink[:, None])
        top = new

    empty = total == 0.0
    share = acc / tl.where(empty, 1.0, total)[:, None]
    to = (piece.to(tl.int64) * TOKENS + token) * HEADS + head
    tl.store(out + to[:, None] * RANK + c, share.to(out.dtype.element_ty), mask=real)
    natural = (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    natural = tl.where(empty, float("-inf"), natural)
    tl.store(lse + to, natural, mask=head < HEADS)
