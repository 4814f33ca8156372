"""V3.2 and GLM-5: the engine's steps against whole sequences, selection and caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import ops
from mla_jax.errors import EngineError
from mla_jax.metadata.buckets import MLABucket, default_steps
from mla_jax.model.deepseek_v32 import SparseMLA
from mla_jax.model.indexer import hadamard
from mla_jax.model.rope import cos_sin
from mla_jax.model.sampling import SamplingParams
from tests.model import sparse

KINDS = ("deepseek_v32", "glm_moe_dsa")
PROMPTS = (1, 2, sparse.TOPK - 1, sparse.TOPK, sparse.TOPK + 1, 17, 50)
NEAR = 2e-5 if jax.default_backend() == "cpu" else 2e-4  # of float32 logits
WISH = SamplingParams(max_new_tokens=10, ignore_eos=True)


def prompts(rng, lengths=PROMPTS):
    return [rng.integers(3, 64, n).tolist() for n in lengths]


def whole(module, ids):
    """Logits of every position of one sequence, without a cache."""
    padded = jnp.asarray([ids + [0] * (sparse.LONGEST - len(ids))])
    return np.asarray(_logits(module)(padded))[: len(ids)]


def _logits(module):
    if not hasattr(module, "_whole"):
        object.__setattr__(module, "_whole", jax.jit(lambda x: module.logits(module.full(x)[0])))
    return module._whole


@pytest.fixture(scope="module", params=KINDS)
def served(request):
    """A model, its configuration and an engine of it."""
    cfg = sparse.config(request.param)
    module = sparse.model(cfg)
    more = {"ladder": sparse.ladder(), "want_logits": True, "num_pages": 12}
    return module, cfg, sparse.engine(module, cfg, **more)


@pytest.mark.slow
def test_steps_equal_whole_sequences(served, rng):
    """Prompts around the selection's size, in chunks, together: logits of every drawn token.

    The pool is too small for all: requests queue, are preempted and computed again.
    """
    module, _, engine = served
    asked = prompts(rng)
    wish = dataclasses.replace(WISH, max_new_tokens=24)
    for prompt, done in zip(asked, engine.generate(asked, wish), strict=True):
        want = whole(module, prompt + list(done.token_ids))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(np.asarray(done.logits), want, atol=NEAR)
        assert list(done.token_ids) == want.argmax(-1).tolist()
    assert engine.stats().pages_used == 0
    assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_no_program_is_compiled_after_warm_up(rng):
    """A rung has two programs, for steps that select and for those that do not."""
    cfg = sparse.config(num_hidden_layers=1)
    engine = sparse.engine(sparse.model(cfg), cfg, ladder=sparse.ladder())
    assert engine.warm_up() == len(engine.builder.rungs()) == engine.stats().compiles == 6
    engine.generate(prompts(rng), WISH)
    assert engine.stats().compiles == 6


def test_index_keys_of_layers_that_select(served):
    _, cfg, engine = served
    latent, keys = engine.groups
    assert (latent.layers, keys.layers) == (3, sum(cfg.indexer.full))
    assert (keys.rank, keys.rope, keys.format) == (8, 0, "fp32")


def test_selections_are_shared_where_there_is_no_indexer():
    module = sparse.model(sparse.config("glm_moe_dsa"))
    assert [layer.attn.indexer is None for layer in module.layers] == [False, True, False]


def dense(engine):
    """Whether a step was, of all kinds of steps that an engine has run."""
    return {isinstance(bucket, MLABucket) for bucket in engine.stats().buckets}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_short_steps_are_dense(kind, rng, monkeypatch):
    """Where no sequence can be longer than the selection nothing is selected, nor compiled for it.

    Prompts in one chunk and in several, decodes beside prefills.
    """

    def selected(*args, **kwargs):
        raise AssertionError("selected")

    monkeypatch.setattr(ops, "select_topk", selected)
    monkeypatch.setattr(ops, "mla_sparse_decode", selected)
    cfg = sparse.config(kind, index_topk=sparse.LONGEST)
    module = sparse.model(cfg)
    engine = sparse.engine(module, cfg, ladder=sparse.ladder(), want_logits=True)
    assert engine.warm_up() == 3
    asked = prompts(rng, (1, 9, 30, 50))
    for prompt, done in zip(asked, engine.generate(asked, WISH), strict=True):
        want = whole(module, prompt + list(done.token_ids))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(np.asarray(done.logits), want, atol=NEAR)
        assert list(done.token_ids) == want.argmax(-1).tolist()
    assert dense(engine) == {True}


@pytest.mark.slow
def test_a_sequence_that_outgrows_the_selection(rng):
    """Dense up to its size, then selected from the keys that the dense steps have written."""
    cfg = sparse.config(index_topk=40)
    module = sparse.model(cfg)
    engine = sparse.engine(module, cfg, want_logits=True)
    asked = prompts(rng, (37,))
    wish = dataclasses.replace(WISH, max_new_tokens=3)
    engine.generate(asked, wish)
    assert dense(engine) == {True}
    (done,) = engine.generate(asked, dataclasses.replace(WISH, max_new_tokens=20))
    assert dense(engine) == {True, False}
    want = whole(module, asked[0] + list(done.token_ids))[len(asked[0]) - 1 : -1]
    np.testing.assert_allclose(np.asarray(done.logits), want, atol=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3"])
def test_sixteen_and_eight_bits(form, rng):
    """Widths of the records; most tokens are those of float32 over the same weights."""
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    cfg = sparse.config(num_attention_heads=2, num_hidden_layers=1, **changes)
    module = sparse.model(cfg)
    exact = sparse.engine(module, cfg)
    low = sparse.engine(module, cfg, cache_format=form)
    records = form == "fp8_e4m3"
    assert [g.format for g in low.groups] == (["ds_mla", "index_key"] if records else [form] * 2)
    asked = prompts(rng, (5, 20, 40))
    wish = dataclasses.replace(WISH, max_new_tokens=4)
    pairs = zip(exact.generate(asked, wish), low.generate(asked, wish), strict=True)
    same = [a == b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True)]
    assert np.mean(same) > 0.5


@pytest.mark.slow
def test_dense_steps_over_records_are_those_that_select(rng):
    """The same rows, all of them: prefills expand what they read, decodes list all of their slots.

    New rows of a prefill are not rounded to records first, so its tokens differ from a selecting
    step's as far as the rounding goes.
    """
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    cfg = sparse.config(num_hidden_layers=2, index_topk=40, **changes)
    module = sparse.model(cfg)
    short = sparse.engine(module, cfg, cache_format="fp8_e4m3", want_logits=True)
    selecting = sparse.engine(module, cfg, cache_format="fp8_e4m3", want_logits=True)
    selecting.builder = dataclasses.replace(selecting.builder, topk=None)
    asked = prompts(rng, (5, 20, 30))
    wish = dataclasses.replace(WISH, max_new_tokens=6)
    found = [engine.generate(asked, wish) for engine in (short, selecting)]
    assert (dense(short), dense(selecting)) == ({True}, {False})
    for a, b in zip(*found, strict=True):
        first = np.asarray(a.logits[0]), np.asarray(b.logits[0])
        assert np.linalg.norm(first[0] - first[1]) < 0.05 * np.linalg.norm(first[1])


def test_eight_bits_of_other_widths_are_refused():
    cfg = sparse.config()
    with pytest.raises(EngineError, match=r"cache_format fp8_e4m3: widths: given .*allowed"):
        sparse.engine(sparse.model(cfg), cfg, cache_format="fp8_e4m3")


def test_hadamard_changes_no_selection_of_exact_scores(rng):
    """Orthogonal: the same products, to rounding; e_0 spreads over all channels."""
    x = jnp.asarray(rng.normal(size=(5, 3, 8)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(5, 3, 8)), jnp.float32)
    np.testing.assert_allclose((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), atol=1e-5)
    np.testing.assert_allclose(hadamard(jnp.eye(4)[0]), [0.5] * 4)
    plain = sparse.config()
    spread = dataclasses.replace(plain, indexer=dataclasses.replace(plain.indexer, hadamard=True))
    ids = prompts(rng, (40,))[0]
    a, b = (sparse.model(cfg) for cfg in (plain, spread))
    np.testing.assert_allclose(whole(a, ids), whole(b, ids), atol=NEAR)


@pytest.mark.slow
def test_the_scores_train_the_indexer(rng):
    """Gradients reach every weight of an indexer through its scores, and no other way."""
    cfg = sparse.config()
    block = sparse.model(cfg).layers[1]
    assert isinstance(block.attn, SparseMLA)
    x = jnp.asarray(rng.normal(size=(12, cfg.hidden)), jnp.float32)
    angles = cos_sin(jnp.arange(12, dtype=jnp.int32), cfg.rope)

    graph, state = nnx.split(block.attn)
    by_scores = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s).scores(x, angles) ** 2))(state)
    by_output = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s).full(x) ** 2))(state)
    for leaf in jax.tree.leaves(by_scores["indexer"]):
        assert np.abs(np.asarray(leaf)).max() > 0
    for leaf in jax.tree.leaves(by_output["indexer"]):
        assert not np.asarray(leaf).any()
    assert np.abs(np.asarray(by_output["kv_up"]["kernel"][...])).max() > 0


def test_default_ladder_serves(rng):
    cfg = sparse.config(num_hidden_layers=1)
    engine = sparse.engine(sparse.model(cfg), cfg, ladder=None)
    steps = default_steps(
        max_requests=4, max_prefill_tokens=sparse.CHUNK, max_pages=sparse.LONGEST // sparse.PAGE
    )
    assert {d.step for d in engine.builder.rungs()} == set(steps.steps())
    assert len(engine.builder.rungs()) == 2 * len(steps.steps())
    assert len(engine.generate(prompts(rng, (3,)), WISH)[0].token_ids) == 10
