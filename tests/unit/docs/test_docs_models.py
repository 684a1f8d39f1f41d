"""The table of model families in docs/models.md is what training each of them gave.

`nox -s families` trains all of them and compares; with COMPOSER_MESH_TEST_FAMILIES=write it writes
the table.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from family_runs import EXACT, difference_from_own_logits, difference_in_training
from model_families import FAMILIES, family_folder

from composer_mesh.actors.models.template_program import describe_model
from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_facts import ModelFacts, check_model_fits, check_model_trains
from composer_mesh.planning.model_folder import check_model_folder
from composer_mesh.planning.model_refusals import UnfitModel

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"
HEAD = (
    "| `model_type` | class | trainer | embedded engine | default adapters |\n" + "|---" * 5 + "|\n"
)
ASKED = os.environ.get("COMPOSER_MESH_TEST_FAMILIES", "")
FEW = ("mistral", "qwen3_moe", "gemma2", "cohere", "gemma3", "qwen3_5", "stablelm", "gpt_oss")
"""A window that covers the context, experts, a capped and a scaled head, a text part, states, own
attention."""


@pytest.fixture
def row(build_config: Any, tokenizer: Any, tmp_path: Path) -> Any:
    """The row of a family, whose model is trained and sampled in every way that is accepted."""

    def made(family: str) -> str:
        folder = family_folder(family, tokenizer, tmp_path / family)
        check_model_folder(folder)
        told = describe_model(folder, len(tokenizer))
        if "error" in told:
            return f"| {family} | | refused: {told['error']} | | |\n"
        facts = ModelFacts.of(told["facts"])
        served = Tried(build_config, folder, facts)
        trainer = served.trainer()
        if not trainer.startswith("exact"):
            return f"| {family} | {facts.name} | {trainer} | | |\n"
        cells = (trainer, served.embedded(), served.adapters())
        return f"| {family} | {facts.name} | {' | '.join(cells)} |\n"

    return made


class Tried:
    """What comes of a folder's model: exact numbers, or a refusal before anything starts."""

    def __init__(self, build_config: Any, folder: Path, facts: ModelFacts) -> None:
        self._build, self._folder, self._facts = build_config, folder, facts
        self._attention = "sdpa" if "sdpa" in facts.implementations else "eager"

    def trainer(self) -> str:
        found = self._tried("vllm", difference_from_own_logits)
        return f"{found}, eager" if self._attention == "eager" else found

    def embedded(self) -> str:
        return self._tried("embedded", difference_in_training)

    def adapters(self) -> str:
        lora: dict[str, Any] = {"lora": {"rank": 2}}
        found = self._tried("vllm", difference_from_own_logits, lora)
        if found == "exact" and self.embedded() == "exact":
            found = self._tried("embedded", difference_in_training, lora)
        return found.replace("exact", ", ".join(self._facts.linear))

    def _tried(self, engine: str, difference: Any, trainer: dict[str, Any] | None = None) -> str:
        config: Config = self._build(
            generator={"engine": engine},
            trainer={"lr": 1e-3, "attention": self._attention, **(trainer or {})},
        )
        try:
            check = check_model_fits if engine == "embedded" else check_model_trains
            check(self._facts, config)
        except UnfitModel as error:
            return self._reason(error)
        found = difference(config, self._folder)
        assert found < EXACT, f"{self._folder.name} is accepted but differs by {found}"
        return "exact"

    def _reason(self, error: UnfitModel) -> str:
        """The reason of a refusal without names, numbers and the repair."""
        name = self._facts.name
        text = str(error).removeprefix(f"the embedded engine cannot serve {name}: ")
        reason = re.split(r" by up to |[:;] ", text.removeprefix(f"{name}: "))[0]
        return f"refused: {reason}"


@pytest.mark.parametrize("family", FEW)
def test_a_family_trains_exactly_or_is_refused_as_the_table_says(family: str, row: Any) -> None:
    pytest.importorskip("peft", exc_type=ModuleNotFoundError)
    assert row(family) in table(PAGE.read_text(encoding="utf-8"))


@pytest.mark.skipif(not ASKED, reason="trains every family: run `nox -s families`")
def test_the_table_is_what_training_every_family_gives(row: Any) -> None:
    made = HEAD + "".join(row(family) for family in sorted(FAMILIES))
    text = PAGE.read_text(encoding="utf-8")
    if ASKED == "write":
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")
    assert table(PAGE.read_text(encoding="utf-8")) == made


def test_the_table_has_a_row_for_each_family_that_is_trained() -> None:
    rows = table(PAGE.read_text(encoding="utf-8")).removeprefix(HEAD).splitlines()
    assert [row.split("|")[1].strip() for row in rows] == sorted(FAMILIES)
    assert len(rows) >= 30


def table(text: str) -> str:
    """The table between its marks."""
    return text.split(BEGIN)[1].split(END)[0]
