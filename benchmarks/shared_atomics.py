"""``python -m benchmarks.shared_atomics``: cycles of Hopper's atomics in shared memory.

Each thread of one block executes an instruction 32 times; a pattern says at which words of shared
memory. A line has the cycles of the multiprocessor (``%clock64``) for one instruction of a warp,
with 1,024 threads and with 512. ``docs/log/indexer.md`` has what was measured.
"""

import ctypes

import numpy as np
import torch

__all__ = ["WAYS", "program"]

EACH, ENTRIES = 32, 2048

WAYS = {
    "an address only": "sub.u32 t, {x}, one; shr.u32 t, t, 10; min.u32 t, t, 8192;"
    "mad.lo.u32 t, t, 4, base; xor.b32 sum, sum, t;",
    "red.shared.add of 1": "red.shared.add.u32 [{x}], 1;",
    "of a number not known": "red.shared.add.u32 [{x}], one;",
    "st.shared": "st.shared.b32 [{x}], one;",
}
"""What a thread does with each of its addresses ``{x}``."""


def program(code: str) -> bytes:
    """PTX of ``k(places [EACH + 1, 1024] int32, a 1 behind them; cycles [1024] int64)``."""
    names = [f"x{i}" for i in range(EACH)]
    loads = (
        f"ld.global.b32 {x}, [at+{4096 * i}]; add.u32 {x}, {x}, base;" for i, x in enumerate(names)
    )
    return f"""
        .version 8.0
        .target sm_90a
        .address_size 64
        .visible .entry k(.param .u64 places, .param .u64 cycles)
        {{
        .reg .b32 {", ".join(names)}, tid, t, one, base, sum; .reg .b64 at, out, start, end;
        .shared .align 16 .b32 table[8192];
        ld.param.u64 at, [places]; ld.param.u64 out, [cycles];
        mov.u32 tid, %tid.x; mad.wide.u32 at, tid, 4, at; mad.wide.u32 out, tid, 8, out;
        mov.u32 base, table; mov.u32 sum, 0;
        {" ".join(loads)}
        ld.global.b32 one, [at+{4096 * EACH}];
        bar.sync 0; mov.u64 start, %clock64;
        {" ".join(code.format(x=x) for x in names)}
        bar.sync 0; mov.u64 end, %clock64;
        sub.u64 end, end, start; st.global.u64 [out], end;
        ld.shared.b32 t, [base]; add.u32 t, t, sum; st.global.b32 [at], t;
        ret;
        }}""".encode()


def _patterns() -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(0), (EACH, 1024)
    anywhere, one = rng.integers(0, ENTRIES, size), np.full(size, ENTRIES)
    floats = (12 + 5 * rng.normal(size=size)).astype(np.float32)
    patterns = {"one place": one, "anywhere": anywhere}
    patterns["top bits of floats"] = (floats.view(np.int32) >> 21) & (ENTRIES - 1)
    for part in (0.03, 0.25):
        patterns[f"{part:.0%} anywhere, else one place"] = np.where(
            rng.random(size) < part, anywhere, one
        )
    return patterns


def main() -> None:
    torch.cuda.init()
    cycles = torch.zeros(1024, dtype=torch.int64, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    for way, code in WAYS.items():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        assert not cuda.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(program(code)))
        assert not cuda.cuModuleGetFunction(ctypes.byref(function), module, b"k")
        for name, places in _patterns().items():
            found = []
            for threads in (1024, 512):
                given = np.concatenate([4 * places, np.ones((1, 1024))]).astype(np.int32)
                at = torch.from_numpy(given).cuda()
                pointers = [ctypes.c_void_p(x.data_ptr()) for x in (at, cycles)]
                operands = (ctypes.c_void_p * 2)(*(ctypes.addressof(x) for x in pointers))
                size = 1, 1, 1, threads, 1, 1, 0, None, operands, None
                assert not cuda.cuLaunchKernel(function, *size)
                torch.cuda.synchronize()
                found.append(int(cycles[:threads].max()) * 32 / (threads * EACH))
            print(f"{way:24} {name:34} {found[0]:6.2f} {found[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
