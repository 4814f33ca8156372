"""Checkpoint folders: round trips, both layouts, fp8 blocks, and hostile files."""

import dataclasses
import json
import math
import os
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mla_jax.cache import LatentCache
from mla_jax.config import ModelConfig
from mla_jax.engine import Engine, load_model
from mla_jax.errors import ConfigError, EngineError, WeightsError
from mla_jax.model.family import family_of
from mla_jax.model.presets import V3
from mla_jax.model.safetensors_io import Checkpoint, write_safetensors
from mla_jax.model.weight_table import expected_shapes, num_params, weight_table
from mla_jax.model.weights import checked_config, load, place, save

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "configs").glob("tiny_*.json"))
TINY_V3 = next(p for p in CONFIGS if p.stem == "tiny_v3")


def _config(path: Path = TINY_V3, **changes: object) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_hf(path), **changes)


def _leaves(config: ModelConfig, dtype: str = "float32") -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        path: jnp.asarray(rng.standard_normal(shape), jnp.float32 if kind == "float32" else dtype)
        for path, (shape, kind) in expected_shapes(config).items()
    }


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {n: t.read() for n, t in Checkpoint.open(folder).tensors.items()}


def _assert_equal(a: dict, b: dict):
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good V3 folder."""
    save(tmp_path, _config(), _leaves(_config()))
    return tmp_path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(path: Path, dtype: str, tmp_path: Path):
    biased = _config(path).family == "deepseek_v2"
    config = _config(path, attention_bias=biased, mlp_bias=biased)
    leaves = _leaves(config, dtype)
    save(tmp_path, config, leaves)
    again = ModelConfig.from_hf(tmp_path)
    assert again == dataclasses.replace(config, ignored_layers=0)
    _assert_equal(load(tmp_path, again, dtype=dtype), leaves)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_table_is_the_module(path: Path):
    """Paths, shapes and dtypes of the table are those of the model's parameters."""
    config = _config(path)
    model = family_of(config.family).abstract(config, jnp.dtype(jnp.bfloat16))
    leaves = _leaves(config, "bfloat16")
    place(model, leaves)
    first = model.stacks[0].blocks[0]
    assert first.attn.kv_up.kernel[...] is leaves["stacks.0.blocks.0.attn.kv_up.kernel"]
    del leaves["final_norm.scale"]
    leaves["embed.embedding"] = leaves["embed.embedding"][1:]
    with pytest.raises(WeightsError) as error:
        place(model, leaves)
    assert len(error.value.problems) == 2


def test_files_are_plain_safetensors(folder: Path):
    theirs, ours = load_file(folder / "model.safetensors"), _tensors(folder)
    _assert_equal(theirs, ours)
    experts = ours["model.layers.1.mlp.experts.3.down_proj.weight"]
    leaf = _leaves(_config())["stacks.1.blocks.0.moe.experts.down"]
    np.testing.assert_array_equal(experts, np.asarray(leaf[0, 3]).T)


def test_heads_and_transposes(folder: Path):
    """Checkpoint rows are [out, in]; merged rows are head by head, key before value."""
    d, tensors, leaves = _config().dims, _tensors(folder), load(folder, _config(), dtype="float32")

    def both(name: str, path: str) -> tuple[np.ndarray, np.ndarray]:
        w = tensors[f"model.layers.1.{name}.weight"]
        return w, np.asarray(leaves[f"stacks.1.blocks.0.{path}"][0])

    w, leaf = both("self_attn.q_b_proj", "attn.q_up.kernel")
    np.testing.assert_array_equal(leaf[5, 2], w[2 * d.qk : 3 * d.qk, 5])
    w, leaf = both("self_attn.kv_b_proj", "attn.kv_up.kernel")
    np.testing.assert_array_equal(leaf[:, 3, 1], w[3 * (d.nope + d.v) + 1])
    w, leaf = both("self_attn.o_proj", "attn.out.kernel")
    np.testing.assert_array_equal(leaf[2, 1], w[:, 2 * d.v + 1])
    for name, path in (
        ("self_attn.q_a_proj", "attn.q_down.kernel"),
        ("self_attn.kv_a_proj_with_mqa", "attn.kv_down.kernel"),
        ("mlp.gate", "moe.router.kernel"),
        ("mlp.experts.7.up_proj", "moe.experts.up"),
        ("mlp.shared_experts.down_proj", "moe.shared.down.kernel"),
    ):
        w, leaf = both(name, path)
        np.testing.assert_array_equal(leaf[7] if "experts.7" in name else leaf, w.T)


def test_shards_with_an_index(tmp_path: Path):
    leaves = _leaves(_config())
    save(tmp_path, _config(), leaves, shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 3
    seen = []
    loaded = load(tmp_path, _config(), dtype="float32", progress=lambda *n: seen.append(n))
    _assert_equal(loaded, leaves)
    total = sum(x.nbytes for x in leaves.values())
    assert seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})


@pytest.mark.parametrize("size", [0, -1, 1.5, "x"])
def test_shards_of_no_size_are_refused(tmp_path: Path, size):
    with pytest.raises(EngineError, match="save: shard_bytes: given"):
        save(tmp_path, _config(), _leaves(_config()), shard_bytes=size)


def test_shards_replace_one_file(tmp_path: Path):
    """``model.safetensors`` of an earlier model would be read before the index."""
    leaves = _leaves(_config())
    save(tmp_path, _config(), {path: 2 * x for path, x in leaves.items()})
    save(tmp_path, _config(), leaves, shard_bytes=200_000)
    _assert_equal(load(tmp_path, _config(), dtype="float32"), leaves)


def test_fused_experts(folder: Path):
    leaves = _leaves(_config())
    tensors = _tensors(folder)
    for i in (1, 2):
        base = f"model.layers.{i}.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{base}.{e}.{part}_proj.weight") for e in range(16)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{base}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        tensors[f"{base}.down_proj"] = parts["down"]
    write_safetensors(folder / "model.safetensors", tensors)
    _assert_equal(load(folder, _config(), dtype="float32"), leaves)
    tensors["model.layers.1.mlp.experts.0.up_proj.weight"] = parts["up"][0]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.1\.mlp\.experts\.0\.up"):
        load(folder, _config(), dtype="float32")


def _quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e4m3, scales, and the float32 values they stand for, block by block."""
    rows, cols = w.shape
    scale = np.ones((math.ceil(rows / 128), math.ceil(cols / 128)), np.float32)
    q, back = np.zeros(w.shape, ml_dtypes.float8_e4m3fn), np.zeros(w.shape, np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scale[i, j] = np.abs(w[block]).max() / 448
        q[block] = (w[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
        back[block] = q[block].astype(np.float32) * scale[i, j]
    return q, scale, back


def test_fp8_blocks(tmp_path: Path):
    """Row counts that are no multiple of 128 included, as in 576 = 4.5 * 128."""
    dims = dataclasses.replace(_config().dims, rank=160, q_rank=136, rope=16)
    rope = dataclasses.replace(_config().rope, dim=16)
    config = _config(dims=dims, rope=rope, hidden=144, fp8_block=128)
    save(tmp_path, config, _leaves(config))
    tensors, plain = {}, {}
    for name, x in _tensors(tmp_path).items():
        plain[name] = tensors[name] = x
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = _quantise(x)
    write_safetensors(tmp_path / "model.safetensors", plain)
    want = load(tmp_path, config, dtype="float32")
    want16 = load(tmp_path, config, dtype="bfloat16")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"].shape == (1, 2)
    _assert_equal(load(tmp_path, config, dtype="float32"), want)
    _assert_equal(load(tmp_path, config, dtype="bfloat16"), want16)
    lost = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors["model.layers.0.self_attn.q_b_proj.weight_scale_inv"] = np.ones((9, 9), np.float32)
    write_safetensors(
        tmp_path / "model.safetensors", {k: v for k, v in tensors.items() if k != lost}
    )
    with pytest.raises(WeightsError) as error:
        load(tmp_path, config, dtype="float32")
    assert [lost in p for p in error.value.problems] == [False, True]
    assert "q_b_proj.weight_scale_inv is [9, 9]" in error.value.problems[0]


def test_an_embedding_and_a_head_in_fp8_blocks(folder: Path):
    """Their scales are named as those of the layers."""
    tensors, plain = _tensors(folder), _tensors(folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name], tensors[f"{name}_scale_inv"], plain[name] = _quantise(plain[name])
    write_safetensors(folder / "model.safetensors", plain)
    want = load(folder, _config(), dtype="float32")
    write_safetensors(folder / "model.safetensors", tensors)
    _assert_equal(load(folder, _config(fp8_block=128), dtype="float32"), want)


def test_what_is_skipped_knowingly(folder: Path):
    tensors = _tensors(folder)
    one = np.ones((2, 2), np.float32)
    extra = {
        "model.layers.3.eh_proj.weight": one,
        "model.layers.3.self_attn.o_proj.weight": one,
        "model.layers.0.self_attn.rotary_emb.inv_freq": one,
        "model.layers.1.mlp.unused_experts.down_proj.weight": np.ones((64, 0), np.float32),
    }
    write_safetensors(folder / "model.safetensors", tensors | extra)
    _assert_equal(load(folder, _config(), dtype="float32"), _leaves(_config()))
    stray = {"model.layers.7.mlp.up_proj.weight": one}
    write_safetensors(folder / "model.safetensors", tensors | stray)
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.7"):
        load(folder, _config(), dtype="float32")
    fewer = dataclasses.replace(  # whose last layer is no MTP block, whatever is declared
        _config(), layers=2, sparse_layers=_config().sparse_layers[:2], ignored_layers=1
    )
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.2"):
        load(folder, fewer, dtype="float32")


def test_a_tied_model_may_store_its_head(tmp_path: Path):
    config = _config(next(p for p in CONFIGS if "youtu" in p.stem))
    save(tmp_path, config, _leaves(config))
    tensors = _tensors(tmp_path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    _assert_equal(load(tmp_path, config, dtype="float32"), _leaves(config))


def test_the_head_of_a_tied_model_that_is_another_one_is_refused(tmp_path: Path):
    config = _config(tied=True, vocab=2050)  # compared in pieces: the last has 2 rows
    save(tmp_path, config, _leaves(config))
    tensors = _tensors(tmp_path)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    for other in (head, head[1:], head.astype(ml_dtypes.float8_e4m3fn)):
        tensors["lm_head.weight"] = other
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(WeightsError, match=r'lm_head.weight.*"tie_word_embeddings": false'):
            load(tmp_path, config, dtype="float32")
    tensors["lm_head.weight"] = head
    write_safetensors(tmp_path / "model.safetensors", tensors)
    untied = load(tmp_path, dataclasses.replace(config, tied=False), dtype="float32")
    np.testing.assert_array_equal(untied["lm_head.kernel"], head.T)


def test_every_problem_is_reported_at_once(folder: Path):
    tensors = _tensors(folder)
    del tensors["model.norm.weight"]
    for e in range(16):
        del tensors[f"model.layers.2.mlp.experts.{e}.up_proj.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:]
    tensors["model.layers.0.input_layernorm.weight"] = np.ones(64, np.int32)
    tensors["model.surprise"] = np.ones(3, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError) as error:
        load(folder, _config(), dtype="float32")
    assert sorted(p.split(" [")[0].split(" is")[0] for p in error.value.problems) == [
        "misshapen: lm_head.weight",
        "missing: model.layers.2.mlp.experts.0..15.up_proj.weight",
        "missing: model.norm.weight",
        "mistyped: model.layers.0.input_layernorm.weight",
        "unexpected: model.surprise",
    ]


def test_float16_overflow_is_an_error(folder: Path):
    tensors = _tensors(folder)
    tensors["model.norm.weight"] = np.full(64, 1e5, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match="beyond float16"):
        load(folder, _config(), dtype="float16")


@pytest.mark.parametrize(
    ("stored", "value", "dtype"),
    [
        ("float64", 1e300, "float32"),
        ("float32", 3.4e38, "bfloat16"),
        ("float64", np.nan, "float32"),
    ],
)
def test_values_beyond_a_narrower_dtype(folder: Path, stored, value, dtype):
    tensors = _tensors(folder)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], value, dtype=stored)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=f"model.norm.weight: values beyond {dtype}, or NaN"):
        load(folder, _config(), dtype=dtype)


def _header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def _raw(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def _entry(dtype: object = "F32", shape: object = (1,), span: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


HOSTILE = {
    "empty": (b"", "truncated"),
    "cut length": (b"\x10\0\0", "truncated"),
    "absurd length": (b"\xff" * 8 + b"{}", "header of 18446744073709551615"),
    "not json": (_header({})[:8] + b"\x80\x02", "unreadable header"),
    "pickle": (b"\x80\x04\x95" + b"\0" * 64, "truncated|unreadable"),
    "deep json": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "unreadable header"),
    "a list": (_header([]), "not a JSON object"),
    "an entry that is a string": (_header({"a": "b"}), "a: entry is not an object"),
    "dtype": (_header({"a": _entry("F4")}, b"0000"), "a: unknown dtype 'F4'"),
    "dtype type": (_header({"a": _entry([])}, b"0000"), "a: unknown dtype"),
    "negative shape": (_header({"a": _entry(shape=(-1, -1))}, b"0000"), "not a list of sizes"),
    "boolean shape": (_header({"a": _entry(shape=(True,))}, b"0000"), "not a list of sizes"),
    "huge shape": (_header({"a": _entry(shape=(2**62, 2**62))}, b"0000"), "does not fill 4"),
    "offsets": (_header({"a": _entry(span=(4, 0))}, b"0000"), "are not"),
    "one offset": (_header({"a": _entry(span=(4,))}, b"0000"), "are not"),
    "outside": (_header({"a": _entry(span=(100, 104))}, b"0000"), "truncated: bytes 100 to 104"),
    "overlap": (_header({"a": _entry(), "b": _entry()}, b"0000"), "a and b overlap"),
    "a gap": (
        _header({"a": _entry(), "b": _entry(span=(8, 12))}, b"0" * 12),
        "4 bytes from byte 4 of the data belong to nothing, before b",
    ),
    "a gap in front": (
        _header({"a": _entry(span=(8, 12))}, b"0" * 12),
        "8 bytes from byte 0 of the data belong to nothing, before a",
    ),
    "trailing bytes": (
        _header({"a": _entry()}, b"0" * 7),
        "3 bytes from byte 4 of the data belong to nothing, after a",
    ),
    "only bytes": (_header({}, b"0"), "1 bytes from byte 0 .*and no tensor"),
    "a name twice": (
        _raw('{"a": %s, "b": %s, "a": %s}' % ((json.dumps(_entry()),) * 3), b"0" * 4),
        "unreadable header .*given twice: a",
    ),
    "a key twice": (
        _raw('{"a": {"dtype": "F32", "dtype": "I32", "shape": [1]}}'),
        "unreadable header .*given twice: dtype",
    ),
    "a million axes": (
        _header({"a": _entry(shape=[2] * 1_000_000)}, b"0000"),
        r"a: shape .*\(3,000,000 characters\) is not a list of sizes",
    ),
    "long integers": (
        _header({"a": _entry(shape=[10**4000] * 60)}, b"0000"),
        "is not a list of sizes",
    ),
    "a layer of many digits": (
        _header({f"model.layers.{'9' * 5000}.x": _entry()}, b"0000"),
        "the config asks for 3 layers, the files hold 0",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, tmp_path: Path):
    content, message = HOSTILE[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        load(tmp_path, _config(), dtype="float32")
    assert "model.safetensors" in str(error.value) or "a layer" in name
    assert len(str(error.value)) < 2000


def test_a_stray_layer_of_many_digits_is_unexpected(folder: Path):
    tensors = _tensors(folder) | {f"model.layers.{'9' * 5000}.x": np.ones(1, np.float32)}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.999"):
        load(folder, _config(), dtype="float32")


def test_a_list_of_stray_tensors_is_cut(folder: Path):
    stray = {f"stray.{i}": np.ones(1, np.float32) for i in range(3000)}
    write_safetensors(folder / "model.safetensors", _tensors(folder) | stray)
    with pytest.raises(WeightsError) as error:
        load(folder, _config(), dtype="float32")
    assert len(error.value.problems) == 3000
    assert "3,000 problem(s)" in str(error.value)
    assert "and 2,990 more" in str(error.value)
    assert len(str(error.value)) < 2000


def _change(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


COUNTS = [
    ({"num_hidden_layers": 10**9}, ConfigError, "num_hidden_layers: given 1000000000"),
    ({"num_hidden_layers": 1024}, WeightsError, "asks for 1,024 layers, the files hold 3"),
    ({"n_routed_experts": 10**9}, ConfigError, "n_routed_experts: given 1000000000"),
    ({"n_routed_experts": 65536}, WeightsError, r"experts\.0\.\.65535\.gate.*hold 16 experts"),
    ({"kv_lora_rank": 10**9}, WeightsError, "kv_a_proj_with_mqa.weight is"),
    ({"hidden_size": 10**9}, WeightsError, "misshapen"),
    ({"vocab_size": 10**9}, WeightsError, "embed_tokens.weight is"),
    ({"qk_rope_head_dim": 10**9, "head_dim": None}, WeightsError, "misshapen"),
    ({"moe_intermediate_size": 10**9}, WeightsError, "misshapen"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), COUNTS, ids=lambda v: str(v)[:28])
@pytest.mark.parametrize("entry", [checked_config, load_model, Engine.from_pretrained])
def test_headers_are_compared_before_anything_is_allocated(
    entry, changes, kind, message, folder: Path, monkeypatch
):
    """A small config.json cannot ask for memory or time that its files do not back."""

    def alloc(*_, **__):
        raise AssertionError("allocated")

    monkeypatch.setattr(nnx, "eval_shape", alloc)
    monkeypatch.setattr(LatentCache, "alloc", alloc)
    _change(folder, **changes)
    settings = {"num_pages": 4} if entry == Engine.from_pretrained else {}
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(kind, match=message):
        entry(folder, **settings)
    assert time.process_time() - start < 5
    assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    tracemalloc.stop()


def test_checked_config_is_the_config(folder: Path):
    assert checked_config(folder) == ModelConfig.from_hf(folder)
    _change(folder, my_key=1)
    with pytest.raises(ConfigError, match="my_key"):
        checked_config(folder)
    with pytest.raises(ConfigError, match="my_key"):
        Engine.from_pretrained(folder, num_pages=4)
    assert checked_config(folder, ignore_keys=["my_key"]).layers == 3
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        Engine.from_pretrained(folder, num_pages=4, ignore_keys=["my_key"])


@pytest.mark.parametrize("what", ["pipe", "device", "sparse", "folder"])
def test_an_index_that_would_hang_or_not_end_is_refused(what: str, tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    if what == "pipe":
        os.mkfifo(index)
    elif what == "device":
        index.symlink_to("/dev/zero")
    elif what == "folder":
        index.mkdir()
    else:
        with index.open("wb") as f:
            f.truncate(20 * 2**30)
    message = {"sparse": "21,474,836,480 bytes, at most 268,435,456"}.get(what, f"a {what}, not a")
    with pytest.raises(WeightsError, match=f"index.json: {message}"):
        load(tmp_path, _config(), dtype="float32")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("a" * 5000 + ".safetensors", "whose name has 5,012 characters; allowed: at most 255"),
        ("/" * 1_000_000, r"\(1,000,002 characters\), not a .safetensors file"),
        (list(range(10**6)), r"characters\), not a .safetensors file"),
    ],
    ids=["long", "slashes", "list"],
)
def test_long_shard_names_are_refused_shortly(file: object, message: str, tmp_path: Path):
    index = {"weight_map": {"n" * 1_000_000: file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message) as error:
        load(tmp_path, _config(), dtype="float32")
    assert len(str(error.value)) < 2000


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path):
    text = '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="given twice: a"):
        load(tmp_path, _config(), dtype="float32")


def test_a_truncated_file_names_what_it_lost(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(WeightsError, match=r"truncated: bytes \d+ to"):
        load(folder, _config(), dtype="float32")


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "b/a.safetensors", "..", 3])
def test_an_index_may_not_leave_the_folder(file: object, tmp_path: Path):
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"not a \.safetensors file of this folder"):
        load(tmp_path, _config(), dtype="float32")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_broken_indices(text: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="no weight_map"):
        load(tmp_path, _config(), dtype="float32")


def test_missing_shards_and_lying_indices(tmp_path: Path):
    save(tmp_path, _config(), _leaves(_config()), shard_bytes=400_000)
    shards = sorted(tmp_path.glob("model-0*.safetensors"))
    shards[0].unlink()
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    hidden = "model.layers.2.mlp.gate.weight"
    lies = {k: v for k, v in data["weight_map"].items() if k != hidden}
    lies["model.ghost"] = shards[1].name
    index.write_text(json.dumps({"weight_map": lies}))
    with pytest.raises(WeightsError) as error:
        load(tmp_path, _config(), dtype="float32")
    text = str(error.value)
    assert f"{shards[0].name}: no such file" in text
    assert "model.ghost is indexed but not there" in text
    assert f"{hidden} is not in the index" in text


def test_folders_without_safetensors(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is never read"):
        load(tmp_path, _config(), dtype="float32")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match="no such file"):
        load(tmp_path, _config(), dtype="float32")


def test_a_file_may_be_a_link_as_in_the_hub_cache(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blob")
    _assert_equal(load(snapshot, _config(), dtype="float32"), _leaves(_config()))


def test_save_refuses_leaves_of_another_model(tmp_path: Path):
    leaves = _leaves(_config())
    leaves["extra"] = leaves.pop("final_norm.scale")
    with pytest.raises(WeightsError) as error:
        save(tmp_path / "out", _config(), leaves)
    assert error.value.problems == ["missing: final_norm.scale", "unexpected: extra"]
    assert not (tmp_path / "out").exists()


def test_v3_census():
    """Bytes and tensors of the published V3 folder, its MTP layer included, without headers."""
    with_mtp = dataclasses.replace(V3, layers=62, sparse_layers=(*V3.sparse_layers, True))
    bytes_, count = 0, 0
    for weight in weight_table(with_mtp):
        for name, shape in weight.names().items():
            quantised = "proj" in name
            each = 1 if quantised else 4 if "correction_bias" in name else 2
            bytes_ += math.prod(shape) * each
            count += 1 + quantised
            if quantised:
                bytes_ += 4 * math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)
    d, v = V3.hidden, V3.vocab
    own = 3 * d + 2 * d * d + 2 * v * d  # three norms, the merge, a second embedding and head
    assert (bytes_ + 2 * own, count + 6) == (688_574_839_360, 91_991)
    assert num_params(V3) == 671_026_419_200
