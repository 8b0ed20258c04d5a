"""Settings as files hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookback.config import DEFAULT_EVERY, Settings, load_rule_document
from lookback.core.errors import SetupError

CONF = Path(__file__).parents[2] / "conf"


def test_settings_of_the_repository() -> None:
    settings = Settings.local("./here", CONF)
    assert settings.root == "./here"
    assert settings.every == "1 second"
    assert settings.spark["spark.driver.memory"]
    assert set(settings.streams()) == {"transactions", "logins", "payments", "items", "readings"}


def test_settings_may_be_missing(tmp_path: Path) -> None:
    assert Settings.local(conf=tmp_path).every == DEFAULT_EVERY


@pytest.mark.parametrize("text", ["- 1", "evry: 1 second", "spark: fast"])
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.yml").write_text(text)
    with pytest.raises(SetupError, match=r"settings\.yml"):
        Settings.local(conf=tmp_path)


def test_a_rule_file_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rule.yml"
    file.write_text("rule_id: a\nwindow: 1 hour\nrule_id: b\n")
    with pytest.raises(SetupError, match=r"rule\.yml:3: the key rule_id stands twice"):
        load_rule_document(file)
