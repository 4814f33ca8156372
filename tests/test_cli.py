import functools
import json
import os
import shutil
import subprocess
import sys
import time
from types import ModuleType
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mla_jax
from mla_jax import cli, demo
from mla_jax.cache import ELEMENT_FORMATS
from mla_jax.commands.options import SamplingOptions
from mla_jax.engine import Engine, WarmUp
from mla_jax.errors import EngineError
from mla_jax.generation_config import GenerationDefaults
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.prefill_crossover import PathRate, PrefillCrossover
from mla_jax.model.sharding import named_leaves
from mla_jax.model.step import Step
from mla_jax.model.weights import save
from mla_jax.tokenizer import TextTokenizer
from tests.model import tiny

CONFIG = tiny.config(layers=1, sparse_layers=(False,), moe=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of one dense layer with a tokenizer of the words w0 … w63 and a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("model")
    model = DeepseekV3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    save(root, CONFIG, named_leaves(nnx.state(model, nnx.Param)))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(root / "tokenizer.json"))
    template = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"
    (root / "chat_template.jinja").write_text(template)
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


@pytest.mark.slow
def test_generate_prints_one_json_line_per_request(run, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    given = [{"prompt_ids": list(range(1, 20))}, {"prompt": "w7 w8"}, {"prompt_ids": [3]}]
    file.write_text("\n".join(map(json.dumps, given)) + "\n\n")
    args = ("--prompts-file", file, "--max-new-tokens", 4, "--dtype", "float32", "--ignore-eos")
    code, out, err = run("generate", folder, *args, "--json", "--page-size", 8)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [x["prompt_ids"] for x in lines] == [list(range(1, 20)), [7, 8], [3]]
    assert [x["index"] for x in lines] == [0, 1, 2]
    for x in lines:
        names = {"index", "prompt_ids", "token_ids", "logprobs", "finish_reason", "text"}
        assert set(x) == names
        assert x["finish_reason"] == "length"
        assert len(x["token_ids"]) == len(x["logprobs"]) == 4
        assert x["text"] == " ".join(f"w{i}" for i in x["token_ids"])
    assert "12 tokens in" in err


QUICK = ("--dtype", "float32", "--ignore-eos", "--page-size", 8)


def test_answers_are_printed_as_they_finish(run, folder, tmp_path, monkeypatch):
    """One prompt at a time: the first answer is out before the second prompt is computed."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2]}\n')
    printed, inner, step = [], cli._print_completion, Step.run

    def note(i, completion, *args, **kwargs):
        printed.append(i)
        inner(i, completion, *args, **kwargs)

    seen = []

    def watch(*args, **kwargs):
        seen.append(list(printed))
        return step(*args, **kwargs)

    monkeypatch.setattr(cli, "_print_completion", note)
    monkeypatch.setattr(Step, "run", watch)
    args = ("--prompts-file", file, "--max-new-tokens", 6, "--max-requests", 1)
    code, out, _ = run("generate", folder, *args, *QUICK)
    assert code == 0
    assert [line[:3] for line in out.splitlines()] == ["[0]", "[1]"]
    assert seen[0] == [] and seen[-1] == [0]


@pytest.mark.parametrize("moment", ["sent", "concluded"])
def test_an_interruption_loses_no_answer(run, folder, tmp_path, monkeypatch, moment):
    """Neither the one that is finished nor what the other has so far."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2]}\n')
    args = ("--prompts-file", file, "--max-new-tokens", 6, "--max-requests", 1, *QUICK, "--json")
    _, whole, _ = run("generate", folder, *args)
    owner, name = {"sent": (Step, "run"), "concluded": (Engine, "_conclude")}[moment]
    inner, count = getattr(owner, name), 0

    def interrupt(*args, **kwargs):
        nonlocal count
        count += 1
        found = inner(*args, **kwargs)
        if count == 9:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(owner, name, interrupt)
    code, out, err = run("generate", folder, *args)
    assert code == 130
    assert "Traceback" not in err
    first, second = map(json.loads, out.splitlines())
    want = list(map(json.loads, whole.splitlines()))
    assert first == want[0]
    assert second["finish_reason"] == "cancelled"
    told = second["token_ids"]
    assert told and told == want[1]["token_ids"][: len(told)]


def test_an_interruption_while_printing_loses_no_answer(run, folder, tmp_path, monkeypatch):
    """Three requests end in one step; the first is printed when the interruption comes."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt_ids": [{i}]}}\n' for i in (1, 2, 3)))
    inner, count = print, 0

    def interrupt(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        inner(*args, **kwargs)

    monkeypatch.setattr(cli, "print", interrupt, raising=False)
    args = ("--prompts-file", file, "--max-new-tokens", 3, "--ignore-eos", *QUICK, "--json")
    code, out, _ = run("generate", folder, *args)
    assert code == 130
    assert sorted(json.loads(line)["index"] for line in out.splitlines()) == [0, 1, 2]


@pytest.mark.parametrize("option", ["--chat", "--system=w8"])
def test_ids_of_a_file_are_no_chat(run, folder, tmp_path, option):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1]}\n')
    code, _, err = run("generate", folder, "--prompts-file", file, option)
    assert code == 2
    assert "line 1: given prompt_ids; allowed: texts or messages, with --chat or --system" in err


def test_chats_that_the_template_refuses_are_named_by_line(run, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w5"}\n{"messages": [{"role": "user", "content": NaN}]}\n')
    code, _, err = run("generate", folder, "--prompts-file", file, "--chat")
    assert code == 2 and "prompts.jsonl line 2: " in err


def test_several_prompts_on_the_command_line(folder, monkeypatch):
    read = []
    monkeypatch.setattr(cli, "_load", lambda *_, **__: None)
    monkeypatch.setattr(cli, "_serve", lambda engine, prompts, *_, **__: read.extend(prompts))
    with pytest.raises(SystemExit):
        cli.main(["generate", str(folder), "--prompt", "w5", "--prompt", "w6 w7"])
    assert read == [[5], [6, 7]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fit", "V2_LITE", "--batch", 3), "--batch: given 3; allowed: with --compile"),
        (
            ("fit", "V2_LITE", "--memory", 24, "--device", "H100"),
            "--memory: given 24.0, with --dev",
        ),
        (("explain", "mla_decode", "--backend", "foo"), "--backend: given foo; allowed: of mla_d"),
        (("explain", "routed_experts"), "given routed_experts; allowed: mla_decode, mla_prefill"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run, args, message):
    code, _, err = run(*args)
    assert code == 2 and message in err


def test_programs_are_a_folder_before_weights_are_read(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_load", lambda *_, **__: pytest.fail("weights were read"))
    file = tmp_path / "file"
    file.write_text("")
    for args in (("warm", folder), ("generate", folder, "--prompt-ids", "1")):
        code, _, err = run(*args, "--programs", file)
        assert code == 2 and f"--programs: given {file}" in err


def test_without_a_command_the_help_is_printed(run):
    code, out, err = run()
    assert code == 2 and "generate" in out and not err


def test_chats_of_options_and_files(folder, tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "w7"}\n')
    monkeypatch.setattr(cli, "_load", lambda *_, **__: None)
    monkeypatch.setattr(cli, "_serve", lambda engine, prompts, *_, **__: read.extend(prompts))

    def prompts(*args):
        read.clear()
        with pytest.raises(SystemExit):
            cli.main(["generate", *map(str, (folder, *args))])
        return list(read)

    read: list[list[int]] = []
    assert prompts("--prompt", "w9") == [[9]]
    assert prompts("--prompt", "w9", "--chat") == [[1, 9, 2]]
    assert prompts("--prompt", "w9", "--system", "w8") == [[1, 8, 1, 9, 2]]
    assert prompts("--prompts-file", file) == [[1, 5, 1, 6, 2], [7]]
    assert prompts("--prompts-file", file, "--chat") == [[1, 5, 1, 6, 2], [1, 7, 2]]
    system = "--prompts-file", file, "--system", "w8"
    assert prompts(*system) == [[1, 8, 1, 5, 1, 6, 2], [1, 8, 1, 7, 2]]
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors begin a file
    assert prompts(*system) == [[1, 8, 1, 5, 1, 6, 2], [1, 8, 1, 7, 2]]


@pytest.mark.parametrize("option", [("--chat",), ("--system", "w8")])
def test_ids_are_no_chat(run, folder, option):
    code, _, err = run("generate", folder, "--prompt-ids", "1,2", *option)
    assert code == 2
    assert f"{option[0]}: given --prompt-ids; allowed: with --prompt or --prompts-file" in err


def test_options_of_sampling(run, folder):
    ask = ("generate", folder, "--prompt-ids", "1", *QUICK, "--max-new-tokens", 6)
    bias = ("--logit-bias", "5:100,6:99.5", "--frequency-penalty", "1", "--logprobs", "2")
    code, out, _ = run(*ask, *bias, "--json")
    line = json.loads(out)
    assert (code, set(line["token_ids"])) == (0, {5, 6})
    assert [len(best) for best in line["top_logprobs"]] == [2] * 6
    code, out, _ = run(*ask, *bias, "--stop", "w6 w5", "--stop", "w99")
    answer, *tokens = out.splitlines()
    assert code == 0
    assert answer.startswith("[0] stop: ") and "w6" not in answer
    assert len(tokens) == answer.count("w5") + 2  # the two that say w6 w5


def test_generation_config_is_the_default_and_options_come_first(settings, copy, monkeypatch):
    seen = []
    monkeypatch.setattr(
        cli.SamplingParams, "__post_init__", lambda params: seen.append(params), raising=True
    )
    to = copy()
    advice = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 3}
    (to / "generation_config.json").write_text(json.dumps(advice))
    settings("generate", to, "--prompt-ids", "1")
    assert (seen[-1].temperature, seen[-1].top_p, seen[-1].max_new_tokens) == (0.6, 0.95, 3)
    settings("generate", to, "--prompt-ids", "1", "--temperature", 0, "--max-new-tokens", 5)
    assert (seen[-1].temperature, seen[-1].top_p, seen[-1].max_new_tokens) == (0, 0.95, 5)


@pytest.mark.parametrize("command", ["generate", "inspect", "warm"])
def test_a_hub_id_is_taken_or_refused_in_words(run, folder, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    more = {"generate": ("--prompt-ids", "1"), "warm": ("--programs", "p")}.get(command, ())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, out, err = run(command, "owner/name", *more)
    assert (code, out) == (2, "")
    assert "model owner/name: given no folder owner/name here" in err
    assert "pip install huggingface_hub" in err
    stub = ModuleType("huggingface_hub")
    stub.snapshot_download = lambda *_, **__: str(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)
    if command == "inspect":
        assert run("inspect", "owner/name")[0] == 0


def test_settings_follow_the_prompts_unless_given(settings, folder):
    args = ("generate", folder, "--prompt-ids", "1, 2,3", "--max-new-tokens", 6)
    small = settings(*args, "--page-size", 4)
    assert small.pop("progress")
    assert small.pop("text").vocab == 64
    assert small.pop("defaults") == GenerationDefaults()
    assert small == {
        "dtype": jnp.dtype("bfloat16"),
        "cache_format": "bf16",
        "num_pages": 3,  # 8 rows, and the null page
        "page": 4,
        "max_requests": 1,
        "prefill_chunk": None,
        "max_model_len": 9,
        "backend": None,
        "fp8_weights": None,
        "fp8_activations": None,
        "ignore_keys": (),
        "devices": None,
        "programs": None,
    }
    given = settings(
        *(*args, "--dtype", "float32", "--num-pages", 99, "--max-model-len", 64),
        *("--prefill-chunk", 32, "--backend", "xla", "--fp8-activations"),
    )
    assert given["fp8_activations"]
    assert (given["cache_format"], given["num_pages"], given["max_model_len"]) == ("fp32", 99, 64)
    assert (given["prefill_chunk"], given["backend"]) == (32, "xla")
    assert settings(*args, "--cache-dtype", "fp8_e4m3")["cache_format"] == "fp8_e4m3"


SMALL = ("--dtype", "float32", "--page-size", 8, "--max-requests", 2, "--max-model-len", 32)
SMALL += ("--prefill-chunk", 8)


@pytest.mark.slow
def test_programs_made_by_warm_serve_generate(run, folder, tmp_path, monkeypatch):
    """With the same settings nothing is compiled; how many prompts there are does not matter."""
    programs = tmp_path / "programs"
    code, out, err = run("warm", folder, *SMALL, "--programs", programs)
    assert code == 0
    files = sorted(programs.iterdir())
    assert f"{len(files)} rungs, a program each:" in out
    assert out.count("MLABucket(") == len(files) > 1
    assert f"{len(files)} programs ready in" in out.splitlines()[-1]
    assert "cache group latent: 1 layers, 9 pages of 8 tokens" in out
    assert f"{len(files)}/{len(files)}" in err

    def compile(*_):
        raise AssertionError("a program was compiled")

    monkeypatch.setattr(Step, "trace", compile)
    ask = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--ignore-eos")
    code, out, _ = run("generate", folder, *ask, *SMALL, "--programs", programs)
    assert code == 0
    assert out.startswith("[0] length: ")
    assert sorted(programs.iterdir()) == files
    with pytest.raises(AssertionError, match="compiled"):
        cli.main(["generate", *map(str, (folder, *ask, *SMALL, "--programs", tmp_path / "other"))])


@pytest.mark.slow
def test_what_xla_compiles_is_kept_where_asked(run, folder, tmp_path):
    """In a process of its own: JAX opens its cache once."""
    command = [sys.executable, "-m", "mla_jax", "generate", folder, "--prompt-ids", "1,2"]
    command += [*SMALL, "--max-new-tokens", "2", "--cache", tmp_path / "cache"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache").iterdir())) > 1


def test_the_bar_says_which_rung_and_how_long_still(run, folder, tmp_path, monkeypatch):
    def warm_up(engine, *, progress):
        for done in (1, 2):
            progress(WarmUp(done=done, total=3, bucket=f"rung {done}", seconds=10.0 * done))
        return 3

    monkeypatch.setattr(Engine, "warm_up", warm_up)
    code, _, err = run("warm", folder, *SMALL, "--programs", tmp_path)
    assert code == 0
    assert "ready: rung 1\nready: rung 2\n" in err
    assert "2/3" in err and "10 s left" in err


def test_devices_are_counted(settings, run, folder):
    args = ("generate", folder, "--prompt-ids", "1")
    assert settings(*args, "--devices", 1)["devices"] is None
    assert settings(*args, "--devices", 0)["devices"] == jax.local_devices()


@pytest.mark.parametrize(
    ("devices", "given", "then"), [(1, None, "1"), (1, "4", "4"), (0, None, None)]
)
def test_one_gpu_has_one_hardware_queue_unless_told_otherwise(
    settings, folder, devices, given, then
):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    with mock.patch.dict(os.environ):
        os.environ.pop(name, None)
        if given is not None:
            os.environ[name] = given
        settings("generate", folder, "--prompt-ids", "1", "--devices", devices)
        assert os.environ.get(name) == then


def test_more_devices_than_there_are_are_refused(run, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (("generate", "--prompt-ids", "1"), ("warm", "--programs", "nowhere")):
        code, _, err = run(command[0], folder, *command[1:], "--devices", 999)
        assert code == 2
        assert "--devices: given 999; allowed: at most" in err
    assert not list(tmp_path.iterdir())


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
        (("--prompt-ids", "1", "--max-model-len", "513"), "--max-model-len: given 513"),
        (("--prompt-ids", "1", "--num-pages", "1"), "num_pages: given 1; allowed: 2 or more"),
        (("--prompt-ids", "1", "--page-size", "0"), "page: given 0"),
        (("--prompt-ids", "1", "--max-requests", "0"), "max_requests: given 0"),
        (("--prompt-ids", "1", "--prefill-chunk", "0"), "prefill_chunk: given 0"),
        (("--prompt-ids", "1", "--temperature", "-1"), "temperature: given -1.0"),
        (("--prompt-ids", "1", "--stop-ids", "70"), "--stop-ids: token 0: given 70"),
        (("--prompt-ids", "1", "--min-p", "2"), "min_p: given 2.0; allowed: 0 to 1"),
        (("--prompt-ids", "1", "--repetition-penalty", "0"), "repetition_penalty: given 0.0"),
        (("--prompt-ids", "1", "--presence-penalty", "3"), "presence_penalty: given 3.0"),
        (("--prompt-ids", "1", "--logprobs", "21"), "logprobs: given 21; allowed: 0 to 20"),
        (("--prompt-ids", "1", "--stop", ""), "stop: given ''; allowed: a string that is not"),
        (
            ("--prompt-ids", "1", "--logit-bias", "1"),
            "--logit-bias: given '1'; allowed: TOKEN",
        ),
        (("--prompt-ids", "1", "--logit-bias", "5:1,5:2"), "--logit-bias: given token 5 twice"),
        (("--prompt-ids", "1", "--fp8-activations"), "None or False: no weight is e4m3"),
        (("--prompt-ids", "1", "--prompt-ids", "x"), "--prompt-ids: token 0: given 'x'"),
        (("--prompt-ids", "1", "--logit-bias", "64:1"), "--logit-bias: token 0: given 64"),
        (("--prompt-ids", "1", "--logit-bias", "1:nan"), "logit_bias: given '1: nan'"),
        (("--prompt-ids", "1", "--dtype", "int8"), "'int8' is not one of 'float32', 'bfloat16'"),
        (("--prompt-ids", "1", "--cache-dtype", "int8"), "'--cache-dtype'"),
        (("--prompts-file", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--no-such-option",), "--no-such-option"),
        (("--prompt-ids", "1", "--num-pages", "2147483648"), "num_pages: given 2147483648"),
        (("--prompt-ids", "1", "--num-pages", "2147483647"), "cache: given"),
        (("--prompt-ids", "1", "--page-size", "1000000000"), "device's memory. Use smaller pages."),
        (("--prompt-ids", "1", "--page-size", "100000000000"), "page: given 100000000000"),
        (("--prompt-ids", "9" * 5000), "--prompt-ids: token 0: given '999"),
        (("--prompt", "w1 \ud800"), "--prompt: given 'w1 \\ud800', which"),
        (("--prompt-ids", "1", "--temperature", "nan"), "temperature: given nan"),
        (("--prompt-ids", "1", "--seed", "9" * 5000), "seed"),
        (("--prompt-ids", "1", "--seed", "-1"), "0 to 2**32 - 1, or random"),
        (("--prompt-ids", "1", "--ignore-key", "vocab_size"), "ignored keys: given vocab_size"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_bad_input_is_one_line_and_exit_code_two(run, folder, args, message):
    code, out, err = run("generate", folder, *args)
    assert (code, out) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("mla-jax: ")
    assert message in line
    assert "Traceback" not in err
    assert len(line) < 2000


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
        ('{"prompt": 3}', "line 2: given prompt of type int;"),
        ('{"prompt_ids": "5"}', "line 2: given prompt_ids of type str;"),
        ('{"messages": 3}', "line 2: given messages that are no list"),
        ("{}", "line 2: given an object without keys;"),
        ('{"prompt_ids": [%s]}' % ("9" * 5000), "line 2: given no JSON (Exceeds the limit"),
        ('{"prompt_ids": [%s]}' % ("9" * 4000), "line 2: token 0: given 99999"),
        ('{"prompt_ids": [1e999]}', "line 2: token 0: given inf"),
        (r'{"prompt": "w1 \ud800"}', r"line 2: given 'w1 \ud800', which"),
        (r'{"\ud800": 1}', r"line 2: given keys \ud800;"),
        ('{"%s": 1}' % ("k" * 100_000), "line 2: given keys kkk"),
        (json.dumps(dict.fromkeys(map(str, range(9999)))), "line 2: given keys 0, 1, 2"),
    ],
    ids=lambda v: v[:40],
)
def test_a_bad_line_is_named_and_nothing_runs(run, folder, tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_ids": [1]}\n' + line + "\n")
    code, out, err = run("generate", folder, "--prompts-file", file, "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"mla-jax: {file} {message}")
    assert len(err) < 2000


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
    assert "Text needs tokenizer.json in the folder, and pip install tokenizers jinja2" in err
    (tmp_path / "tokenizer.json").write_text("{}")
    code, _, err = run("generate", tmp_path, "--prompt", "w1")
    assert code == 2
    assert "tokenizer.json" in err


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_folder_that_is_no_model_is_refused(run, tmp_path, command):
    code, out, err = run(command, tmp_path / "none")
    assert (code, out) == (2, "")
    assert "none" in err


def test_inspect_lists_the_programs_of_an_engine(run, folder):
    code, out, _ = run("inspect", folder, "--json")
    programs = json.loads(out)["programs"]
    assert code == 0
    assert 1 < len(programs) == len(set(programs))
    _, text, _ = run("inspect", folder)
    assert f"programs: {len(programs)}\n  {programs[0]}" in text


def test_inspect_takes_names_of_published_models(run):
    code, out, _ = run("inspect", "v3.2", "--json")
    assert code == 0
    assert json.loads(out)["family"] == "deepseek_v32"


def test_a_random_seed_is_another_one_for_each_request():
    params = functools.partial(SamplingOptions.params, vocab=64)
    assert params(SamplingOptions(seed="random"), GenerationDefaults()).seed is None
    assert params(SamplingOptions(seed="7"), GenerationDefaults()).seed == 7


def test_inspect_counts_bytes(run, folder):
    code, out, _ = run("inspect", folder, "--json", "--dtype", "float32")
    facts = json.loads(out)
    row = CONFIG.dims.row
    assert code == 0
    assert facts["family"] == "deepseek_v3"
    assert facts["cache_bytes_per_token"] == {
        name: CONFIG.layers * row * f.itemsize for name, f in ELEMENT_FORMATS.items()
    }
    held = facts["weight_bytes_float32"]
    assert held["weights"] == 4 * facts["parameters"]
    _, out, _ = run("inspect", folder)
    assert "family: deepseek_v3" in out
    assert "rank=16" in out


@pytest.fixture
def copy(folder, tmp_path):
    """A function that copies the model with another config.json or tokenizer.json."""

    def copy(*, config: dict | None = None, tokenizer: dict | None = None):
        to = tmp_path / "copy"
        shutil.copytree(folder, to, dirs_exist_ok=True)
        for name, changes in (("config.json", config), ("tokenizer.json", tokenizer)):
            if changes is not None:
                data = json.loads((to / name).read_text()) | changes
                (to / name).write_text(json.dumps(data))
        return to

    return copy


@pytest.mark.parametrize("command", [("inspect",), ("generate", "--prompt-ids", "1")])
@pytest.mark.parametrize("key", ["num_hidden_layers", "first_k_dense_replace"])
def test_a_small_config_cannot_ask_for_work_without_end(run, copy, command, key):
    start = time.process_time()
    bad = copy(config={"num_hidden_layers": 10**9, key: 10**9})
    code, out, err = run(command[0], bad, *command[1:])
    assert (code, out) == (2, "")
    assert "num_hidden_layers: given 1000000000; allowed: an integer >= 1, at most 1,024" in err
    assert time.process_time() - start < 5


def test_inspect_of_the_largest_counts_ends_soon(run, copy):
    start = time.process_time()
    most = {"num_hidden_layers": 1024, "n_routed_experts": 65536, "first_k_dense_replace": 0}
    most |= {"num_experts_per_tok": 8, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    code, out, _ = run("inspect", copy(config=most), "--json")
    assert code == 0
    assert json.loads(out)["layers"] == 1024
    assert time.process_time() - start < 10


def test_a_config_that_is_a_pipe_is_refused(run, copy):
    bad = copy()
    (bad / "config.json").unlink()
    os.mkfifo(bad / "config.json")
    for command in (("inspect",), ("generate", "--prompt-ids", "1")):
        code, _, err = run(command[0], bad, *command[1:])
        assert code == 2
        assert "given a pipe, not a regular file" in err


@pytest.mark.filterwarnings("default")
def test_unknown_keys_are_passed_over_by_option_and_bookkeeping_is_a_warning(run, copy):
    odd = copy(config={"my_key": 1, "unsloth_version": "2025.1"})
    ask = ("--prompt-ids", "1", "--max-new-tokens", "1", "--dtype", "float32")
    for command in (("inspect",), ("generate", *ask)):
        code, _, err = run(command[0], odd, *command[1:])
        assert code == 2
        assert "--ignore-key" in err
        code, _, err = run(command[0], odd, *command[1:], "--ignore-key", "my_key")
        assert code == 0
        assert "mla-jax: warning:" in err
        assert "unsloth_version" in err


@pytest.mark.parametrize("options", [("--tokens", -5), ("--page-size", 0), ("--heads", 2**31)])
def test_explain_refuses_sizes_that_are_none(run, options):
    code, out, err = run("explain", "mla_decode", *options)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{options[0]}'" in err


def test_version_and_module_and_the_choices_in_help(run):
    assert run("--version") == (0, f"mla-jax {mla_jax.__version__}\n", "")
    command = [sys.executable, "-m", "mla_jax", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"mla-jax {mla_jax.__version__}\n"
    for command in ("generate", "inspect", "explain"):
        _, out, _ = run(command, "--help")
        assert "float32|bfloat16" in out
        assert "<Dtype>" not in out
    assert "auto|bf16|fp16|fp32|fp8_e4m3" in run("generate", "--help")[1]


def test_text_that_the_shipped_model_cannot_read_is_refused(run):
    code, out, err = run("generate", demo.FOLDER, "--prompt", "Hello World")
    assert (code, out) == (2, "")
    assert "mla-jax: --prompt: given 'Hello World', which" in err


def test_a_token_that_the_model_does_not_have_is_named(run, copy):
    words = {f"w{i}": i for i in range(64)} | {"beyond": 64}
    model = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    code, _, err = run("generate", copy(tokenizer=model), "--prompt", "w1 beyond")
    assert code == 2
    assert "--prompt: tokenizer.json: token 1: given 64; allowed: integers from 0 to 63" in err


def test_ids_without_a_text_are_printed_all_the_same(run, folder, monkeypatch):
    def refuse(*_):
        raise EngineError("tokenizer.json", "ids", "others")

    monkeypatch.setattr(TextTokenizer, "decode", refuse)
    ask = ("--prompt-ids", "1", "--max-new-tokens", "2", "--dtype", "float32", "--ignore-eos")
    code, out, err = run("generate", folder, *ask)
    assert code == 0
    assert out.startswith("[0] length: ")
    assert "warning: request 0: tokenizer.json" in err


def test_text_reaches_a_terminal_of_ascii(folder, tmp_path):
    code = (
        "import mla_jax.cli as c; from mla_jax.tokenizer import TextTokenizer as T;"
        "T.decode = lambda *_: 'caf\\xe9 \\u4e2d';"
        f"c.main(['generate', {str(folder)!r}, '--prompt-ids', '1', '--max-new-tokens', '1'])"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"caf\xe9 \u4e2d" in done.stdout


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
    for op in ("mla_decod", "route_tokens"):  # no operation; one whose sizes are no options
        code, _, err = run("explain", op)
        assert code == 2
        assert "mla_decode" in err
    assert "mla_jax.explain takes the arguments of any operation" in err


@pytest.mark.parametrize("option", ["--cache", "--programs"])
def test_a_folder_that_cannot_be_made_is_refused(run, folder, tmp_path, option):
    (tmp_path / "file").write_text("")
    code, _, err = run("generate", folder, "--prompt-ids", "1", option, tmp_path / "file" / "x")
    assert code == 2
    assert "allowed: a folder that is there or can be made" in err


def test_a_length_that_holds_no_request_is_refused_by_its_name(run, folder):
    code, _, err = run("generate", folder, "--prompt-ids", "1", "--max-model-len", 0)
    assert code == 2
    assert "--max-model-len: given 0; allowed: 2 or more" in err


def test_the_support_matrix_is_a_table(run):
    code, out, _ = run("support-matrix")
    assert code == 0
    assert out.startswith("|")
    assert "mla_decode" in out


def test_without_its_packages_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import mla_jax.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.strip() == "mla-jax needs typer: pip install typer rich"


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
