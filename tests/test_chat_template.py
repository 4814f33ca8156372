"""Chat templates as transformers renders them, and what is refused."""

import json
import sys

import pytest

from mla_jax.chat_template import ChatTemplate, is_chat, special_tokens
from mla_jax.errors import ConfigError, EngineError

pytest.importorskip("jinja2")
HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n    {% if m['role'] == 'user' %}\n"
    "<U>{{ m['content'] }}{% else %}\n<A>{{ m['content'] }}{{ eos_token }}{% endif %}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<A>{% endif %}"
)
CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": PLAIN,
}


def write(folder, *, template: str | None = None, **config) -> "ChatTemplate | None":
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return ChatTemplate.open(folder)


def test_messages_become_text(tmp_path):
    found = write(tmp_path)
    assert found.render(HELLO) == "<s><U>Hello<A>"
    assert found.render(HELLO, add_generation_prompt=False) == "<s><U>Hello"
    answered = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
    assert found.render(answered) == "<s><U>Hello<A>Hi</s><U>Hello<A>"


def test_the_file_comes_before_the_configuration(tmp_path):
    found = write(tmp_path, template="{{ messages[0].content }}!{{ thinking }}")
    assert found.render(HELLO, thinking=True) == "Hello!True"
    assert found.where.endswith("chat_template.jinja")


def test_tools_may_have_a_template_of_their_own(tmp_path):
    named = {"default": "D{{ tools }}", "tool_use": "T{{ tools | tojson }}"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    tools = [{"type": "function", "function": {"name": "f", "description": "ñ <b>"}}]
    found = write(tmp_path, chat_template=listed)
    assert found.render(HELLO) == "DNone"
    assert found.render(HELLO, tools=tools) == "T" + json.dumps(tools, ensure_ascii=False)
    found = write(tmp_path, chat_template=listed[1:])
    with pytest.raises(EngineError, match="templates tool_use; allowed: one named default"):
        found.render(HELLO)


def test_loops_can_break_and_generation_is_printed(tmp_path):
    text = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    text += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert write(tmp_path, template=text).render(HELLO * 3) == "Hello"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.x.y }}", "UndefinedError"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error(tmp_path, template, message):
    with pytest.raises(EngineError, match=message) as error:
        write(tmp_path, template=template).render(HELLO)
    assert "chat_template.jinja" in str(error.value)


def test_the_conversation_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"^file line 3: .*chat_template\.jinja: given"):
        write(tmp_path, template="{{ 1 / 0 }}").render(HELLO, where="file line 3")


@pytest.mark.parametrize("option", ["continue_final_message", "tokenize", "chat_template"])
def test_options_that_no_template_reads_are_refused(tmp_path, option):
    found = write(tmp_path, template="{{ thinking }}")
    with pytest.raises(EngineError, match=f"chat: given {option}=True; allowed: tools, add_gen"):
        found.render(HELLO, **{option: True})
    assert found.render(HELLO, thinking=True) == "True"


def test_templates_see_plain_data_only(tmp_path):
    found = write(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(EngineError, match="chat: given Object of type object"):
        found.render([{"role": "user", "content": object()}])
    messages = [{"role": "user", "content": "x"}]
    write(tmp_path, template="{% set m = messages[0] %}{{ m.update(a=1) if false }}").render(
        messages
    )
    assert messages == [{"role": "user", "content": "x"}]


def test_folders_without_one(tmp_path):
    assert ChatTemplate.open(tmp_path) is None
    assert write(tmp_path, chat_template=None) is None


@pytest.mark.parametrize("wrong", [5, [], [1], [{"name": "default"}], {"default": "x"}], ids=str)
def test_templates_that_are_none(tmp_path, wrong):
    if wrong == []:
        assert write(tmp_path, chat_template=wrong) is None
        return
    with pytest.raises(EngineError, match="chat_template: given"):
        write(tmp_path, chat_template=wrong)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(EngineError, match="byte 0 is not UTF-8"):
        ChatTemplate.open(tmp_path)


def test_without_jinja_it_says_what_to_install(tmp_path, monkeypatch):
    found = write(tmp_path, template="never compiled before {{ messages }}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "mla_jax.chat_sandbox", raising=False)
    with pytest.raises(EngineError, match=r"jinja2 is not installed. pip install jinja2"):
        found.render(HELLO)


def test_special_tokens_of_both_files(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "B", "pad_token": "P"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "pad_token": "P"}


def test_what_a_chat_is():
    assert is_chat(HELLO) and is_chat(tuple(HELLO))
    for other in ("text", b"", [], [1], {}, HELLO[0], [HELLO], None):
        assert not is_chat(other)
