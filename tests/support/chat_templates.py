"""Small chat templates in the manner of the families, and conversations to try them with."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- endif %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in rest %}
    {%- if message.role == 'user' and loop.first and tools %}
        {{- "<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n" }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) + "\\n\\n" }}
        {%- endfor %}
        {{- message.content | trim + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("Only one call at a time is known.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be kind.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + (messages[0]['content'] if messages[0].role == 'system' else 'Be kind.') }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """\
{%- set ns = namespace(last_query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\\n<tool_call>\\n' }}{% for tool in tools %}{{ tool | tojson ~ '\\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """\
{%- set system = messages[0]["content"] if messages[0]["role"] == "system" else none %}
{%- set turns = messages[1:] if system is not none else messages %}
{%- set users = turns | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in turns | rejectattr("role", "equalto", "tool") | rejectattr("tool_calls", "defined") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant.") }}
    {%- endif %}
{%- endfor %}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + value | tojson }}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (system + "\\n\\n" if loop.last and system is not none else "") + message["content"] }}
        {{- "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
{{ message['content'] | trim }}
    {%- else -%}
        {% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}
    {%- endif -%}
{{ '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{% endif %}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'assistant' %}
{% generation %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endgeneration %}{% else %}
{% continue %}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi3": PHI3,
}

_USER = {"role": "user", "content": " How warm is it in Zürich & <Bern>? 🌡\n"}
_ANSWER = {"role": "assistant", "content": "It is \"warm\", 'really'.\n"}
_CALL = {
    "id": "abcDEF123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Zürich </s>", "days": 2, "scale": 0.5, "now": True}},
}
_RESULT = {"role": "tool", "content": '{"degrees": 21}', "tool_call_id": "abcDEF123", "name": "weather"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [_USER],
    "a system message": [{"role": "system", "content": "Be brief.\n"}, _USER],
    "a second turn": [{"role": "system", "content": ""}, _USER, _ANSWER, {"role": "user", "content": "And tomorrow?"}],
    "text in parts": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "a call": [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _RESULT],
    "two calls": [_USER, {"role": "assistant", "content": "Well.", "tool_calls": [_CALL, _CALL]}, _RESULT, _RESULT],
    "reasoning": [_USER, _ANSWER | {"reasoning_content": "\nHm.\n"}, _USER, _ANSWER | {"reasoning": "So?"}],
    "reasoning in the text": [_USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}],
    "an answer to nothing": [_ANSWER],
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Temperature <now> & "later", in °C',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": None}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
