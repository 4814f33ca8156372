"""``python -m benchmarks.step_check``: whether an engine's tokens are right on this GPU.

An engine with the widths of a published model and few layers answers prompts alone and in one
batch. Its log-probabilities are compared with those of ``model.full``, whole sequences without a
cache. Each variant changes one thing in how steps are compiled, in a process of its own: a crash is
one row of the table. Until 2026-11-25 the default ended in an illegal memory access when 24
requests ran together, and the rows that did not fail named the cause (docs/log/step_graphs.md).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "serial_graph": {"options": {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}},
    "no_unrolling": {"unrolled": False},
    "no_graphs": {"options": {"xla_gpu_enable_command_buffer": ""}, "unrolled": False},
    "loops_outside": {
        "options": {
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
            "DYNAMIC_SLICE_FUSION"
        },
        "unrolled": False,
    },
    "no_slice_fusion": {"options": {"xla_gpu_enable_dynamic_slice_fusion": False}},
    "no_cublaslt": {"options": {"xla_gpu_enable_cublaslt": False}},
    "no_autotuning": {"options": {"xla_gpu_autotune_level": 0}},
    "no_history": {"history": False},
    "no_run_ahead": {"run_ahead": False},
    "xla_experts": {"off": ("routed_experts",)},
    "xla_router": {"off": ("route_tokens",)},
    "xla_append": {"off": ("append_latent",)},
    "xla_decode": {"off": ("mla_decode",)},
    "rows_in_16_bits": {"fp8_activations": False},  # of models with e4m3 weights
}
"""What each changes: compiler options, unrolled loops, token history, operations of ``xla``."""

_FEW = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 32}
_FEW |= {"vocab_size": 8192}


def _few(name: str, **changes: Any) -> Any:
    """A released model with three layers, 32 experts and a small vocabulary, in 16 bits."""
    from mla_jax.config import ModelConfig
    from mla_jax.model.presets import released

    facts = released(name) | _FEW | changes
    facts.pop("quantization_config", None)
    return ModelConfig.from_hf(facts)


def _few_v4() -> Any:
    """A layer of each kind, the first with hashed experts."""
    from mla_jax.model.presets import V4_FLASH

    few = {"compress_ratios": (0, 4, 128), "hash_layers": 1, "index_topk": 64, "vocab": 8192}
    moe = dataclasses.replace(V4_FLASH.moe, experts=32)
    return dataclasses.replace(V4_FLASH, **few, moe=moe, fp8_block=None)


E4M3 = "v3_weights", "v3_2_weights", "v4_weights"
"""Of ``MODELS`` those whose products have block-scaled e4m3 weights."""

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "v2_lite": (lambda: _few("v2_lite", n_routed_experts=64, vocab_size=102400), "bf16"),
    "v3": (lambda: _few("v3"), "bf16"),
    "v3_e4m3": (lambda: _few("v3"), "fp8_e4m3"),
    "v3_weights": (lambda: _few("v3"), "bf16"),
    "v3_2_weights": (lambda: _few("v3_2", index_topk=256), "fp8_e4m3"),
    "v3_2": (lambda: _few("v3_2", index_topk=256), "bf16"),
    "v3_2_records": (lambda: _few("v3_2", index_topk=256), "fp8_e4m3"),
    "v4": (_few_v4, "bf16"),
    "v4_records": (_few_v4, "fp8_e4m3"),
    "v4_weights": (_few_v4, "bf16"),
}
"""Widths of a model, and the format of its caches. Prompts are shorter and longer than top-k."""

LENGTHS = (200, 700)  # tokens of a prompt
REQUESTS, ALONE, NEW = 24, 6, 24
MOST, PAGE, CHUNK = 32, 64, 512
CLOSE = 0.1  # largest difference of log-probabilities in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_check", description=__doc__)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["v2_lite"])
    parser.add_argument("--here", action="store_true", help="the first of each, in this process")
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a variant")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this on a CPU")
    parser.add_argument("--devices", type=int, default=1, help="over which the engine divides")
    given = parser.parse_args()
    if given.here:
        facts = {"tiny": given.tiny, "devices": given.devices}
        print(json.dumps(check(given.variants[0], given.models[0], **facts)))
        return

    def apart(case: tuple[str, str]) -> str:
        command = [sys.executable, "-m", "benchmarks.step_check", "--here"]
        command += ["--models", case[0], "--variants", case[1], *(["--tiny"] if given.tiny else [])]
        command += ["--devices", str(given.devices)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
        except subprocess.TimeoutExpired as late:
            told = (late.stderr or b"").decode().strip().splitlines() or ["nothing"]
            return f"no end within {given.limit:.0f} s; reached: {told[-1]}"
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[-1]
        told = [line for line in done.stderr.splitlines() if "Error: " in line]
        return f"exit {done.returncode}: {told[-1][:160] if told else done.stderr[-160:]}"

    cases = [(model, variant) for model in given.models for variant in given.variants]
    with ThreadPoolExecutor(given.jobs) as pool:
        for case, found in zip(cases, pool.map(apart, cases), strict=True):
            print(f"{' '.join(case):24} {found}", flush=True)


def check(variant: str, model: str, *, tiny: bool = False, devices: int = 1) -> dict[str, Any]:
    """The variant's answers against whole sequences."""
    from benchmarks.random_model import drawn
    from mla_jax.model.family import family_of

    started = time.perf_counter()
    make, cache_format = MODELS[model]
    config = make()
    if tiny:
        assert model == "v2_lite", "V2-Lite has a tiny model"
        moe = dataclasses.replace(config.moe, experts=8, topk=2, width=64)
        dims = dataclasses.replace(config.dims, heads=2)
        config = dataclasses.replace(config, vocab=256, hidden=64, mlp=64, moe=moe, dims=dims)
    module = family_of(config.family).module
    weights = drawn(config, module, fp8=model in E4M3)
    engine = Given(weights, config, cache_format, devices)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab, n).tolist() for n in rng.integers(*LENGTHS, REQUESTS)]
    found = answers(engine, prompts, **VARIANTS[variant])
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - started)}
    row |= {"alone_twice": compared(found["alone"], found["again"])}
    row |= {"alone_in_batch": compared(found["alone"], found["batch"][:ALONE])}
    row |= {"whole": beside_whole(engine.model, prompts, found["batch"])}
    return row | {"right": row["whole"]["off"] < CLOSE > row["whole"]["below_best"]}


def beside_whole(model: Any, prompts: list[list[int]], answers: list) -> dict[str, float]:
    """How far log-probabilities of drawn tokens are off, and these below the best ones.

    Its matrix products run on cuBLAS, without autotuning, which would take a minute. XLA's Triton
    kernels are off: without autotuning their tiles are 16 x 8, and 24 sequences take over 150 s.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, state = nnx.split(model)
    untuned = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    options = untuned if jax.default_backend() == "gpu" else None

    @partial(jax.jit, compiler_options=options)
    def whole(state, ids, first):
        model = nnx.merge(graph, state)
        hidden = jax.lax.dynamic_slice_in_dim(model.full(ids[None])[0], first, NEW)
        return jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))

    off = below = 0.0
    for prompt, (drawn, logprobs) in zip(prompts, answers, strict=True):
        ids = np.zeros(LENGTHS[1] + NEW, np.int32)
        ids[: len(prompt) + NEW] = [*prompt, *drawn]
        want = np.asarray(whole(state, jnp.asarray(ids), len(prompt) - 1))
        taken = want[np.arange(NEW), drawn]
        found = (np.abs(taken - logprobs).max(), (want.max(axis=1) - taken).max())
        off, below = (max(a, float(b)) for a, b in zip((off, below), found, strict=True))
    return {"off": round(off, 5), "below_best": round(below, 5)}


@dataclasses.dataclass(frozen=True)
class Given:
    """What both engines of a check have."""

    model: Any
    config: Any
    cache_format: str
    devices: int


def answers(
    given: Given,
    prompts: list[list[int]],
    *,
    options: dict[str, Any] | None = None,
    unrolled: bool = True,
    history: bool = True,
    run_ahead: bool = True,
    fp8_activations: bool | None = None,
    off: tuple[str, ...] = (),
) -> dict[str, list[tuple[list[int], np.ndarray]]]:
    """Token ids and log-probabilities: some requests alone, the same again, all in one batch."""
    import jax

    from mla_jax import Engine, ModelConfig, SamplingParams
    from mla_jax.dispatch import REGISTRY
    from mla_jax.metadata.buckets import Ladder, MLALadder, StepLadder
    from mla_jax.model import step

    kept = step.GPU_OPTIONS, step.UNROLLED, step.sample
    backends = REGISTRY.backends
    left = tuple(b for b in backends if b.op not in off or b.name == "xla")
    object.__setattr__(REGISTRY, "backends", left)
    step.GPU_OPTIONS = step.GPU_OPTIONS | (options or {})
    step.UNROLLED = step.UNROLLED if unrolled else {}
    if not history:
        step.sample = lambda logits, batch, _, fed, sample=step.sample: sample(logits, batch)
    try:
        rungs = {
            "decodes": Ladder.of("decode requests", {8, MOST}),
            "prefills": Ladder("prefill requests", (MOST,)),
            "prefill_tokens": Ladder("prefill tokens", (CHUNK,)),
            "pages": Ladder.of("pages of one request", {16}),
            "mixed": ((MOST, CHUNK), (0, CHUNK)),
        }
        dense = isinstance(given.config, ModelConfig) and given.config.indexer is None
        engine = Engine(
            given.model,
            given.config,
            num_pages=16 * MOST + 1,
            page=PAGE,
            max_requests=MOST,
            prefill_chunk=CHUNK,
            max_model_len=16 * PAGE,
            cache_format=given.cache_format,
            devices=jax.devices()[: given.devices],
            ladder=MLALadder(**rungs, context_rows=4096) if dense else StepLadder(**rungs),
            absorb_prefills=False,
            run_ahead=run_ahead,
            fp8_activations=fp8_activations,
        )
        started = time.perf_counter()

        def reached(what: str) -> None:
            """On standard error: where a run was that does not end."""
            seconds = time.perf_counter() - started
            print(f"{what}, {seconds:.0f} s", file=sys.stderr, flush=True)

        engine.warm_up()
        reached("programs")
        wish = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

        def told(given: list[list[int]]) -> list[tuple[list[int], np.ndarray]]:
            done = engine.generate(given, wish)
            return [(list(c.token_ids), np.asarray(c.logprobs, np.float32)) for c in done]

        alone = [told([p])[0] for p in prompts[:ALONE]]
        reached("alone")
        again = [told([p])[0] for p in prompts[:ALONE]]
        reached("again")
        batch = told(prompts)
        reached("in a batch")
        return {"alone": alone, "again": again, "batch": batch}
    finally:
        step.GPU_OPTIONS, step.UNROLLED, step.sample = kept
        object.__setattr__(REGISTRY, "backends", backends)


def compared(mine: list, theirs: list) -> dict[str, Any]:
    """Of how many answers tokens and bits are equal; the difference up to where tokens part."""
    tokens = bits = 0
    off = 0.0
    for (a, x), (b, y) in zip(mine, theirs, strict=True):
        tokens += a == b
        bits += a == b and bool((x == y).all())
        n = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), len(a))
        gap = np.abs(x[: max(n, 1)] - y[: max(n, 1)]).max(initial=0.0)
        off = max(off, float(gap) if np.isfinite(gap) else float("inf"))
    return {"of": len(mine), "tokens": tokens, "bits": bits, "off": round(off, 4)}


if __name__ == "__main__":
    main()
