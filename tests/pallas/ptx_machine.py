"""Runs the assembly of ``select_sm90`` on a CPU: all threads of a cluster in step, with numpy.

Of PTX it knows what that program uses. Branches lead forward: a thread that takes one does nothing
until its label. Threads in step see no race; a barrier only asserts that all of a block are there.
"""

import functools
import re

import numpy as np

U32, U64 = np.uint32, np.uint64
UNTOUCHED = np.int32(-0x33333334)
"""What stands in results before they are written."""

CALLS = {
    "add": np.add, "sub": np.subtract, "xor": np.bitwise_xor, "and": np.bitwise_and,
    "shr": np.right_shift, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@functools.cache
def instructions(text: str) -> list[str]:
    """Lines of a program; a label ends with a colon."""
    text = re.sub(r"//[^\n]*", "", text)
    tokens = re.sub(r"\b(\w+):(?!:)", r"\1:;", text.replace("::", "_"))
    lines = (re.sub(r"^[{}\s]+", "", " ".join(line.split())) for line in tokens.split(";"))
    return [line for line in lines if line and not line.startswith(".reg")]


@functools.cache
def parts_of(line: str) -> tuple[str, list[str], list[str]]:
    """The predicate of an instruction or "", parts of its name, and its arguments."""
    predicate, line = line[1:].split(" ", 1) if line[0] == "@" else ("", line)
    op, _, rest = line.partition(" ")
    return predicate, op.split("."), re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", rest)


@functools.cache
def number(name: str) -> int | None:
    """The number that an operand is, in 64 bits; None: it is a register."""
    is_one = re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", name)
    return int(name, 0) & (2**64 - 1) if is_one else None


class Machine:
    """A cluster of thread blocks; ``memory`` are words, ``operands`` the program's ``$0``, …

    ``teams``: the blocks are teams of one, which share its memory. Operands are numbers, or arrays
    of each thread's.
    """

    def __init__(
        self, memory, operands, *, blocks: int, threads: int, shared_words: int, teams: bool = False
    ):
        n = blocks * threads
        self.memory, self.blocks, self.threads, self.n = memory, blocks, threads, n
        self.shared = np.full((1 if teams else blocks, shared_words), 0xDEADBEEF, U32)
        self.registers = {f"${i}": np.full(n, x, U64) for i, x in enumerate(operands)}
        own = np.arange(n) if teams else np.tile(np.arange(threads), blocks)
        self.registers["%tid.x"] = own.astype(U64)
        self.registers["%cluster_ctarank"] = np.repeat(np.arange(blocks), threads).astype(U64)
        self.block = np.zeros(n, int) if teams else np.repeat(np.arange(blocks), threads)
        self.awake = np.ones(n, bool)
        self.waits = {}  # threads that wait for each label

    def run(self, text: str) -> None:
        for line in instructions(text):
            if line.endswith(":"):
                self.awake = self.awake | self.waits.pop(line[:-1], False)
                continue
            self.step(line)

    def step(self, line: str) -> None:
        active = self.awake
        if not active.any():
            return
        op, arguments, active = self.parsed(line, active)
        if op[0] == "bra":
            here = active.reshape(-1, 32)
            assert (here.all(1) | ~here.any(1)).all(), "a branch of a part of a warp"
            self.waits[arguments[0]] = self.waits.get(arguments[0], False) | active
            self.awake = self.awake & ~active
            return
        if op[0] in ("bar", "barrier"):
            here = active.reshape(self.blocks, -1)
            assert here.all() if op[0] == "barrier" else (here.all(1) | ~here.any(1)).all(), line
            return
        if not active.any():
            return
        getattr(self, f"do_{op[0]}")(op, arguments, active)

    def parsed(self, line: str, active):
        """Parts of an instruction's name, its arguments, and which of the threads take it."""
        predicate, op, arguments = parts_of(line)
        if predicate:
            taken = self.registers[predicate.lstrip("!")].astype(bool)
            active = active & (~taken if predicate[0] == "!" else taken)
        return op, arguments, active

    # values ---------------------------------------------------------------------------------

    def get(self, name: str, kind: str = "u32"):
        given = number(name)
        if given is not None and name not in self.registers:
            self.registers[name] = np.full(self.n, given, U64)
        value = self.registers[name]
        if kind.endswith("64"):
            return value
        value = value.astype(U32)
        return value.view(np.int32) if kind[0] == "s" else value

    def put(self, name: str, value, active) -> None:
        value = np.asarray(value)
        if value.dtype == np.int32:
            value = value.view(U32)
        if name not in self.registers:
            self.registers[name] = np.full(self.n, 0xBADBADBAD, U64)
        self.registers[name] = np.where(active, value.astype(U64), self.registers[name])

    def binary(self, op, a, active) -> None:
        x, y = self.get(a[1], op[-1]), self.get(a[2], op[-1])
        with np.errstate(over="ignore"):
            self.put(a[0], CALLS[op[0]](x, y), active)

    do_add = do_sub = do_xor = do_shr = do_min = do_max = binary

    def do_and(self, op, a, active) -> None:
        self.binary(op, a, active)

    def do_not(self, op, a, active) -> None:
        self.put(a[0], 1 - self.registers[a[1]], active)

    def do_mov(self, op, a, active) -> None:
        self.put(a[0], self.get(a[1]), active)

    def do_cvt(self, op, a, active) -> None:
        self.put(a[0], self.get(a[1]), active)

    def do_mul(self, op, a, active) -> None:
        self.do_mad(op, [*a, "0"], active)

    def do_mad(self, op, a, active) -> None:
        kind = op[-1]
        if op[1] == "lo":
            x, y, z = (self.get(n) for n in a[1:])
            with np.errstate(over="ignore"):
                self.put(a[0], x * y + z, active)
            return
        x, y = (self.get(n, kind).astype(np.int64) for n in a[1:3])
        self.put(a[0], (x * y).view(U64) + self.get(a[3], "u64"), active)

    def do_setp(self, op, a, active) -> None:
        kind = op[-1]
        found = COMPARE[op[1]](self.get(a[1], kind), self.get(a[2], kind))
        if len(op) == 4:
            assert op[2] == "and"
            found = found & self.registers[a[3]].astype(bool)
        self.put(a[0], found.astype(U64), active)

    def do_selp(self, op, a, active) -> None:
        p = self.registers[a[3]].astype(bool)
        self.put(a[0], np.where(p, self.get(a[1]), self.get(a[2])), active)

    def do_bfe(self, op, a, active) -> None:
        x, low, bits = self.get(a[1]), int(a[2]), int(a[3])
        self.put(a[0], (x >> U32(low)) & U32((1 << bits) - 1), active)

    def do_dp4a(self, op, a, active) -> None:
        x, y, total = self.get(a[1]), self.get(a[2]), self.get(a[3])
        for n in range(0, 32, 8):
            total = total + ((x >> U32(n)) & U32(255)) * ((y >> U32(n)) & U32(255))
        self.put(a[0], total, active)

    # warps ----------------------------------------------------------------------------------

    def do_shfl(self, op, a, active) -> None:
        to, _, ok = a[0].partition("|")
        lane = np.arange(self.n) % 32
        x, n = self.get(a[1]), int(a[2])
        if op[2] == "up":
            own = 32 - (int(a[3]) >> 8)  # lanes of a part of the warp
            source, good = lane - n, lane % own >= n
        elif op[2] == "bfly":
            source, good = lane ^ n, np.ones(self.n, bool)
        else:
            assert op[2] == "idx"
            source, good = np.full(self.n, n), np.ones(self.n, bool)
        source = np.where(good, source, lane)
        self.put(to, x.reshape(-1, 32)[np.arange(self.n) // 32, source], active)
        if ok:
            self.put(ok, good.astype(U64), active)

    def do_redux(self, op, a, active) -> None:
        here = active.reshape(-1, 32)
        assert (here.all(1) | ~here.any(1)).all(), "a sum of a part of a warp"
        sums = self.get(a[1]).reshape(-1, 32).sum(1, dtype=U32)
        self.put(a[0], np.repeat(sums, 32), active)

    # memory ---------------------------------------------------------------------------------

    def places(self, text: str, shared: bool):
        name, _, offset = text[1:-1].partition("+")
        at = self.registers[name].astype(np.int64) + int(offset or 0)
        assert shared or (at[self.awake] % 4 == 0).all()
        return at

    def window(self, op, at, active):
        """Block and word of addresses of shared memory: blocks have windows of 2^24 bytes."""
        where = at & 0xFFFFFFFF
        block = np.where(where >> 24 > 0, (where >> 24) - 1, self.block)
        local = "cluster" not in "".join(op)
        assert not (local and active.any()) or (where[active] >> 24 == 0).all()
        return block, (where & 0xFFFFFF) // 4

    def do_mapa(self, op, a, active) -> None:
        self.put(a[0], self.get(a[1]) + ((self.get(a[2]) + U32(1)) << U32(24)), active)

    def do_ld(self, op, a, active) -> None:
        shared = "shared" in op[1]
        at = self.places(a[1], shared)
        names = re.findall(r"[$\w]+", a[0])
        if shared:
            assert (at[active] % (4 * len(names)) == 0).all(), "an address that is not aligned"
        for i, name in enumerate(names):
            if shared:
                block, word = self.window(op, at + 4 * i, active)
                value = np.zeros(self.n, U32)
                value[active] = self.shared[block[active], word[active]]
            else:
                value = np.zeros(self.n, U64)
                value[active] = self.memory[at[active] // 4 + i]
                if op[-1] == "b64":
                    value[active] |= self.memory[at[active] // 4 + 1].astype(U64) << U64(32)
            self.put(name, value, active)

    def do_mbarrier(self, op, a, active) -> None:
        """Of a barrier its word has the bytes that it still waits for."""
        block, word = self.window(op, self.places(a[op[1] in ("arrive", "try_wait")], True), active)
        where = block[active], word[active]
        match op[1]:
            case "init":
                self.shared[where] = 0
            case "arrive":
                np.add.at(self.shared, where, self.get(a[2])[active])
            case "try_wait":  # all threads are in step: what is not there now never comes
                assert (self.shared[where] == 0).all(), "words that nobody has sent"
                self.put(a[0], np.ones(self.n, U64), active)

    def do_createpolicy(self, op, a, active) -> None:
        pass

    def do_fence(self, op, a, active) -> None:
        pass

    def do_cp(self, op, a, active) -> None:
        """A bulk copy from memory, there at once; its barrier waits for that many bytes less."""
        size = int(a[2])
        for thread in np.flatnonzero(active):
            to, source, barrier = (self.places(a[i], i != 1)[thread] // 4 for i in (0, 1, 3))
            shared = self.shared[self.block[thread]]
            shared[to : to + size // 4] = self.memory[source : source + size // 4]
            shared[barrier] -= U32(size)

    def do_st(self, op, a, active) -> None:
        if op[1] == "async":
            block, word = self.window(op, self.places(a[2], True), active)
            np.subtract.at(self.shared, (block[active], word[active]), U32(4))
        shared = "shared" in "".join(op)
        at = self.places(a[0], shared)
        for i, name in enumerate(re.findall(r"[$\w]+", a[1])):
            value = self.get(name)
            if shared:
                block, word = self.window(op, at + 4 * i, active)
                self.shared[block[active], word[active]] = value[active]
            else:
                self.memory[at[active] // 4 + i] = value[active]

    def do_red(self, op, a, active) -> None:
        block, word = self.window(op, self.places(a[0], True), active)
        np.add.at(self.shared, (block[active], word[active]), self.get(a[1])[active])


def select(
    ranks, starts, ends, origins=None, places=None, first=0,
    *, k: int, shape, ranked=False, eager=False, ahead=False, whole=False,
):  # fmt: skip
    """``select_sm90.select``; ``ahead``: one thread block, or each of its teams, has several rows,
    and copies the next one."""
    from mla_jax.pallas.topk import select_sm90 as kernel

    rows, columns = ranks.shape
    form = kernel.Form(
        starts=starts is not None,
        origins=origins is not None,
        places=places is not None,
        ranked=ranked,
        eager=eager,
        ahead=ahead,
        whole=whole,
    )
    given = [ends if x is None else x for x in (starts, ends, origins, places)]
    results = np.full((1 + ranked, len(ends) if whole else rows, k), UNTOUCHED)
    parts = [np.ascontiguousarray(x, np.int32).ravel() for x in (ranks, *given, *results)]
    at = np.cumsum([0, *map(len, parts)])
    memory = np.concatenate(parts).view(U32)
    text = kernel.program(k, columns, shape, form)
    words = shape.teams * (shape.words(k, form) + columns * ahead)
    size = {"blocks": shape.teams * shape.blocks, "threads": shape.threads, "shared_words": words}
    shared, own = None, np.repeat(np.arange(shape.teams), shape.blocks * shape.threads)
    for turn, start in enumerate(range(0, rows, shape.teams)):
        # A team without a row repeats the last one.
        row = np.minimum(start + own, rows - 1)
        after = start + shape.teams + own
        following = np.minimum(after, rows - 1) if after[0] < rows else 2**32 - 1
        numbers = row, first + row, following, turn % 2
        operands = [*(4 * at[:6]), 4 * at[5 + ranked], 0, *numbers]
        machine = Machine(memory, operands, **size, teams=shape.teams > 1)
        if ahead and turn:
            machine.shared = shared
        elif ahead:
            machine.run(kernel.first_copy(k, columns, shape, form))
        machine.run(text)
        shared = machine.shared
    found = memory[at[5] :].view(np.int32).reshape(results.shape)
    return tuple(found) if ranked else found[0]
