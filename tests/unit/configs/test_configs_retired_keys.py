"""A renamed config key is refused with its new name."""

from composer_mesh.configs.errors import is_key, unknown_key
from composer_mesh.configs.retired_keys import RETIRED_KEYS, new_name
from composer_mesh.configs.schema import Config

RENAMED = {"sdpo.old_rate": "sdpo.ema_rate", "feedback": "sdpo.hints"}


def test_a_renamed_key_is_refused_with_its_new_name() -> None:
    line = unknown_key(Config, ["sdpo", "old_rate"], 0.1, RENAMED)
    assert line == "sdpo.old_rate = 0.1: sdpo.old_rate was renamed: write sdpo.ema_rate instead"


def test_a_key_of_a_renamed_table_names_the_table() -> None:
    line = unknown_key(Config, ["feedback", "max_tokens"], 3, RENAMED)
    assert line == "feedback.max_tokens = 3: feedback was renamed: write sdpo.hints instead"


def test_list_positions_do_not_hide_a_renamed_key() -> None:
    assert new_name(["teachers", 2, "old"], {"teachers.old": "teachers.new"}) == (
        "teachers.old",
        "teachers.new",
    )


def test_a_key_that_was_never_there_is_no_renamed_one() -> None:
    assert new_name(["sdpo", "rate"], RENAMED) is None
    assert "unknown key" in unknown_key(Config, ["sdpo", "rate"], 3, RENAMED)


def test_every_retired_key_is_gone_and_its_new_name_exists() -> None:
    for old, new in RETIRED_KEYS.items():
        assert not is_key(Config, old.split(".")), old
        assert is_key(Config, new.split(".")), new
