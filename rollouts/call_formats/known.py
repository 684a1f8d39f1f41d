"""The formats of tool calls that are known. Several may share a name: variants of one family."""

from composer_mesh.rollouts.call_formats.gemma_calls import GemmaCalls
from composer_mesh.rollouts.call_formats.json_calls import HermesCalls, ListedJson, LlamaJson
from composer_mesh.rollouts.call_formats.port import CallFormat
from composer_mesh.rollouts.call_formats.pythonic_calls import PythonicCalls
from composer_mesh.rollouts.call_formats.token_calls import HarmonyCalls, MistralArgs, TokenFramed
from composer_mesh.rollouts.call_formats.xml_calls import GlmXml, QwenXml

HERMES = HermesCalls()
HARMONY = HarmonyCalls()

_DEEPSEEK = (
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
_GEMMA_CHANNEL = ("<|channel>thought\n", "<channel|>")

KNOWN: tuple[CallFormat, ...] = (
    HERMES,
    QwenXml(),
    GlmXml(),
    GlmXml(between=""),
    HARMONY,
    MistralArgs(),
    ListedJson("mistral", "[TOOL_CALLS]", with_ids=True),
    ListedJson("granite", "<|tool_call|>"),
    ListedJson("phi4", "<|tool_call|>", "<|/tool_call|>"),
    ListedJson("cohere", "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    TokenFramed(
        "kimi",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
        numbered=True,
    ),
    TokenFramed(*_DEEPSEEK, head="function", fence=("\n```json\n", "\n```"), between="\n"),
    TokenFramed(*_DEEPSEEK),
    PythonicCalls("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", quote="'", json_values=True),
    GemmaCalls("gemma", "<|tool_call>", "<tool_call|>", '<|"|>', _GEMMA_CHANNEL),
    GemmaCalls("gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    LlamaJson(),
    PythonicCalls("llama_pythonic"),
)
NAMES = tuple(dict.fromkeys(one.name for one in KNOWN))
