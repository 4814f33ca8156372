"""``mla-jax parity`` names the mistake: faults of the usual kinds, put into our side one by one."""

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_jax import cli
from mla_jax.commands import parity, transformers_trace
from mla_jax.commands.trace import Trace, trace_model
from mla_jax.config import ModelConfig
from mla_jax.errors import ArgumentError, ConfigError
from mla_jax.model import mla, weights
from mla_jax.model.deepseek_v32 import SparseMLA
from mla_jax.model.indexer import Indexer
from mla_jax.model.mla import MLA
from mla_jax.model.moe import MoE, Router
from mla_jax.model.reading import Tensors
from mla_jax.model.rope import rotate
from tests import imports
from tests.consoles import assert_promised, consoles
from tests.parity import checkpoint, reference
from tests.parity.families import BY_NAME

torch.set_num_threads(1)
TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Side:
    """A folder and what transformers computes from it."""

    tensors: Tensors
    config: ModelConfig
    theirs: Trace

    @property
    def ids(self) -> list[int]:
        return parity.prompt_ids(self.config, TOKENS)

    def judge(self, edit: Callable[[Any], None] = lambda model: None) -> parity.Parity:
        model = parity.load_ours(self.tensors.folder, self.config)
        edit(model)
        mine = trace_model(model, self.config, self.ids)
        return parity.judge(self.tensors, self.config, mine, self.theirs, model=model)


@functools.cache
def _side(name: str, folder: Path, fp8: bool) -> Side:
    case = BY_NAME[name]
    checkpoint.save_released(reference.build(case), case, folder, fp8=fp8)
    tensors, config = Tensors(folder), ModelConfig.from_hf(folder)
    model = transformers_trace.load(tensors, config)
    theirs = transformers_trace.trace(model, config, parity.prompt_ids(config, TOKENS))
    return Side(tensors=tensors, config=config, theirs=theirs)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Side]:
    root = tmp_path_factory.getbasetemp()
    return lambda name, fp8=False: _side(name, root / f"{name}{'_fp8' * fp8}", fp8)


def attentions(model: Any) -> Iterator[Any]:
    for stack in model.stacks:
        for block in stack.blocks:
            yield block.attn


def routers(model: Any) -> Iterator[Any]:
    for stack in model.stacks:
        for block in stack.blocks:
            if block.sparse:
                yield block.moe.router


# ---------------------------------------------------------------- faults that edit the module


def half_split(model: Any) -> None:
    for attn in attentions(model):
        attn.rope = replace(attn.rope, interleaved=False)


def no_yarn(model: Any) -> None:
    for attn in attentions(model):
        attn.rope = replace(attn.rope, yarn=None)


def m_on_cos(model: Any) -> None:
    for attn in attentions(model):
        m = 0.1 * float(np.log(attn.rope.yarn.factor)) + 1
        attn.rope = replace(attn.rope, yarn=replace(attn.rope.yarn, attention_factor=m))


def no_mscale(model: Any) -> None:
    for attn in attentions(model):
        attn.scale = attn.dims.qk**-0.5


def scale_of_nope(model: Any) -> None:
    for attn in attentions(model):
        attn.scale = attn.scale * (attn.dims.qk / attn.dims.nope) ** 0.5


def swapped_kv_up(model: Any) -> None:
    """The weight itself: values before keys in each head."""
    for attn in attentions(model):
        up = attn.kv_up.kernel[...]
        attn.kv_up.kernel.set_value(jnp.roll(up, attn.dims.v, axis=-1))


def swapped_gate(model: Any) -> None:
    for stack in model.stacks:
        for block in stack.blocks:
            if block.sparse:
                experts = block.moe.experts
                gate, up = experts.gate[...], experts.up[...]
                experts.gate.set_value(up)
                experts.up.set_value(gate)


def flip_normalise(model: Any) -> None:
    for router in routers(model):
        router.moe = replace(router.moe, normalise=not router.moe.normalise)


def no_routed_scale(model: Any) -> None:
    for router in routers(model):
        router.moe = replace(router.moe, scale=1.0)


def index_layout(model: Any) -> None:
    for attn in attentions(model):
        if attn.indexer is not None:
            indexer = attn.indexer
            indexer.config = replace(indexer.config, interleaved=not indexer.config.interleaved)


EDITED = [
    ("v3_small", half_split, "rotation layout: halves (i, i + rope / 2)", "query_rope"),
    ("v3_small", no_yarn, "rotary frequencies: plain, YaRN forgotten", "query_rope"),
    ("v3_small", m_on_cos, "factor on cos and sin: m = 1.369", "query_rope"),
    ("v3_small", no_mscale, "softmax scale: (nope + rope)^-1/2 m², m² left out", "attention"),
    ("v3_small", swapped_kv_up, "order of kv_b_proj: [value; key] of each head", "kv_b_proj"),
    ("v3_small", swapped_gate, "gate and up: swapped", "gate_proj"),
    ("v3_small", flip_normalise, "expert weights: as scored", "router"),
    ("v3_small", no_routed_scale, "routed scale: left out", "router"),
    ("v2_small", flip_normalise, "expert weights: divided by their sum", "router"),
    ("v2_small", half_split, "rotation layout: halves (i, i + rope / 2)", "query_rope"),
    ("v32_small", index_layout, "rotation layout of the indexer: pairs (2i, 2i + 1)", "selected"),
    (
        "glm_dsa_small",
        index_layout,
        "rotation layout of the indexer: halves (i, i + rope / 2)",
        "selected",
    ),
    ("glm_flash_small", scale_of_nope, "softmax scale: nope^-1/2", "attention"),
]


@pytest.mark.parametrize("name, edit, fault, first", EDITED)
def test_a_wrong_setting_is_named(side, name, edit, fault, first):
    found = side(name).judge(edit)
    assert found.faults == (fault,)
    assert first in str(found.first)
    assert all(f.side == "mla_jax" for f in found.findings)


# ------------------------------------------------------------------ faults in the code itself


def rotary_first(monkeypatch):
    def rotated(self, q, angles):
        rope = self.dims.rope
        turned = rotate(q[..., :rope], *angles, interleaved=True)
        return jnp.concatenate([q[..., rope:], turned], axis=-1)

    monkeypatch.setattr(MLA, "_rotate_queries", rotated)


def _split_row(norm):
    def split(self, kv, angles):
        latent, rope = norm(self, kv)
        return latent, rotate(rope, *angles, interleaved=self.rope.interleaved)

    return split


def no_latent_norm(monkeypatch):
    rank = _split_row(lambda self, kv: (kv[:, : self.dims.rank], kv[:, self.dims.rank :]))
    monkeypatch.setattr(MLA, "_split_row", rank)


def norm_on_the_key(monkeypatch):
    def norm(self, kv):
        wide = kv / jnp.sqrt((kv**2).mean(-1, keepdims=True) + self.kv_norm.eps)
        return self.kv_norm(kv[:, : self.dims.rank]), wide[:, self.dims.rank :]

    monkeypatch.setattr(MLA, "_split_row", _split_row(norm))


def values_first(monkeypatch):
    right = MLA._up_projection

    def wrong(self):
        return jnp.roll(right(self), -self.dims.v, axis=-1)

    monkeypatch.setattr(MLA, "_up_projection", wrong)


def no_rotation(monkeypatch):
    monkeypatch.setattr(mla, "rotate", lambda x, *angles, interleaved: x)


def _router(score=jax.nn.sigmoid, group=None, biased=False):
    """A router of our own making with one of its ways changed."""

    def route(self, x, real=None, **_):
        moe = self.moe
        s = score(x @ self.kernel[...])
        z = s if self.choice_bias is None else s + self.choice_bias[...]
        grouped = z.reshape(len(z), moe.groups, -1)
        best = jnp.sort(grouped, -1)[..., -2:].sum(-1)
        value = best if group is None else group(grouped, best)
        kept = value >= jnp.sort(value, -1)[:, -moe.topk_groups, None]
        z = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(z.shape)
        _, experts = jax.lax.top_k(z, moe.topk)
        w = jnp.take_along_axis(z if biased else s, experts, 1)
        return (w / w.sum(-1, keepdims=True) if moe.normalise else w) * moe.scale, experts

    return route


def largest_of_a_group(monkeypatch):
    monkeypatch.setattr(Router, "__call__", _router(group=lambda z, best: z.max(-1)))


def two_best_of_a_group(monkeypatch):
    monkeypatch.setattr(Router, "__call__", _router(jax.nn.softmax))


def bias_in_weights(monkeypatch):
    monkeypatch.setattr(Router, "__call__", _router(biased=True))


def softmax_scores(monkeypatch):
    monkeypatch.setattr(Router, "__call__", _router(jax.nn.softmax))


def scaled_shared_expert(monkeypatch):
    right = MoE.__call__

    def wrong(self, x, real, **facts):
        return right(self, x, real, **facts) + (self.router.moe.scale - 1) * self.shared(x)

    monkeypatch.setattr(MoE, "__call__", wrong)


def no_relu(monkeypatch):
    def scores(self, x, angles):
        q = self.indexer.queries(self.query_latents(x), angles)
        s = jnp.einsum("thd,sd->ths", q, self.indexer.keys(x, angles))
        return jnp.einsum("ths,th->ts", s, self.indexer.weights(x))

    monkeypatch.setattr(SparseMLA, "scores", scores)


def trailing_index_channels(monkeypatch):
    def placed(self, x, angles):
        rest, rope = x[..., : -self.rope], x[..., -self.rope :]
        turned = rotate(rope, *angles, interleaved=self.config.interleaved)
        return jnp.concatenate([rest, turned], axis=-1)

    monkeypatch.setattr(Indexer, "_placed", placed)


CODED = [
    ("v3_small", rotary_first, "rotary channels of a head: first", "query_nope"),
    ("v3_small", no_latent_norm, "key/value latent norm: omitted", "latent"),
    ("v3_small", norm_on_the_key, "norm of the rotary key: the latent's", "key_rope"),
    ("v3_small", values_first, "order of kv_b_proj: [value; key] of each head", "attention"),
    ("v3_small", no_rotation, "rotation: omitted", "query_rope"),
    ("v3_small", largest_of_a_group, "value of a group: largest", "router_choice"),
    ("v3_small", bias_in_weights, "router bias: in the weights too", "router"),
    ("v3_small", softmax_scores, "router score: softmax", "router"),
    ("v3_small", scaled_shared_expert, "shared expert: times the routed scale", "mlp"),
    ("v2_small", two_best_of_a_group, "value of a group: sum of the two best", "router_choice"),
    ("v32_small", no_relu, "ReLU of index scores: omitted", "selected"),
    ("v32_small", trailing_index_channels, "rotary channels of the indexer: last", "selected"),
]


@pytest.mark.parametrize("name, break_it, fault, first", CODED)
def test_a_wrong_line_is_named(side, name, break_it, fault, first, monkeypatch):
    expected = side(name)
    break_it(monkeypatch)
    found = expected.judge()
    assert found.faults == (fault,)
    assert first in str(found.first)


@pytest.mark.parametrize("how", ["divided by", "left out"])
def test_wrong_block_scales_are_named(side, how, monkeypatch):
    right = weights.dequantise
    expected = side("v3_small", fp8=True)

    def wrong(q, scale):
        return right(q, 1 / scale if how == "divided by" else np.ones_like(scale))

    monkeypatch.setattr(weights, "dequantise", wrong)
    found = expected.judge()
    assert found.faults[0] == f"block scales of e4m3 weights: {how}"
    assert str(found.first).startswith("weights of layer 0")


def test_an_unknown_fault_is_not_explained_away(side):
    def edit(model):
        for attn in attentions(model):
            attn.scale = attn.scale * 1.01

    found = side("v3_small").judge(edit)
    assert found.first == "layers.0.attention"
    assert found.faults[0].startswith("unexplained: attention")
    assert "no known convention explains mla_jax" in str(found.findings[0])


@pytest.mark.parametrize(
    "name", ["v2_small", "v2_lite_small", "v3_small", "v32_small", "glm_dsa_small"]
)
def test_equal_models_agree(side, name):
    found = side(name).judge()
    assert found.agrees
    assert not found.findings
    assert all(expected == theirs == mine for _, expected, theirs, mine in found.conventions)


def test_e4m3_weights_agree(side):
    assert side("v3_small", fp8=True).judge().agrees


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("fp8", [False, True])
def test_tensors_without_elements_may_be_there_or_not(fp8, tmp_path):
    """transformers makes and saves shared experts of width 0."""
    case = BY_NAME["v3_small"]
    case = replace(case, config=case.config | {"n_shared_experts": 0, "num_mtp_layers": 0})
    checkpoint.save_released(reference.build(case), case, tmp_path, fp8=fp8, shards=1)
    (file,) = tmp_path.glob("*.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors = load_file(file)
    file.unlink()
    full = {name: x for name, x in tensors.items() if x.numel()}
    assert len(tensors) - len(full) >= 6
    for stored in (tensors, full):
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert parity.compare(tmp_path, list(range(3, 20)), serve=False).agrees


def test_the_conventions_of_a_model_are_listed(side):
    names = {name for name, *_ in side("v32_small").judge().conventions}
    assert {"rotation layout", "softmax scale", "key/value latent norm"} <= names
    assert {"rotation layout of the indexer", "value of a group"} <= names


def test_leading_layers_alone(side):
    found = parity.compare(side("v3_small").tensors.folder, list(range(3, 20)), layers=2)
    assert found.agrees
    assert {row.name.split(".")[1] for row in found.rows if "." in row.name} == {"0", "1"}


def test_the_command(side, tmp_path, capsys):
    """Prints the tables, writes the page, serves, and says with its exit code that all agrees."""
    page = tmp_path / "parity.html"
    folder = side("v2_lite_small").tensors.folder
    with pytest.raises(SystemExit) as done:
        cli.main(["parity", str(folder), "--tokens", "20", "--out", str(page)])
    out = capsys.readouterr().out
    assert done.value.code == 0
    assert "served.decode.3" in out
    assert "equal: no tensor differs" in out
    assert "rotation layout" in page.read_text()


def test_the_page_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.chdir(imports.ROOT)
    command, promised = consoles()[0]
    with pytest.raises(SystemExit) as done:
        cli.main(command)
    assert done.value.code == 0
    assert_promised(promised, capsys.readouterr().out)


def test_the_page_counts_the_faults():
    named = len(EDITED) + len(CODED) + 2
    assert f"puts {named} mistakes" in (imports.ROOT / "docs" / "commands.md").read_text()


def test_a_folder_that_does_not_hold_the_model_is_refused(side, tmp_path, capsys, monkeypatch):
    """With exit code 2: 1 is that of tensors that differ."""
    folder = side("v3_small").tensors.folder
    shutil.copytree(folder, tmp_path / "model")
    name = "model.layers.1.mlp.gate.weight"
    files = {file: load_file(file) for file in (tmp_path / "model").glob("*.safetensors")}
    ((file, tensors),) = [held for held in files.items() if name in held[1]]
    save_file(tensors | {name: tensors[name].T.contiguous()}, file, metadata={"format": "pt"})

    def refused() -> str:
        with pytest.raises(SystemExit) as done:
            cli.main(["parity", str(tmp_path / "model"), "--tokens", "20", "--no-serve"])
        assert done.value.code == 2
        return capsys.readouterr().err

    assert f"misshapen: {name} is " in refused()
    save_file(tensors, file, metadata={"format": "pt"})

    def fails(*args: Any) -> None:
        raise TypeError("'<=' not supported")

    monkeypatch.setattr(transformers_trace, "_made", fails)
    assert "TypeError: '<=' not supported; allowed: a folder that transformers loads" in refused()


def test_refusals(side):
    folder = side("v3_small").tensors.folder
    with pytest.raises(ArgumentError, match="allowed: 1 to 3"):
        parity.compare(folder, layers=4)
    with pytest.raises(ArgumentError, match="each 0 to 255"):
        parity.compare(folder, [256])
    with pytest.raises(ConfigError, match="models of deepseek_v3, deepseek_v32"):
        trace_model(None, replace(side("v3_small").config, family="deepseek_v4"), [1])  # pyright: ignore
