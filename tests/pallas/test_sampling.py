"""What a step of plain requests pays for penalties and likeliest tokens: nothing is copied."""

import re

import jax
import jax.numpy as jnp
import pytest

from mla_jax.model.sampling import SamplingBatch, sample
from mla_jax.model.step import GPU_OPTIONS, UNROLLED
from mla_jax.model.token_history import Fed, TokenHistory
from tests import aot

REQUESTS, VOCAB, TOKENS, HIDDEN = 32, 4096, 64, 64


def end_of_step(hidden, kernel, batch, history, fed):
    """Logits and draws, as in ``Step``."""
    logits = jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
    return sample(logits, batch, history, fed)


def arguments():
    ints = jnp.zeros(TOKENS, jnp.int32)
    return (
        jnp.zeros((REQUESTS, HIDDEN), jnp.bfloat16),
        jnp.zeros((HIDDEN, VOCAB), jnp.bfloat16),
        jax.tree.map(jnp.asarray, SamplingBatch.nothing(REQUESTS)),
        jax.tree.map(jnp.asarray, TokenHistory.zeros(REQUESTS, VOCAB)),
        Fed(ids=ints, positions=ints, requests=ints, real=jnp.zeros(TOKENS, bool)),
    )


def check(text: str) -> None:
    """No copy of logits or history outside of loops; the history's three arrays stay in place."""
    (entry,) = re.findall(r"^ENTRY .*?^}", text, flags=re.MULTILINE | re.DOTALL)
    rows = rf"(?:f32|s32)\[{REQUESTS},{VOCAB}\]"
    assert re.search(rf"{rows}.*parameter\(", entry)
    assert entry.count(" while(") == 1  # around all that a greedy request does not need
    assert not re.findall(rf"= {rows}\S* copy(?:-start)?\(.*", entry)
    branches = re.findall(r"= (\(.*?\)) conditional\(", entry)
    assert not any(re.search(rows, branch) for branch in branches)  # a branch not taken copies
    first = text.splitlines()[0]
    assert first.count("may-alias") + first.count("must-alias") == 3


def test_nothing_is_copied_on_a_cpu():
    check(jax.jit(end_of_step, donate_argnums=3).lower(*arguments()).compile().as_text())


@pytest.mark.skipif(bool(aot.available()), reason=aot.available())
def test_compiles_for_sm90_without_a_copy():
    options = GPU_OPTIONS | UNROLLED
    compiled, _ = aot.compile_sm90(end_of_step, *arguments(), donate=(3,), options=options)
    check(compiled.as_text())
    logits = 4 * REQUESTS * VOCAB
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * logits + 2**23  # cuBLAS has 4 MiB
