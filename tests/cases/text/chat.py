"""Chat templates in the manner of those that models bring, written for these tests, and conversations to
render.

`chat.json` holds what Transformers makes of them. `python tests/cases/text/chat.py` makes it anew; it needs
`transformers`.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("chat.json")
OPTIONS = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name & country"},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abc",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Malmö", "days": [1]}},
}
ASKED = {"role": "user", "content": "Will it rain in Malmö?"}
CASES: dict[str, dict[str, Any]] = {
    "user": {"messages": [{"role": "user", "content": "Hello!"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "  Hi\n"},
            {"role": "assistant", "content": "<think>greet</think>\n\nHello."},
            {"role": "user", "content": "2+2?"},
        ]
    },
    "system": {
        "messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hello!"}]
    },
    "tools": {"messages": [ASKED], "tools": [WEATHER]},
    "result": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abc", "name": "weather", "content": '{"rain": true}'},
        ],
        "tools": [WEATHER],
    },
    "out of turn": {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
}
TEMPLATES = {
    # ChatML with a list of tools, calls as JSON between tags, results joined into one turn of the user
    "marked": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "You may call:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ call.name
                }}{{ '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # headers with a date, one call a message, whatever is not text as JSON
    "headed": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '[system]\\nToday: ' + date_string + '\\n' + system + '[end]' }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1
            %}{{- raise_exception('One call at a time.') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '[assistant]' + call.name + '(' }}
        {%- for name, value in call.arguments | items %}{{- name + '=' + value | tojson
            }}{%- if not loop.last %}, {% endif %}{%- endfor %}
        {{- ')[end]' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '[tool]' }}{{- (message.content | tojson) if message.content is mapping
            or message.content is iterable else message.content }}[end]
    {%- else %}
        {{- '[' + message['role'] + ']\\n' + message['content'] | trim + '[end]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n' }}{%- endif %}
""",
    # no system role, strict turns, the assistant under another name
    "alternating": """{{ bos_token }}{% if messages[0]['role'] == 'system'
    %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0)
    %}{{ raise_exception('Roles must alternate user/assistant/...') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start>' + role + '\\n' + message['content'] | trim + '<end>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start>model\\n'}}{% endif %}""",
    # what was thought is dropped from earlier turns, kept by a namespace
    "thinking": """{% set ns = namespace(system='', last='') %}{{ bos_token }}
{%- for message in messages %}{% if message.role == 'system' %}{% set ns.system = message.content
    %}{% endif %}{% endfor %}{{ ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = 'user' %}<|User|>{{ message.content }}{% endif %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}{% set ns.last = 'calls' %}
{%- for call in message.tool_calls %}<|Call|>{{ call.type }}:{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```{% endfor %}{% endif %}
{%- if message.role == 'assistant' and message.tool_calls is not defined
    %}{% set ns.last = 'assistant' %}<|Assistant|>
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n')
    %}{% endif %}{{ content }}{{ eos_token }}{% endif %}
{%- if message.role == 'tool' %}<|Output|>{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last != 'calls' %}<|Assistant|><think>
{% endif %}""",
    # types of a tool's parameters by a macro that calls itself
    "typed": """{%- macro kind(p) -%}
{%- if p.type is string %}{% if p.type == 'array' %}list[{{ kind(p['items']) }}]{% else
    %}{{ {'string': 'str', 'integer': 'int', 'object': 'dict'}[p.type] }}{% endif %}
{%- else %}{% for t in p.type %}{{ kind({'type': t}) if t != 'null' else 'None' }}{% if not loop.last
    %} | {% endif %}{% endfor %}{% endif -%}
{%- endmacro -%}
{{ bos_token }}{% for tool in tools %}
def {{ tool.function.name }}({% for name, p in tool.function.parameters.properties.items()
    %}{{ name }}: {{ kind(p) }}{{ ', ' if not loop.last }}{% endfor %})
    {{ tool.function.description }}
{% for name, p in tool.function.parameters.properties | dictsort %}    {{ name
    }} ({{ 'required' if name in tool.function.parameters.required else 'optional'
    }}): {{ p.description | default('none') }}
{% endfor %}{% endfor %}
{% for m in messages if m.content %}{{ m.role | upper }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}""",
}


def renderings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, a template, and what it is to be rendered with."""
    for name, template in TEMPLATES.items():
        for case, given in CASES.items():
            for generate in (True, False):
                options = {**OPTIONS, "tools": given.get("tools"), "add_generation_prompt": generate}
                yield f"{name}|{case}|{generate}", template, {"messages": given["messages"], **options}


def by_transformers(template: str, messages: list[dict], tools: Any, **options: Any) -> str | dict[str, str]:
    """Its text, or the error's."""
    utils: Any = import_module("transformers.utils.chat_template_utils")
    try:
        texts, _ = utils.render_jinja_template([messages], tools=tools, chat_template=template, **options)
    except Exception as error:  # noqa: BLE001 - templates raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    return texts[0]


if __name__ == "__main__":
    found = {name: by_transformers(template, **given) for name, template, given in renderings()}
    lines = (f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
