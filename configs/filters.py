"""The recipe of quality filters between preference pairs and training, in order.

What a filter does with a pair is `rollouts.pair_filters`.
"""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from composer_mesh.configs.base import Count, Section, Share, by_type

Side = Literal["chosen", "rejected"]
BOTH: tuple[Side, ...] = ("chosen", "rejected")


class _OfSides(Section):
    """A filter that looks at the texts of a pair; one that fails drops the pair."""

    sides: Annotated[tuple[Side, ...], Field(strict=False, min_length=1)] = BOTH
    """Which texts it looks at."""


class _Between(_OfSides):
    """A filter that counts, with bounds that may be met."""

    max: Count

    min: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min} but max is {self.max}, so no text can pass: swap them"
            )
        return self


class LengthFilter(_Between):
    """Characters of a text."""

    type: Literal["length"] = "length"

    min: Annotated[int, Field(ge=0)] = 8
    """Fewest characters that pass."""

    max: Count = 32_000
    """Most characters that pass."""


class WordsFilter(_Between):
    """Words of a text; characters of scripts without spaces count one each."""

    type: Literal["words"]

    min: Annotated[int, Field(ge=0)] = 2
    """Fewest words that pass."""

    max: Count = 4_096
    """Most words that pass."""


class SpecialCharactersFilter(_OfSides):
    """Share of characters that are no letters, digits or white space; of a call, in its values."""

    type: Literal["special_characters"]

    max_ratio: Share = 0.5
    """Largest share that passes."""


class ExactDuplicatesFilter(Section):
    """A pair with the context and the two actions of an earlier one of the run."""

    type: Literal["exact_duplicates"]


class NearDuplicatesFilter(Section):
    """A pair whose text is nearly that of an earlier one, by MinHash over character shingles."""

    type: Literal["near_duplicates"]

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Jaccard similarity from which two pairs count as one."""

    shingle: Count = 5
    """Characters of a shingle."""

    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Hash functions: more are more exact and slower."""

    window: Annotated[int, Field(ge=1)] = 50_000
    """Earlier pairs that are remembered."""


FilterConfig = Annotated[
    Annotated[LengthFilter, Tag("length")]
    | Annotated[WordsFilter, Tag("words")]
    | Annotated[SpecialCharactersFilter, Tag("special_characters")]
    | Annotated[ExactDuplicatesFilter, Tag("exact_duplicates")]
    | Annotated[NearDuplicatesFilter, Tag("near_duplicates")],
    Discriminator(by_type("length")),
]

DEFAULT_FILTERS: tuple[FilterConfig, ...] = (
    LengthFilter(),
    WordsFilter(type="words"),
    SpecialCharactersFilter(type="special_characters"),
    ExactDuplicatesFilter(type="exact_duplicates"),
    NearDuplicatesFilter(type="near_duplicates"),
)
