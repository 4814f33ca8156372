"""How often a model answers the demo's questions, by length of the prompt."""

import random
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.demo_task import KINDS, PAD, Question, ask, encode, longest_answer
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.types import Array

__all__ = ["LENGTHS", "accuracy"]

LENGTHS = (24, 128, 512, 1024, 2048, 3060)
"""Prompt lengths at which a trained model is measured."""


def accuracy(
    model: DeepseekV3, *, lengths: Sequence[int], questions: int, seed: int, group: int = 32
) -> dict[int, dict[str, float]]:
    """Share of wholly right greedy answers to prompts of each length, by kind.

    One causal pass over prompt and answer: greedy decoding gives the answer exactly if the
    likeliest token is the answer's at every one of its positions.
    """
    width = max(lengths) + max(map(longest_answer, KINDS))

    @nnx.jit
    def likeliest(model: DeepseekV3, ids: Array) -> Array:
        return jnp.argmax(model.logits(model.full(ids)), axis=-1)

    def right(asked: Sequence[Question]) -> int:
        ids = np.full((group, width), PAD, np.int32)
        for row, q in zip(ids, asked, strict=False):
            row[: len(q.prompt + q.answer)] = encode(q.prompt + q.answer)
        best = np.asarray(likeliest(model, ids))
        first = [len(q.prompt) - 1 for q in asked]
        spans = [slice(at, at + len(q.answer)) for at, q in zip(first, asked, strict=True)]
        return sum(
            best[i, span].tolist() == encode(q.answer)
            for i, (span, q) in enumerate(zip(spans, asked, strict=True))
        )

    rng, shares = random.Random(seed), {}
    for tokens in lengths:
        shares[tokens] = {}
        for kind in KINDS:
            asked = [ask(rng, kind, tokens=tokens) for _ in range(questions)]
            groups = [asked[i : i + group] for i in range(0, questions, group)]
            shares[tokens][kind] = sum(map(right, groups)) / questions
    return shares
