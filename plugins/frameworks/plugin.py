"""Other frameworks import these modules by their paths: nothing is registered (docs/plugins.md)."""

TABLE: dict[str, dict[str, str]] = {}
