"""Layers in stacks: how a decoder is cut, and that stacking changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.model.stack import Period, periods_of, places_of
from tests.model import tiny


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ("", []),
        ("d", [("d", 1)]),
        ("dddd", [("d", 4)]),
        ("dssss", [("d", 1), ("s", 4)]),
        ("abcbcbc", [("a", 1), ("bc", 3)]),
        ("wwc4c4c4".replace("c4", "c"), [("w", 2), ("c", 3)]),
        ("xyxyz", [("xy", 2), ("z", 1)]),
        ("d" + 26 * "s", [("d", 1), ("sss", 8), ("s", 2)]),
        (15 * "xy" + "x", [("xy", 15), ("x", 1)]),
        (13 * "xyzw", [("xyzw", 13)]),
    ],
)
def test_periods(kinds, want):
    found = [("".join(p.kinds), p.repeats) for p in periods_of(kinds)]
    assert found == want


@given(st.text("ab", max_size=40))
def test_periods_spell_the_layers_again(kinds):
    periods = periods_of(kinds)
    assert "".join("".join(p.kinds) * p.repeats for p in periods) == kinds
    places = places_of(periods)
    assert [periods[p.stack].kinds[p.block] for p in places] == list(kinds)
    assert len({(p.stack, p.block, p.index) for p in places}) == len(kinds)
    firsts = [p.first for p in periods]
    assert firsts == sorted(firsts)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [(False, True, True, True), (True, False) * 2, (False,) * 4])
def test_a_stack_is_its_layers_one_after_the_other(sparse):
    cfg = tiny.config("noaux_tc" if any(sparse) else None, layers=4, sparse_layers=sparse)
    model = tiny.model(cfg)
    ids = jnp.arange(9)[None] % cfg.vocab
    h = model.embed(ids)
    for i in range(cfg.layers):
        h = model.layers[i].full(h)
    np.testing.assert_allclose(model.full(ids), model.final_norm(h), atol=1e-5)
    assert len(model.layers) == len(list(model.layers)) == len(model.layers[:]) == cfg.layers
    assert [block.sparse for block in model.layers[1:]] == list(sparse[1:])
    with pytest.raises(IndexError):
        model.layers[cfg.layers]


def test_one_program_text_for_any_depth():
    """The jaxpr of sixty layers is as long as that of twelve; of a few, as that of three."""

    def length(layers: int) -> int:
        cfg = tiny.config(layers=layers, sparse_layers=(False, *(True,) * (layers - 1)))
        model = tiny.model(cfg)
        return str(jax.make_jaxpr(model.full)(jnp.zeros((1, 5), jnp.int32))).count(" = ")

    assert length(61) == length(13)
    assert length(9) == length(3)


def test_nothing_to_run():
    model = tiny.model(tiny.config())
    assert model.full(jnp.zeros((0, 7), jnp.int32)).shape == (0, 7, 32)
    assert model.full(jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 32)


def test_periods_are_values():
    assert Period(first=0, kinds=("a",), repeats=2) == Period(first=0, kinds=("a",), repeats=2)
