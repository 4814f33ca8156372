import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import EngineError
from mla_jax.model.sampling import SamplingBatch, SamplingParams, sample


@jax.jit
def draw(logits, batch):
    found = sample(logits, batch)
    return found.token, found.logprob


def batch(n: int, **columns) -> SamplingBatch:
    """``n`` rows; a scalar is the value of every row."""
    made = SamplingBatch.nothing(n)
    for name, value in columns.items():
        getattr(made, name)[:] = value
    return jax.tree.map(jnp.asarray, made)


def normal(*shape: int, seed: int = 0) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype("f4"))


def test_temperature_zero_is_argmax_whatever_else_is_set():
    logits = normal(5, 40)
    token, _ = draw(logits, batch(5, top_k=3, top_p=0.5, seed=range(5)))
    assert token.dtype == jnp.int32
    np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-45}, {"temperature": 1e-4}]
)
def test_the_strictest_filters_are_greedy(filters):
    logits = normal(5, 40)
    token, _ = draw(logits, batch(5, **({"temperature": 1.0, "seed": range(5)} | filters)))
    np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


def test_numbers_of_jax_are_numbers():
    made = SamplingParams(
        seed=jnp.uint32(5), top_k=jnp.int32(3), logprobs=jnp.int32(2), stop_token_ids=jnp.array([3])
    )
    assert made == SamplingParams(seed=5, top_k=3, logprobs=2, stop_token_ids=(3,))
    assert hash(made.stop_token_ids) == hash((3,))
    numbers = SamplingParams(temperature=jnp.float32(0.5), top_p=np.float32(0.5))
    assert hash(numbers) == hash(SamplingParams(temperature=0.5, top_p=0.5))
    half = np.array(0.5)
    kept = SamplingParams(min_p=half)
    half[...] = np.nan  # an array may change after it was checked
    assert kept == SamplingParams(min_p=0.5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_tokens", "max_tokens: here max_new_tokens"), ("n", "seed=None"), ("x", "logprobs")],
)
def test_unknown_parameters_are_refused_in_words(name, hint):
    with pytest.raises(EngineError, match=rf"given {name}; allowed: by name: .*{hint}"):
        SamplingParams(**{name: 1})
    with pytest.raises(EngineError, match=r"given 0\.5; allowed: by name"):
        SamplingParams(0.5)


def test_the_logprob_is_of_the_raw_softmax():
    logits = normal(4, 30)
    rows = batch(4, temperature=[0, 0.3, 2, 1], top_k=[0, 2, 0, 5], top_p=[1, 1, 0.9, 0.5])
    token, logprob = draw(logits, rows)
    x = np.asarray(logits, np.float64)
    raw = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprob, raw[np.arange(4), token], atol=1e-6)


def test_a_row_does_not_depend_on_its_company():
    logits = normal(6, 50)
    columns = {
        "temperature": np.array([0, 1, 0.7, 1.3, 0, 1]),
        "top_k": np.array([0, 0, 5, 0, 2, 50]),
        "top_p": np.array([1, 0.9, 1, 0.5, 1, 1]),
        "seed": np.array([1, 2, 3, 2**32 - 1, 5, 6]),
        "position": np.arange(6) * 100,
    }
    together = draw(logits, batch(6, **columns))
    turned = draw(logits[::-1], batch(6, **{k: v[::-1] for k, v in columns.items()}))
    for i in range(6):
        alone = draw(logits[i : i + 1], batch(1, **{k: v[i] for k, v in columns.items()}))
        for a, b, c in zip(together, turned, alone, strict=True):
            assert a[i] == b[5 - i] == c[0]


def test_seed_and_position_decide_the_draw():
    logits = jnp.zeros((64, 1000), jnp.float32)
    by_seed, _ = draw(logits, batch(64, temperature=1.0, seed=range(64)))
    by_position, _ = draw(logits, batch(64, temperature=1.0, position=range(64)))
    again, _ = draw(logits, batch(64, temperature=1.0))
    assert len(set(by_seed.tolist())) > 50
    assert len(set(by_position.tolist())) > 50
    assert len(set(again.tolist())) == 1


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, 5),
        ({"top_k": 3}, 3),
        ({"top_k": 99}, 5),
        ({"top_p": 0.75}, 3),  # 0.4 + 0.3 = 0.7 is not enough
        ({"top_p": 0.4}, 1),
        ({"top_k": 2, "top_p": 0.6}, 2),  # of the two left, the first holds 4/7 < 0.6
        ({"top_k": 2, "top_p": 0.5}, 1),
    ],
)
def test_draws_follow_the_filtered_distribution(filters, kept):
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    order = np.array([3, 0, 4, 2, 1])  # likeliest is token 3
    logits = np.empty(5, "f4")
    logits[order] = np.log(p)
    n = 4000
    rows = batch(n, temperature=1.0, position=range(n), **filters)
    token, _ = draw(jnp.broadcast_to(jnp.asarray(logits), (n, 5)), rows)
    want = np.zeros(5)
    want[order[:kept]] = p[:kept] / p[:kept].sum()
    seen = np.bincount(token, minlength=5) / n
    assert (seen[want == 0] == 0).all()
    np.testing.assert_allclose(seen, want, atol=0.035)  # over 4 sigma


def test_temperature_flattens_and_sharpens():
    n = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.8, 0.2], jnp.float32)), (n, 2))
    for t in (0.5, 2.0):
        token, _ = draw(logits, batch(n, temperature=t, position=range(n)))
        p = np.array([0.8, 0.2]) ** (1 / t)
        np.testing.assert_allclose(np.mean(np.asarray(token) == 0), (p / p.sum())[0], atol=0.035)


def test_ties_at_the_edge_of_top_k_go_to_the_lower_id():
    n = 500
    rows = batch(n, temperature=1.0, top_k=2, position=range(n))
    token, _ = draw(jnp.zeros((n, 6), jnp.float32), rows)
    assert set(token.tolist()) == {0, 1}


def test_huge_logits_do_not_overflow_and_forbidden_tokens_are_never_drawn():
    n = 200
    logits = jnp.broadcast_to(jnp.asarray([3e38, -3e38, -jnp.inf, 3e38], jnp.float32), (n, 4))
    for t in (1e-4, 1.0):
        token, logprob = draw(logits, batch(n, temperature=t, position=range(n)))
        assert set(token.tolist()) == {0, 3}
        assert np.isfinite(logprob).all()


def test_nan_logits_are_seen_in_the_logprob_of_their_row_only():
    logits = normal(3, 8).at[1, 2].set(jnp.nan)
    for t in (0.0, 1.0):
        _, logprob = draw(logits, batch(3, temperature=t))
        assert np.isfinite(logprob).tolist() == [True, False, True]


def test_what_other_servers_call_nothing_is_nothing():
    nothing = SamplingParams(top_k=-1, stop=None, stop_token_ids=None, logprobs=None)
    assert nothing == SamplingParams()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -1.0}, "temperature: given -1.0; allowed: 0"),
        ({"temperature": float("nan")}, "temperature: given nan"),
        ({"temperature": float("inf")}, "temperature: given inf"),
        ({"temperature": 1e-9}, "temperature: given 1e-09"),
        ({"top_k": -2}, "top_k: given -2"),
        ({"top_k": 2**70}, f"top_k: given {2**70}; allowed: 0 to 2"),
        ({"top_k": 1.5}, "top_k: given 1.5"),
        ({"top_p": 0.0}, "top_p: given 0.0"),
        ({"top_p": 1.1}, "top_p: given 1.1"),
        ({"top_p": float("nan")}, "top_p: given nan"),
        ({"seed": -1}, "seed: given -1"),
        ({"seed": 2**32}, "seed: given 4294967296"),
        ({"max_new_tokens": 0}, r"max_new_tokens: given 0; allowed: 1 to 2\*\*31 - 1"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens: given int of"),
        ({"max_new_tokens": True}, "max_new_tokens: given True"),
        ({"stop_token_ids": (1, -2)}, "stop_token_ids: given -2"),
        ({"temperature": "hot"}, "temperature: given 'hot'; allowed: 0"),
        ({"temperature": "1"}, "temperature: given '1'"),
        ({"temperature": None}, "temperature: given None"),
        ({"temperature": True}, "temperature: given True"),
        ({"temperature": 10**400}, "temperature: given .* characters"),
        ({"top_p": None}, "top_p: given None; allowed: above 0"),
        ({"top_k": "3"}, "top_k: given '3'"),
        ({"seed": 1.0}, "seed: given 1.0"),
        ({"seed": 10**5000}, "seed: given int of 16610 bits"),
        ({"max_new_tokens": None}, "max_new_tokens: given None"),
        ({"stop_token_ids": 5}, "stop_token_ids: given 5; allowed: token ids in a tuple"),
        ({"stop_token_ids": "12"}, "stop_token_ids: given '12'"),
        ({"stop_token_ids": ["12"]}, "stop_token_ids: given '12'"),
        ({"min_p": 1.5}, "min_p: given 1.5; allowed: 0 to 1"),
        ({"min_p": None}, "min_p: given None"),
        ({"repetition_penalty": 0}, "repetition_penalty: given 0; allowed: 1e-6 to 1e6"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: given inf"),
        ({"presence_penalty": 2.1}, "presence_penalty: given 2.1; allowed: -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty: given '1'"),
        ({"logit_bias": 5}, "logit_bias: given 5; allowed: {token id: a number"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: given '-1: 1.0'"),
        ({"logit_bias": {1: 101}}, "logit_bias: given '1: 101'"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: given '1: nan'"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias: given"),
        ({"stop": 5}, "stop: given 5; allowed: a string"),
        ({"stop": ("a", "")}, "stop: given ''; allowed: a string that is not empty"),
        ({"stop": [b"a"]}, "stop: given b'a'"),
        ({"logprobs": 21}, "logprobs: given 21; allowed: 0 to 20"),
        ({"logprobs": True}, "logprobs: given True"),
        ({"ignore_eos": "no"}, "ignore_eos: given 'no'; allowed: True or False"),
    ],
)
def test_params_check_themselves(bad, message):
    with pytest.raises(EngineError, match=message):
        SamplingParams(**bad)


def test_stop_tokens_of_any_iterable_are_kept():
    for stops in ([3, 4], (i for i in (3, 4)), range(3, 5), np.array([3, 4])):
        params = SamplingParams(stop_token_ids=stops)
        assert params.stop_token_ids == (3, 4)
        assert params.stop_token_ids == (3, 4)
        assert hash(params) == hash(SamplingParams(stop_token_ids=(3, 4)))


def test_bias_and_stops_in_any_form_are_one():
    given = ({7: 1, 3: -2.5}, [(7, 1.0), (3, -2.5)], {np.int64(3): np.float32(-2.5), 7: 1})
    for bias in given:
        assert SamplingParams(logit_bias=bias).logit_bias == ((3, -2.5), (7, 1.0))
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ("end",)
    assert not SamplingParams(min_p=0.1, logprobs=3, temperature=1.0).needs_history
    assert SamplingParams(logit_bias={1: 0.5}).needs_history


def test_the_likeliest_are_those_of_a_sort():
    """With equal logits the lower id first; forbidden tokens last; as many as any row wants."""
    logits = np.random.default_rng(4).normal(size=(9, 50)).round(1).astype("f4") + np.float32(0)
    logits[3, 7:] = -np.inf
    rows = batch(9, logprobs=[0, 1, 20, 20, 5, 0, 2, 3, 4])
    found = jax.jit(sample)(jnp.asarray(logits), rows)
    want = np.argsort(-logits, kind="stable", axis=-1)[:, :20]
    np.testing.assert_array_equal(found.best.T, want)
    log = jax.nn.log_softmax(logits)[np.arange(9)[:, None], want]
    np.testing.assert_allclose(found.best_logprob.T, log, atol=1e-5)
    rows = batch(9, logprobs=3)
    assert (np.asarray(jax.jit(sample)(jnp.asarray(logits), rows).best)[3:] == 0).all()


def test_min_p_leaves_what_is_likely_enough():
    n = 3000
    p = np.array([0.5, 0.3, 0.16, 0.04], "f4")
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p)), (n, 4))
    for least, kept in ((0.0, 4), (0.1, 3), (0.5, 2), (0.7, 1), (1.0, 1)):
        token, _ = draw(logits, batch(n, temperature=1.0, position=range(n), min_p=least))
        assert set(token.tolist()) == set(range(kept))


def test_numbers_of_numpy_and_jax_are_numbers():
    SamplingParams(temperature=np.float32(0.5), top_p=jnp.float32(0.9), seed=np.uint32(7))


def sorted_draw(logits, row) -> int:
    """The definition: the vocabulary in order, cut by rank and by mass before, then Gumbel-max."""
    logits = np.asarray(logits)
    order = np.argsort(-logits, kind="stable")
    z = (logits[order] - logits.max()) / np.float32(row["temperature"])
    kept = np.arange(len(z)) < (row["top_k"] or len(z))
    p = np.where(kept, np.exp(z.astype(np.float64)), 0)
    p /= p.sum()
    before = np.cumsum(p) - p
    kept &= (row["top_p"] >= 1) | (before < np.float64(row["top_p"]))
    kept[0] = True
    key = jax.random.fold_in(jax.random.key(np.uint32(row["seed"])), row["position"])
    noise = np.asarray(jax.random.gumbel(key, logits.shape, jnp.float32))[order]
    return int(order[np.argmax(np.where(kept, z + noise, -np.inf))])


@pytest.mark.parametrize("digits", [None, 1, 0], ids=["distinct", "ties", "many ties"])
def test_draws_are_those_of_the_sorted_definition(digits):
    """Filters alone and together, logits that tie, forbidden ones, every sign."""
    rng = np.random.default_rng(3)
    n, vocab = 300, 97
    logits = (4 * rng.normal(size=(n, vocab)) - rng.choice([0, 30], size=(n, 1))).astype("f4")
    if digits is not None:
        logits = logits.round(digits) + np.float32(0)
    logits[rng.random((n, vocab)) < 0.05] = -np.inf
    columns = {
        "temperature": rng.choice([0.5, 1.0, 1.5], n),
        "top_k": rng.choice([0, 1, 2, 5, 20, 96, 97, 500], n),
        "top_p": rng.choice([1.0, 0.999, 0.9, 0.5, 0.1], n).astype("f4"),
        "seed": rng.integers(0, 2**32, n),
        "position": rng.integers(0, 1000, n),
    }
    tokens, _ = draw(jnp.asarray(logits), batch(n, **columns))
    rows = [{name: column[i] for name, column in columns.items()} for i in range(n)]
    want = [sorted_draw(x, row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_array_equal(tokens, want)


def test_the_vocabulary_is_not_sorted():
    text = jax.jit(sample).lower(normal(8, 1000), batch(8)).as_text()
    assert "stablehlo.sort" not in text and "top_k" not in text
