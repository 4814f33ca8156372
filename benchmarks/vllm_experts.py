"""``python -m benchmarks.vllm_experts OUT``: vLLM's fused Triton experts, in a process of its own.

Its file is what ``benchmarks.experts --beside OUT`` compares with. Run it on the same machine right
before, in the environment of ``shared/peers/vllm`` (``/tmp/b`` once ``go.sh`` has unpacked):
``PYTHONPATH=/tmp/b/fix:/tmp/b/tree:/tmp/b/site``. Both of vLLM's configurations are timed where the
model has 64 experts: the default, and the table that it ships for 1,280 columns.
"""

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from benchmarks.expert_cases import CASES, Model

CALLS, RUNS = 20, 5
METHOD = (
    f"a CUDA graph of {CALLS} calls of fused_experts, one after the other, each with the next "
    f"experts; median of {RUNS}"
)
LIKE = "E=64,N=1280,device_name=NVIDIA_H200.json"  # vLLM's table nearest to V2-Lite's experts


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    import torch
    from vllm.model_executor.layers.fused_moe import fused_moe

    def rows(name: str):
        model, tokens = CASES[name]
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, model.hidden, device="cuda", generator=generator).bfloat16()
        share = torch.rand(tokens, model.topk, device="cuda", generator=generator)
        order = torch.rand(tokens, model.experts, device="cuda", generator=generator)
        return x, share / share.sum(1, keepdim=True), order.argsort(dim=1)[:, : model.topk].int()

    def weights(model: Model):
        shapes = (2 * model.width, model.hidden), (model.hidden, model.width)
        found = [
            torch.empty(model.experts, *s, device="cuda", dtype=torch.bfloat16) for s in shapes
        ]
        for w in found:
            w.normal_(0, w.shape[2] ** -0.5)
        return found

    def error(name: str, w1, w2) -> float:
        """Relative to float32, of one token."""
        x, share, experts = rows(name)
        got = fused_moe.fused_experts(x, w1, w2, share, experts)[0].float()
        want = torch.zeros_like(got)
        for s, e in zip(share[0], experts[0], strict=True):
            gate, up = (w1[e].float() @ x[0].float()).chunk(2)
            want += s * (w2[e].float() @ (torch.nn.functional.silu(gate) * up))
        return float((got - want).norm() / want.norm())

    def us(name: str, w1, w2) -> float:
        x, share, experts = rows(name)
        moved = [(experts + i) % len(w1) for i in range(CALLS)]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # Triton compiles here, not in the graph
            fused_moe.fused_experts(x, w1, w2, share, moved[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for e in moved:
                fused_moe.fused_experts(x, w1, w2, share, e)
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times) / CALLS

    folder = Path("/tmp/moe_tables")
    folder.mkdir(exist_ok=True)
    shipped = Path(fused_moe.__file__).parent / "configs" / LIKE
    shutil.copy(shipped, folder / LIKE.replace("N=1280", "N=1408"))
    record = {"device": torch.cuda.get_device_name(), "method": METHOD, "cases": {}}
    model = pair = None
    for name in sorted(chosen, key=list(CASES).index):
        if CASES[name][0] != model:
            pair = None
            model, pair = CASES[name][0], weights(CASES[name][0])
        row = {}
        for label in ("default", "n1280") if model.experts == 64 else ("default",):
            os.environ.pop("VLLM_TUNED_CONFIG_FOLDER", None)
            if label != "default":
                os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)
            fused_moe.get_moe_configs.cache_clear()
            row |= {label: us(name, *pair), f"{label}_error": error(name, *pair)}
        record["cases"][name] = row
        print(name, row, flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
