import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from quire.core.errors import ConfigError, InvalidRequest
from quire.text import template as template_module
from quire.text.template import ChatTemplate, checked_messages, load_template

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = """{{ bos_token }}{% set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + message.role + ' here') }}{% endif %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role == 'assistant' %}
    {% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
[{{ ns.turns }}] {{ message.content | trim }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}>{% endif %}"""
TOOLS = """{% if tools %}{{ tools | tojson }}
{{ tools | tojson(indent=2) }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}

{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""

CHATS = [
    [{"role": "user", "content": "Hello <b>& you</b>"}],
    [{"role": "user", "content": " spaces "}, {"role": "assistant", "content": "Yes, \n and 😀  "}],
    [{"role": "user", "content": str(index)} for index in range(12)],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(template: str, chat: list[dict[str, Any]], **settings: Any) -> str:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, **SPECIAL
    )
    return reference.apply_chat_template(chat, tokenize=False, **settings)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=["one", "two", "many"])
@pytest.mark.parametrize("template", [CHATML, TRIMMING, TOOLS], ids=["chatml", "trimming", "tools"])
def test_templates_render_as_transformers_renders_them(template: str, chat: list, prompt: bool) -> None:
    ours = ChatTemplate(template, SPECIAL)
    expected = theirs(template, chat, add_generation_prompt=prompt)
    assert ours.render(chat, add_generation_prompt=prompt) == expected


def test_tools_and_variables_reach_the_template() -> None:
    ours = ChatTemplate(TOOLS, SPECIAL)
    assert ours.reads_tools
    settings = {"tools": [TOOL], "enable_thinking": False}
    expected = theirs(TOOLS, CHATS[0], add_generation_prompt=True, **settings)
    assert ours.render(CHATS[0], **settings) == expected
    assert "<é>" in expected
    assert expected.endswith("<think></think>")


@pytest.mark.parametrize("template", [CHATML, TRIMMING], ids=["chatml", "trimming"])
@pytest.mark.parametrize("content", ["Yes, and", "Yes, and  "])
def test_the_last_message_can_be_continued(template: str, content: str) -> None:
    chat = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, SPECIAL)
    rendered = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == theirs(template, chat, continue_final_message=True)
    assert rendered.rstrip().endswith("Yes, and")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ours.render(chat, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="drops the last message"):
        ChatTemplate("nothing").render(chat, add_generation_prompt=False, continue_final_message=True)


def test_the_callers_messages_are_not_touched() -> None:
    chat = [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    ]
    before = json.dumps(chat)
    ChatTemplate(TOOLS).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before


def test_the_shapes_of_the_chat_api_are_understood() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    assert ChatTemplate(TOOLS).render(chat) == 'user: one\ntwo\nassistant: f({"a": 1})\ntool: 5\n'


def test_arguments_that_a_limit_cut_off_are_an_object_with_their_text() -> None:
    cut = {"function": {"name": "f", "arguments": '{"city": "Par'}}
    (message,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": [cut]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"raw_arguments": '{"city": "Par'}
    assert cut["function"]["arguments"] == '{"city": "Par'  # the request's own


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list of messages, not str"),
        (None, "messages must be a list of messages, not NoneType"),
        (["hello"], r"messages\[0\] must be an object with role and content, not str"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] has role 5"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is a int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] has type 'image_url': only text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text"),
        ([{"role": "user", "content": object()}], "content is a object: only JSON values"),
        ([{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}], "has no function with a name"),
        ([{"role": "system", "content": "x"}], "refuses the messages: no system here"),
    ],
)
def test_bad_messages_are_refused_in_one_line(messages: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        ChatTemplate(TRIMMING, SPECIAL).render(messages)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[5].content.x.y }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_breaks_out_fails_the_request_alone(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template"):
        ChatTemplate(template).render(CHATS[0])


def test_the_size_of_the_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidRequest, match="more than 1,000 characters"):
        ChatTemplate("{% for i in range(90000) %}{{ 'some' ~ i }}{% endfor %}").render(CHATS[0])


class Source:
    name = "tiny"

    def __init__(self, **config: Any) -> None:
        self.config = config

    def tokenizer_config(self) -> dict[str, Any]:
        return self.config


def test_a_template_is_found_named_or_given(tmp_path: Path) -> None:
    bare = Source(bos_token={"content": "<s>"})
    with pytest.raises(InvalidRequest, match="tiny has no chat template"):
        load_template(bare)
    assert load_template(bare, "{{ bos_token }}!").render(CHATS[0]) == "<s>!"
    (tmp_path / "t.jinja").write_text("from a file")
    assert load_template(bare, str(tmp_path / "t.jinja")).render(CHATS[0]) == "from a file"
    with pytest.raises(ConfigError, match="no template and no readable file"):
        load_template(bare, str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="no valid jinja"):
        load_template(bare, "{% for %}").render(CHATS[0])
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    named = load_template(Source(chat_template=both))
    assert named.render(CHATS[0]) == "plain"
    assert named.render(CHATS[0], tools=[TOOL]) == "tools"
