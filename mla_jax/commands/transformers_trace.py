"""The other side of a comparison: the model of transformers, float32, eager, on the CPU.

Imported only by those who compare; it needs the packages of the extra ``parity``.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mla_jax.commands.trace import Trace
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.errors import ConfigError, MLAError, WeightsError
from mla_jax.hf_keys import load_json
from mla_jax.model.reading import Tensors

try:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as missing:
    raise ConfigError(
        "parity",
        f"a Python without {missing.name}",
        "one with torch and transformers",
        "In a checkout: pip install -e '.[parity]'.",
    ) from None

__all__ = ["load", "logits_of", "trace", "trace_v4"]

_TYPES = {"kimi_k2": "deepseek_v3"}
"""``model_type`` of released folders that transformers knows by another name."""


def load(tensors: Tensors, config: AnyConfig) -> torch.nn.Module:
    """The folder's model with ``config.layers`` layers, float32, eager attention.

    Weights go through transformers' own reader; block-scaled e4m3 ones, which the reader of
    transformers 5.23 refuses where 128 does not divide their rows, are widened here.

    Raises:
        ConfigError: transformers has no such model, or cannot load the folder.
        WeightsError: transformers misses weights.
    """
    if isinstance(config, V4Config) and config.fp8_block:
        allowed = "16 or 32 bits: this command does not widen the block-scaled weights of V4"
        raise ConfigError("parity: weights of a DeepSeek V4", "e4m3", allowed)
    data: Any = load_json(tensors.folder / "config.json")
    data.pop("quantization_config", None)
    data["num_hidden_layers"] = config.layers
    for name in ("mlp_layer_types", "indexer_types"):
        if data.get(name):
            data[name] = data[name][: config.layers]
    kind = _TYPES.get(config.family, config.family)
    data["model_type"] = kind
    if kind not in transformers.CONFIG_MAPPING:
        given = f"{kind!r}, which transformers {transformers.__version__} does not know"
        raise ConfigError("parity: model_type", given, "a model that both sides have")
    try:
        return _made(tensors, config, transformers.CONFIG_MAPPING[kind].from_dict(data))
    except MLAError:
        raise
    except Exception as error:  # it checks less than is checked here, and in words of its own
        given = f"transformers {transformers.__version__}: {type(error).__name__}: {error}"
        allowed = "a folder that transformers loads"
        raise ConfigError("parity", given, allowed) from error


def _made(tensors: Tensors, config: AnyConfig, facts: Any) -> torch.nn.Module:
    """The model of ``facts``, transformers' configuration."""
    facts._attn_implementation = "eager"
    facts.dtype = torch.float32
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(facts)]
    if not isinstance(config, V4Config) and config.fp8_block:
        model = cls(facts).float()
        _fill(model, tensors, config)
    else:
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # layers that are left out on purpose
        model, info = cls.from_pretrained(
            tensors.folder, config=facts, dtype=torch.float32, output_loading_info=True
        )
        transformers.logging.set_verbosity(before)
        tied = not isinstance(config, V4Config) and config.tied
        empty = {n for n, value in model.state_dict().items() if not value.numel()}
        absent = set(info["missing_keys"]) - empty
        absent = [n for n in absent if not (tied and "lm_head" in n)]
        if absent:
            problems = [f"missing for transformers: {name}" for name in sorted(absent)]
            raise WeightsError(str(tensors.folder), problems)
    return model.eval()


def _fill(model: torch.nn.Module, tensors: Tensors, config: ModelConfig) -> None:
    """Every weight from the folder, widened; experts of one layer in one tensor."""
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if (config.tied and name.startswith("lm_head")) or not value.numel():
                continue
            if ".experts." in name and name not in tensors:
                owner, _, leaf = name.rpartition(".")
                parts = ("down_proj",) if leaf == "down_proj" else ("gate_proj", "up_proj")
                for e, expert in enumerate(value.data):
                    one = [tensors[f"{owner}.{e}.{part}.weight"] for part in parts]
                    expert.copy_(torch.from_numpy(np.concatenate(one)))
                continue
            value.data.copy_(torch.from_numpy(tensors[name]))


@torch.no_grad()
def logits_of(model: torch.nn.Module, token_ids: Sequence[int]) -> np.ndarray:
    """``[tokens, vocab]`` of one sequence."""
    out = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return out.logits[0].float().numpy()


@torch.no_grad()
def trace(model: Any, config: ModelConfig, token_ids: Sequence[int]) -> Trace:
    """One sequence through the model, every tensor of ``trace.Trace`` written down."""
    rough: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for name, module, see in _probes(model, config):
            stack.callback(module.register_forward_hook(_hook(rough, name, see)).remove)
        stack.enter_context(_attention(model, config, rough))
        logits = logits_of(model, token_ids)
    found = Trace(side="transformers")
    found.put("embedding", rough["embedding"])
    dims, tokens = config.dims, len(token_ids)
    for i in range(config.layers):
        at = f"layers.{i}"
        after = f"layers.{i + 1}.input" if i + 1 < config.layers else "final_input"
        found.put(f"{at}.attn_norm", rough[f"{at}.attn_norm"])
        if dims.q_rank is not None:
            found.put(f"{at}.query_latent", rough[f"{at}.query_latent"])
        found.put(f"{at}.query", rough[f"{at}.query"].reshape(tokens, dims.heads, dims.qk))
        found.put(f"{at}.row", rough[f"{at}.row"])
        found.put(f"{at}.latent", rough[f"{at}.latent"])
        for name in ("query_nope", "query_rope", "key_rope", "selected"):
            if f"{at}.{name}" in rough:
                found.put(f"{at}.{name}", rough[f"{at}.{name}"])
        found.put(f"{at}.attention", rough[f"{at}.attention"])
        found.put(f"{at}.after_attn", rough[f"{at}.mlp_input"])
        found.put(f"{at}.mlp_norm", rough[f"{at}.mlp_norm"])
        if f"{at}.gate" in rough:
            assert config.moe is not None  # a layer that routes
            _, weights, experts = rough[f"{at}.gate"]
            found.put_router(at, weights, experts, config.moe.experts)
        found.put(f"{at}.mlp", rough[f"{at}.mlp"])
        found.put(f"{at}.residual", rough[after])
    found.put("final_norm", rough["final_norm"])
    found.put("logits", logits)
    return found


@torch.no_grad()
def trace_v4(model: Any, config: V4Config, token_ids: Sequence[int]) -> Trace:
    """One sequence through a DeepSeek V4, every tensor of ``trace_v4.trace_model_v4``."""
    found = Trace(side="transformers")

    def flat(x: torch.Tensor) -> np.ndarray:
        return x.detach().float().reshape(len(token_ids), -1).numpy().copy()

    def write(name: str, read: Callable[[Any, Any], Any]) -> Callable[..., None]:
        return lambda module, given, out: found.put(name, flat(read(given, out)))

    def states(at: str) -> Callable[..., None]:
        def hook(module: Any, given: Any, out: Any) -> None:
            rows, bias = out
            pooled = rows[0, 0].float().numpy().copy()
            if bias is None:  # fewer tokens than a group has: no state, and nothing to select
                selected = np.zeros((len(token_ids), len(pooled)), np.float32)
            else:
                selected = flat(bias[0, 0] == 0)
            found.put(f"{at}.states", pooled)
            found.put(f"{at}.selected", selected)

        return hook

    def router(at: str) -> Callable[..., None]:
        return lambda module, given, out: found.put_router(at, out[1], out[2], config.moe.experts)

    def result(given: Any, out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    inner = model.model
    hooks = [(inner.embed_tokens, write("embedding", result))]
    for i, layer in enumerate(inner.layers):
        at, attn = f"layers.{i}", layer.self_attn
        hooks += [
            (layer.attn_hc, write(f"{at}.attn_input", lambda given, out: out[2])),
            (layer.input_layernorm, write(f"{at}.attn_norm", result)),
            (attn.q_a_norm, write(f"{at}.query_latent", result)),
            (attn.q_b_proj, write(f"{at}.query", result)),
            (attn.kv_proj, write(f"{at}.row", result)),
            (attn.kv_norm, write(f"{at}.normed_row", result)),
            *([] if attn.compressor is None else [(attn.compressor, states(at))]),
            (attn, write(f"{at}.attention", result)),
            (layer.ffn_hc, write(f"{at}.after_attn", lambda given, out: given[0])),
            (layer.ffn_hc, write(f"{at}.mlp_input", lambda given, out: out[2])),
            (layer.post_attention_layernorm, write(f"{at}.mlp_norm", result)),
            (layer.mlp.gate, router(at)),
            (layer.mlp, write(f"{at}.mlp", result)),
            (layer, write(f"{at}.residual", result)),
        ]
    hooks.append((inner.norm, write("final_norm", result)))
    with contextlib.ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        logits = logits_of(model, token_ids)
    found.put("logits", logits)
    return found


_IN, _OUT = "input", "output"


def _probes(model: Any, config: ModelConfig) -> Iterator[tuple[str, Any, str]]:
    """Name, module of transformers, and which side of it is read."""
    inner = model.model
    yield "embedding", inner.embed_tokens, _OUT
    for i, layer in enumerate(inner.layers):
        at, attn = f"layers.{i}", layer.self_attn
        yield f"{at}.input", layer.input_layernorm, _IN
        yield f"{at}.attn_norm", layer.input_layernorm, _OUT
        if config.dims.q_rank is None:
            yield f"{at}.query", attn.q_proj, _OUT
        else:
            yield f"{at}.query_latent", attn.q_a_layernorm, _OUT
            yield f"{at}.query", attn.q_b_proj, _OUT
        yield f"{at}.row", attn.kv_a_proj_with_mqa, _OUT
        yield f"{at}.latent", attn.kv_a_layernorm, _OUT
        yield f"{at}.attention", attn.o_proj, _OUT
        yield f"{at}.mlp_input", layer.post_attention_layernorm, _IN
        yield f"{at}.mlp_norm", layer.post_attention_layernorm, _OUT
        if config.sparse_layers[i]:
            yield f"{at}.gate", layer.mlp.gate, _OUT
        yield f"{at}.mlp", layer.mlp, _OUT
    yield "final_input", inner.norm, _IN
    yield "final_norm", inner.norm, _OUT


def _hook(rough: dict[str, Any], name: str, see: str) -> Callable[..., None]:
    def hook(module: Any, given: tuple[Any, ...], out: Any) -> None:
        value = given[0] if see == _IN else out
        if isinstance(value, tuple):  # of a router: logits, weights, experts
            rough[name] = tuple(x.detach().float() if x.is_floating_point() else x for x in value)
        else:
            flat = value.detach().float()
            rough[name] = flat.reshape(-1, flat.shape[-1]).numpy().copy()

    return hook


@contextlib.contextmanager
def _attention(model: Any, config: ModelConfig, rough: dict[str, Any]) -> Iterator[None]:
    """Read queries and keys where the eager attention of the model's file receives them."""
    home: Any = sys.modules[type(model).__module__]
    original = home.eager_attention_forward
    nope, rope = config.dims.nope, config.dims.rope
    pairs = config.rope.interleaved
    reordered = pairs and config.family != "deepseek_v2"  # emits halves of what it read as pairs

    def ordered(x: Any) -> np.ndarray:
        if reordered:
            x = x.unflatten(-1, (2, rope // 2)).transpose(-1, -2).flatten(-2)
        return x.float().numpy().copy()

    def attention(module, query, key, value, attention_mask, **more):
        at = f"layers.{module.layer_idx}"
        rough[f"{at}.query_nope"] = query[0, ..., :nope].transpose(0, 1).float().numpy().copy()
        rough[f"{at}.query_rope"] = ordered(query[0, ..., nope:].transpose(0, 1))
        rough[f"{at}.key_rope"] = ordered(key[0, 0, :, nope:])
        if config.indexer is not None:
            mask = attention_mask[0, 0]
            seen = mask if mask.dtype == torch.bool else mask == 0
            rough[f"{at}.selected"] = seen.float().numpy().copy()
        return original(module, query, key, value, attention_mask, **more)

    home.eager_attention_forward = attention
    try:
        yield
    finally:
        home.eager_attention_forward = original
