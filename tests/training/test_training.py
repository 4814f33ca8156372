"""Training sequences speak the demo's language, and training learns."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("optax")
pytest.importorskip("tokenizers")

from mla_jax.config import MLADims, RopeConfig
from mla_jax.demo_task import decode, solve
from mla_jax.model.sharding import named_leaves
from training.batches import sample_batch
from training.train_demo import CONFIG, Recipe, Stage, Trainer, _is_matrix

TINY = replace(
    CONFIG,
    hidden=32,
    layers=1,
    sparse_layers=(True,),
    mlp=32,
    dims=MLADims(heads=2, rank=16, nope=8, rope=8, v=8, q_rank=16),
    rope=RopeConfig(dim=8, theta=100.0),
    moe=replace(CONFIG.moe, width=16),
)


def test_sequences_hold_facts_and_right_answers():
    batch = sample_batch(jax.random.key(0), sequences=8, length=400)
    seen = set()
    for tokens, kind in zip(batch.tokens.tolist(), batch.kind.tolist(), strict=True):
        text = decode(tokens)
        assert len(text) == len(tokens)
        known, at = "", 0
        for item in re.finditer(r"([a-z]{2}=\d\d;)|(\?[a-z\d+]+=)([\d+=]*\.)", text):
            assert item.start() == at, text[at:]
            at = item.end()
            if item[1]:
                known += item[1]
                assert not any(kind[item.start() : at])
                continue
            assert item[3] == solve(known + item[2])
            assert not any(kind[item.start() : item.start(3)])
            assert len(set(kind[item.start(3) : at])) == 1
            seen.add(kind[item.start(3)])
        assert len(text) - at < len("?ab+cd=99+99=198.")
    assert seen == {1, 2, 3}


@pytest.mark.slow
def test_a_step_lowers_the_loss():
    stage = Stage(length=48, sequences=16, steps=1)
    trainer = Trainer(TINY, Recipe(stages=(stage,), warmup=1))
    batch = sample_batch(jax.random.key(5), sequences=32, length=49)
    loss = jax.jit(lambda params: trainer.loss(params, batch)[0])
    before = loss(trainer.params)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        (record,) = trainer.run()
    assert record["step"] == 1
    assert loss(trainer.params) < before


def test_bias_moves_against_the_load():
    trainer = Trainer(TINY, Recipe())
    loads = np.full((1, 8), 0.1, np.float32)
    loads[0, 2] = 0.3
    trainer.balance(jnp.asarray(loads))
    block = trainer.params["stacks"][0]["blocks"][0]
    bias = block["moe"]["router"]["choice_bias"][0]
    assert bias[2] < 0
    assert (np.delete(np.asarray(bias), 2) > 0).all()


def test_saved_weights_are_what_was_trained(tmp_path):
    trainer = Trainer(TINY, Recipe(seed=1))
    trainer.save(tmp_path)
    again = Trainer(TINY, Recipe(seed=2))
    again.resume(tmp_path)
    kept = [nnx.state(t.model(), nnx.Param) for t in (trainer, again)]
    jax.tree.map(np.testing.assert_array_equal, *kept)


def test_decay_is_for_matrices_alone():
    trainer = Trainer(TINY, Recipe())
    decayed = jax.tree.map_with_path(_is_matrix, trainer.params)
    for name, leaf in named_leaves(decayed).items():
        assert leaf != name.endswith(("scale", "bias")), name
