"""Base class of all config sections: frozen, strict, no unknown keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
ImportPath = Annotated[str, Field(min_length=1)]
# TOML has no path type, so strings are converted to paths; strict mode converts nothing else.
FilePath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """A table of a config. Strings are not converted to numbers, nor booleans to counts."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def by_type(default: str) -> Callable[[Any], str | None]:
    """Return a discriminator that reads a table's `type`; `default` if it has none."""

    def tag(table: Any) -> str | None:
        if isinstance(table, Section):
            return str(getattr(table, "type", default))
        found = table.get("type", default) if isinstance(table, dict) else None
        return found if isinstance(found, str) else None

    return tag
