"""Text and chats in, text out: the engine with a tokenizer."""

import copy
import dataclasses
import json
import sys
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax.engine import Engine, load_model
from mla_jax.errors import EngineError
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.sharding import named_leaves
from mla_jax.model.weights import save
from mla_jax.text import TextProcessor
from tests import traffic

tokenizers = pytest.importorskip("tokenizers")
CONFIG = traffic.CONFIG
HELLO = [{"role": "user", "content": "ab"}]
ADVICE = {"do_sample": True, "temperature": 0.7, "top_k": 9, "eos_token_id": [0, 9]}
LETTERS = "abcdefghijklmnop"


def byte_vocab() -> list[str]:
    """63 tokens: two special ones, letters, pairs, and the bytes of 中 (e4 b8 ad) and ñ."""
    pieces = ["<s>", "</s>", *LETTERS, "Ġ", "ä", "¸", "Ń", "Ã", "±"]
    return pieces + [a + b for a in LETTERS[:7] for b in LETTERS[:7]][: 64 - len(pieces)]


def write_tokenizer(folder, *, bos: bool = False, **config) -> None:
    """``bos``: every text begins with <s>."""
    vocab = {piece: i for i, piece in enumerate(byte_vocab())}
    merges = [(p[0], p[1]) for p in vocab if len(p) == 2 and p.isalpha()]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    if bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer, a template and advice."""
    root = tmp_path_factory.mktemp("model")
    save(root, CONFIG, named_leaves(nnx.state(traffic.model(), nnx.Param)))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
    template += "{% if tools %}{{ tools[0].name }}{% endif %}"
    template += "{% if add_generation_prompt %}c{% endif %}"
    write_tokenizer(root, bos=True, chat_template=template)
    (root / "generation_config.json").write_text(json.dumps(ADVICE))
    return root


SETTINGS = {
    "num_pages": traffic.PAGES,
    "page": traffic.PAGE,
    "max_requests": traffic.MOST,
    "prefill_chunk": 16,
    "cache_format": "fp32",
    "ladder": traffic.LADDER,
    "dtype": jnp.float32,
}


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, **SETTINGS)


@pytest.fixture
def another(engine, folder):
    """An engine of other settings with the same programs."""

    def another(**more) -> Engine:
        made = Engine.from_pretrained(folder, **(SETTINGS | more))
        return traffic.with_programs_of(engine, made)

    return another


def wish(n: int, **more) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, ignore_eos=True, **more)


MANY = [wish(24, temperature=2.0, seed=i) for i in range(12)]


@pytest.mark.slow
def test_texts_and_chats_are_prompts(engine):
    vocab = byte_vocab()
    ab, c, space = vocab.index("ab"), vocab.index("c"), vocab.index("Ġ")
    got = engine.generate(["ab", HELLO, [3, 4], "<s>ab"], wish(1))
    want = [(0, ab), (0, ab, space, c), (3, 4), (0, 0, ab)]
    assert [x.prompt_ids for x in got] == want
    assert engine.encode("ab", special_tokens=False) == [ab]
    assert engine.encode(HELLO, add_generation_prompt=False) == [0, ab, space]
    assert engine.encode(HELLO, tools=[{"name": "h"}])[-2:] == [vocab.index("h"), c]
    (event,) = list(engine.stream(HELLO, wish(1)))
    assert event.completion.prompt_ids == want[1]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_text_is_that_of_the_tokens(another, ahead):
    """Of streams too, piece by piece, under evictions, and never half a character."""
    engine = another(run_ahead=ahead)
    pool = engine.scheduler.groups[0].pool
    pool.alloc(pool.free - 14)
    told: dict[str, str] = {}

    def note(event):
        assert not event.text.endswith("\ufffd") or event.completion is not None
        told[event.id] = told.get(event.id, "") + event.text

    got = engine.generate([[i + 2] for i in range(12)], MANY, on_progress=note)
    assert engine.stats().preemptions > 0
    assert sum("中" in c.text or "ñ" in c.text or "\ufffd" in c.text for c in got) > 0
    for c in got:
        assert c.text == told[c.id] == engine.text.decode(c.token_ids)


@pytest.mark.parametrize("ahead", [True, False])
def test_stop_strings_end_a_request_where_the_definition_says(another, ahead):
    engine = another(run_ahead=ahead)
    prompts = [[i + 2] for i in range(12)]
    free = engine.generate(prompts, MANY)
    stops = tuple(sorted({c.text[5:8] for c in free if len(c.text) > 8})[:4])
    assert len(stops) == 4
    told: dict[str, str] = {}

    def note(event):
        told[event.id] = told.get(event.id, "") + event.text

    asked = [dataclasses.replace(params, stop=stops) for params in MANY]
    got = engine.generate(prompts, asked, on_progress=note)
    assert engine.stats().live == engine.stats().pages_used == 0
    for c, whole in zip(got, free, strict=True):
        tokens, text, reason = whole.token_ids, whole.text, "length"
        for n in range(1, len(tokens) + 1):
            sofar = engine.text.decode(tokens[:n])
            if not sofar.endswith("\ufffd") and any(stop in sofar for stop in stops):
                tokens, reason = tokens[:n], "stop"
                text = sofar[: min(sofar.find(stop) for stop in stops if stop in sofar)]
                break
        assert (c.token_ids, c.text, c.finish_reason) == (tokens, text, reason)
        assert told[c.id] == c.text
    assert {c.finish_reason for c in got} == {"stop", "length"}


def test_a_stop_token_is_no_text(engine):
    (free,) = engine.generate([[5]], wish(6))
    params = wish(6, stop_token_ids=free.token_ids[3:4])
    (got,) = engine.generate([[5]], params)
    first = free.token_ids.index(free.token_ids[3])
    assert got.token_ids == free.token_ids[: first + 1]
    assert got.text == engine.text.decode(free.token_ids[:first])


def test_a_cancelled_request_has_the_text_so_far(engine):
    id = engine.add("ab", wish(20))
    events = [*engine.step(), *engine.step(), *engine.step()]
    engine.cancel(id)
    events += engine.step()
    completion = events[-1].completion
    assert completion.finish_reason == "cancelled" and completion.token_ids
    assert completion.text == engine.text.decode(completion.token_ids)
    assert "".join(e.text for e in events) == completion.text


def test_the_advice_is_for_requests_without_params(engine):
    assert engine.default_params == SamplingParams(temperature=0.7, top_k=9)
    assert engine.scheduler.eos == {0, 9}
    asked = engine.default_params
    assert engine.generate(["ab"])[0].token_ids == engine.generate(["ab"], asked)[0].token_ids
    (greedy,) = engine.generate(["ab"], SamplingParams())
    assert greedy.token_ids == engine.generate(["ab"], [SamplingParams(seed=5)])[0].token_ids
    events = list(engine.stream("ab"))
    assert events[-1].completion.token_ids == engine.generate(["ab"])[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("ab", r"prompts: given 'ab' \(str\).*A single prompt is written \[text\]"),
        (HELLO, r"prompt 0: given .*A single chat is written \[\[\{message\}, …\]\]"),
        ([b"ab"], r"prompt 0: given b'ab' \(bytes\); allowed: token ids, a text, or a list of"),
        ([["ab"]], r"generate: prompt 0: given a list of texts; allowed: .*This is one prompt"),
        ([[2], [999]], r"^generate: prompt 1: token 0: given 999; allowed: integers from 0"),
        ([[2], [3] * 70], r"^generate: prompt 1: prompt \+ max_new_tokens"),
        ([5], r"prompt 0: given 5 \(int\).*A single prompt is written \[\[5\]\]"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_in_words(engine, prompts, message):
    with pytest.raises(EngineError, match=message):
        engine.generate(prompts, wish(1))
    assert engine.stats().live == 0


@pytest.mark.parametrize("prompts", [["ab"], [HELLO]], ids=["texts", "chats"])
def test_several_prompts_in_place_of_one_are_refused(engine, prompts):
    with pytest.raises(EngineError, match=r"^stream: prompt: given a list of .*This is one prompt"):
        next(engine.stream(prompts))
    with pytest.raises(EngineError, match=r"^request a: prompt: given a list of .*This is one"):
        engine.add(prompts, id="a")
    assert engine.stats().live == 0


def test_without_a_tokenizer_text_is_refused_in_words(another):
    engine = another(text=None)
    for call in (
        lambda: engine.generate(["ab"]),
        lambda: engine.generate([HELLO]),
        lambda: engine.add("ab"),
        lambda: next(engine.stream(HELLO)),
    ):
        with pytest.raises(EngineError, match=r"allowed: a sequence of token ids.*tokenizer.json"):
            call()
    for prompt in ("ab", HELLO, [1]):
        with pytest.raises(EngineError, match=r"allowed: nothing: .* no tokenizer.*tokenizer.json"):
            engine.encode(prompt)
    with pytest.raises(EngineError, match=r"stop: given .*because the engine has no tokenizer"):
        engine.add([1], wish(2, stop="x"))
    (got,) = engine.generate([[1]], wish(2))
    assert got.text is None
    assert (engine.stats().live, engine.stats().pages_used) == (0, 0)


def test_what_encode_takes(engine):
    with pytest.raises(EngineError, match="encode: a text: given with tools; allowed: these for"):
        engine.encode("ab", tools=[])
    with pytest.raises(EngineError, match=r"encode: given .*a text, or a list of messages"):
        engine.encode([1, 2])
    with pytest.raises(EngineError, match=r"special_tokens: given 3 .*True or False"):
        engine.encode("ab", special_tokens=3)


@pytest.mark.parametrize("ids", [None, "ab", [-1], [10**6], [1.5], 3])
def test_what_is_no_id_has_no_text(engine, ids):
    with pytest.raises(EngineError, match="decode"):
        engine.text.decode(ids)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deepseek_v3", "publishes no chat template. One would be in chat_template.jinja"),
        ("deepseek_v32", r"encoding/encoding_dsv32.py instead.*special_tokens=False"),
        ("deepseek_v4", r"encoding/encoding_dsv4.py instead.*encode_messages"),
    ],
)
def test_models_without_a_template_refuse_chats_by_name(tmp_path, family, message):
    write_tokenizer(tmp_path)
    text = TextProcessor.open(tmp_path, vocab=64, family=family)
    with pytest.raises(EngineError, match=message):
        text.ids(HELLO)


def test_folders_without_a_tokenizer(tmp_path, monkeypatch):
    assert TextProcessor.open(tmp_path, vocab=64, family="deepseek_v3") is None
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert TextProcessor.open(tmp_path, vocab=64, family="deepseek_v3") is None


def test_a_token_beyond_the_model_is_named(tmp_path):
    write_tokenizer(tmp_path)
    text = TextProcessor.open(tmp_path, vocab=20, family="deepseek_v3")
    with pytest.raises(EngineError, match=r"here: tokenizer.json: token 0: given"):
        text.ids("ab", "here")


def test_a_hub_id_is_a_folder(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stub = ModuleType("huggingface_hub")
    stub.snapshot_download = lambda *_, **__: str(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)
    assert Engine.from_pretrained("owner/name", **SETTINGS).text.vocab == 64
    _, config = load_model("owner/name", dtype=jnp.float32)
    assert config.vocab == 64
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for load in (Engine.from_pretrained, load_model):
        with pytest.raises(EngineError, match="model owner/name: given no folder"):
            load("owner/name")


def test_ids_without_a_text(another, monkeypatch):
    """The tokens were paid for: they are given; only who asked for a stop string has an error."""
    engine = another()

    def refuse(ids):
        raise EngineError("tokenizer.json", "ids", "others")

    tokenizer = copy.copy(engine.text.tokenizer)
    tokenizer.decode = refuse
    engine.text = dataclasses.replace(engine.text, tokenizer=tokenizer)
    plain, stopped = engine.generate([[1], [1]], [wish(3), wish(3, stop="x")])
    assert (plain.text, len(plain.token_ids), plain.finish_reason) == (None, 3, "length")
    assert (stopped.text, len(stopped.token_ids), stopped.finish_reason) == (None, 1, "error")
    assert np.isfinite(stopped.logprobs).all()
