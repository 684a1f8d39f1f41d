"""The hints that the SDPO channel prefers for a rollout's turns, by the rules that a batch follows.

No model is loaded for it: a text is counted in tokens only where its bytes do not already say that
it is short enough. Whether a step had room for a hint is not said.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from composer_mesh.configs.hints import HintsConfig
from composer_mesh.rollouts.hint_counts import HintCounts
from composer_mesh.rollouts.hint_sources import Hint, HintSources, Place, Written
from composer_mesh.rollouts.hints import TEMPLATES, HintTemplateError
from composer_mesh.rollouts.traces import Trace

TOKENIZER_FILE = "tokenizer.json"


class TokenCount:
    """Counts the tokens of a text. `find` is asked for a tokenizer's folder once one is needed."""

    def __init__(self, limit: int, find: Callable[[], Path | None]) -> None:
        self._limit, self._find = limit, find
        self._tokenizer: Tokenizer | None = None
        self.guessed = False
        """Whether a text had to be counted without a tokenizer."""

    def __call__(self, text: str) -> int:
        """The tokens of a text, or a number above them that is within the limit too.

        Each token stands for a byte at least. Without a tokenizer a text is taken for short enough.
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
    answer: str,
    written: Mapping[Place, Written],
    tokens: Callable[[str], int],
) -> tuple[list[Hint], list[str]]:
    """The first hint of each turn that gets one, and notes about turns that get none.

    `written` holds a writer's words by trace and turn.
    """
    templates = TEMPLATES.extended(config.templates) if config.templates else TEMPLATES
    sources = HintSources(config, lambda _: answer, tokens, templates, written)
    found, notes = list[Hint](), list[str]()
    for turn in sources.turns(trace, group):
        counts = HintCounts()
        try:
            hint = next(sources.hints(trace, turn, group, counts), None)
        except HintTemplateError as error:
            notes.append(f"turn {turn} has no hint: {error}")
            continue
        if hint is not None:
            found.append(hint)
        elif counts.refused:
            notes.append(f"turn {turn} has no hint: each one would have told the answer")
    return found, notes


def tokenizer_folder(run: Path, policy: Path | None) -> Path | None:
    """Where the tokenizer of a run's policy is: its newest checkpoint, or the policy's folder."""
    steps = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    numbered = [(int(number), path) for path, number in steps.items() if number.isdecimal()]
    folders = [path for _, path in sorted(numbered, reverse=True)]
    if policy is not None:
        folders.append(policy)
    return next((one for one in folders if (one / TOKENIZER_FILE).is_file()), None)
