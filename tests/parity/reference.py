"""The other side of the comparison: tiny transformers models, in float32, on the CPU.

``build`` fills a model with weights that depend on (seed, tensor name, shape) only and break
every symmetry of the default initialisation. ``greedy`` runs prompts one at a time, without
padding, and keeps the logits of every step.
"""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers

from tests.parity.families import Case

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 40, 64, 65, 129, 300)
"""Around the page of 16 and the chunk of 64, from a single token to several chunks."""

V4_LENGTHS = (1, 3, 4, 5, 16, 127, 128, 129, 255, 257)
"""Around the groups of 4, 16 and 128 tokens, and beyond the windows of 8 and 128."""


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def tensor(
    name: str, shape: Sequence[int], *, seed: int, tied: bool, experts: int = 0
) -> np.ndarray:
    """Value of a named tensor.

    Matrices ``N / sqrt(fan_in)``, head twice that, embedding ``N`` (as the head when tied), norm
    gains ``1 + 0.1 N``, biases and the router's choice bias ``0.1 N``. V4's sinks and gate biases
    ``N``, its streams' base ``0.5 N`` and scale ``1 + 0.2 N``, its table distinct random experts.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf == "tid2eid":
        draw = _generator(seed, name)
        return np.stack([draw.permutation(experts)[: shape[1]] for _ in range(shape[0])])
    noise = _generator(seed, name).standard_normal(tuple(shape)).astype(np.float32)
    if leaf in ("sinks", "position_bias"):
        return noise
    if leaf in ("base", "hc_base"):
        return 0.5 * noise
    if leaf in ("scale", "hc_scale"):
        return 1 + 0.2 * noise
    if leaf in ("bias", "e_score_correction_bias"):
        return 0.1 * noise
    if owner.rpartition(".")[2].endswith("norm"):
        return 1 + 0.1 * noise
    unit = noise / np.float32(np.sqrt(shape[-1]))
    if owner.endswith("embed_tokens"):
        return 2 * unit if tied else noise
    return 2 * unit if owner.endswith("lm_head") else unit


def build(case: Case) -> torch.nn.Module:
    """The transformers model of a case, filled, float32, eager attention."""
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
    tied = bool(config.tie_word_embeddings)
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if tied and name.startswith("lm_head"):
                continue
            experts = getattr(config, "n_routed_experts", 0)
            drawn = tensor(name, value.shape, seed=case.seed, tied=tied, experts=experts)
            value.data.copy_(torch.from_numpy(np.ascontiguousarray(drawn)))
    return model


def prompts(case: Case, lengths: Sequence[int] = ()) -> list[list[int]]:
    """Uniform token ids of these lengths, or the family's; 0 to 2 are left to special tokens."""
    lengths = lengths or (V4_LENGTHS if case.family == "DeepseekV4" else PROMPT_LENGTHS)
    vocab = case.config["vocab_size"]
    draw = _generator(case.seed, "prompts")
    return [draw.integers(3, vocab, size=n).tolist() for n in lengths]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the other side says, one row per prompt."""

    prompts: list[list[int]]
    tokens: np.ndarray  # int64 [prompts, steps], greedy
    logits: np.ndarray  # float32 [prompts, steps, vocab]; row i chose token i
    router_gap: float  # smallest distance of an expert choice from flipping
    greedy_gap: float  # smallest distance of the best logit from the second

    def logprobs(self) -> np.ndarray:
        """Log-probability of each chosen token, float64 ``[prompts, steps]``."""
        z = self.logits.astype(np.float64)
        top = z.max(-1, keepdims=True)
        total = np.log(np.exp(z - top).sum(-1)) + top[..., 0]
        return np.take_along_axis(z, self.tokens[..., None], -1)[..., 0] - total


@contextlib.contextmanager
def _watch_choices(gaps: list[float], selected: int | None) -> Iterator[None]:
    """Record how far the last chosen value of every choice is from the next.

    Routers choose by ``torch.topk``, indexers ``selected`` tokens by the method of a tensor.
    """
    original, method = torch.topk, torch.Tensor.topk

    def record(x: torch.Tensor, k: int) -> None:
        if k >= x.shape[-1]:
            return
        best = original(x.detach(), k + 1, dim=-1)[0]
        gap = best[..., k - 1] - best[..., k]
        finite = gap[torch.isfinite(gap) & (best[..., k] > -1e30)]
        if finite.numel():
            gaps.append(float(finite.min()))

    def function(x: torch.Tensor, k: int, *args, **kwargs):
        record(x, k)
        return original(x, k, *args, **kwargs)

    def called(x: torch.Tensor, k: int, *args, **kwargs):
        if k == selected:
            record(x, k)
        return method(x, k, *args, **kwargs)

    torch.topk, torch.Tensor.topk = function, called
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = original, method


@torch.no_grad()
def _continue(model: torch.nn.Module, prompt: list[int], steps: int) -> list[np.ndarray]:
    """Logits that choose each of ``steps`` greedy tokens."""
    rows = []
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    for _ in range(steps):
        row = out.logits[0, -1].float()
        rows.append(row.numpy().copy())
        if len(rows) < steps:
            chosen = row.argmax().reshape(1, 1)
            out = model(input_ids=chosen, past_key_values=out.past_key_values, use_cache=True)
    return rows


def greedy(model: torch.nn.Module, requests: list[list[int]], steps: int = 32) -> Reference:
    """Greedy continuation of every prompt on its own; special tokens do not stop it."""
    gaps: list[float] = []
    with _watch_choices(gaps, getattr(model.config, "index_topk", None)):
        logits = np.stack([_continue(model, prompt, steps) for prompt in requests])
    second, first = np.moveaxis(np.sort(logits, -1)[..., -2:], -1, 0)
    return Reference(
        prompts=requests,
        tokens=logits.argmax(-1),
        logits=logits,
        router_gap=min(gaps, default=float("inf")),
        greedy_gap=float((first - second).min()),
    )
