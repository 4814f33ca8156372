"""Stored programs: what is damaged, unreadable or of other settings is made again."""

import os
import uuid
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.errors import EngineError
from mla_jax.model.program_store import ProgramStore
from mla_jax.placement import Placement

SPEC = jax.ShapeDtypeStruct((4,), jnp.float32)
FACTS = ("facts",)


@pytest.fixture(scope="module")
def program():
    """Of a name that JAX's persistent cache cannot have, as a step's."""

    def run(x):
        return x + 1

    run.__name__ = f"run_{uuid.uuid4().hex}"
    return jax.jit(run).lower(SPEC).compile()


def loaded(store: ProgramStore, facts=FACTS):
    return store.load(facts, jax.tree.structure(((0,), {})), jax.tree.structure(0))


@pytest.fixture
def store(program, tmp_path):
    store = ProgramStore(tmp_path, Placement.of(None))
    store.save(FACTS, program)
    return store


def test_a_program_is_found_by_its_facts(store):
    found = loaded(store)
    np.testing.assert_array_equal(found(jnp.ones(4)), 2)
    assert loaded(store, ("other",)) is None
    assert [p.suffix for p in store.folder.iterdir()] == [".program"]


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_file_is_no_program(store, at):
    """Loading other bytes than those that were written may end the process."""
    path = store.path(FACTS)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert loaded(store) is None


def test_a_file_of_another_program_is_no_program(store):
    store.path(FACTS).replace(store.path(("other",)))
    assert loaded(store, ("other",)) is None


@pytest.mark.parametrize("data", [b"", b"text", b"\0" * 99])
def test_what_no_store_wrote_is_no_program(store, data):
    store.path(FACTS).write_bytes(data)
    assert loaded(store) is None


def test_a_folder_that_takes_no_file_stops_nobody(store, program, monkeypatch):
    store.path(FACTS).unlink()
    store.path(FACTS).mkdir()  # so that no file can take its place
    assert loaded(store) is None
    with pytest.warns(UserWarning, match="programs are not stored in .*: "):
        store.save(FACTS, program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        store.save(FACTS, program)
    assert [p.name for p in store.folder.iterdir()] == [store.path(FACTS).name]

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    store.path(FACTS).rmdir()
    store.save(FACTS, program)
    monkeypatch.setattr(type(store.folder), "read_bytes", denied)
    assert loaded(store) is None


@pytest.mark.parametrize(
    ("name", "value"), [("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg")]
)
def test_settings_of_random_numbers_are_facts(store, tmp_path, name, value):
    """The same seed draws other tokens with them."""
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, value)
        other = ProgramStore(tmp_path, Placement.of(None))
    finally:
        jax.config.update(name, before)
    assert other.path(FACTS) != store.path(FACTS)


@pytest.mark.parametrize("folder", ["", 5, "a\0b", os.devnull])
def test_what_is_no_folder_is_refused(folder):
    with pytest.raises(EngineError, match=r"^programs: given .*; allowed: a folder"):
        ProgramStore(folder, Placement.of(None))
