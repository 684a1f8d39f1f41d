"""Quality filters for preference pairs before training, in order.

`rollouts.pair_filters` implements them.
"""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from composer_mesh.configs.base import Count, CountOrZero, Section, Share, by_type

Side = Literal["chosen", "rejected"]
BOTH: tuple[Side, ...] = ("chosen", "rejected")


class _OfSides(Section):
    """A filter on the texts of a pair; the pair is dropped if one text fails."""

    sides: Annotated[tuple[Side, ...], Field(strict=False, min_length=1, max_length=2)] = BOTH
    """Texts to check."""


class _Between(_OfSides):
    """A filter on a count with inclusive bounds."""

    max: Count

    min: CountOrZero

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min} but max is {self.max}, so no text can pass: swap them"
            )
        return self


class LengthFilter(_Between):
    """Number of characters of a text."""

    type: Literal["length"] = "length"

    min: CountOrZero = 8
    """Minimum number of characters."""

    max: Count = 32_000
    """Maximum number of characters."""


class WordsFilter(_Between):
    """Number of words of a text; characters of scripts without spaces count one each."""

    type: Literal["words"]

    min: CountOrZero = 2
    """Minimum number of words."""

    max: Count = 4_096
    """Maximum number of words."""


class SpecialCharactersFilter(_OfSides):
    """Share of characters other than letters, digits and white space; of a call, in its values."""

    type: Literal["special_characters"]

    max_ratio: Share = 0.5
    """Maximum share."""


class ExactDuplicatesFilter(Section):
    """Drops pairs whose context and actions equal those of an earlier pair of the run."""

    type: Literal["exact_duplicates"]


class NearDuplicatesFilter(Section):
    """Drops pairs whose text is similar to an earlier one, by MinHash over character shingles."""

    type: Literal["near_duplicates"]

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Jaccard similarity from which two pairs count as duplicates."""

    shingle: Annotated[int, Field(ge=1, le=1000)] = 5
    """Characters per shingle."""

    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Number of hash functions; more are more accurate and slower."""

    window: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Number of earlier pairs to compare with."""


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
