import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.metadata import staging
from mla_jax.metadata.packed import pack
from mla_jax.placement import Placement


def words(i):
    return pack((np.full(5, i, np.int32), np.int32(7 * i)))


def check_every_call_sees_its_own_words():
    run = staging.staged(lambda packed, x: [a + x for a in packed.unpack()])
    found = [run(words(i), jnp.int32(i)) for i in range(20)]  # queued: nothing is awaited
    for i, (a, b) in enumerate(found):
        assert a.tolist() == [2 * i] * 5 and int(b) == 8 * i
    assert run.compiled_programs() == 1


def test_every_call_sees_its_own_words():
    check_every_call_sees_its_own_words()


def test_what_is_fetched_is_a_copy_of_page_locked_memory():
    placement = Placement.of(None)
    wanted = np.arange(12, dtype=np.int32).reshape(3, 4)
    for sharding in (placement.page_locked, placement.everywhere):
        there = jax.device_put(wanted, sharding)
        found = staging.fetched(there)
        np.testing.assert_array_equal(found, wanted)
        if found.flags.writeable:
            found[:] = 7
        np.testing.assert_array_equal(staging.fetched(there), wanted)


@pytest.mark.gpu
def test_every_call_sees_its_own_words_on_device():
    """The device is busy with the first call while the host writes for the others."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
    busy = slow(jnp.eye(4096))
    check_every_call_sees_its_own_words()
    jax.block_until_ready(busy)


def test_slots_are_reused_only_when_read(monkeypatch):
    """The ring, with a device that is late: a slot waits for its reader."""
    awaited = []

    class Late:
        def __init__(self, i):
            self.i = i

        def block_until_ready(self):
            awaited.append(self.i)

    class Slot(staging._Slot):
        def __init__(self, size, placement):
            self.words, self.views = jnp.zeros(size, jnp.int32), [np.zeros(size, np.int32)]
            self.read = None

    monkeypatch.setattr(staging, "_Slot", Slot)
    turns = staging._turns(3, Placement.of(None))
    for i in range(2 * staging.SLOTS):
        slot = next(turns)
        slot.write(np.full(3, i, np.int32))
        assert slot.views[0].tolist() == [i] * 3
        slot.read = Late(i)
    assert awaited == list(range(staging.SLOTS))


def test_donation_and_static_arguments_are_those_of_jit():
    run = staging.staged(
        lambda packed, x, *, n: packed.unpack()[0][:n] + x, donate_argnums=(1,), static_argnames="n"
    )
    assert run(words(3), jnp.zeros(2, jnp.int32), n=2).tolist() == [3, 3]


def test_what_a_call_returns_and_the_next_one_takes_compiles_once(monkeypatch):
    """The path of a GPU, on any device."""
    run = staging.staged(lambda packed, x: x + packed.unpack()[1], donate_argnums=(1,))
    monkeypatch.setattr(run._staging, "page_locked", True)
    x = jax.device_put(jnp.zeros(3, jnp.int32), jax.devices()[0])
    for i in range(4):
        x = jax.block_until_ready(run(words(i), x))
    assert x.tolist() == [7 * (1 + 2 + 3)] * 3
    assert run.compiled_programs() == 1
