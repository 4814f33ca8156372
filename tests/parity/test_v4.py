"""DeepSeek V4 equals transformers: 32 tokens and their logits, however prompts are cut."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mla_jax.engine import Engine
from mla_jax.metadata.buckets import default_steps
from mla_jax.model.sampling import SamplingParams
from tests.parity import checkpoint, reference
from tests.parity.compare import assert_robust, assert_same
from tests.parity.families import V4_FAMILY

torch.set_num_threads(1)

PAGE, LONGEST, STEPS, REQUESTS = 16, 304, 32, 10
WHOLE, PART = 512, 64
"""Prompt tokens of a step: any prompt at once; of true widths, which a CPU computes slowly."""


@pytest.fixture(scope="module", params=V4_FAMILY, ids=str)
def served(request, tmp_path_factory):
    """Engine and reference of a case: true widths as published, narrow ones as saved."""
    case, folder = request.param, tmp_path_factory.mktemp("v4")
    model, most = reference.build(case), WHOLE
    if case.name.endswith("_dims"):
        most = PART
        checkpoint.save_published_v4(model, folder)
    else:
        checkpoint.save_pretrained(model, folder, shard="400KB")
    ref = reference.greedy(model, reference.prompts(case), STEPS)
    assert_robust(ref)
    engine = Engine.from_pretrained(
        folder,
        dtype=jnp.dtype(jnp.float32),
        cache_format="fp32",
        num_pages=120,
        page=PAGE,
        max_requests=REQUESTS,
        prefill_chunk=most,
        max_model_len=LONGEST,
        want_logits=True,
        ladder=default_steps(
            max_requests=REQUESTS, max_prefill_tokens=most, max_pages=LONGEST // PAGE
        ),
    )
    return engine, ref


@contextmanager
def at_most(engine: Engine, tokens: int) -> Iterator[None]:
    """Steps take so many prompt tokens."""
    usual = engine.scheduler.max_prefill_tokens
    engine.scheduler.max_prefill_tokens = min(tokens, usual)
    try:
        yield
    finally:
        engine.scheduler.max_prefill_tokens = usual


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [WHOLE, 1, 37], ids=["whole", "one_by_one", "37"])
def test_however_prompts_are_cut(tokens, served, record_property):
    """All prompts together; single tokens, uneven chunks, or each prompt in one step."""
    engine, ref = served
    wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    with at_most(engine, tokens):
        completions = engine.generate(ref.prompts, wish)
    record_property("max_abs_logit_difference", assert_same(completions, ref))
    assert engine.stats().pages_used == 0
    assert engine.stats().compiles <= len(engine.builder.rungs())


@pytest.mark.slow
def test_preempted(served, record_property):
    """Few pages: requests queue, are evicted and computed again."""
    engine, ref = served
    held, before = [], engine.stats().preemptions
    for group in engine.scheduler.groups:
        least = group.least(LONGEST)
        leave = least + 2 if least > 1 else REQUESTS
        held.append((group.pool, group.pool.alloc(max(group.pool.free - leave, 0))))
    try:
        wish = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
        completions = engine.generate(ref.prompts, wish)
    finally:
        for pool, pages in held:
            pool.release(pages)
    assert engine.stats().preemptions > before
    record_property("max_abs_logit_difference", assert_same(completions, ref))


def test_one_alone(served):
    """A prompt by itself has the logits that it has among others."""
    engine, ref = served
    wish = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for prompt, logits in list(zip(ref.prompts, ref.logits, strict=True))[-2:]:
        (got,) = engine.generate([prompt], wish)
        assert got.logits is not None
        np.testing.assert_allclose(got.logits, logits[:4], atol=2e-4)
