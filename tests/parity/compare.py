"""Serve a folder with our engine and hold it against the reference, token by token."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from mla_jax.engine import Engine
from mla_jax.metadata.buckets import Ladder, MLALadder
from mla_jax.model.sampling import SamplingParams
from mla_jax.scheduler import Completion
from tests.parity.reference import Reference

PAGE = 16
CHUNK = 64
MAX_LEN = 336  # the longest prompt and its 32 new tokens
LOGIT_TOLERANCE = 2e-4
ROUTER_GAP = 1e-5  # below this, rounding alone may choose another expert

# One rung per size, so that a test compiles a handful of programs.
COARSE = MLALadder(
    decodes=Ladder("decode requests", (10,)),
    prefills=Ladder("prefill requests", (10,)),
    prefill_tokens=Ladder("prefill tokens", (CHUNK,)),
    pages=Ladder("pages of one request", (MAX_LEN // PAGE,)),
    context_rows=MAX_LEN,
)


def serve(folder: Path, requests: Sequence[Sequence[int]], *, steps: int = 32, **settings):
    """All prompts together, in float32, pages of 16 and chunks of 64; completions and engine."""
    engine = Engine.from_pretrained(
        folder,
        dtype=jnp.dtype(jnp.float32),
        cache_format="fp32",
        page=PAGE,
        prefill_chunk=CHUNK,
        max_model_len=MAX_LEN,
        max_requests=10,
        want_logits=True,
        **({"num_pages": 96, "ladder": COARSE} | settings),
    )
    wish = SamplingParams(max_new_tokens=steps, ignore_eos=True)
    return engine.generate(requests, wish), engine


def assert_robust(ref: Reference) -> None:
    """A reference that rounding could turn is no judge: choose another seed."""
    assert ref.router_gap >= ROUTER_GAP, f"router gap {ref.router_gap:.1e}"
    assert ref.greedy_gap >= 2 * LOGIT_TOLERANCE, f"greedy gap {ref.greedy_gap:.1e}"


def assert_same(completions: Sequence[Completion], ref: Reference) -> float:
    """Every token equal, every logit within the tolerance at every step; the largest distance."""
    worst = 0.0
    for i, (got, prompt) in enumerate(zip(completions, ref.prompts, strict=True)):
        where = f"prompt {i} of {len(prompt)} tokens"
        assert got.logits is not None
        delta = np.abs(np.asarray(got.logits) - ref.logits[i]).max(-1)
        step = int(np.argmax(delta > LOGIT_TOLERANCE))
        assert delta.max() <= LOGIT_TOLERANCE, f"{where}: |Δlogit| {delta[step]:.1e} at step {step}"
        assert list(got.token_ids) == ref.tokens[i].tolist(), where
        np.testing.assert_allclose(got.logprobs, ref.logprobs()[i], atol=LOGIT_TOLERANCE)
        worst = max(worst, float(delta.max()))
    return worst
