"""Chat templates with tools and thinking, of the manners of five families of models.

Each is written against the control tokens that `chat_templates.with_template` adds.
"""

from __future__ import annotations

TOOLS = "{% for tool in tools or [] %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}"
CALLS = (
    '{% for call in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' ~ call.function.name'
    " ~ '\", \"arguments\": ' ~ call.function.arguments ~ '}\\n</tool_call>' }}{% endfor %}"
)
ANSWER = "(m.content or '').split('</think>')[-1].lstrip('\\n')"

# Tools in the system part, no thinking of its own.
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools' }}"
    + TOOLS
    + "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content or '') }}" + CALLS + ""
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Thinking of its own field, left out of all but the last answers; results in user turns.
QWEN = (
    "{{ '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else '') }}"
    "{% if tools %}{{ '\\n\\n# Tools' }}" + TOOLS + "{% endif %}{{ '<|im_end|>\\n' }}"
    "{% set last = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if m.reasoning_content and loop.index0 > last.asked %}"
    "{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}{{ "
    + ANSWER
    + " }}"
    + CALLS
    + "{{ '<|im_end|>\\n' }}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A BOS, headers, contents trimmed, results of a role of their own.
LLAMA = (
    "{{ '<|bos|>' }}{% if tools %}{{ '<|head|>system<|tail|>\\n\\nTools:' }}" + TOOLS + ""
    "{{ '<|im_end|>' }}{% endif %}{% for m in messages %}"
    "{{ '<|head|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|tail|>\\n\\n' }}"
    "{{ (m.content or '') | trim }}" + CALLS + "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"
)
# Tools before the last question, no generation prompt, ids of calls in results.
MISTRAL = (
    "{{ '<|bos|>' }}{% set last = namespace(asked=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == last.asked %}{{ '<|eot|>' }}" + TOOLS + "{{ '<|eot|>' }}"
    "{% endif %}{{ '<|head|>' ~ m.content ~ '<|tail|>' }}{% elif m.role == 'tool' %}"
    '{{ \'<|head|>{"content": "\' ~ m.content ~ \'", "id": "\' ~ m.tool_call_id ~ \'"}<|tail|>\' }}'
    "{% elif m.role == 'assistant' %}{{ (m.content or '') }}" + CALLS + "{{ '<|im_end|>' }}"
    "{% endif %}{% endfor %}"
)
# The model's turns open a thinking block, and results are users' turns.
GEMMA = (
    "{{ '<|bos|>' }}{% if tools %}{{ '<|head|>user\\n' }}"
    + TOOLS
    + "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|head|>' ~ ('model' if m.role == 'assistant' else 'user') ~ '\\n' }}"
    "{% if m.role == 'assistant' %}{{ " + ANSWER + " }}" + CALLS + "{% elif m.role == 'tool' %}"
    "{{ 'Result: ' ~ m.content }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>model\\n<think>\\n' }}{% endif %}"
)
FAMILIES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA}
