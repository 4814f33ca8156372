"""The assembly that gathers selected rows, run line by line by a small model of a warpgroup."""

import functools
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import RECORD_FORMATS, LatentCache, RecordCache
from mla_jax.pallas import mosaic_inline
from mla_jax.pallas.cache_io.records import gather_rows, write_records
from mla_jax.pallas.sparse_attention import feed_sm90, mosaic, rows_sm90
from mla_jax.pallas.sparse_attention.rows_sm90 import BLOCK, LEFT, RIGHT, ROPE
from tests.cases import draw
from tests.pallas.test_widen_sm90 import unit

KB = 1024
GLOBAL = 3 * 2**32 + 4096  # address of the caches: more than 32 bits
BASES = {LEFT: KB, RIGHT: 33 * KB, ROPE: 65 * KB}  # of a slot's places in shared memory
MARKS = 80 * KB
LOW, LONG = 2**32 - 1, 2**64 - 1


def bits(x):
    return int(np.float32(x).view(np.uint32)) if isinstance(x, np.floating) else x


ARITHMETIC = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a & LOW,
    "mov.b64": lambda a: a,
    "bfe.u32": lambda a, at, size: (a >> at) & ((1 << size) - 1),
    "and.b32": lambda a, b: a & b,
    "and.pred": lambda a, b: a and b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: (a << b) & LOW,
    "add.u32": lambda a, b: (a + b) & LOW,
    "sub.u32": lambda a, b: (a - b) & LOW,
    "mul.lo.u32": lambda a, b: (a * b) & LOW,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & LOW,
    "mad.wide.u32": lambda a, b, c: ((a & LOW) * (b & LOW) + c) & LONG,
    "add.u64": lambda a, b: (a + b) & LONG,
    "div.u32": lambda a, b: a // b,
    "setp.lt.u32": lambda a, b: (a & LOW) < (b & LOW),
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u64": lambda a, b: a != b,
    "selp.b32": lambda a, b, p: a if p else b,
    "selp.b64": lambda a, b, p: a if p else b,
}


PLACE = re.compile(r"\[([\w$]+)(?:\+(\d+))?\]")


@functools.cache
def parsed(line):
    """Of an instruction its name, what follows, the places in brackets, and the other operands."""
    op, rest = line.split(" ", 1)
    places = [(base, int(offset or 0)) for base, offset in PLACE.findall(rest)]
    return op, rest, places, re.findall(r"[\w%$.-]+", re.sub(r"\[.*?\]", "", rest))


class Machine:
    """Global memory from ``GLOBAL`` on, shared memory from 0 on; what goes to the L2 cache.

    Copies are there at once, or (``waits``) when their group was waited for.
    """

    def __init__(self, memory, shared=96, *, waits=False):
        self.memory, self.shared = memory, np.full(shared * KB, 0xEE, np.uint8)
        self.fetched, self.waits, self.groups = [], waits, [[]]

    def commit(self):
        self.groups.append([])

    def await_groups(self, later):
        """All copies but those of the ``later`` last groups."""
        count = max(len(self.groups) - 1 - later, 0)
        done, self.groups = self.groups[:count], self.groups[count:]
        for place, found in (copy for group in done for copy in group):
            self.shared[place : place + len(found)] = found

    def reach(self, address, size):
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - size, "reads outside of the memory"
        return self.memory[at : at + size]

    def run(self, lines, thread, *given, results=0):
        """One thread; operands behind its ``results``, which are returned."""
        regs = {"%tid.x": 384 + thread}
        regs |= {f"${results + i}": x for i, x in enumerate(given)}
        for line in lines:
            if line.startswith("@"):
                predicate, line = line[1:].split(" ", 1)
                if not regs[predicate]:
                    continue
            self._step(line.rstrip(";"), regs)
        return [regs[f"${i}"] for i in range(results)]

    def _step(self, line, regs):
        op, rest, places, names = parsed(line)
        at = [regs[base] + offset for base, offset in places]

        def value(name):
            return regs[name] if name in regs else int(name) & LONG

        if op.startswith("ld.global"):
            assert at[0] % (4 * len(names)) == 0, "aligned loads"
            words = self.reach(at[0], 4 * len(names)).view(np.uint32)
            regs |= dict(zip(names, map(int, words), strict=True))
        elif op.startswith("st.shared"):
            words = np.array([bits(regs[n]) for n in names], np.uint32).view(np.uint8)
            assert at[0] % len(words) == 0, "aligned stores"
            self.shared[at[0] : at[0] + len(words)] = words
        elif op.startswith("cp.async.cg"):
            size, count = map(value, names)
            assert size == 16
            assert at[0] % 16 == at[1] % 16 == 0
            found = self.reach(at[1], 16) * np.uint8(count == 16)
            self.groups[-1].append((at[0], found))
            if not self.waits:
                self.commit()
                self.await_groups(0)
        elif op.startswith(("cp.async.bulk.prefetch", "prefetch")):
            size = value(names[0]) if names else 1
            assert not names or at[0] % 16 == size % 16 == 0
            self.reach(at[0], size)
            self.fetched.append((at[0] - GLOBAL, size))
        elif op == "mov.b32" and rest.startswith("{"):
            low, high, word = names
            regs[low], regs[high] = regs[word] & 0xFFFF, regs[word] >> 16
        elif op == "cvt.rn.f16x2.e4m3x2":
            pair = np.asarray([regs[names[1]]], np.uint16).view(ml_dtypes.float8_e4m3fn)
            regs[names[0]] = int(pair.astype(np.float16).view(np.uint32)[0])
        elif op == "cvt.f32.f16":
            half = np.asarray([regs[names[1]]], np.uint16).view(np.float16)[0]
            regs[names[0]] = np.float32(half)
        elif op == "mul.f32":
            a, b = (np.array(bits(regs[n]), np.uint32).view(np.float32) for n in names[1:])
            regs[names[0]] = np.float32(a * b)
        elif op == "cvt.rn.bf16x2.f32":
            to, high, low = names
            pair = np.asarray([regs[low], regs[high]], np.float32).astype(ml_dtypes.bfloat16)
            regs[to] = int(pair.view(np.uint32)[0])
        else:
            regs[names[0]] = ARITHMETIC[op](*map(value, names[1:]))


def stored(machine, width, bases=BASES):
    """The block of 64 keys in the slot, bits of 16, from its swizzled tiles."""
    found = np.zeros((BLOCK, width), np.uint16)
    for r, c in np.ndindex(BLOCK, width):
        place, column = c // 256, c % 256
        pitch = 1 if place == ROPE else 4
        at = bases[place] + (r // 8 * pitch + column // 64) * KB + unit(r, column % 64 * 2)
        found[r, c] = machine.shared[at : at + 2].view(np.uint16)[0]
    return found


def filled(form, page, rng, *, pages=7, layers=3):
    """A stack whose every row holds numbers, and the numbers of layer 1."""
    if form in ("ds_mla", "v4"):
        cache = RecordCache.alloc(num_pages=pages, page=page, format=form, layers=layers)
        raw = rng.integers(0, 256, cache.pages.shape).astype(np.uint8)
        raw[raw % 128 == 127] = 1  # no NaN: those are compared elsewhere
        cache = replace(cache, pages=jnp.asarray(raw))
        values = np.split(
            draw(rng, pages * page, cache.format.row, dtype="bfloat16"),
            [cache.format.values[0].count],
            axis=1,
        )
        slots = np.arange(pages * page, dtype=np.int32)
        cache = write_records(cache, tuple(map(jnp.asarray, values)), jnp.asarray(slots), layer=1)
    else:
        width = int(form)
        cache = LatentCache.alloc(num_pages=pages, page=page, rank=512, rope=width - 512, layers=3)
        raw = draw(rng, *cache.pages.shape, dtype="bfloat16")
        cache = replace(cache, pages=jnp.asarray(raw))
    slots = jnp.arange(pages * page, dtype=jnp.int32)
    return cache, np.asarray(gather_rows(cache, slots, dtype=jnp.bfloat16, layer=jnp.int32(1)))


def listed(rng, scope, slots):
    """A list of 100 entries with holes, of which the second block has 36; its address in memory."""
    entries = rng.integers(0, slots, scope.keys).astype(np.int32)
    entries[rng.random(scope.keys) < 0.2] = -1
    entries[70], entries[71], entries[72] = slots, 2**31 - 1, -(2**31)
    return entries


@pytest.mark.parametrize(
    ("form", "page"),
    [("ds_mla", 5), ("ds_mla", 64), ("v4", 2), ("v4", 3), ("v4", 64), ("576", 4), ("512", 64)],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_block_of_rows(form, page, number, rng):
    """Both blocks of a list, in a layer of a stack; rows that are not there become zeros."""
    cache, values = filled(form, page, rng)
    pages, scope = mosaic._scope(cache, keys=100)
    entries = listed(rng, scope, cache.num_slots)
    raw = np.asarray(pages).view(np.uint8).ravel()
    short = -len(raw) % 16
    machine = Machine(np.concatenate([raw, np.zeros(short, np.uint8), entries.view(np.uint8)]))
    base = GLOBAL + scope.pages * scope.page_bytes  # of layer 1
    begin, entry = GLOBAL + len(raw) + short, BLOCK * number
    tiles = rows_sm90.tiles_of(scope.format, scope.width)
    gather = _gather_records if form in ("ds_mla", "v4") else _gather_elements
    for thread in range(128):
        gather(machine, scope, tiles, thread, base, (begin, entry, scope.keys))
    wanted = np.full(BLOCK, -1)
    wanted[: 100 - entry] = entries[entry : entry + BLOCK]
    there = (wanted >= 0) & (wanted < cache.num_slots)
    expected = np.where(there[:, None], values[np.where(there, wanted, 0)].view(np.uint16), 0)
    np.testing.assert_array_equal(stored(machine, scope.width), expected)
    marks = machine.shared[MARKS : MARKS + 4 * BLOCK].view(np.float32)
    np.testing.assert_array_equal(marks, there.astype(np.float32))


def _gather_records(machine, scope, tiles, thread, base, entries):
    begin, entry, count = entries
    for half in range(2):
        given = begin, entry + 32 * half, count
        (slot,) = machine.run(rows_sm90.look_up("unit"), thread, *given, results=1)
        row, scales = machine.run(rows_sm90.find(scope), thread, slot, base, results=2)
        machine.run(rows_sm90.mark(half), thread, MARKS, row)
        codes, rotary = machine.run(rows_sm90.spread(scope.format), thread, row, results=2)
        targets = machine.run(rows_sm90.targets(), thread, *BASES.values(), results=3)
        words = 4 if scope.flat else 2
        factors = machine.run(rows_sm90.load(0, words), thread, scales, row, results=4)
        for tile in tiles:
            to, at = targets[tile.place], rows_sm90.offset_of(tile, half)
            if tile.group is None:
                found = [
                    word
                    for byte in (0, 16)
                    for word in machine.run(rows_sm90.load(byte), thread, rotary, row, results=4)
                ]
                machine.run(rows_sm90.store_elements(at), thread, to, *found)
                continue
            found = machine.run(rows_sm90.load(tile.byte), thread, codes, row, results=4)
            text = rows_sm90.scale(scope.format, tile.group)
            (scale,) = machine.run(text, thread, *factors, results=1)
            machine.run(rows_sm90.store_codes(at), thread, to, *found, scale)


def _gather_elements(machine, scope, tiles, thread, base, entries):
    slots = machine.run(rows_sm90.look_up("block"), thread, entries[0], *entries[1:], results=4)
    for k, slot in enumerate(slots):
        row, _ = machine.run(rows_sm90.find(scope), thread, slot, base, results=2)
        machine.run(rows_sm90.copy(tiles, k), thread, *BASES.values(), MARKS, row, base)


@pytest.mark.parametrize(("form", "page"), [("ds_mla", 5), ("v4", 3)])
def test_what_is_fetched_to_the_l2_cache(form, page, rng):
    """The lines of a block's rows, once each, and scales where they lie apart."""
    cache, _ = filled(form, page, rng)
    pages, scope = mosaic._scope(cache, keys=100)
    entries = listed(rng, scope, cache.num_slots)
    raw = np.asarray(pages).view(np.uint8).ravel()
    short = -len(raw) % 16
    machine = Machine(np.concatenate([raw, np.zeros(short, np.uint8), entries.view(np.uint8)]))
    given = GLOBAL + len(raw) + short, BLOCK, scope.keys
    for thread in range(128):
        (slot,) = machine.run(rows_sm90.look_up("row"), thread, *given, results=1)
        row, scales = machine.run(rows_sm90.find(scope), thread, slot, GLOBAL, results=2)
        text = rows_sm90.fetch(scope.row_bytes, apart=not scope.flat)
        machine.run(text, thread, row, scales)
    some = entries[BLOCK:]
    some = some[(some >= 0) & (some < cache.num_slots)]
    at = some // page * scope.page_bytes + some % page * scope.row_bytes
    lines = range(0, scope.row_bytes, rows_sm90.LINE)
    expected = [(a + line, 1) for a in at.tolist() for line in lines]
    if not scope.flat:
        apart = some // page * scope.page_bytes + page * scope.row_bytes + some % page * 8
        expected += [(a, 1) for a in apart.tolist()]
    assert sorted(machine.fetched) == sorted(expected)


def test_addresses_have_64_bits():
    """The last record of a stack of 6 GB."""
    scope = rows_sm90.Scope(
        format="ds_mla", page=64, page_bytes=64 * 656, pages=150_000, layers=1, width=576, keys=64
    )
    machine, slot = Machine(np.zeros(0, np.uint8)), scope.slots - 1
    row, scales = machine.run(rows_sm90.find(scope), 0, slot, GLOBAL, results=2)
    assert row == GLOBAL + slot * 656 > GLOBAL + 2**32
    assert scales == row + 512
    assert machine.run(rows_sm90.find(scope), 0, slot + 1, GLOBAL, results=2) == [0, 0]


@pytest.mark.parametrize("byte", [0, 1, 105, 127, 254, 255])
def test_scales_of_eight_bits(byte):
    """2^(byte - 127), and no number for 255."""
    words = [0, byte << 8, 0, 0]  # group 5 is byte 1 of the second word
    (found,) = Machine(np.zeros(0, np.uint8)).run(rows_sm90.scale("v4", 5), 0, *words, results=1)
    want = np.asarray([byte], np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(np.asarray([found], np.uint32).view(np.float32), want)


def test_a_code_that_is_no_number_stays_none():
    machine = Machine(np.zeros(0, np.uint8))
    machine.run(rows_sm90.store_codes(0), 0, 0, 0x7F, 0xFF00, 0, 0x38, bits(np.float32(3)))
    found = machine.shared[:32].view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isnan(found[0])
    assert np.isnan(found[5])
    assert found[12] == 3
    assert not found[[1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15]].any()


@dataclass
class Place:
    """A reference: where it begins, and how far its elements along the first axis are apart."""

    address: int
    pitch: int = 0

    @property
    def at(self):
        return self

    def __getitem__(self, i):
        return Place(self.address + int(i) * self.pitch)


def _words(words, *, vector):
    """Registers of an array: a value of each thread in every word."""
    registers = np.empty(len(words) // vector, object)
    for i in range(len(registers)):
        registers[i] = words[i * vector : (i + 1) * vector]
    return SimpleNamespace(registers=registers)


@pytest.fixture
def on_machine(monkeypatch):
    """What generates code runs at once, all threads of a text one after the other."""
    machine = Machine(np.zeros(0, np.uint8), shared=160, waits=True)

    def asm(text, operands, constraints, *, result="void"):
        if text.startswith("cp.async.wait_group"):
            return machine.await_groups(int(text.rstrip(";").split()[1]))
        if text.startswith("cp.async.commit_group"):
            return machine.commit()
        if not text.startswith("{"):
            assert text.startswith("fence.proxy.async")
            return None
        lines = [x for x in text.split("\n")[1:-1] if not x.startswith(".reg")]
        count = 0 if result == "void" else result.count("i32") + result.count("i64")
        assert len(re.sub(r",~\{memory\}", "", constraints).split(",")) == count + len(operands)
        each = [
            machine.run(lines, t, *(x[t] if isinstance(x, list) else x for x in operands),
                        results=count)
            for t in range(128)
        ]  # fmt: skip
        found = [list(x) for x in zip(*each, strict=True)]
        return found if result.startswith("struct") else found[0] if count else None

    def inline(arg_types=(), return_type=None):
        del arg_types, return_type

        def scalar(x):
            numbers = (int, np.integer, jax.Array)
            return SimpleNamespace(registers=np.array(int(x))) if isinstance(x, numbers) else x

        return lambda f: lambda *args: f(None, *map(scalar, args))

    def loop(begin, end, step, carry):
        for i in range(int(begin), int(end)):
            carry = step(jnp.int32(i), carry)
        return carry

    for name, fake in {
        "asm": asm,
        "unpacked": lambda found, count, bits=32: found,
        "strided": _words,
        "words": list,
        "address": lambda ref, offset: ref.address + int(offset),
        "wide": int,
        "constant": lambda n, bits=32: n,
    }.items():
        monkeypatch.setattr(mosaic_inline, name, fake)
    monkeypatch.setattr(plgpu, "inline_mgpu", inline)
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    monkeypatch.setattr(mgpu.utils, "memref_ptr", lambda ref: ref.address)
    monkeypatch.setattr(jax.lax, "fori_loop", loop)
    monkeypatch.setattr(pl, "when", lambda condition: lambda f: f() if condition else None)
    monkeypatch.setattr(arith, "muli", lambda a, b: int(a) * int(b))
    monkeypatch.setattr(arith, "cmpi", lambda kind, a, b: int(a) != int(b))
    monkeypatch.setattr(arith, "select", lambda chosen, a, b: a if chosen else b)
    return machine


def _copy_blocks(feed, blocks, seen_of):
    """Blocks of elements as the warpgroups of a pair copy them; the first part is there first."""
    for e in map(jnp.int32, range(int(feed.start), int(feed.stop))):
        g = len(blocks)
        feed.begin(feed.entries(e), e)
        feed.finish(0)
        early, _ = seen_of(g)
        feed.finish(1)
        blocks.append(seen_of(g))
        first = [*range(128), *range(256, 384)]
        np.testing.assert_array_equal(early[:, first], blocks[-1][0][:, first])
        assert not np.array_equal(early, blocks[-1][0])


@pytest.mark.parametrize(
    ("form", "pages", "keys"),
    [
        ("ds_mla", (5,), (100,)),
        ("v4", (64, 2), (40, 100)),
        ("576", (4,), (100,)),
        ("512", (4, 7), (40, 100)),
    ],
)
def test_all_blocks_of_a_worker(form, pages, keys, rng, on_machine, monkeypatch):
    """The feed itself: which text runs when, of which row; blocks 1 to 3 of two tokens' lists."""
    found = [filled(form, page, rng) for page in pages]
    arrays, scopes = zip(
        *(mosaic._scope(cache, keys=n) for (cache, _), n in zip(found, keys, strict=True)),
        strict=True,
    )
    lists = [
        np.stack([listed(rng, scope, scope.slots)[:100] for _ in range(2)])
        if scope.keys == 100
        else rng.integers(-1, scope.slots, (2, scope.keys)).astype(np.int32)
        for scope in scopes
    ]
    memory, begins = b"", []
    for x in (*arrays, *lists):
        begins.append(GLOBAL + len(memory))
        raw = np.ascontiguousarray(x).view(np.uint8).tobytes()
        memory += raw + bytes(-len(raw) % 16)
    on_machine.memory = np.frombuffer(memory, np.uint8)
    records = form in RECORD_FORMATS
    slot = dict(zip(BASES, (0, 64 * KB, 128 * KB), strict=True))
    pitch = {LEFT: 32 * KB, RIGHT: 32 * KB, ROPE: 8 * KB}
    marks, blocks = Place(144 * KB, 256), []

    def seen_of(g):
        """The columns of block ``g`` where the products read them, and which keys there are."""
        bases = {k: at + g % 2 * pitch[k] for k, at in slot.items()}
        at = marks.address + g % (4 if records else 2) * 256
        seen = on_machine.shared[at : at + 256].view(np.float32).copy()
        return stored(on_machine, scopes[0].width, bases), seen

    monkeypatch.setattr(plgpu, "barrier_arrive", lambda _: blocks.append(seen_of(len(blocks))))
    n, e = len(scopes), Place(0)
    feed = feed_sm90.Feed(
        scopes=scopes,
        lists=[Place(x) for x in begins[n:]],
        pages=[Place(x) for x in begins[:n]],
        layers=[1] * n,
        start=jnp.int32(1),
        stop=jnp.int32(4),
        keys=(Place(slot[LEFT], pitch[LEFT]), Place(slot[RIGHT], pitch[RIGHT])),
        rotary=Place(slot[ROPE], pitch[ROPE]),
        marks=marks,
        full=e,
        freed=e,
        simulate=False,
    )
    if records:
        feed.run()
    else:
        _copy_blocks(feed, blocks, seen_of)
    every = [
        (i, t, first)
        for t in range(2)
        for i, scope in enumerate(scopes)
        for first in range(0, scope.keys, BLOCK)
    ]
    assert len(blocks) == 3
    for (i, token, first), (got, seen) in zip(every[1:4], blocks, strict=True):
        wanted = np.full(BLOCK, -1)
        entries = lists[i][token, first : first + BLOCK]
        wanted[: len(entries)] = entries
        there = (wanted >= 0) & (wanted < scopes[i].slots)
        values = found[i][1].view(np.uint16)
        expected = np.where(there[:, None], values[np.where(there, wanted, 0)], 0)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(seen, there.astype(np.float32))
