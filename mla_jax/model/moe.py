"""Mixture of experts: a float32 router, grouped expert products, one shared SwiGLU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mla_jax import ops
from mla_jax.config import ModelConfig, MoEConfig
from mla_jax.errors import ConfigError
from mla_jax.metadata.buckets import FEWEST_ROWS
from mla_jax.model.linear import product_float32, scaled_params
from mla_jax.model.mlp import SwiGLU
from mla_jax.model.sharding import divided, named_leaves, share_axis
from mla_jax.model.sums import summed
from mla_jax.pallas import fp8_matmul
from mla_jax.pallas.axes import AddNorm, RowNorm
from mla_jax.pallas.router.ref import (
    choose_experts,
    scaled_weights,
    scores_of,
)
from mla_jax.placement import SHARDS, Placement, several
from mla_jax.types import Array, BlockScaled, Bool, Float, Int

__all__ = [
    "Experts",
    "HashRouter",
    "MoE",
    "Router",
    "choose_experts",
    "routed",
    "routed_and_shared",
]


class Router(nnx.Module):
    """Scores every expert in float32, whatever the dtype of the model."""

    def __init__(self, hidden: int, moe: MoEConfig, *, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (hidden, moe.experts), jnp.float32)
        self.kernel = nnx.Param(kernel * hidden**-0.5)
        self.choice_bias = nnx.Param(jnp.zeros((moe.experts,), jnp.float32)) if moe.biased else None
        self.moe = moe

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"] | None = None,
        *,
        first: bool = False,
        norm: RowNorm | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Any, ...]:
        """``ops.route_tokens``, of all tokens if ``real`` is None; every device routes them all.

        ``norm`` is for one device.
        """
        real = jnp.ones(x.shape[:1], jnp.bool_) if real is None else real
        bias = None if self.choice_bias is None else self.choice_bias[...]
        facts = {"first": first, "norm": norm, "backend": ops.named("route_tokens", backend)}
        run = partial(ops.route_tokens, moe=self.moe, **facts)
        run = divided(run, placement, given=(None,) * 4, returned=(None,) * (2 + first))
        return run(x, self.kernel[...], bias, real)


def routed(
    router: Router,
    x: Float[Array, "tokens hidden"],
    real: Bool[Array, "tokens"],
    *,
    fp8: bool,
    norm: RowNorm | None = None,
    **facts: Any,
) -> tuple[Float[Array, "tokens topk"], Int[Array, "tokens topk"], Float[Array, "tokens hidden"]]:
    """``(weights, experts, x)``: compute the shared experts from this ``x``.

    With ``norm`` the ``x`` given is normalised first, and returned so.

    In the smallest steps, which often have one request, they then start after the router's logits.
    A layer of V3.2 takes 7 us less (of 230) with one request, and 4 more (of 400) with eight. With
    ``fp8`` experts the choice is also launched before the shared experts' products, beside which it
    would wait for room: 7 us of V4-Flash's layer (of 170), by a trace. 16-bit shared experts leave
    room as they are (``_beside``), and XLA's order is as good.
    """
    few = len(x) <= FEWEST_ROWS
    weights, chosen, *same = router(x, real, first=few, norm=norm, **facts)
    x = same[0] if same else x
    return _ahead(weights, chosen, x) if few and fp8 else (weights, chosen, x)


def _ahead[*Arrays](*found: *Arrays) -> tuple[*Arrays]:
    """The same arrays. XLA launches all that computes them before any kernel that reads one.

    This is an order of launches alone: each kernel still waits only for what it reads.
    """
    return lax.optimization_barrier(found)


class HashRouter(nnx.Module):
    """Experts by a table of token ids (DeepSeek V4's first layers); their weights by scores."""

    def __init__(self, hidden: int, vocab: int, moe: MoEConfig, *, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (hidden, moe.experts), jnp.float32)
        self.kernel = nnx.Param(kernel * hidden**-0.5)
        draw = partial(jax.random.choice, a=moe.experts, shape=(moe.topk,), replace=False)
        table = jax.vmap(draw)(jax.random.split(rngs.params(), vocab))
        self.table = nnx.Param(table.astype(jnp.int32))
        self.moe = moe

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        token_ids: Int[Array, "tokens"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens topk"], Int[Array, "tokens topk"]]:
        """``(weights, experts)``; a token that is not real has experts -1."""
        experts = self.table[...][token_ids]
        logits = product_float32(x, self.kernel[...], backend=backend, placement=placement)
        scores = scores_of(logits, self.moe)
        weights = scaled_weights(jnp.take_along_axis(scores, experts, axis=-1), self.moe)
        return weights, jnp.where(real[:, None], experts, -1)


class Experts(nnx.Module):
    """``experts`` SwiGLUs, of which each token passes its own.

    With ``limit`` gate and up-projection are clamped to it before they are multiplied.

    With ``fp8`` weights are block-scaled e4m3 ``[experts, out, in]``, each with its scales.
    ``quantise_rows`` rounds rows to e4m3 too where an expert has ``fp8_matmul.MANY_EACH`` and more
    on average (``activations``).
    """

    def __init__(
        self,
        hidden: int,
        moe: MoEConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        fp8: bool = False,
        limit: float | None = None,
    ):
        self.fp8, self.limit, self.count = fp8, limit, moe.experts
        self.quantise_rows = False
        if fp8:
            into, back = (moe.experts, moe.width, hidden), (moe.experts, hidden, moe.width)
            self.gate, self.gate_scale = scaled_params(into)
            self.up, self.up_scale = scaled_params(into)
            self.down, self.down_scale = scaled_params(back)
            return

        def init(in_dim: int, out_dim: int) -> nnx.Param:
            w = jax.random.normal(rngs.params(), (moe.experts, in_dim, out_dim), jnp.float32)
            return nnx.Param((w * in_dim**-0.5).astype(dtype))

        self.gate = init(hidden, moe.width)
        self.up = init(hidden, moe.width)
        self.down = init(moe.width, hidden)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens topk"],
        experts: Int[Array, "tokens topk"],
        real: Bool[Array, "tokens"] | None = None,
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """``sum_k weights[:, k] * expert_k(x)``; an index that is no expert adds 0.

        So do all choices of a token that is not ``real``.

        Over several devices of a ``placement`` each one adds up what its share of the experts
        gives, and then all add up what each has.
        """
        return self._run(x, weights, experts, real, None, backend, placement)

    def onto(
        self,
        then: AddNorm,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens topk"],
        experts: Int[Array, "tokens topk"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The residual plus that sum, and its norm: ``ops.routed_experts(…, then=then)``."""
        return self._run(x, weights, experts, None, then, backend, placement)

    def _run(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens topk"],
        experts: Int[Array, "tokens topk"],
        real: Bool[Array, "tokens"] | None,
        then: AddNorm | None,
        backend: str | None,
        placement: Placement | None,
    ) -> Any:
        if real is not None:
            experts = jnp.where(real[:, None], experts, -1)
        op = "routed_experts_fp8" if self.fp8 else "routed_experts"
        run = partial(getattr(ops, op), limit=self.limit, backend=ops.named(op, backend))
        if self.fp8:
            many = experts.size >= fp8_matmul.MANY_EACH * self.count
            run = partial(run, quantise_rows=self.quantise_rows and many)

        def share(gate, up, down, x, weights, chosen):
            return run(x, gate, up, down, weights, _own(chosen, gate.shape[0], of=self.count))

        gate, up, down = self._products()
        axes = self._axes(placement)
        if placement is None or None in axes:
            return run(x, gate, up, down, weights, experts, then=then)
        given = (*axes, None, None, None)
        on_all = summed(share, placement, given=given, then=then, backend=backend)
        return on_all(gate, up, down, x, weights, experts)

    def _axes(self, placement: Placement | None) -> list[int | None]:
        """The divided axis of gate, up and down and of their scales; None: they are not divided."""
        devices = 1 if placement is None else placement.size
        weights = {"gate": self.gate[...], "up": self.up[...], "down": self.down[...]}
        return [
            share_axis(f"experts.{name}", w.shape, w.dtype, devices) for name, w in weights.items()
        ]

    def _products(self) -> tuple[Any, Any, Any]:
        """Gate, up and down: arrays, or block-scaled ones."""
        values = self.gate[...], self.up[...], self.down[...]
        if not self.fp8:
            return values
        scales = self.gate_scale[...], self.up_scale[...], self.down_scale[...]
        pairs = zip(values, scales, strict=True)
        gate, up, down = (BlockScaled(values=v, scale=scale) for v, scale in pairs)
        return gate, up, down


def routed_and_shared(
    experts: Experts,
    shared: SwiGLU | None,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens topk"],
    chosen: Int[Array, "tokens topk"],
    *,
    then: AddNorm | None = None,
    backend: str | None,
    placement: Placement | None,
) -> Any:
    """``y = experts(x, weights, chosen) + shared(x)``; with ``then`` its residual plus y, and the
    norm of that.

    Devices that have a share of both add their shares first. Then one sum over the devices is
    enough: of 16-bit rows each rounds what it adds. Elsewhere the residual is added to the shared
    part first, which XLA does inside of its last product; that sum needs no routed expert, so both
    parts can run at the same time.
    """
    facts: dict[str, Any] = {"backend": backend, "placement": placement}
    axes = None if shared is None else _shares(experts, shared, placement)
    if shared is None or placement is None or axes is None:
        more = None if shared is None else _beside(shared, x, **facts)
        if then is not None:
            then = then if more is None else then._replace(residual=then.residual + more)
            return experts.onto(then, x, weights, chosen, **facts)
        y = experts(x, weights, chosen, **facts)
        return y if more is None else more + y
    graph, state = nnx.split({"experts": experts, "shared": shared})
    leaves, tree = jax.tree.flatten(state)

    def share(leaves, x, weights, chosen):
        own = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        mine = _own(chosen, own["experts"].gate.shape[0], of=own["experts"].count)
        y = own["experts"](x, weights, mine, backend=backend)
        return own["shared"](x, backend=backend) + y

    given = (axes, None, None, None)
    return summed(share, placement, given=given, then=then, backend=backend)(
        leaves, x, weights, chosen
    )


def _beside(shared: SwiGLU, x: Float[Array, "tokens hidden"], **facts: Any) -> Array:
    """``shared(x)``, by kernels that leave room for those of the routed experts.

    In the smallest steps 16-bit shared experts are one expert that every token chooses: cuBLAS's
    thread blocks take all the shared memory of a multiprocessor, and keep the choice of experts and
    their first product out. V2-Lite's step, one request, takes 94 us less (of 2,585).
    """
    placement: Placement | None = facts["placement"]
    if not _smallest(x, placement) or shared.fp8 or shared.biased:
        return shared(x, **facts)
    every = jnp.zeros((len(x), 1), jnp.int32)
    gate, up, down = (w.kernel[...][None] for w in (shared.gate, shared.up, shared.down))
    given = x, gate, up, down, jnp.ones(every.shape, jnp.float32), every
    how = {"limit": shared.limit, "backend": ops.named("routed_experts", facts["backend"])}
    if ops.backend_of("routed_experts", *given, **how) != "triton":
        return shared(x, **facts)
    return ops.routed_experts(*given, **how)


def _smallest(x: Float[Array, "tokens hidden"], placement: Placement | None) -> bool:
    """Whether these are the rows of one of the smallest steps, on one device."""
    return len(x) <= FEWEST_ROWS and not several(placement)


def _shares(
    experts: Experts, shared: SwiGLU, placement: Placement | None
) -> list[int | None] | None:
    """The divided axis of each leaf of both; None: a device has one of them whole.

    Then its part would be added as often as there are devices; so would a bias of the last product.
    """
    if not several(placement) or shared.down.bias is not None:
        return None
    state = nnx.split({"experts": experts, "shared": shared})[1]
    pairs = named_leaves(state).items()
    axes = [share_axis(path, leaf.shape, leaf.dtype, placement.size) for path, leaf in pairs]
    return None if None in axes else axes


def _own(chosen: Int[Array, "tokens topk"], count: int, *, of: int) -> Int[Array, "tokens topk"]:
    """Choices as numbers of this device's ``count`` experts; -1 for those of other devices.

    As they are if the device has a part ``of`` all.
    """
    if count == of:
        return chosen
    mine = chosen - lax.axis_index(SHARDS) * count
    return jnp.where((chosen >= 0) & (mine >= 0) & (mine < count), mine, -1)


class MoE(nnx.Module):
    """Routed experts plus the shared SwiGLU."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, fp8: bool = False):
        moe = config.moe
        if moe is None:
            raise ConfigError("MoE: config.moe", None, "a MoEConfig", "Dense layers are SwiGLU.")
        self.router = Router(config.hidden, moe, rngs=rngs)
        self.experts = Experts(config.hidden, moe, dtype=dtype, rngs=rngs, fp8=fp8)
        self.shared = (
            SwiGLU(
                config.hidden,
                moe.shared * moe.width,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
                fp8=fp8,
            )
            if moe.shared
            else None
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Rows that are not real reach no expert and give the shared part only.

        Over several devices of a ``placement`` each one has a share of the experts.
        """
        facts = {"backend": backend, "placement": placement}
        weights, chosen, x = routed(self.router, x, real, fp8=self.experts.fp8, **facts)
        return routed_and_shared(self.experts, self.shared, x, weights, chosen, **facts)

    def onto(
        self,
        then: AddNorm,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        *,
        norm: RowNorm | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The residual plus all of that, and its norm.

        ``norm`` says that ``x`` is the residual normalised by it. In the smallest steps the
        router's kernel does that for itself: nothing reads ``x`` then, and XLA leaves it out.
        """
        facts: dict[str, Any] = {"backend": backend, "placement": placement}
        if norm is not None and not self._normalises(then.residual, real, norm, **facts):
            norm = None
        x = x if norm is None else then.residual
        weights, chosen, x = routed(self.router, x, real, fp8=self.experts.fp8, norm=norm, **facts)
        return routed_and_shared(self.experts, self.shared, x, weights, chosen, then=then, **facts)

    def _normalises(
        self,
        x: Float[Array, "tokens hidden"],
        real: Bool[Array, "tokens"],
        norm: RowNorm,
        *,
        backend: str | None,
        placement: Placement | None,
    ) -> bool:
        """Whether the router's kernel should normalise: where a norm would be a launch of its own.

        cuBLAS adds the residual to the product with 16-bit weights. With e4m3 weights, or several
        devices, a kernel adds it, and normalises in the same launch. V2-Lite's layer takes 1.7 us
        less (of 83).
        """
        if not _smallest(x, placement) or self.experts.fp8:
            return False
        given, named = (x, self.router.kernel[...], None, real), ops.named("route_tokens", backend)
        facts = {"moe": self.router.moe, "norm": norm, "backend": named}
        return ops.backend_of("route_tokens", *given, **facts) == "triton"
