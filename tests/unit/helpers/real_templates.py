"""Chat templates of published models, from the files that TRL ships, and tokenizers for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer_mesh.rollouts.chat import ChatFormat

FOLDER = Path(trl.__file__).parent / "chat_templates"

CONTROLS = re.compile(
    r"<[|｜][^<>\s'\"{}|｜]*[|｜]?>|<[a-z_]+[|｜]>|</?(?:tool_call|think|tool_response|bos|eos"
    r"|start_of_turn|end_of_turn)>|</?s>"
)


@dataclass(frozen=True)
class RealTemplate:
    """A published template: its file, the format of its calls, and what ends an action."""

    file: str
    calls: str
    eos: str = "<|im_end|>"
    stops: tuple[str, ...] = ()
    bos: str = "<s>"
    several: bool = True
    """Whether the template takes several calls in one message."""


TEMPLATES = (
    RealTemplate("qwen2_5", "hermes"),
    RealTemplate("qwen3", "hermes"),
    RealTemplate("qwen3_instruct_2507", "hermes"),
    RealTemplate("qwen3_vl", "hermes"),
    RealTemplate("qwen3_5_think", "qwen_xml"),
    RealTemplate("qwen3_5_nothink", "qwen_xml"),
    RealTemplate("qwen3_6", "qwen_xml"),
    RealTemplate("qwen3_8", "qwen_xml"),
    RealTemplate("nemotron_3_nano", "qwen_xml"),
    RealTemplate("nemotron_3_super", "qwen_xml"),
    RealTemplate("nemotron_3_ultra", "qwen_xml"),
    RealTemplate("llama3_1", "llama_json", "<|eot_id|>", ("<|eom_id|>",), several=False),
    RealTemplate("llama3_2", "llama_json", "<|eot_id|>", ("<|eom_id|>",), several=False),
    RealTemplate("glm4moe", "glm", "<|endoftext|>", ("<|user|>", "<|observation|>")),
    RealTemplate("gptoss", "harmony", "<|return|>", ("<|call|>",), several=False),
    RealTemplate("gemma4", "gemma", "<turn|>", ("<|tool_response>", "<eos>"), "<bos>"),
    RealTemplate("deepseekv3", "deepseek", "<｜end▁of▁sentence｜>", (), "<｜begin▁of▁sentence｜>"),
    RealTemplate("lfm2_v2", "lfm2"),
    RealTemplate("lfm2_2_5", "lfm2"),
)


REWRITES_HISTORY = {
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_6",
    "qwen3_8",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "glm4moe",
    "gptoss",
    "deepseekv3",
}
"""Templates that write an earlier turn otherwise than its prompt had it; ids are continued."""


def text_of(template: RealTemplate) -> str:
    return (FOLDER / f"{template.file}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer_of(template: RealTemplate) -> Any:
    """Return a tokenizer of bytes that has every control token that the template writes."""
    text = text_of(template)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"."), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=template.eos, bos_token=template.bos, chat_template=text
    )
    found = set(CONTROLS.findall(text)) | {template.eos, *template.stops, template.bos}
    fast.add_tokens(sorted(found), special_tokens=True)
    return fast


def chat_of(template: RealTemplate, tools: list[dict[str, Any]], **options: Any) -> ChatFormat:
    return ChatFormat(tokenizer_of(template), tools, stops=template.stops, options=options)
