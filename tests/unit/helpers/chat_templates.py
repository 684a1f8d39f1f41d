"""Chat templates of the manners that models have today, for the built-in tokenizer's corpus.

Each is written against the control tokens that `with_template` adds. Nothing is asserted here.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

MARKERS = ["<think>", "</think>", "<|bos|>", "<|head|>", "<|tail|>", "<|eot|>"]

IM = "'<|im_start|>' ~ m.role ~ '\\n' ~ {content} ~ '<|im_end|>\\n'"
SHOWN = "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content)"

FOR = "{% for m in messages %}"
# Earlier thinking is taken out when a conversation is rendered again.
STRIPS_THINKING = (
    FOR + "{{ " + IM.format(content=SHOWN) + " }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Not thinking is asked for by an empty block in the generation prompt.
EMPTY_THINKING = (
    "{% for m in messages %}{{ " + IM.format(content=SHOWN) + " }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
# The policy begins inside an opened thinking block.
OPENS_THINKING = EMPTY_THINKING.replace("\\n\\n</think>\\n\\n", "\\n")
# A BOS once, headers of their own, contents trimmed.
WRITES_BOS = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{{ '<|head|>' ~ m.role ~ '<|tail|>\\n\\n' ~ m.content | trim ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"
)
# Line ends between messages and not behind them.
JOINS = (
    "{% for m in messages %}{{ '' if loop.first else '\\n' }}"
    "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
# Users and assistants must take turns; no generation prompt is needed.
ALTERNATES = (
    "{{ '<|bos|>' }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if (m.role != 'assistant') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ m.content ~ '<|im_end|>' }}"
    "{% else %}{{ '<|head|>' ~ m.content ~ '<|tail|>' }}{% endif %}{% endfor %}"
)
USABLE = {
    "strips thinking": STRIPS_THINKING,
    "adds an empty thinking block": EMPTY_THINKING,
    "opens a thinking block": OPENS_THINKING,
    "writes a BOS": WRITES_BOS,
    "joins with line ends": JOINS,
    "lets roles alternate": ALTERNATES,
}

# Behind a tool result the policy goes on without a generation prompt.
NO_PROMPT_BEHIND_TOOLS = WRITES_BOS.replace(
    "{% if add_generation_prompt %}",
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}",
)
# No control token sets the generation prompt off, and the tokenizer joins a word across it.
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|im_end|> calcu' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'lator: ' }}{% endif %}"
)
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ " + IM.format(content="m.content") + " }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Every user message but the last becomes a note.
DROPS_CONTENT = STRIPS_THINKING.replace(SHOWN, "('note' if m.role == 'user' else m.content)")
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}" + STRIPS_THINKING[len(FOR) :]
WRITES_TWICE = STRIPS_THINKING.replace(SHOWN, f"{SHOWN} ~ {SHOWN}")
# A user message behind a tool result is part of it.
MERGES_INTO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 and "
    "messages[loop.index0 - 1].role == 'tool' %}{{ '<|im_start|>tool\\n' ~ m.content ~ '\\n' }}"
    "{{ '<|im_end|>\\n' }}{% else %}{{ " + IM.format(content="m.content") + " }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Calls have their ids in place of names, and results are found by them: the manner of Kimi K2.
IDS_FOR_NAMES = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}Result of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tokenizer: Any, template: str) -> Any:
    """A copy of a tokenizer that knows the markers and renders with this template."""
    copy = deepcopy(tokenizer)
    copy.add_tokens(MARKERS, special_tokens=True)
    copy.chat_template = template
    return copy
