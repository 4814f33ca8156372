"""The assembly that widens e4m3 keys, run line by line by a small model of a warp."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax.pallas.dense_decode import widen_sm90 as widen

KB = 1024
ARITHMETIC = {
    "mov.u32": lambda a: a,
    "mul.lo.u32": lambda a, b: a * b,
    "bfe.u32": lambda a, at, size: (a >> at) & ((1 << size) - 1),
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "add.u32": lambda a, b: a + b,
}


def step(line, regs, memory):
    """One instruction of one thread."""
    op, rest = line.rstrip(";").split(" ", 1)
    names = re.findall(r"[\w%$.]+", rest)
    if op.startswith(("ld.shared", "st.shared")):
        base, offset = re.search(r"\[(\w+)\+(\d+)\]", rest).groups()
        at = regs[base] + int(offset)
        assert at % 16 == 0, "a unit of 16 bytes"
        words = memory[at : at + 16].view(np.uint32)
        for i, name in enumerate(re.search(r"\{(.*)\}", rest)[1].split(", ")):
            if op.startswith("ld"):
                regs[name] = int(words[i])
            else:
                words[i] = regs[name]
    elif op == "mov.b32":
        low, high, word = names
        regs[low], regs[high] = regs[word] & 0xFFFF, regs[word] >> 16
    elif op == "cvt.rn.f16x2.e4m3x2":
        pair = np.asarray([regs[names[1]]], np.uint16).view(ml_dtypes.float8_e4m3fn)
        regs[names[0]] = int(pair.astype(np.float16).view(np.uint32)[0])
    elif op == "cvt.f32.f16":
        regs[names[0]] = np.asarray([regs[names[1]]], np.uint16).view(np.float16)[0]
    elif op == "cvt.rn.bf16x2.f32":
        to, high, low = names
        pair = np.asarray([regs[low], regs[high]], np.float32).astype(ml_dtypes.bfloat16)
        regs[to] = int(pair.view(np.uint32)[0])
    else:
        to, *sources = names
        values = [int(s) if s.isdigit() else regs[s] for s in sources]
        regs[to] = ARITHMETIC[op](*values)


def run(lines, memory, base, backwards):
    """All threads of a warpgroup; between two of its barriers one thread after the other."""
    threads = [{"%tid.x": 256 + i, "$0": base} for i in range(128)]
    for stretch in "\n".join(lines).split(widen.SYNC):
        for regs in threads[:: -1 if backwards else 1]:
            for line in filter(None, stretch.split("\n")):
                step(line, regs, memory)


def unit(row, byte):
    """Place of a byte in swizzled tiles of 8 rows x 128 bytes."""
    return row % 8 * 128 + ((byte // 16) ^ row % 8) * 16 + byte % 16


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_byte_becomes_its_number(dtype, columns, backwards, rng):
    codes = rng.integers(0, 256, (64, columns)).astype(np.uint8)
    codes[codes % 128 == 127] = 1  # a NaN stays one, but not bit for bit
    memory = rng.integers(0, 256, 3 * codes.size).astype(np.uint8)
    before = memory.copy()
    base = KB
    for r, c in np.ndindex(*codes.shape):
        memory[base + codes.size + r * columns + c] = codes[r, c]
    run(widen._keys(jnp.dtype(dtype), columns), memory, base, backwards)
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).astype(stored)
    got = np.zeros_like(wanted)
    for r, c in np.ndindex(*codes.shape):
        at = base + r // 8 * columns * 16 + c // 64 * KB + unit(r, c % 64 * 2)
        got[r, c] = memory[at : at + 2].view(stored)[0]
    np.testing.assert_array_equal(got, wanted)
    around = [slice(base), slice(base + 2 * codes.size, None)]
    assert all((memory[s] == before[s]).all() for s in around)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_through_registers(dtype, half, rng):
    codes = rng.integers(0, 256, (32, 576)).astype(np.uint8)
    codes[codes % 128 == 127] = 1
    memory = np.concatenate([codes.ravel(), np.zeros(72 * KB, np.uint8)])
    latent, rope, words = codes.size, codes.size + 64 * KB, 36
    for thread in range(128):
        regs = {"%tid.x": 256 + thread, f"${words}": 0}
        for line in widen._take():
            step(line, regs, memory)
        taken = {f"${2 + i}": regs[f"${i}"] for i in range(words)}
        regs = {"%tid.x": 256 + thread, "$0": latent, "$1": rope, **taken}
        for line in widen._put(jnp.dtype(dtype), half):
            step(line, regs, memory)
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).astype(stored)
    got = np.zeros_like(wanted)
    for r, c in np.ndindex(32, 576):
        row = 32 * half + r
        tile = latent + row // 8 * 8 * KB + c // 64 * KB if c < 512 else rope + row // 8 * KB
        at = tile + unit(row, c % 64 * 2)
        got[r, c] = memory[at : at + 2].view(stored)[0]
    np.testing.assert_array_equal(got, wanted)
