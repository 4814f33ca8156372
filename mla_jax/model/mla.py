"""Multi-head latent attention: the expanded and the absorbed path, side by side.

With ``c`` the normalised latent (``rank`` wide), ``k_r`` the one shared rotary key and
``W_kv = [U_k | U_v]`` the per-head up-projection:

* expanded (prefill): ``[k_n; v] = c W_kv``, ``o = softmax(scale (q_n k_n + q_r k_r)) v``
* absorbed (decode): ``q~ = q_n U_k^T``, ``o = softmax(scale (q~ c + q_r k_r)) c U_v``

Both give the same numbers with the same ``scale``; the cache row ``[c | k_r]`` serves both.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.cache import LatentCache, RecordCache
from mla_jax.config import MLADims, ModelConfig, RopeConfig
from mla_jax.metadata.buckets import FEWEST_ROWS
from mla_jax.metadata.mla import ContextMetadata, DecodeMetadata, MLAMetadata, PrefillMetadata
from mla_jax.model.linear import Linear, contract, project
from mla_jax.model.norm import RMSNorm
from mla_jax.model.rope import cos_sin, rotate
from mla_jax.model.sharding import divided, divides
from mla_jax.pallas.axes import AddNorm, PageTable, PerRequest, Starts
from mla_jax.placement import Placement, several
from mla_jax.types import Array, AttnState, Float, Int

__all__ = ["MLA", "Absorbed", "Rows", "StepPlan", "Up", "absorb_weights", "plan_step"]


FEW_HEADS = 32
"""Of a device: up to so many a small step's kernel of new rows absorbs the queries too."""


class Absorbed(NamedTuple):
    """The up-projection as decoding wants it; follows from ``MLA.kv_up`` alone."""

    k: Float[Array, "heads nope rank"]  # U_k^T
    v: Float[Array, "heads rank v"]  # U_v


def absorb_weights(kv_up: Float[Array, "rank heads nope_v"], *, nope: int) -> Absorbed:
    """``(U_k^T, U_v)`` per head from the interleaved up-projection ``[U_k | U_v]``."""
    u_k, u_v = kv_up[..., :nope], kv_up[..., nope:]
    return Absorbed(u_k.transpose(1, 2, 0), u_v.transpose(1, 0, 2))


class StepPlan(NamedTuple):
    """What all layers of a step share. None: nothing to do, or the backend makes no plan."""

    decode: object = None  # of ``mla_decode``
    prefill: object = None  # of ``mla_prefill`` over the new tokens
    angles: tuple[Array, Array] | None = None  # cos and sin of every token; None: made again


def plan_step(
    dims: MLADims,
    rope: RopeConfig,
    meta: MLAMetadata,
    cache: LatentCache | RecordCache,
    *,
    dtype: DTypeLike,
    backend: str | None = None,
    placement: Placement | None = None,
) -> StepPlan:
    """The plans of a step, made once for all its layers; dense decode has no records."""
    shares = placement.size if placement and divides(placement, dims.heads) else 1
    heads, decode, prefill = dims.heads // shares, None, None
    if meta.decode is not None and isinstance(cache, LatentCache):
        decode = ops.plan_decode(
            meta.decode,
            cache,
            tokens=meta.bucket.decode_tokens,
            heads=heads,
            dtype=dtype,
            backend=ops.named("mla_decode", backend),
        )
    if meta.prefill is not None:
        prefill = ops.plan_prefill(
            meta.prefill,
            tokens=meta.bucket.prefill_tokens,
            keys=meta.bucket.prefill_tokens,
            heads=heads,
            nope=dims.nope,
            rope=dims.rope,
            v=dims.v,
            dtype=dtype,
            out_dtype=None if meta.context is None else jnp.float32,
            backend=ops.named("mla_prefill", backend),
        )
    return StepPlan(decode, prefill, cos_sin(meta.positions, rope))


class Rows(NamedTuple):
    """A step's new rows: queries of some heads, and what the cache stores."""

    q: Float[Array, "tokens heads qk"]
    latent: Float[Array, "tokens rank"]
    k_rope: Float[Array, "tokens rope"]

    @property
    def q_nope(self) -> Float[Array, "tokens heads nope"]:
        return self.q[..., : self.q.shape[-1] - self.k_rope.shape[-1]]

    @property
    def q_rope(self) -> Float[Array, "tokens heads rope"]:
        return self.q[..., self.q.shape[-1] - self.k_rope.shape[-1] :]

    def part(self, start: Int[Array, ""], size: int) -> "Rows":
        """``size`` rows from ``start`` on."""
        return Rows(*(lax.dynamic_slice_in_dim(a, start, size) for a in self))


class _Raw(NamedTuple):
    """What a step's products give, before rotation and norm."""

    q: Float[Array, "tokens heads qk"]
    kv: Float[Array, "tokens row"]
    gain: Float[Array, "rank"]  # of the latent's norm
    angles: tuple[Array, Array]


class _Queries(NamedTuple):
    """Queries of some heads whose rows the cache has already.

    The part that is not rotated is there as it is, or with the up-projection absorbed.
    """

    q_nope: Float[Array, "tokens heads nope"] | None
    q_rope: Float[Array, "tokens heads rope"]
    q_latent: Float[Array, "tokens heads rank"] | None = None


class Up(NamedTuple):
    """The up-projection of the same heads, in both forms."""

    kv_up: Float[Array, "rank heads nope_v"]
    absorbed: Absorbed


class MLA(nnx.Module):
    """One attention layer. Cache in, cache out; everything else is an argument."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        d = config.dims
        facts = {"dtype": dtype, "rngs": rngs, "fp8": fp8}

        def linear(in_dim: int, *out_dims: int, bias: bool = False, **more: Any) -> Linear:
            return Linear((in_dim,), out_dims, bias=bias, **facts, **more)

        biased = config.attention_bias
        if d.q_rank is None:
            self.q = linear(config.hidden, d.heads, d.qk, parallel="column")
        else:
            self.q_down = linear(config.hidden, d.q_rank, bias=biased)
            self.q_norm = RMSNorm(d.q_rank, eps=config.latent_eps, dtype=dtype)
            self.q_up = linear(d.q_rank, d.heads, d.qk, parallel="column")
        self.kv_down = linear(config.hidden, d.row, bias=biased)
        self.kv_norm = RMSNorm(d.rank, eps=config.latent_eps, dtype=dtype)
        self.kv_up = linear(d.rank, d.heads, d.nope + d.v)
        self.out = Linear((d.heads, d.v), (config.hidden,), bias=biased, **facts, parallel="row")
        self.dims, self.rope, self.scale = d, config.rope, config.scale

    def absorbed(self) -> Absorbed:
        """The decode weights, derived from ``kv_up`` as it is now."""
        return absorb_weights(self._up_projection(), nope=self.dims.nope)

    def _up_projection(self) -> Float[Array, "rank heads nope_v"]:
        """``[U_k | U_v]`` of all heads, widened if the weights are e4m3."""
        return self.kv_up.dense(self.kv_norm.scale[...].dtype)

    def queries(
        self, x: Float[Array, "tokens hidden"], angles: tuple[Array, Array], *,
        backend: str | None = None, placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens heads nope"], Float[Array, "tokens heads rope"]]:  # fmt: skip
        """Per-head queries, the rotary part rotated."""
        q = self._rotate_queries(self._project_queries(x, backend, placement), angles)
        return q[..., : self.dims.nope], q[..., self.dims.nope :]

    def latents(
        self, x: Float[Array, "tokens hidden"], angles: tuple[Array, Array], *,
        backend: str | None = None, placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens rank"], Float[Array, "tokens rope"]]:  # fmt: skip
        """What the cache stores: the normalised latent and the rotated shared key."""
        return self._split_row(self.kv_down(x, backend=backend, placement=placement), angles)

    def _project_queries(
        self,
        x: Float[Array, "tokens hidden"],
        backend: str | None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens heads qk"]:
        """Per-head queries before rotation."""
        facts: dict[str, Any] = {"backend": backend, "placement": placement}
        if self.dims.q_rank is None:
            return self.q(x, **facts)
        return self.q_up(self.query_latents(x, **facts), **facts)

    def query_latents(
        self,
        x: Float[Array, "tokens hidden"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens q_rank"]:
        """The normalised query latent, of models that have one."""
        return self.q_norm(self.q_down(x, backend=backend, placement=placement))

    def _rotate_queries(
        self, q: Float[Array, "tokens heads qk"], angles: tuple[Array, Array]
    ) -> Float[Array, "tokens heads qk"]:
        """Their rotary part rotated, where it is: XLA moves nothing else."""
        rope = rotate(q[..., self.dims.nope :], *angles, interleaved=self.rope.interleaved)
        return lax.dynamic_update_slice_in_dim(q, rope, self.dims.nope, axis=-1)

    def _split_row(
        self, kv: Float[Array, "tokens row"], angles: tuple[Array, Array]
    ) -> tuple[Float[Array, "tokens rank"], Float[Array, "tokens rope"]]:
        latent, rope = kv[:, : self.dims.rank], kv[:, self.dims.rank :]
        return self.kv_norm(latent), rotate(rope, *angles, interleaved=self.rope.interleaved)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        meta: MLAMetadata,
        cache: LatentCache,
        *,
        then: AddNorm | None = None,
        layer: Int[Array, ""] | int | None = None,
        absorbed: Absorbed | None = None,
        backend: str | None = None,
        plan: StepPlan | None = None,
        placement: Placement | None = None,
    ) -> tuple[Any, LatentCache]:
        """Write the new rows, attend over pages and new tokens, project back: ``(y, cache)``.

        ``y`` is [tokens, hidden]; with ``then`` it is the residual plus that, and the sum's norm.
        ``layer`` is this layer's number in a stacked cache. ``absorbed`` is ``self.absorbed()``;
        a server keeps it, without it the step derives it again. ``backend`` names the backend of
        every operation that has one of that name; None takes the best that qualifies. ``plan`` is
        ``plan_step`` of the same step, which serves every layer. Over several devices of a
        ``placement`` each one attends with its own heads.
        """
        facts: dict[str, Any] = {"backend": backend, "placement": placement}
        plan = StepPlan() if plan is None else plan
        angles = cos_sin(meta.positions, self.rope) if plan.angles is None else plan.angles
        q, kv = self._project_queries(x, backend, placement), self.kv_down(x, **facts)
        kv_up, number = self._up_projection(), 0 if layer is None else layer
        absorbed = self.absorbed() if absorbed is None else absorbed
        divided_heads = divides(placement, self.dims.heads)
        fused = meta.prefill is None and (divided_heads or not several(placement))
        new = Rows(self._rotate_queries(q, angles), *self._split_row(kv, angles))
        raw = _Raw(q, kv, self.kv_norm.scale[...], angles)

        def attend(raw, new, kv_up, absorbed, meta, cache, number, plan):
            at, up = None if layer is None else number, Up(kv_up, absorbed)
            by = {"layer": at, "backend": backend}
            if fused and (found := self._appended(raw, up, meta, cache, **by)):
                new, cache = found
            return self._attend(new, up, meta, cache, **by, plan=plan)

        if divided_heads:
            rows = Rows._make((1, None, None)), 1, 0, None, None, None, None
            given = (_Raw._make((1, None, None, None)), *rows)
            attend = divided(attend, placement, given=given, returned=(1, None))
        heads, cache = attend(raw, new, kv_up, absorbed, meta, cache, number, plan)
        if then is not None:
            return self.out.onto(then, heads, **facts), cache
        return self.out(heads, **facts), cache

    def _appended(
        self,
        raw: "_Raw",
        up: "Up",
        meta: MLAMetadata,
        cache: LatentCache,
        *,
        layer: Int[Array, ""] | int | None,
        backend: str | None,
    ) -> tuple["_Queries", LatentCache] | None:
        """The queries, and the cache with the new rows, if one kernel makes both here.

        The few queries of a small step meet the up-projection in that kernel too.
        """
        absorbing = meta.decode is not None and meta.prefill is None
        absorbing = absorbing and meta.bucket.decode_tokens == len(raw.q) <= FEWEST_ROWS
        absorbing = absorbing and raw.q.shape[1] <= FEW_HEADS
        given = cache, raw.q, raw.kv, raw.gain, raw.angles, meta.slots
        facts: dict[str, Any] = {
            "eps": self.kv_norm.eps,
            "interleaved": self.rope.interleaved,
            "layer": layer,
            "up_k": up.absorbed.k if absorbing else None,
        }
        named = ops.named("append_latent", backend)
        if not ops.in_one_kernel("append_latent", *given, backend=named, **facts):
            return None
        first, q_rope, cache = ops.append_latent(*given, backend=named, **facts)
        if absorbing:
            return _Queries(None, q_rope, first), cache
        return _Queries(first, q_rope), cache

    def _attend(
        self,
        new: "Rows | _Queries",
        up: "Up",
        meta: MLAMetadata,
        cache: LatentCache,
        *,
        layer: Int[Array, ""] | int | None,
        backend: str | None,
        plan: StepPlan,
    ) -> tuple[Float[Array, "tokens heads v"], LatentCache]:
        """Attention of some heads, or all, and the cache with the new rows."""
        if isinstance(new, Rows):
            writing = ops.named("write_latent", backend)
            cache = ops.write_latent(
                cache, new.latent, new.k_rope, meta.slots, layer=layer, backend=writing
            )
        facts = {"scale": self.scale, "layer": layer, "plan": plan.decode}
        facts["backend"] = ops.named("mla_decode", backend)

        def decode(q_latent: Array, q_rope: Array, view: DecodeMetadata) -> AttnState:
            return ops.mla_decode(q_latent, q_rope, cache, view, **facts)

        return self.attended(
            new, up, meta, cache, decode, layer=layer, backend=backend, plan=plan
        ), cache

    def attended(
        self,
        new: "Rows | _Queries",
        up: "Up",
        meta: MLAMetadata,
        cache: LatentCache | RecordCache,
        decode: Callable[[Array, Array, DecodeMetadata], AttnState],
        *,
        layer: Int[Array, ""] | int | None,
        backend: str | None,
        plan: StepPlan,
    ) -> Float[Array, "tokens heads v"]:
        """Attention of some heads, or all, over a cache that has the new rows.

        ``decode`` takes absorbed queries, their rotary parts, and the decode view.
        """
        tokens, heads, _ = new.q_rope.shape
        out = jnp.zeros((tokens, heads, self.dims.v), new.q_rope.dtype)
        if meta.decode is not None:
            n = meta.bucket.decode_tokens
            q_latent = new.q_latent if isinstance(new, _Queries) else None
            if q_latent is None:
                assert new.q_nope is not None
                q_latent = contract("thd,hdr->thr", new.q_nope[:n], up.absorbed.k)
            state = decode(q_latent, new.q_rope[:n], meta.decode)
            found = contract("thr,hrv->thv", state.out, up.absorbed.v).astype(out.dtype)
            # Not ``out.at[:n]``: its empty index crashes XLA's partitioner under ``shard_map``.
            out = found if n == tokens else lax.dynamic_update_slice_in_dim(out, found, 0, 0)
        if meta.prefill is not None:
            assert isinstance(new, Rows), "a step with prefills makes its rows apart"
            start, size = meta.num_decode_tokens, meta.bucket.prefill_tokens
            alone = not meta.bucket.decodes
            rows = new if alone else new.part(start, size)
            state = self.prefill(
                rows.q,
                rows.latent,
                rows.k_rope,
                cache,
                meta.prefill,
                meta.context,
                kv_up=up.kv_up,
                layer=layer,
                backend=backend,
                plan=plan.prefill,
            )
            found = state.out.astype(out.dtype)
            out = found if alone else lax.dynamic_update_slice_in_dim(out, found, start, 0)
        return out

    def prefill(
        self, q: Float[Array, "tokens heads qk"], latent: Float[Array, "tokens rank"],
        k_rope: Float[Array, "tokens rope"], cache: LatentCache | RecordCache, new: PrefillMetadata,
        context: ContextMetadata | None, *, kv_up: Float[Array, "rank heads nope_v"] | None = None,
        layer: Int[Array, ""] | int | None = None, backend: str | None = None, plan: object = None,
    ) -> AttnState:  # fmt: skip
        """Expanded attention of new tokens among themselves and over their cached context.

        ``kv_up`` is the up-projection of these heads; None: the layer's own, of all heads.
        ``plan`` is that of the new tokens; each chunk of context makes its own.
        """
        expand = partial(
            self._expanded,
            kv_up=self._up_projection() if kv_up is None else kv_up,
            backend=backend,
        )
        if context is None:
            return expand(q, latent, k_rope, new, plan=plan)
        state = expand(q, latent, k_rope, new, out_dtype=jnp.float32, plan=plan)
        merging = ops.named("merge_attn_states", backend)

        def one_chunk(i: Array, state: AttnState) -> AttnState:
            first, meta = context.chunk(i)
            where = context.page_table, first, meta.key_starts
            facts = {"rows": context.rows, "dtype": q.dtype}
            rows = self.cached_rows(cache, *where, **facts, layer=layer, backend=backend)
            latent, k_rope = rows[:, : self.dims.rank], rows[:, self.dims.rank :]
            part = expand(q, latent, k_rope, meta, causal=False)
            return ops.merge_attn_states(part, state, out_dtype=jnp.float32, backend=merging)

        # Parts come in the dtype of the queries, which halves what a merge reads; their sum is
        # float32 and stays where it is from turn to turn.
        return lax.fori_loop(0, context.num_chunks(), one_chunk, state)

    def cached_rows(
        self,
        cache: LatentCache | RecordCache,
        page_table: PageTable,
        first: PerRequest,
        row_starts: Starts,
        *,
        rows: int,
        dtype: DTypeLike,
        layer: Int[Array, ""] | int | None,
        backend: str | None,
    ) -> Float[Array, "{rows} row"]:
        """``ops.gather_latent``."""
        assert isinstance(cache, LatentCache), "sparse models read byte records"
        named = ops.named("gather_latent", backend)
        facts: dict[str, Any] = {"rows": rows, "dtype": dtype, "layer": layer, "backend": named}
        return ops.gather_latent(cache, page_table, first, row_starts, **facts)

    def full(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """One whole sequence by the expanded path, without a cache; differentiable.

        Always on ``xla``: the kernels have no derivative.
        """
        tokens = x.shape[0]
        angles = cos_sin(jnp.arange(tokens, dtype=jnp.int32), self.rope)
        q = self._rotate_queries(self._project_queries(x, "xla"), angles)
        new = Rows(q, *self.latents(x, angles, backend="xla"))
        starts = jnp.array([0, tokens], jnp.int32)
        meta = PrefillMetadata(query_starts=starts, key_starts=starts)
        state = self._expanded(
            new.q, new.latent, new.k_rope, meta, kv_up=self._up_projection(), backend="xla"
        )
        return self.out(state.out.astype(x.dtype), backend="xla")

    def _expanded(
        self,
        q: Float[Array, "tokens heads qk"],
        latent: Float[Array, "keys rank"],
        k_rope: Float[Array, "keys rope"],
        meta: PrefillMetadata,
        *,
        kv_up: Float[Array, "rank heads nope_v"],
        causal: bool = True,
        out_dtype: DTypeLike | None = None,
        backend: str | None = None,
        plan: object = None,
    ) -> AttnState:
        """Up-project the latents and attend; nothing is copied per head."""
        return ops.mla_prefill(
            q,
            project(latent, kv_up),
            k_rope,
            meta,
            scale=self.scale,
            causal=causal,
            out_dtype=out_dtype,
            backend=ops.named("mla_prefill", backend),
            plan=plan,
        )
