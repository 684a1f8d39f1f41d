"""The tokenizer of a model folder, with its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.rollouts.control_tokens import AddedToken
from composer_mesh.rollouts.traces import Message

if TYPE_CHECKING:  # imported where it is used: it takes seconds at each controller start
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
            "chat_template.jinja beside its tokenizer"
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
                f"policy.stop_tokens has {stop!r}, which is no token of the tokenizer: name one "
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
                f"{len(tokenizer) - 1}: mend it"
            )
        stops.append(str(tokenizer.convert_ids_to_tokens(one)))
    return [stop for stop in dict.fromkeys(stops) if stop != tokenizer.eos_token]


class BackendTokenizer:
    """A tokenizer whose texts are encoded by its Rust backend directly.

    Gives the same ids as transformers in about half of the time: no offsets, no checks of types.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        # As transformers does with each call: a folder may ask for both.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token = str(tokenizer.eos_token)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, **options))

    def encode(self, text: str, **options: Any) -> list[int]:
        (encoded,) = self._backend.encode_batch_fast([text], **options)
        return list(encoded.ids)

    def decode(self, ids: list[int], **options: Any) -> str:
        if options.pop("clean_up_tokenization_spaces", False):
            raise ValueError("text is not cleaned up here: its tokens would not be those sampled")
        return str(self._backend.decode(ids, **options))

    @property
    def chat_template(self) -> Any:
        return self._tokenizer.chat_template

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self._tokenizer.added_tokens_decoder

    def __len__(self) -> int:
        return len(self._tokenizer)

    def convert_tokens_to_ids(self, token: str) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(token))
