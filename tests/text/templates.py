"""Chat templates as families of models have them, each with what it leaves out of a conversation."""

from __future__ import annotations

_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HEAD = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_CALLS = (
    "{% for call in m.tool_calls %}{% set f = call.function %}<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n{% endfor %}'
)

TEMPLATES = {
    # every message, and nothing of tools: SmolLM2
    "no tools": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}" + _END,
    # Hermes, Qwen 2.5: no ids, no reasoning
    "hermes": _HEAD + "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}\n"
    "{% if m.tool_calls %}" + _CALLS + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}" + _END,
    # Qwen 3: reasoning before the last question is taken out, of content too; texts of arguments as they are
    "qwen3": _HEAD + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not"
    " (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ content }}\n</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}{% set reasoning = '' %}"
    "{% if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and reasoning %}<think>\n{{ reasoning.strip('\\n') }}\n</think>\n{% endif %}"
    "{{ content }}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>"
    "{% endif %}{% endif %}",
    # Qwen 3 Coder: arguments one by one, which text has none of
    "tags": _HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for k, v in call.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + _END,
    # Llama 3.1: one call at most, and no text beside it; the first system message alone
    "one call": "{% if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}{% set messages = "
    "messages[1:] %}{% else %}{% set first = '' %}{% endif %}<|start_header_id|>system<|end_header_id|>\n{{ first }}"
    '{% if tools %}{"name": function name, "parameters": dictionary}{{ tools | tojson }}{% endif %}<|eot_id|>'
    "{% for m in messages %}{% if not (m.role == 'tool' or m.role == 'ipython' or m.tool_calls) %}<|start_header_id|>"
    "{{ m.role }}<|end_header_id|>\n{{ m.content | trim }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n{"name": "{{ f.name }}", '
    '"parameters": {{ f.arguments | tojson }}}<|eot_id|>{% else %}<|start_header_id|>ipython<|end_header_id|>\n'
    "{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}",
    # Mistral: roles alternate, ids of nine characters, calls or a text
    "alternating": "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == "
    "'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for call in m.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments, 'id': call.id} | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
    "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}"
    "{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}",
    # DeepSeek: calls where the content is null
    "null": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}<call>"
    "{{ call.type + call.function.name + '\n' }}{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% elif m.role == 'assistant' %}<Assistant>{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>{% elif m.role == 'tool' %}<output>{{ m.content }}</output>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}",
    # Gemma: no system message, one tool turn is none
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}",
    # all that is there
    "json": "{{ messages | tojson }}{{ tools | tojson }}",
    "names and ids": "{% for m in messages %}{{ m.role }}({{ m.name }}{{ m.tool_call_id }}{% if m.is_error %} failed"
    "{% endif %}): {{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }}"
    " {{ c.function.arguments }}{% endfor %}\n{% endfor %}",
    # and templates that leave out more than any model's should
    "no roles": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "the last": "{{ messages[-1].role }}: {{ messages[-1].content }}",
    "short": "{% for m in messages %}{{ m.role }}: {{ m.content[:8] }}\n{% endfor %}",
    "long": "{% for m in messages %}{{ m.role }}: {% if m.content | length > 4 %}{{ m.content }}{% endif %}\n"
    "{% endfor %}",
    "the last error": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[-1].is_error or messages[-1].odd %}!{% endif %}{% if messages[0].odd %}?{% endif %}",
    "shouting": "{% for m in messages %}{{ m.role | upper }}: {{ m.content | upper }}\n{% endfor %}",
}
