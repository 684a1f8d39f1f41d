"""Preferred SDPO hints of a rollout's turns, by the same rules as training batches.

No model is loaded: a text is tokenized only if its size in bytes exceeds the token limit. Whether a
hint fitted into the context of its step is not determined.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from composer_mesh.configs.hints import HintsConfig
from composer_mesh.rollouts.hint_counts import HintCounts
from composer_mesh.rollouts.hint_sources import Hint, HintSources, Place, Written
from composer_mesh.rollouts.hints import TEMPLATES
from composer_mesh.rollouts.traces import Trace

TOKENIZER_FILE = "tokenizer.json"


class TokenCount:
    """Counts the tokens of a text. `find` returns a tokenizer's folder, when one is needed."""

    def __init__(self, limit: int, find: Callable[[], Path | None]) -> None:
        self._limit, self._find = limit, find
        self._tokenizer: Tokenizer | None = None
        self.guessed = False
        """Whether a text was counted without a tokenizer."""

    def __call__(self, text: str) -> int:
        """Return the number of tokens, or an upper bound if that is within the limit.

        Each token has at least one byte. Without a tokenizer every text is assumed to be short
        enough.
        """
        if (most := len(text.encode(errors="replace"))) <= self._limit:
            return most
        if self._tokenizer is None:
            folder = self._find()
            if folder is None:
                self.guessed = True
                return self._limit
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def hints_of(
    trace: Trace,
    group: Sequence[Trace],
    config: HintsConfig,
    answer: str | None,
    written: Mapping[Place, Written],
    tokens: Callable[[str], int],
) -> tuple[list[Hint], list[str]]:
    """Return the first hint of each turn that gets one, and notes about turns without one.

    `written` holds a hint writer's texts by trace and turn.
    """
    templates = TEMPLATES.extended(config.templates) if config.templates else TEMPLATES
    sources = HintSources(config, lambda _: answer, tokens, templates, written)
    found, notes = list[Hint](), list[str]()
    for turn in sources.turns(trace, group):
        counts = HintCounts()
        hint = next(sources.hints(trace, turn, group, counts), None)
        if hint is not None:
            found.append(hint)
        elif counts.faults:
            notes.append(f"turn {turn} has no hint: {next(iter(counts.faults))}")
        elif counts.refused:
            notes.append(f"turn {turn} has no hint: each one would have told the answer")
    return found, notes


def tokenizer_folder(run: Path, policy: Path | None) -> Path | None:
    """Return the policy's tokenizer folder: its newest checkpoint, or the policy's folder."""
    steps = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    numbered = [(int(number), path) for path, number in steps.items() if number.isdecimal()]
    folders = [path for _, path in sorted(numbered, reverse=True)]
    if policy is not None:
        folders.append(policy)
    return next((one for one in folders if (one / TOKENIZER_FILE).is_file()), None)
