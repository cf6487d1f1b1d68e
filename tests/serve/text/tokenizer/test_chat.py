"""Chat templates: rendered as Transformers renders them, refused with the place of what is wrong."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from cases.text.chat import FILE, by_transformers, renderings
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from duetto.serve.text.tokenizer.chats.chat import (
    ChatTemplateError,
    normalise_messages,
    render_chat,
    tokenize_chat,
)
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
SIMPLE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def render(template: str, messages=USER, **options) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)


GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


def test_templates_are_rendered_as_transformers_renders_them():
    found = {}
    for name, template, given in renderings():
        try:
            found[name] = render_chat(template, **given)
        except ChatTemplateError as error:
            found[name] = {"error": str(error).removeprefix("the chat template failed: ")}
    assert found == GOLDEN


@pytest.mark.extras
def test_the_transformers_installed_renders_the_same():
    pytest.importorskip("transformers")
    assert {name: by_transformers(template, **given) for name, template, given in renderings()} == GOLDEN


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (SIMPLE, "<s>[user]hi"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hi\n"),
        ("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': [1], 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": [\n  1\n ]\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% if add_generation_prompt %}go{% endif %}{{ tools is none }}", "goTrue"),
        ("{{ '%s-%s' % (1, eos_token) }}{{ undefined_name }}", "1-</s>"),
    ],
)
def test_what_templates_rely_on(template, text):
    assert render(template) == text


def test_the_time_can_be_given():
    now = datetime(2024, 7, 26)
    assert render("{{ strftime_now('%d %b %Y') }}", now=now) == "26 Jul 2024"
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "TemplateError: System role not supported"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for x in tools %}{% endfor %}", "TypeError: 'NoneType' object is not iterable"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_what_fails_in_a_template_is_one_error(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", r"messages must be a list of at least one message, not str 'hi'"),
        ([], r"messages must be a list of at least one message, not an empty list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\].role must be a string, not nothing"),
        (
            [*USER, {"role": "user"}],
            r"messages\[1\].content must be a string or a list of text parts, not nothing",
        ),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be .* not int 3"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\].content\[0\] must be .*only text",
        ),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [1]}], r"tool_calls\[0\] must be an object"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages, message):
    with pytest.raises(ChatTemplateError, match=message):
        normalise_messages(messages)


def test_messages_reach_the_template_in_its_form():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    user, assistant = normalise_messages(given)
    assert user["content"] == parts
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert given[0]["content"] is parts and CALL["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]


@pytest.fixture
def folder(tmp_path) -> Path:
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *"[]userhi"])}
    backend = Backend(models.BPE(vocab, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def tokenizer_with(folder: Path, **config) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_ids_have_one_bos_though_template_and_tokenizer_add_it(folder):
    tokenizer = tokenizer_with(folder, chat_template=SIMPLE)
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    ids = tokenize_chat(tokenizer, USER)
    assert ids.count(0) == 1 and tokenizer.decode(ids).replace(" ", "") == "<s>[user]hi"
    assert tokenizer.apply_chat_template(USER).input_ids == ids
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "<s>[user]hi"


def test_where_a_template_is_found(folder):
    with pytest.raises(ChatTemplateError, match="the model has no chat template"):
        tokenize_chat(tokenizer_with(folder), USER)
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert tokenizer_with(folder).chat_template == "J"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert tokenizer_with(folder, chat_template=named).chat_template == "D"
    assert tokenizer_with(folder, chat_template="S").chat_template == "S"
    (folder / "chat_template.jinja").write_text("F\n")
    assert tokenizer_with(folder, chat_template="S").chat_template == "F\n"


def test_templates_are_chosen_for_tools_or_by_name(folder):
    named = [{"name": name, "template": name} for name in ("tool_use", "default", "rag")]
    tokenizer = tokenizer_with(folder, chat_template=named)

    def text(**options) -> str:
        return tokenizer.apply_chat_template(USER, tokenize=False, **options)

    assert (text(), text(tools=[]), text(chat_template="rag")) == ("default", "tool_use", "rag")
    assert text(chat_template="{{ messages[0].role }}") == "user"
    tokenizer.chat_template = "own"
    assert text(tools=[]) == "own"
    assert tokenizer_with(folder, chat_template="S").get_chat_template(with_tools=True) == "S"


@pytest.mark.parametrize("holds", ["[]", "{", '{"template": "x"}', '{"chat_template": 5}'])
def test_a_broken_chat_template_json_is_named(folder, holds):
    (folder / "chat_template.json").write_text(holds)
    with pytest.raises(ValueError, match=r"chat_template\.json(:| is no JSON object) "):
        tokenizer_with(folder)


def test_empty_fields_are_dropped_and_reasoning_has_every_name():
    sent = {"role": "assistant", "content": "a", "reasoning": "b", "tool_calls": None, "name": None}
    (found,) = normalise_messages([sent])
    assert found == {
        "role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b", "thinking": "b",
    }  # fmt: skip
    assert normalise_messages([{**sent, "thinking": "c"}])[0]["reasoning_content"] == "c"


def test_templates_see_the_named_special_tokens_and_documents(folder):
    tokenizer = tokenizer_with(folder, unk_token="</s>")
    template = "{{ unk_token }} {{ pad_token is defined }} {{ documents is none }}"
    assert tokenizer.apply_chat_template(USER, chat_template=template, tokenize=False) == "</s> False True"
    shown = render(template, unk_token="u", pad_token=None, documents=[{"text": "x"}])
    assert shown == "u False False"


def test_templates_that_concatenate_arguments_get_them_as_text():
    called = [*USER, {"role": "assistant", "tool_calls": [CALL]}]
    joined = "{{ 'f ' + messages[1].tool_calls[0].function.arguments }}"
    assert render(joined, called) == 'f {"x": 1}'
    assert render(joined.replace("arguments", "arguments.x | string"), called) == "f 1"
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render("{{ 'f ' + messages }}", called)
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render("{{ 'f ' + messages }}")
