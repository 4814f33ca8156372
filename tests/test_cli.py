import json
import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax import nnx

from mla_jax import cli
from mla_jax.cache import ELEMENT_FORMATS
from mla_jax.engine import Engine
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.prefill_crossover import PathRate, PrefillCrossover
from mla_jax.model.weights import save
from tests.model import tiny

CONFIG = tiny.config(layers=1, sparse_layers=(False,), moe=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of one dense layer with a tokenizer of the words w0 … w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("model")
    model = DeepseekV3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    save(root, CONFIG, {".".join(map(str, path)): v.get_value() for path, v in params})
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(root / "tokenizer.json"))
    return root


@pytest.fixture
def run(capsys):
    """Run a command in this process: its exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in args])
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def settings(monkeypatch):
    """What an engine would be built with, without building it."""
    seen = {}

    class Enough(Exception):
        pass

    def build(_, **given):
        seen.update(given)
        raise Enough

    monkeypatch.setattr(Engine, "from_pretrained", build)

    def ask(*args: object) -> dict:
        with pytest.raises(Enough):
            cli.main([str(a) for a in args])
        return seen

    return ask


def test_generate_prints_one_json_line_per_request_in_order(run, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    given = [{"prompt_ids": list(range(1, 20))}, {"prompt": "w7 w8"}, {"prompt_ids": [3]}]
    file.write_text("\n".join(map(json.dumps, given)) + "\n\n")
    args = ("--prompts-file", file, "--max-new-tokens", 4, "--dtype", "float32", "--ignore-eos")
    code, out, err = run("generate", folder, *args, "--json", "--page-size", 8)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [x["prompt_ids"] for x in lines] == [list(range(1, 20)), [7, 8], [3]]
    for x in lines:
        assert set(x) == {"prompt_ids", "token_ids", "logprobs", "finish_reason", "text"}
        assert x["finish_reason"] == "length"
        assert len(x["token_ids"]) == len(x["logprobs"]) == 4
        assert x["text"] == " ".join(f"w{i}" for i in x["token_ids"])
    assert "12 tokens in" in err


def test_settings_follow_the_prompts_unless_given(settings, folder):
    args = ("generate", folder, "--prompt-ids", "1, 2,3", "--max-new-tokens", 6)
    small = settings(*args, "--page-size", 4)
    assert small.pop("progress")
    assert small == {
        "dtype": jnp.dtype("bfloat16"),
        "cache_format": "bf16",
        "num_pages": 3,  # 8 rows, and the null page
        "page": 4,
        "max_requests": 1,
        "prefill_chunk": 512,
        "max_model_len": 9,
        "backend": None,
    }
    given = settings(
        *(*args, "--dtype", "float32", "--num-pages", 99, "--max-model-len", 64),
        *("--prefill-chunk", 32, "--backend", "xla"),
    )
    assert (given["cache_format"], given["num_pages"], given["max_model_len"]) == ("fp32", 99, 64)
    assert (given["prefill_chunk"], given["backend"]) == (32, "xla")
    assert settings(*args, "--cache-dtype", "fp8_e4m3")["cache_format"] == "fp8_e4m3"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "prompts: given 0 sources; allowed: exactly one of"),
        (("--prompt-ids", "1", "--prompt", "w1"), "prompts: given 2 sources"),
        (("--prompt-ids", ""), "--prompt-ids: given no tokens"),
        (("--prompt-ids", "1,x"), "--prompt-ids: token 1: given 'x'; allowed: integers from 0"),
        (("--prompt-ids", "1,64"), "--prompt-ids: token 1: given 64"),
        (("--prompt-ids", "1,-2"), "--prompt-ids: token 1: given -2"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "max_new_tokens: given 0"),
        (("--prompt-ids", "1", "--max-new-tokens", "x"), "x"),
        (("--prompt-ids", "1", "--max-new-tokens", "512"), "1 tokens and 512 new ones"),
        (("--prompt-ids", "1,2", "--max-model-len", "17"), "allowed: at most 17 together"),
        (("--prompt-ids", "1", "--max-model-len", "513"), "max_model_len: given 513"),
        (("--prompt-ids", "1", "--num-pages", "1"), "num_pages: given 1; allowed: 2 or more"),
        (("--prompt-ids", "1", "--page-size", "0"), "page: given 0"),
        (("--prompt-ids", "1", "--max-requests", "0"), "max_requests: given 0"),
        (("--prompt-ids", "1", "--prefill-chunk", "0"), "max_prefill_tokens: given 0"),
        (("--prompt-ids", "1", "--temperature", "-1"), "temperature: given -1.0"),
        (("--prompt-ids", "1", "--stop-ids", "70"), "--stop-ids: token 0: given 70"),
        (("--prompt-ids", "1", "--dtype", "int8"), "'float32' or 'bfloat16'"),
        (("--prompt-ids", "1", "--cache-dtype", "int8"), "'--cache-dtype'"),
        (("--prompts-file", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(run, folder, args, message):
    code, out, err = run("generate", folder, *args)
    assert (code, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("mla-jax: ")
    assert message in line
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: given no JSON"),
        ("[" * 5000, "line 2: given no JSON"),
        ("[1]", "line 2: given list"),
        ('{"ids": [1]}', "line 2: given keys ids"),
        ('{"prompt_ids": [1], "prompt": "w1"}', "line 2: given keys prompt_ids, prompt"),
        ('{"prompt_ids": [1, 2.5]}', "line 2: token 1: given 2.5"),
        ('{"prompt_ids": [true]}', "line 2: token 0: given True"),
        ('{"prompt_ids": ["1"]}', "line 2: token 0: given '1'"),
        ('{"prompt_ids": []}', "line 2: given no tokens"),
        ('{"prompt": ""}', "line 2: given no tokens"),
        ('{"prompt": 3}', "line 2: given keys prompt;"),
    ],
)
def test_a_bad_line_is_named_and_nothing_runs(run, folder, tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [1]}\n' + line + "\n")
    code, out, err = run("generate", folder, "--prompts-file", file, "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"mla-jax: {file} {message}")


@pytest.mark.parametrize(("content", "message"), [(b"\n \n", "no prompts"), (b"\xff", "UTF-8")])
def test_a_file_without_prompts_is_refused(run, folder, tmp_path, content, message):
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    code, _, err = run("generate", folder, "--prompts-file", file)
    assert code == 2
    assert message in err


def test_text_without_a_tokenizer_is_refused(run, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    code, _, err = run("generate", tmp_path, "--prompt", "w1")
    assert code == 2
    assert "Text needs tokenizer.json in the folder and pip install 'mla-jax[hf]'" in err
    (tmp_path / "tokenizer.json").write_text("{}")
    code, _, err = run("generate", tmp_path, "--prompt", "w1")
    assert code == 2
    assert "tokenizer.json" in err


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_folder_that_is_no_model_is_refused(run, tmp_path, command):
    code, out, err = run(command, tmp_path / "none")
    assert (code, out) == (2, "")
    assert "none" in err


def test_inspect_counts_bytes(run, folder):
    code, out, _ = run("inspect", folder, "--json", "--memory", 1, "--dtype", "float32")
    facts = json.loads(out)
    row = CONFIG.dims.row
    assert code == 0
    assert facts["family"] == "deepseek_v3"
    assert facts["cache_bytes_per_token"] == {
        name: CONFIG.layers * row * f.itemsize for name, f in ELEMENT_FORMATS.items()
    }
    held = facts["weight_bytes_float32"]
    assert held["weights"] == 4 * facts["parameters"]
    assert facts["tokens_in_1_gib"]["bf16"] == (2**30 - sum(held.values())) // (2 * row)
    _, out, _ = run("inspect", folder)
    assert "family: deepseek_v3" in out
    assert "rank=16" in out


@pytest.mark.parametrize(
    "op",
    [
        "write_latent",
        "gather_latent",
        "copy_blocks",
        "swap_blocks",
        "mla_decode",
        "mla_prefill",
        "merge_attn_states",
        "apply_sinks",
    ],
)
def test_explain_names_a_backend_for_every_operation(run, op):
    code, out, _ = run("explain", op, "--heads", 16, "--page-size", 32)
    assert code == 0
    assert "xla" in out


def test_explain_refuses_what_does_not_exist(run):
    code, _, err = run("explain", "mla_decod")
    assert code == 2
    assert "mla_decode" in err


def test_the_support_matrix_is_a_table(run):
    code, out, _ = run("support-matrix")
    assert code == 0
    assert out.startswith("|")
    assert "dense_decode" in out


def test_without_its_packages_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import mla_jax.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.strip() == "mla-jax needs typer: pip install 'mla-jax[cli]'"


def test_explain_prefill_crossover(run, monkeypatch):
    code, out, _ = run("explain", "prefill_crossover")
    assert code == 0
    assert "no measured rates for cpu" in out
    rate = PathRate(tflops=600.0, fixed_us=0.0)
    monkeypatch.setattr(
        PrefillCrossover,
        "of",
        classmethod(
            lambda cls, dims, device: cls(
                dims=dims,
                run=4,
                multiprocessors=132,
                expanded=rate,
                absorbed=rate,
                projection_tflops=600.0,
                measured="made up",
            )
        ),
    )
    _, out, _ = run("explain", "prefill_crossover", "--tokens", 16, "--keys", 9000)
    assert "16 tokens on 9000 cached" in out
    assert "runs absorbed" in out
