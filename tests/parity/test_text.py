"""Text, chats, advice and penalties as transformers has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mla_jax.model.sampling import SamplingBatch, SamplingParams, sample
from mla_jax.model.token_history import Fed, TokenHistory
from mla_jax.text import TextProcessor
from tests.test_text import write_tokenizer

LOOPS = """
{%- set ns = namespace(system='', first=true) -%}
{%- for m in messages if m['role'] == 'system' -%}
    {%- set ns.system = ns.system + m['content'] -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}{% continue %}{% endif %}
    {%- if m['role'] not in ('user', 'assistant') %}
        {{- raise_exception('no such role: ' ~ m['role']) }}
    {%- endif %}
    {%- if m['role'] == 'user' %}a{{ m['content'] | trim }}{% else %}
    {%- generation %}b{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}c{% if thinking is defined and thinking %}d
    {%- endif %}{% endif %}
{%- endfor %}
"""
TOOLS = """{% if tools %}
    {% for tool in tools %}
{{ tool | tojson(indent=2) }} {{ tool.function.name | upper }}
    {% endfor %}
{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls is defined %}
{{ m.tool_calls | tojson }}{% endif %}

{% endfor %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a ñ <b> & 'c'",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
CHAT = [
    {"role": "system", "content": "ef"},
    {"role": "user", "content": "  gh \n"},
    {"role": "assistant", "content": "ij</think>kl"},
    {"role": "user", "content": "mn"},
]


def both(folder, **config):
    """Ours and theirs, of one folder."""
    write_tokenizer(folder, tokenizer_class="PreTrainedTokenizerFast", **config)
    ours = TextProcessor.open(folder, vocab=64, family="deepseek_v3")
    return ours, PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("template", [LOOPS, TOOLS], ids=["loops", "tools"])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_chats(tmp_path, template, add, tools):
    ours, theirs = both(tmp_path, chat_template=template, bos=True)
    for chat in (CHAT, CHAT[1:2], CHAT[:2]):
        for more in ({}, {"thinking": True}):
            facts = {"tools": tools, "add_generation_prompt": add, **more}
            want = theirs.apply_chat_template(chat, tokenize=False, **facts)
            assert ours.template.render(chat, **facts) == want
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **facts)
            assert ours.chat(chat, **facts) == ids


def test_templates_by_name_and_in_a_file(tmp_path):
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    ours, theirs = both(tmp_path, chat_template=listed)
    for tools in (None, [TOOL]):
        want = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.template.render(CHAT, tools=tools) == want
    (tmp_path / "chat_template.jinja").write_text("F{{ bos_token }}")
    ours = TextProcessor.open(tmp_path, vocab=64, family="deepseek_v3")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.template.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("flag", [None, True, False])
def test_tokens_around_a_text(tmp_path, bos, flag):
    """tokenizer.json decides; ``add_bos_token`` does not."""
    ours, theirs = both(tmp_path, bos=bos, **({} if flag is None else {"add_bos_token": flag}))
    for text in ("ab中", "<s>ab中", " a "):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special_tokens=False) == bare
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_what_is_left_to_draw_from():
    """Repetition, temperature, top-k, top-p, min-p in transformers' order, draws beside it."""
    rng = np.random.default_rng(0)
    n, vocab, prompt, drawn = 40, 50, 7, 9
    logits = (3 * rng.normal(size=(n, vocab))).astype("f4")
    said = rng.integers(0, vocab, (n, prompt + drawn)).astype("i4")
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.7, 1.0, 1.8])),
            top_k=int(rng.choice([0, 5, 20])),
            top_p=float(rng.choice([1.0, 0.9, 0.6])),
            min_p=float(rng.choice([0.0, 0.02, 0.2])),
            repetition_penalty=float(rng.choice([1.0, 1.5, 0.8])),
        )
        for _ in range(n)
    ]
    batch = SamplingBatch.nothing(n)
    batch.fill(params)
    batch.adjust.row[:], batch.adjust.prompt_len[:] = np.arange(n)[::-1], prompt
    positions = np.tile(np.arange(prompt + drawn, dtype=np.int32), n)
    fed = Fed(
        ids=jnp.asarray(said.reshape(-1)),
        positions=jnp.asarray(positions),
        requests=jnp.asarray(np.repeat(np.arange(n, dtype=np.int32), prompt + drawn)),
        real=jnp.ones(n * (prompt + drawn), bool),
    )
    draw = jax.jit(lambda batch: sample(jnp.asarray(logits), batch, history, fed).token)
    history = jax.tree.map(jnp.asarray, TokenHistory.zeros(n, vocab))
    seen = [set() for _ in range(n)]
    for position in range(400):
        batch.position[:] = position
        for row, token in enumerate(np.asarray(draw(batch))):
            seen[row].add(int(token))
    for row, p in enumerate(params):
        steps = [
            RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
            TemperatureLogitsWarper(p.temperature),
            *([TopKLogitsWarper(p.top_k)] if p.top_k else []),
            *([TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []),
            *([MinPLogitsWarper(p.min_p)] if p.min_p else []),
        ]
        ids = torch.from_numpy(said[row : row + 1]).long()
        scores = LogitsProcessorList(steps)(ids, torch.from_numpy(logits[row : row + 1]))
        chances = torch.softmax(scores, -1)[0].numpy()
        assert seen[row] <= set(np.flatnonzero(chances > 0).tolist())
        assert seen[row] >= set(np.flatnonzero(chances > 0.05).tolist())
