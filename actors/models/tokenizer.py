"""The tokenizer of a model folder, with its chat template.

Compares two tokenizers: whether token ids of one mean the same to a model with the other.

Chat templates are not compared: token ids travel between models, text does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.rollouts.traces import Message

_SHOWN = 60
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttabs\t\tand\n\n\nnew lines \r\n at the end ",
    "0 7 42 1234567890 3.14159 1,000,000 1e-9 007",
    "ÄÖÜ ß naïve café e\u0301 \u00bd ﬁ Ⅳ",
    "日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \ud7ff \ufeff \u00a0 \u200b",
    'def f(x: int) -> str:\n    return f"{x!r}"  # ~!@#$%^&*()_+-=[]{}|;:,.<>?/\\',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, null]}}\n</tool_call>',
    "<think>\nso\n</think>\n\n<|im_start|>user\nhi<|im_end|>\n<|endoftext|><s></s><pad>",
    "I'm you're WE'LL don't  can't",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
)
"""Texts of many scripts, digits, spaces and controls, on which tokenizers differ if they do."""


def difference(policy: Any, other: Any) -> str:
    """Return the first difference of two tokenizers in words, about `other`; "" if there is none.

    They are equal if they have the same tokens, ids and special ids, and encode `PROBES` alike.
    """
    return _of_ids(policy, other) or _of_special_ids(policy, other) or _of_probes(policy, other)


def _of_ids(policy: Any, other: Any) -> str:
    own, theirs = policy.get_vocab(), other.get_vocab()
    differing = [token for token in {**own, **theirs} if own.get(token) != theirs.get(token)]
    if not differing:
        return ""
    none = 1 << 62
    ids = {one: (own.get(one, none), theirs.get(one, none)) for one in differing}
    token = min(differing, key=lambda one: (min(ids[one]), ids[one][1]))
    return (
        f"has {len(theirs)} tokens and the policy's {len(own)}, {len(differing)} of them different:"
        f" {_shown(token)} is {_id(theirs.get(token))} there and {_id(own.get(token))} here"
    )


def _of_special_ids(policy: Any, other: Any) -> str:
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = getattr(policy, name), getattr(other, name)
        if own != theirs:
            return f"has {name} {theirs}, and the policy's has {own}"
    own, theirs = set(policy.all_special_ids), set(other.all_special_ids)
    for number in sorted(own ^ theirs):
        here, there = ("is", "is not") if number in own else ("is not", "is")
        return f"says that id {number} {there} special, which it {here} for the policy's"
    return ""


def _of_probes(policy: Any, other: Any) -> str:
    for probe in PROBES:
        own, theirs = (one.encode(probe, add_special_tokens=False) for one in (policy, other))
        if own != theirs:
            at = next(
                (n for n, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
                min(len(own), len(theirs)),
            )
            return (
                f"encodes {_shown(probe)} as {len(theirs)} ids and the policy's as {len(own)}, "
                f"different from id number {at} on"
            )
        if (text := policy.decode(own)) != (read := other.decode(own)):
            return f"decodes the ids of {_shown(text)} as {_shown(read)}"
    return ""


def _id(found: int | None) -> str:
    return "no token" if found is None else f"id {found}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


if TYPE_CHECKING:  # imported where it is used: it takes seconds at each controller start
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
MOST_BYTES = 64 << 20
PANIC = "PanicException"
"""Class of errors of native code written in Rust; it cannot be imported and is no `Exception`."""

GENERIC = "TokenizersBackend"
"""Class of a tokenizer that `tokenizer.json` describes completely, as ours."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer with its chat template; raises ValueError where it has none."""
    tokenizer = _class_of(folder).from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder} has no chat template: use an instruction-tuned model, or put a "
            "chat_template.jinja next to its tokenizer"
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def _class_of(folder: Path) -> Any:
    """Return what loads a folder's tokenizer: without a search where the folder names the class.

    The search imports half of transformers and torch's compiler.
    """
    try:
        named = json.loads(read_regular(folder / CONFIG, MOST_BYTES)).get("tokenizer_class")
    except FileNotFoundError:
        named = None
    if named == GENERIC:
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def chat_settings(folder: Path, tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ChatFormat` for a folder: those given, with its own stop tokens.

    Raises ValueError for a stop token that the tokenizer does not have.
    """
    stops = [*generation_stops(folder, tokenizer), *given["stops"]]
    known = tokenizer.get_vocab()
    for stop in stops:
        if stop not in known:
            raise ValueError(
                f"policy.stop_tokens has {stop!r}, which is not a token of the tokenizer: name one "
                "of its tokens, such as its eos_token"
            )
    return {**given, "stops": tuple(stops)}


def generation_stops(folder: Path, tokenizer: Any) -> list[str]:
    """Return the tokens that a folder's generation config ends texts with, besides the eos token.

    Raises ValueError for ids that the tokenizer does not have.
    """
    try:
        stated = json.loads(read_regular(folder / GENERATION, MOST_BYTES)).get("eos_token_id")
    except FileNotFoundError:
        return []
    ids = stated if isinstance(stated, list) else [stated] * (stated is not None)
    stops = []
    for one in ids:
        if type(one) is not int or not 0 <= one < len(tokenizer):
            raise ValueError(
                f"{GENERATION} has the eos_token_id {one!r} but the tokenizer has the ids 0 to "
                f"{len(tokenizer) - 1}: correct it"
            )
        stops.append(str(tokenizer.convert_ids_to_tokens(one)))
    return [stop for stop in dict.fromkeys(stops) if stop != tokenizer.eos_token]


class WrappedTokenizer:
    """What a tokenizer that stands for another one has in common with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token = str(tokenizer.eos_token)

    @property
    def chat_template(self) -> Any:
        return self._tokenizer.chat_template

    def get_chat_template(self, *, tools: list[dict[str, Any]] | None = None) -> str:
        return str(self._tokenizer.get_chat_template(tools=tools))

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return cast("Mapping[int, AddedToken]", self._tokenizer.added_tokens_decoder)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def convert_tokens_to_ids(self, token: str) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(token))


class BackendTokenizer(WrappedTokenizer):
    """A tokenizer whose texts are encoded by its Rust backend directly.

    Gives the same ids as transformers in about half of the time: no offsets, no checks of types.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        # As transformers does with each call: a folder may ask for both.
        self._backend.no_truncation()
        self._backend.no_padding()

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, **options))

    def encode(self, text: str, **options: Any) -> list[int]:
        (encoded,) = self._backend.encode_batch_fast([text], **options)
        return list(encoded.ids)

    def decode(self, ids: list[int], **options: Any) -> str:
        if options.pop("clean_up_tokenization_spaces", False):
            raise ValueError("text is not cleaned up here: its tokens would not be those sampled")
        return str(self._backend.decode(ids, **options))
