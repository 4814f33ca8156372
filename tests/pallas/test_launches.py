"""What a decode step launches, from its program compiled for an H200 without one."""

import collections

import pytest

from benchmarks.random_model import of_layers
from mla_jax.model.presets import V2_LITE
from mla_jax.model.stack import LAYERS_A_TURN
from tests import aot
from tests.pallas.experts import missing
from tools import assembly, launches

WITHOUT = aot.available() or missing("triton")
TEXT = """
%body.1 (x: s32[]) -> s32[] {
  %a = bf16[8,4]{1,0} fusion(%x), kind=kCustom, calls=%sliced
  %b = (bf16[8]{0}, s32[]) fusion-start(%x), calls=%plain
  %c = bf16[8]{0} fusion-done(%b)
}

%sliced (x: s32[]) -> bf16[8,4] {
  ROOT %d = bf16[8,4]{1,0} custom-call(%x), custom_call_target="__cublas$gemm"
}

ENTRY %main (x: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %w = (s32[], bf16[8]{0}) while(%p), condition=%cond, body=%body.1
  ROOT %m = s32[] custom-call(%w), custom_call_target="mosaic_gpu_v2"
}
"""


def test_a_program_is_read():
    assert list(launches.launches(TEXT)) == [
        (0, "while", "(s32[], bf16[8]{0})"),
        (1, "product", "bf16[8,4]{1,0}"),
        (1, "fusion", "(bf16[8]{0}, s32[])"),
        (0, "mosaic", "s32[]"),
    ]


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_compiles_a_decode_step_of_few_launches():
    """Layers of V2-Lite with experts, of one request: no weight is copied, small steps are few."""
    found = list(launches.launches(launches.compiled(V2_LITE, batch=1, context=4096)))
    loop = next(i for i, (_, kind, _) in enumerate(found) if kind == "while")
    turn = []
    for depth, kind, _ in found[loop + 1 :]:
        if depth == 0:
            break
        turn.append(kind)
    # queries, latents, values, output
    # new rows and absorbed queries; norm with scores, and choice; the shared expert's gate and up,
    # down; the others' gate and up, down, the sum with what follows
    # attention and its merge
    # the shared expert's result, the layer's number
    layer = {"product": 4, "triton": 8, "mosaic": 2, "fusion": 2}
    each = collections.Counter({kind: LAYERS_A_TURN * count for kind, count in layer.items()})
    each["fusion"] += 2  # the loop's counter, the shared expert's number
    assert collections.Counter(turn) == each


def test_an_order_of_instructions():
    sass = """
        /*0180*/  @!P4 LDG.E.128 R4, desc[UR6][R4.64] ;
        /*01e0*/       LDG.E R16, desc[UR6][R16.64] ;
        /*03a0*/       STS.128 [R11+UR4], R20 ;
        /*03b0*/       BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*03c0*/       LDGSTS.E.BYPASS.128 [R13], desc[UR16][R94.64] ;
        /*03d0*/       FADD R1, R2, R3 ;
    """
    assert assembly.order(sass) == "LDG2 STS BAR LDGSTS"


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_compiles_small_kernels_that_spill_nothing():
    found = list(assembly.kernels(of_layers(V2_LITE, 4), batch=1, context=4096))
    names = {kernel.name for kernel in found}
    assert {"append", "logits_normed", "choose", "gate_up", "down", "add_norm"} <= names
    assert all(kernel.taken.stack == 0 for kernel in found)
    new_rows = next(kernel for kernel in found if kernel.name == "append")
    assert "LDG9 STS" in new_rows.order, "weights and queries are not read at once"


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_compiles_trials_of_a_decode_step(monkeypatch):
    """Those of ``card_trials`` with kernels of their own: as many launches."""
    from benchmarks import choosing  # needs Triton, as the next one
    from mla_jax.pallas import triton_lib

    def found():
        text = launches.compiled(V2_LITE, batch=1, context=4096)
        return collections.Counter(kind for _, kind, _ in launches.launches(text))

    plain = found()
    monkeypatch.setattr(triton_lib, "call", choosing.Choosing(triton_lib.call))
    assert found() == plain


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_compiles_a_step_that_fills_the_memory():
    """131 GB of weights and caches on an H200: nothing is computed twice to save memory."""
    full = launches.compiled(V2_LITE, batch=32, context=100_352)
    assert ".remat" not in full
