"""The demo's task, its embedded model, and the demo itself."""

import random

import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from hypothesis import given

from mla_jax import demo
from mla_jax.demo_task import (
    CHARACTERS,
    EOS,
    FACT,
    KINDS,
    ask,
    decode,
    encode,
    longest_answer,
    solve,
)
from mla_jax.engine import load_model


@given(st.sampled_from(KINDS), st.integers(24, 4000), st.integers(0, 2**16))
def test_questions_are_well_formed(kind, tokens, seed):
    q = ask(random.Random(seed), kind, tokens=tokens)
    assert tokens - FACT < len(q.prompt) <= tokens
    assert decode(encode(q.prompt + q.answer)) == q.prompt + q.answer
    keys = [fact[:2] for fact in q.prompt.rsplit("?", 1)[0].split(";") if fact]
    assert len(set(keys)) == len(keys)
    assert q.answer == solve(q.prompt)
    assert q.answer.endswith(".")
    assert len(q.answer) <= longest_answer(kind)


@pytest.mark.parametrize(
    "prompt, answer",
    [
        ("ab=12;cd=34;?cd=", "34."),
        ("?12+34=", "46."),
        ("ab=12;cd=99;?cd+ab=", "99+12=111."),
    ],
)
def test_solving_by_hand(prompt, answer):
    assert solve(prompt) == answer


def test_foreign_characters_are_named():
    with pytest.raises(ValueError, match="'A'"):
        encode("A=1")


def test_the_tokenizer_file_says_the_same():
    tokenizers = pytest.importorskip("tokenizers")
    read = tokenizers.Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    assert read.encode(CHARACTERS).ids == encode(CHARACTERS)
    assert read.decode(encode(CHARACTERS)) == CHARACTERS


def test_questions_of_the_demo_are_mixed():
    asked = demo.questions(12, seed=1)
    lengths = [len(q.prompt) for q in asked]
    assert {q.kind for q in asked} == set(KINDS)
    assert min(lengths) <= demo.SHORTEST
    assert max(lengths) > demo.LONGEST - FACT
    assert asked == demo.questions(12, seed=1) != demo.questions(12, seed=2)


def test_the_embedded_model_answers():
    model, config = load_model(demo.FOLDER, dtype=jnp.float32)
    assert config.vocab == len(CHARACTERS) + 1
    assert config.eos == (EOS,)
    assert model.embed.embedding[...].dtype == jnp.float32
    assert sum(file.stat().st_size for file in demo.FOLDER.iterdir()) < 3e6
    rng = random.Random(7)
    asked = [ask(rng, kind, tokens=n) for n in (24, 110) for kind in KINDS]
    right = [encode(q.answer) for q in asked]
    answers = demo.recompute(model, asked, right, done=lambda: None)
    assert [decode(a) for a in answers] == [q.answer for q in asked]
    wrong = [[*a[:-2], a[-2] % 42 + 1, a[-1]] for a in right]
    answers = demo.recompute(model, asked, wrong, done=lambda: None)
    assert all(list(a) != w for a, w in zip(answers, wrong, strict=True))


@pytest.mark.slow
def test_the_demo_runs(capsys):
    assert demo.main(requests=6, seed=3) == 0
    printed = capsys.readouterr()
    assert "6 right, 0 wrong" in printed.out
    assert "6 of 6 equal" in printed.out
    assert ", 0 now" in printed.out
    assert "serving     6/6" in printed.err
