"""The tokenizer of a model folder, with its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from composer_mesh.configs.regular_files import read_regular

if TYPE_CHECKING:  # imported where it is used: it takes seconds at each controller start
    from transformers import PreTrainedTokenizerFast

CONFIG = "tokenizer_config.json"
MOST_BYTES = 64 << 20
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
