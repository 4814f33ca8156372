"""``mla-jax demo``: serve a small trained model, check its answers, then recompute them.

A few dozen questions of ``demo_task``, from a line to thousands of tokens, are served together
over a page pool that cannot hold them all: prompts enter in chunks, and requests queue for pages.
Every greedy answer is then computed again without engine, cache or batch.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.config import ModelConfig
from mla_jax.demo_task import KINDS, PAD, Question, ask, decode, encode, longest_answer
from mla_jax.engine import Engine, load_model
from mla_jax.metadata.buckets import Ladder, MLALadder
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sampling import SamplingParams
from mla_jax.scheduler import Completion, Event
from mla_jax.types import Array, cdiv

__all__ = ["FOLDER", "build_engine", "main", "questions", "recompute"]

FOLDER = Path(__file__).parent / "demo_model"
"""The embedded checkpoint; ``docs/demo.md`` says how it was trained."""

SHORTEST, LONGEST = 24, 3000
PAGE, PAGES = 16, 460
REQUESTS, CHUNK = 12, 512
WIDTHS = (128, 512, 1024, 2048, 3072)


def questions(count: int, *, seed: int) -> list[Question]:
    """Questions of all kinds, lengths evenly spread on a logarithmic scale, shuffled."""
    rng = random.Random(seed)
    span = np.geomspace(SHORTEST, LONGEST, count).round().astype(int).tolist()
    asked = [ask(rng, KINDS[i % len(KINDS)], tokens=n) for i, n in enumerate(span)]
    rng.shuffle(asked)
    return asked


def build_engine(model: DeepseekV3, config: ModelConfig) -> Engine:
    """An engine over a page pool too small for all requests at once."""
    longest = LONGEST + max(map(longest_answer, KINDS))
    ladder = MLALadder(  # one rung each: three programs serve everything
        decodes=Ladder("decode requests", (REQUESTS,)),
        prefills=Ladder("prefill requests", (REQUESTS,)),
        prefill_tokens=Ladder("prefill tokens", (CHUNK,)),
        pages=Ladder("pages of one request", (cdiv(longest, PAGE),)),
        context_rows=1024,
    )
    return Engine(
        model,
        config,
        cache_format="fp32",
        page=PAGE,
        num_pages=PAGES,
        max_requests=REQUESTS,
        prefill_chunk=CHUNK,
        max_model_len=longest,
        ladder=ladder,
    )


def recompute(
    model: DeepseekV3,
    asked: Sequence[Question],
    given: Sequence[Sequence[int]],
    *,
    done: Callable[[], None],
) -> list[tuple[int, ...]]:
    """The likeliest token at every place of every given answer, from whole sequences.

    One causal pass over prompt and answer, without engine, cache or batch. If each of these
    tokens is the answer's, then greedy decoding by whole passes gives that answer: its first
    token depends on the prompt alone, and so on. Sequences are padded to a few lengths.
    """
    graph, state = nnx.split(model)

    @jax.jit
    def likeliest(state: nnx.State, ids: Array) -> Array:
        model = nnx.merge(graph, state)
        return jnp.argmax(model.logits(model.full(ids[None])[0]), axis=-1)

    answers = []
    for q, answer in zip(asked, given, strict=True):
        ids = encode(q.prompt) + list(answer)
        row = np.full(next(n for n in WIDTHS if n >= len(ids)), PAD, np.int32)
        row[: len(ids)] = ids
        first = len(q.prompt) - 1
        best = np.asarray(likeliest(state, row))[first : first + len(answer)]
        answers.append(tuple(best.tolist()))
        done()
    return answers


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of ``total`` things; counted on stderr, in place if it can."""
    count, began, in_place = 0, time.perf_counter(), sys.stderr.isatty()

    def advance() -> None:
        nonlocal count
        count += 1
        if in_place or count % max(total // 8, 1) == 0 or count == total:
            seconds = time.perf_counter() - began
            end = "\r" if in_place and count < total else "\n"
            print(f"{label} {count}/{total}  {seconds:.0f} s", end=end, file=sys.stderr, flush=True)

    yield advance


def _show(q: Question, completion: Completion) -> str:
    got = decode(completion.token_ids)
    tail = q.prompt if len(q.prompt) <= 40 else "…" + q.prompt[-39:]
    verdict = "right" if got == q.answer else f"WRONG, not {q.answer}"
    return f"  {q.kind:<6} {len(q.prompt):>5} tokens  {tail:>40} {got:<10} {verdict}"


def main(*, requests: int = 32, seed: int = 0) -> int:
    """Run the demo and print its findings; 0 if every answer is right and recomputed alike."""
    began = time.perf_counter()
    model, config = load_model(FOLDER, dtype=jnp.float32)
    engine, asked = build_engine(model, config), questions(requests, seed=seed)
    wishes = [SamplingParams(max_new_tokens=longest_answer(q.kind)) for q in asked]
    prompts = [encode(q.prompt) for q in asked]
    needed = sum(cdiv(len(p), PAGE) for p in prompts)
    print(
        f"{requests} requests of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
        f"{sum(map(len, prompts))} in all: {needed} pages of {PAGE} tokens, the pool has "
        f"{engine.stats().pages}.",
        flush=True,
    )
    served = time.perf_counter()
    with progress("serving    ", requests) as done:

        def watch(event: Event) -> None:
            if event.completion is not None:
                done()

        completions = engine.generate(prompts, wishes, on_progress=watch)
    seconds, stats = time.perf_counter() - served, engine.stats()

    by_length = sorted(zip(asked, completions, strict=True), key=lambda pair: len(pair[0].prompt))
    right = [decode(c.token_ids) == q.answer for q, c in by_length]
    for i, pair in enumerate(by_length):
        if i % max(requests // 8, 1) == 0 or not right[i]:
            print(_show(*pair))
    with progress("recomputing", requests) as done:
        again = recompute(model, asked, [c.token_ids for c in completions], done=done)
    same = sum(c.token_ids == a for c, a in zip(completions, again, strict=True))

    fed, drawn = stats.prompt_tokens, stats.new_tokens
    print(
        f"""answers      {sum(right)} right, {requests - sum(right)} wrong
recomputed   {same} of {requests} equal token for token to plain full passes
speed        {fed + drawn} tokens in {seconds:.1f} s = {(fed + drawn) / seconds:.0f} tokens/s
             ({fed} fed, {drawn} drawn, {stats.steps} steps; compilation included)
pages        {stats.pages} in the pool, {stats.pages_peak} at the peak, {stats.pages_used} now
preemptions  {stats.preemptions}
programs     {stats.compiles} compiled for {len(stats.buckets)} step sizes
total        {time.perf_counter() - began:.1f} s on {engine.placement.device.device_kind}"""
    )
    return 0 if all(right) and same == requests else 1
