"""``python -m benchmarks.step_check``: whether an engine's tokens are right on this GPU.

An engine of V2-Lite's widths with few layers answers prompts alone and in one batch. Its answers
are compared with those of the backend ``xla`` without CUDA graphs. Each variant changes one thing
in how steps are compiled, in a process of its own: a crash is one row of the table. On 2026-11-25
the default ended in an illegal memory access when 24 requests ran together (docs/serving.md,
Limits); these variants are to tell why. Each holds the weights of its model, 5 GB with four layers,
and two engines' caches.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
}
"""What each changes: compiler options, unrolled loops, token history, operations of ``xla``."""

LENGTHS = (200, 700)  # tokens of a prompt
REQUESTS, ALONE, NEW = 24, 6, 24
MOST, PAGE, CHUNK = 32, 64, 512
CLOSE = 0.1  # largest difference of log-probabilities in bfloat16 as long as the tokens agree


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_check", description=__doc__)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--one", choices=VARIANTS, help="this variant, in this process")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a variant")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this on a CPU")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(check(given.one, given.layers, tiny=given.tiny)))
        return

    def apart(name: str) -> str:
        command = [sys.executable, "-m", "benchmarks.step_check", "--one", name]
        command += ["--layers", str(given.layers), *(["--tiny"] if given.tiny else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
        except subprocess.TimeoutExpired:
            return f"no end within {given.limit:.0f} s"
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[-1]
        told = [line for line in done.stderr.splitlines() if "Error: " in line]
        return f"exit {done.returncode}: {told[-1][:160] if told else done.stderr[-160:]}"

    with ThreadPoolExecutor(given.jobs) as pool:
        for name, found in zip(given.variants, pool.map(apart, given.variants), strict=True):
            print(f"{name:16} {found}", flush=True)


def check(name: str, layers: int, *, tiny: bool) -> dict[str, Any]:
    """The variant's answers against those of ``xla`` with the safest options."""
    started = time.perf_counter()
    model, config = the_model(layers, tiny=tiny)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab, n).tolist() for n in rng.integers(*LENGTHS, REQUESTS)]
    found = answers(model, config, prompts, **VARIANTS[name])
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - started)}
    row |= {"alone_twice": compared(found["alone"], found["again"])}
    row |= {"alone_in_batch": compared(found["alone"], found["batch"][:ALONE])}
    safe = answers(model, config, prompts, backend="xla", **VARIANTS["no_graphs"])
    row |= {"alone_xla": compared(found["alone"], safe["alone"])}
    row |= {"batch_xla": compared(found["batch"], safe["batch"])}
    close = (row["alone_xla"]["off"], row["batch_xla"]["off"])
    return row | {"right": all(x < CLOSE for x in close)}


def the_model(layers: int, *, tiny: bool) -> tuple[Any, Any]:
    """V2-Lite's widths, or very small ones, with random weights."""
    import dataclasses

    from benchmarks.random_model import drawn, of_layers
    from mla_jax.model.presets import V2_LITE

    config = of_layers(V2_LITE, layers)
    assert config.moe is not None, "V2-Lite has experts"
    if tiny:
        moe = dataclasses.replace(config.moe, experts=8, topk=2, width=64)
        dims = dataclasses.replace(config.dims, heads=2)
        config = dataclasses.replace(config, vocab=256, hidden=64, mlp=64, moe=moe, dims=dims)
    return drawn(config), config


def answers(
    model: Any,
    config: Any,
    prompts: list[list[int]],
    *,
    options: dict[str, Any] | None = None,
    unrolled: bool = True,
    history: bool = True,
    run_ahead: bool = True,
    off: tuple[str, ...] = (),
    backend: str | None = None,
) -> dict[str, list[tuple[list[int], np.ndarray]]]:
    """Token ids and log-probabilities: some requests alone, the same again, all in one batch."""
    from mla_jax import Engine, SamplingParams
    from mla_jax.dispatch import REGISTRY
    from mla_jax.metadata.buckets import Ladder, MLALadder
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
        ladder = MLALadder(
            decodes=Ladder.of("decode requests", {8, MOST}),
            prefills=Ladder("prefill requests", (MOST,)),
            prefill_tokens=Ladder("prefill tokens", (CHUNK,)),
            pages=Ladder.of("pages of one request", {16}),
            context_rows=4096,
            mixed=((MOST, CHUNK), (0, CHUNK)),
        )
        engine = Engine(
            model, config, num_pages=16 * MOST + 1, page=PAGE, max_requests=MOST,
            prefill_chunk=CHUNK, max_model_len=16 * PAGE, ladder=ladder, absorb_prefills=False,
            run_ahead=run_ahead, backend=backend,
        )  # fmt: skip
        engine.warm_up()
        wish = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

        def told(given: list[list[int]]) -> list[tuple[list[int], np.ndarray]]:
            done = engine.generate(given, wish)
            return [(list(c.token_ids), np.asarray(c.logprobs, np.float32)) for c in done]

        alone = [told([p])[0] for p in prompts[:ALONE]]
        again = [told([p])[0] for p in prompts[:ALONE]]
        return {"alone": alone, "again": again, "batch": told(prompts)}
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
