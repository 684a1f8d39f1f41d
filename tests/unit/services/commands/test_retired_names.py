"""Commands, options and config keys that were renamed are refused with their new names."""

import pytest
from repository import ROOT

from composer_mesh.services.cli import main

QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["check-run", "runs/x"], "verify"),
        (["train", str(QUICKSTART), "--resume-or-begin"], "--auto-resume"),
        (["train", str(QUICKSTART), "--replay-traces=runs/x"], "--from-traces"),
    ],
)
def test_a_retired_command_or_option_is_refused_with_its_new_name(
    words: list[str], new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"was renamed: write {new} instead\n")
