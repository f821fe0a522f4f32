"""Chat rendering against transformers, and loss targets against expectations written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_glm.data.chat import ChatTemplate
from megatron_glm.data.keys import Notes
from megatron_glm.data.messages import read_conversation
from tests.helpers.rows import chat_folder, tokenise

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "glm-4.6-chat_template.jinja"
# newer GLM templates open the thinking in the generation prompt, and close it there when thinking is off
THINK_IN_PROMPT = """[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>' + m.reasoning_content + '</think>' }}
{%- else -%}
{{ '</think>' }}
{%- endif -%}
{{ m.content }}
{%- else -%}
{{ '<|' + m.role + '|>' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}"""

PLAIN = "{% for m in messages %}{{ '<|' + m.role + '|>' + BODY }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<|assistant|>{% endif %}"

TOOLS = [{"type": "function", "function": {"name": "wetter", "description": "für <b>Städte</b>", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "tage": 3}}}
CALL_TEXT = (
    "\n<tool_call>wetter\n<arg_key>ort</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>tage</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


CALLS_TWICE = [
    user("a"),
    assistant("", reasoning_content="look", tool_calls=[CALL]),
    {"role": "tool", "content": "12 °C"},
    assistant("cold", reasoning_content="so"),
    user("b"),
    assistant("", tool_calls=[CALL]),
]
CONVERSATIONS = {
    "one turn": [user("a"), assistant("b")],
    "system, thinking": [{"role": "system", "content": "s"}, user("a"), assistant("b", reasoning_content="t")],
    "thinking in the content": [user("a"), assistant("<think>t</think>b")],
    "thinking is dropped": [user("a"), assistant("b", reasoning_content="t"), user("c"), assistant("d")],
    "tools": CALLS_TWICE,
    "user last": [user("a"), assistant("b"), user("c")],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(FIXTURE.read_text(), "glm")


def targets_of(template: ChatTemplate, messages: list[dict], tools=None) -> list[str]:
    text, targets = rendered(template, messages, tools)
    return [text[start:end] for start, end in targets]


def rendered(template: ChatTemplate, messages, tools=None) -> tuple[str, list[tuple[int, int]]]:
    chat = read_conversation(messages, tools, Notes(), template)
    return template.render_targets(chat.messages, chat.tools)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_rendering_is_that_of_transformers(template: ChatTemplate, name: str, tools):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    messages = CONVERSATIONS[name]
    for prompt in (False, True):
        expected = reference.apply_chat_template(
            messages, tools, chat_template=FIXTURE.read_text(), add_generation_prompt=prompt, tokenize=False
        )
        assert template.render(messages, tools, prompt) == expected
    if messages[-1]["role"] == "user":
        assert rendered(template, messages, tools)[0] == template.render(messages, tools)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("one turn", ["\n<think></think>\nb<|user|>"]),
        ("system, thinking", ["\n<think>t</think>\nb<|user|>"]),
        ("thinking in the content", ["\n<think>t</think>\nb<|user|>"]),
        ("thinking is dropped", ["\n<think></think>\nb<|user|>", "\n<think></think>\nd<|user|>"]),
        (
            "tools",
            [
                "\n<think></think>" + CALL_TEXT + "<|observation|>",
                "\n<think></think>\ncold<|user|>",
                "\n<think></think>" + CALL_TEXT + "<|observation|>",
            ],
        ),
        ("user last", ["\n<think></think>\nb<|user|>"]),
        ("parts", []),
    ],
)
def test_targets(template: ChatTemplate, name: str, expected: list[str]):
    """Thinking and the token that ends a turn belong to the loss, every earlier turn included."""
    assert targets_of(template, CONVERSATIONS[name]) == expected


def test_targets_where_no_earlier_rendering_is_a_prefix(template: ChatTemplate):
    """The second turn was generated with the first one's thinking in sight, which the whole text has dropped."""
    text, targets = template.render_targets(CALLS_TWICE)
    assert "look" in template.render(CALLS_TWICE[:3], add_generation_prompt=True) and "look" not in text
    assert not text.startswith(template.render(CALLS_TWICE[:3], add_generation_prompt=True))
    assert [text[:start].endswith("<|assistant|>") for start, _ in targets] == [True] * 3


def test_assistant_turns_in_a_row(template: ChatTemplate):
    messages = [user("a"), assistant("b"), assistant("c")]
    assert targets_of(template, messages) == ["\n<think></think>\nb<|assistant|>", "\n<think></think>\nc<|user|>"]


def test_what_the_generation_prompt_holds_is_no_target():
    template = ChatTemplate(THINK_IN_PROMPT, "thinking")
    messages = [user("a"), assistant("b", reasoning_content="t"), user("c"), assistant("d", reasoning_content="u")]
    assert targets_of(template, messages) == ["b<|user|>", "u</think>d<|user|>"]


def test_a_turn_unlike_its_generation_prompt_is_refused():
    template = ChatTemplate(THINK_IN_PROMPT.replace("{{ '</think>' }}", "none"), "odd")
    with pytest.raises(ValueError, match=r"messages\[1\] unlike any of its generation prompts"):
        rendered(template, [user("a"), assistant("b")])


@pytest.mark.parametrize(
    "prompt, match",
    [
        ("", "with add_generation_prompt it does not append"),
        ("<|user|>", "with add_generation_prompt it does not append"),
        ("<|assistant|>{{ messages | length }}", "its generation prompt is '1' in one conversation and '2' in another"),
    ],
)
def test_a_template_in_which_turns_cannot_be_found_is_refused(tmp_path: Path, prompt: str, match: str):
    """Found once, when the template is loaded: it is no bad row."""
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    chat_folder(tmp_path, source + "{% if add_generation_prompt %}" + prompt + "{% endif %}")
    with pytest.raises(ValueError, match=f"turns cannot be found .*chat_template.jinja: .*{match}"):
        tokenise(tmp_path, {"messages": [user("a"), assistant("b")]}, skip_bad_rows=True)


def test_a_template_whose_prompt_changes_the_text_before_it_is_refused():
    source = "{{ '.' if add_generation_prompt else '' }}" + PLAIN.replace("BODY", "m.content")
    with pytest.raises(ValueError, match="turns cannot be found in the text of the chat template moved"):
        rendered(ChatTemplate(source, "moved"), [user("a"), assistant("b")])


def test_a_chat_is_rendered_once(template: ChatTemplate, monkeypatch):
    conversation = [user("a"), assistant("b", reasoning_content="t")] * 40
    targets_of(template, conversation)  # what is found once a template
    calls = []
    monkeypatch.setattr(
        template, "render", lambda *args, **kwargs: calls.append(1) or ChatTemplate.render(template, *args)
    )
    assert len(targets_of(template, conversation)) == 40 and len(calls) == 1


@pytest.mark.parametrize(
    "body, messages, lost",
    [
        (
            "(m.content if m.role != 'system' else '')",
            [{"role": "system", "content": "user"}],
            r"\[0\].content: the chat",
        ),
        (
            "m.content",
            [user("a"), assistant("b", reasoning_content="a")],
            r"\[1\].reasoning_content: the chat template",
        ),
        ("m.content", [user("a"), assistant("a", tool_calls=[CALL])], r"\[1\].tool_calls: the chat template"),
        ("m.content[:9]", [user("a"), assistant("much longer")], r"render messages\[1\].content \('much longer'\)"),
        ("(m.content | replace('x', ''))", [user("a"), user("bx"), assistant("c")], r"render messages\[1\].content"),
    ],
)
def test_what_the_template_drops_is_named(body: str, messages: list[dict], lost: str):
    with pytest.raises(ValueError, match=lost):
        rendered(ChatTemplate(PLAIN.replace("BODY", body), "plain"), messages)


def test_tools_that_the_template_drops_are_named():
    with pytest.raises(ValueError, match="the chat template plain renders no tools"):
        rendered(ChatTemplate(PLAIN.replace("BODY", "m.content"), "plain"), [user("a"), assistant("b")], TOOLS)


def test_a_key_that_only_this_template_reads():
    template = ChatTemplate(PLAIN.replace("BODY", "m.name|default('') + m.content"), "names")
    assert "<|user|>Zoea" in rendered(template, [user("a") | {"name": "Zoe"}, assistant("b")])[0]


@pytest.mark.parametrize(
    "messages, tools, match",
    [
        ([], None, "messages must be a list that is not empty"),
        ("hello", None, "messages is not valid JSON"),
        ({"role": "user"}, None, "messages must be a list that is not empty"),
        ([{"from": "robot", "value": "x"}], None, r"messages\[0\] must be an object with a role"),
        ([user("a"), {"role": "bot", "content": "b"}], None, r"messages\[1\] must be an object with a role"),
        ([user("a"), assistant("b", tool_calls=7)], None, r"messages\[1\].tool_calls must be a list"),
        ([user("a"), assistant("b", tool_calls=[{}])], None, r"messages\[1\].tool_calls holds .*names no function"),
        ([user("a"), assistant("b", tool_calls=[{"name": "f", "arguments": "{"}])], None, "is not valid JSON"),
        ([user("a"), assistant("b", tool_calls=[{"name": "f", "arguments": "[1]"}])], None, "must be an object"),
        ([user("a"), assistant("b")], "{", "tools is not valid JSON"),
        ([user("a"), assistant("b")], "[" * 100_000, "tools is not valid JSON"),
        ([user("a"), assistant("b")], ["search"], r"tools\[0\] is not valid JSON"),
        ([user("a"), assistant("b")], [["search"]], r"tools must be a list of objects, got \[\['search'\]\]"),
        ([user("a"), assistant({"text": "b"})], None, r"messages\[1\].content must be a string or a list of parts"),
        ([user(7), assistant("b")], None, r"messages\[0\].content must be a string or a list of parts, got 7"),
        ([user("a"), assistant("b", reasoning_content=["c"])], None, r"messages\[1\].reasoning_content must be a str"),
    ],
)
def test_bad_messages_are_refused(template: ChatTemplate, messages, tools, match: str):
    with pytest.raises(ValueError, match=match):
        rendered(template, messages, tools)


def test_json_text_and_null_fields(template: ChatTemplate):
    """OpenAI rows hold arguments as JSON text, and null where there is no content."""
    call = {"type": "function", "function": {"name": "wetter", "arguments": json.dumps({"ort": "Köln", "tage": 3})}}
    row = [user("a"), {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [call]}]
    plain = [user("a"), assistant("", tool_calls=[CALL])]
    assert rendered(template, row, json.dumps(TOOLS)) == rendered(template, plain, TOOLS)


def test_template_reasons_reach_the_user():
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", "strict").render([user("a")])
    with pytest.raises(ValueError, match="refuses the messages: division by zero"):
        ChatTemplate("{{ 1 / 0 }}", "divides").render([user("a")])
    with pytest.raises(ValueError, match="broken.jinja is malformed at line 2"):
        ChatTemplate("a\n{% if %}", "broken.jinja")
    with pytest.raises(ValueError, match="refuses the messages"):
        ChatTemplate("{{ messages.append(1) }}", "unsafe").render([user("a")])


def test_template_files(tmp_path: Path):
    with pytest.raises(ValueError, match="need a chat template: .*chat_template.jinja"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="need a chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*tokenizer_config.json"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from the config"}))
    assert ChatTemplate.load(tmp_path).render([user("a")]) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert ChatTemplate.load(tmp_path).render([user("a")]) == "from the file"


def test_environment(template: ChatTemplate):
    """Block lines leave nothing behind, loops can be left, tojson takes its argument and escapes no HTML."""
    source = "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m | tojson(ensure_ascii=True) }}"
    source += "{% endfor %}"
    text = ChatTemplate(source, "loop").render([{"x": "<é>"}, {}])
    assert text == '{"x": "<\\u00e9>"}'
