"""The class that reads and writes Delta's logs in folders: it does what Delta's own does, and looks at less."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError

from lookback.spark.platform import logstore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

_SETTING = "spark.delta.logStore.file.impl"
_NAMES = st.one_of(
    st.integers(0, 10**20 - 1).map(lambda version: f"{version:020d}.json"),
    st.text(st.characters(exclude_characters="/\0:", exclude_categories=["Cs"]), min_size=1, max_size=20),
).filter(lambda name: name.strip(".") and len(name.encode()) < 200)


class _Store:
    """A log store, called as Delta calls it."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._jvm: Any = spark._jvm
        self._settings = spark._jsparkSession.sessionState().newHadoopConf()
        loader = self._jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        self._store = loader.loadClass(name).getConstructors()[0].newInstance(self._array(self._settings))

    def list_from(self, file: Path) -> list[tuple[str, int, int]]:
        """Returns names, lengths and times of change."""
        found = self._store.listFrom(self._path(file), self._settings)
        files = []
        while found.hasNext():
            each = found.next()
            files.append((each.getPath().getName(), each.getLen(), each.getModificationTime()))
        return files

    def write(self, file: Path, lines: Iterable[str], *, overwrite: bool = False) -> None:
        texts = self._jvm.java.util.ArrayList()
        for line in lines:
            texts.add(line)
        self._store.write(self._path(file), texts.iterator(), overwrite, self._settings)

    def _path(self, file: Path) -> Any:
        # A text would be read as an address.
        return self._jvm.org.apache.hadoop.fs.Path(self._jvm.java.io.File(str(file)).toURI())

    def _array(self, value: Any) -> Any:
        values = self._jvm.java.util.ArrayList()
        values.add(value)
        return values.toArray()


@pytest.fixture(scope="session")
def store(spark: SparkSession) -> _Store:
    return _Store(spark, "lookback.FolderLogStore")


@pytest.fixture(scope="session")
def deltas(spark: SparkSession) -> _Store:
    return _Store(spark, "io.delta.storage.HDFSLogStore")


def test_tables_of_a_session_that_is_started_here_use_the_class(spark: SparkSession, tmp_path: Path) -> None:
    jvm: Any = spark._jvm
    spark.range(1).write.format("delta").save(str(tmp_path / "table"))
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(tmp_path / "table"))
    store = log.store().getDelegate(log.logPath())
    assert store.logStoreImpl().getClass().getName() == "lookback.FolderLogStore"


@given(names=st.lists(_NAMES, unique=True, max_size=12), first=_NAMES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_listing_equals_that_of_delta(
    store: _Store, deltas: _Store, tmp_path_factory: pytest.TempPathFactory, names: list[str], first: str
) -> None:
    folder = tmp_path_factory.mktemp("log") / "it's `odd`, 100%"
    folder.mkdir()
    for number, name in enumerate(names):
        (folder / name).write_text("x" * number, encoding="utf-8")
    for name in (first, *names):
        assert store.list_from(folder / name) == deltas.list_from(folder / name)


def test_a_listing_looks_at_no_file_before_the_first(store: _Store, tmp_path: Path) -> None:
    for version in range(3):
        (tmp_path / f"{version:020d}.json").write_text("{}", encoding="utf-8")
    # To look at it fails, as it leads to itself.
    (tmp_path / f"{1:020d}.json").unlink()
    (tmp_path / f"{1:020d}.json").symlink_to(f"{1:020d}.json")
    assert [name for name, _, _ in store.list_from(tmp_path / f"{2:020d}.json")] == [f"{2:020d}.json"]
    with pytest.raises(Py4JJavaError):
        store.list_from(tmp_path / f"{1:020d}.json")


def test_a_listing_of_a_folder_that_is_not_there_fails_as_that_of_delta(
    store: _Store, deltas: _Store, tmp_path: Path
) -> None:
    for each in (store, deltas):
        with pytest.raises(Py4JJavaError, match="FileNotFoundException"):
            each.list_from(tmp_path / "none" / f"{0:020d}.json")


def test_a_commit_is_never_written_over_and_leaves_nothing_beside_it(store: _Store, tmp_path: Path) -> None:
    file = tmp_path / f"{0:020d}.json"
    store.write(file, ['{"a": "ä"}', "{}"])
    assert file.read_text(encoding="utf-8") == '{"a": "ä"}\n{}\n'
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        store.write(file, ["other"])
    assert file.read_text(encoding="utf-8") == '{"a": "ä"}\n{}\n'
    store.write(file, ["other"], overwrite=True)
    assert file.read_text(encoding="utf-8") == "other\n"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(Py4JJavaError, match="FileNotFoundException"):
        store.write(tmp_path / "none" / file.name, ["{}"])


def test_of_writers_of_one_commit_at_a_time_one_succeeds(store: _Store, tmp_path: Path) -> None:
    def write(version: int, writer: int) -> bool:
        try:
            store.write(tmp_path / f"{version:020d}.json", [f"{writer}"] * 100)
        except Py4JJavaError as error:
            assert "FileAlreadyExistsException" in str(error)  # noqa: PT017 - others must not be
            return False
        return True

    commits, writers = range(15), range(6)
    with ThreadPoolExecutor(len(writers)) as pool:
        for version in commits:
            won = list(pool.map(lambda writer, version=version: write(version, writer), writers))  # type: ignore[misc]
            assert won.count(True) == 1
            assert (tmp_path / f"{version:020d}.json").read_text("utf-8") == f"{won.index(True)}\n" * 100
    assert len(list(tmp_path.iterdir())) == len(commits)


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Any]:
    """The settings of Spark without the class that Lookback has set; afterwards it is set again."""
    conf: Any = spark.sparkContext._jsc.sc().conf()  # type: ignore[attr-defined]
    before = conf.get(_SETTING)
    conf.remove(_SETTING)
    yield conf
    conf.set(_SETTING, before)


@pytest.mark.parametrize("setting", ["spark.delta.logStore.class", _SETTING])
def test_a_users_own_log_store_stays(spark: SparkSession, conf: Any, setting: str) -> None:
    conf.set(setting, "theirs")
    try:
        logstore.use_folder_logs(spark)
        assert conf.get(setting) == "theirs"
        assert not conf.contains(_SETTING) or setting == _SETTING
    finally:
        conf.remove(setting)


def _break_source(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "Broken.java").write_text("class {", encoding="utf-8")
    monkeypatch.setattr(logstore, "_SOURCE", folder / "Broken.java")


def _hide_janino(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    compile_class = logstore._compile
    monkeypatch.setattr(logstore, "_compile", lambda jvm, loader: compile_class(jvm.org.codehaus.none, loader))


@pytest.mark.parametrize("spoil", [_break_source, _hide_janino])
def test_where_the_class_cannot_be_compiled_delta_uses_its_own(
    spark: SparkSession,
    conf: Any,
    spoil: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logstore, "_NAME", "lookback.Broken")
    spoil(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING, "lookback"):
        logstore.use_folder_logs(spark)
    assert not conf.contains(_SETTING)
    assert "using Delta's own log store" in caplog.text
