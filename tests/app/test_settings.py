"""Settings as files hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookback.config import DEFAULT_EVERY, RETAINED, Settings, load_rule_document
from lookback.core.errors import SetupError
from lookback.core.values.limits import LIMITS

CONF = Path(__file__).parents[2] / "conf"


def test_settings_of_the_repository() -> None:
    settings = Settings.local("./here", CONF)
    assert settings.root == str(Path("here").absolute())
    assert (settings.profile, settings.every) == ("latency", "0 seconds")
    assert settings.spark["spark.driver.memory"]
    of_users = {"transactions", "logins", "payments", "activity", "items", "readings", "processes"}
    assert set(settings.streams()) == {*of_users, "metrics", "alerts"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 30.0), ("metrics: 5 minutes", 300.0), ("metrics: none", None), ("metrics: 1 second", 1.0)],
)
def test_how_often_metrics_are_written(tmp_path: Path, text: str, seconds: float | None) -> None:
    (tmp_path / "settings.yml").write_text(text)
    assert Settings.local(conf=tmp_path).metrics == seconds


def test_settings_may_be_missing(tmp_path: Path) -> None:
    assert Settings.local(conf=tmp_path).every == DEFAULT_EVERY


def test_a_profile_is_chosen_by_one_name_and_settings_go_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "calm.yml").write_text(
        "every: 9 seconds\nspark: {a: 1, b: 2}\nadmission: {maxFilesPerTrigger: 3}"
    )
    (tmp_path / "profiles" / "other.yml").write_text("every: 8 seconds")
    (tmp_path / "settings.yml").write_text("profile: calm\nspark: {b: 7}")
    calm = Settings.local(conf=tmp_path)
    assert (calm.every, calm.spark, calm.admission) == ("9 seconds", {"a": "1", "b": "7"}, {"maxFilesPerTrigger": "3"})
    monkeypatch.setenv("LOOKBACK_PROFILE", "other")
    assert Settings.local(conf=tmp_path).every == "8 seconds"
    assert Settings.local(conf=tmp_path, profile="calm").every == "9 seconds"
    with pytest.raises(SetupError, match=r"no profile 'brisk' in .*; profiles: calm, other"):
        Settings.local(conf=tmp_path, profile="brisk")


def test_every_profile_of_the_repository_can_be_used() -> None:
    for file in sorted((CONF / "profiles").glob("*.yml")):
        settings = Settings.local(conf=CONF, profile=file.stem)
        assert set(settings.admission) <= {"maxFilesPerTrigger", "maxBytesPerTrigger"}
        assert settings.every


@pytest.mark.parametrize(
    "text",
    [
        "- 1",
        "evry: 1 second",
        "spark: fast",
        "every: {a: 1}",
        "metrics: often",
        "metrics: 0 seconds",
        "metrics: {a: 1}",
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.yml").write_text(text)
    with pytest.raises(SetupError, match=r"settings\.yml"):
        Settings.local(conf=tmp_path)


def test_a_rule_file_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rule.yml"
    file.write_text("rule_id: a\nwindow: 1 hour\nrule_id: b\n")
    with pytest.raises(SetupError, match=r"rule\.yml:3: the key rule_id is written twice"):
        load_rule_document(file)
    file.write_text("sequence:\n  steps:\n  - name: a\n    where: x\n    where: y\n  - name: b\n    where: x\n")
    with pytest.raises(SetupError) as refused:
        load_rule_document(file)
    assert str(refused.value) == f"{file}:5: the key sequence.steps[0].where is written twice"


def test_how_long_rows_are_kept_is_a_setting_by_table_and_all_are_kept_without(tmp_path: Path) -> None:
    file = tmp_path / "settings.yml"
    assert Settings.local(conf=tmp_path).retention == {}
    file.write_text("retention: {alerts: 730 days, metrics: 13 weeks, rule_log: none}")
    days = {name: age.days for name, age in Settings.local(conf=tmp_path).retention.items()}
    assert days == {"alerts": 730, "metrics": 91}
    # Shorter than the queue goes back, or than a nightly job needs; each at its edge.
    for name, least in RETAINED.items():
        file.write_text(f"retention: {{{name}: {least} days}}")
        assert Settings.local(conf=tmp_path).retention[name].days == least
        file.write_text(f"retention: {{{name}: {least * 24 - 1} hours}}")
        with pytest.raises(SetupError, match=rf"settings.yml: retention\.{name} must be from {least} to 36,500 days"):
            Settings.local(conf=tmp_path)
    file.write_text("retention: {alerts: 36501 days}")
    with pytest.raises(SetupError, match="to 36,500 days, got '36501 days'; none keeps every row"):
        Settings.local(conf=tmp_path)
    file.write_text("retention: {payments: 30 days, alerts: often}")
    with pytest.raises(SetupError) as refused:
        Settings.local(conf=tmp_path)
    assert str(refused.value) == (
        f"{file}: retention has no table 'payments'; known: {', '.join(RETAINED)}; retention.alerts: 'often' is "
        "not a duration; write an integer and a unit, such as '24 hours', or none to keep every row"
    )
    file.write_text("retention: 30 days")
    with pytest.raises(SetupError, match="retention must be a mapping of settings, got '30 days'"):
        Settings.local(conf=tmp_path)


def test_a_file_may_be_as_large_as_its_document(tmp_path: Path) -> None:
    # In YAML a document takes up to twice as much as in JSON, by which `document_bytes` counts.
    file = tmp_path / "rule.yml"
    file.write_text(
        "rule_id: r\nwhere: |\n" + f"  {'n = 1 or ' * 10}\n" * 2 * (LIMITS["document_bytes"].most // 100 - 1)
    )
    assert len(load_rule_document(file)["where"]) > LIMITS["document_bytes"].most
