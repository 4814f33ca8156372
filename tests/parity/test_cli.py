"""The same comparison through the command line: token ids and log-probabilities."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.parity import checkpoint, reference
from tests.parity.compare import LOGIT_TOLERANCE
from tests.parity.families import FAMILIES

torch.set_num_threads(1)
LENGTHS = (1, 16, 17, 70)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in FAMILIES if c.name.endswith("small")], ids=str)
def test_generate_json(case, tmp_path):
    model = reference.build(case)
    ref = reference.greedy(model, reference.prompts(case, LENGTHS), steps=12)
    folder = checkpoint.save_released(model, case, tmp_path / "model", shards=2)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": p}) + "\n" for p in ref.prompts))
    entry = "from mla_jax.cli import main; main()"
    command = [sys.executable, "-c", entry, "generate", str(folder)]
    command += ["--prompts-file", str(file), "--max-new-tokens", "12", "--ignore-eos"]
    command += ["--dtype", "float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt_ids"] for line in lines] == ref.prompts
    assert [line["token_ids"] for line in lines] == ref.tokens.tolist()
    assert {line["finish_reason"] for line in lines} == {"length"}
    np.testing.assert_allclose(
        [line["logprobs"] for line in lines], ref.logprobs(), atol=LOGIT_TOLERANCE
    )
