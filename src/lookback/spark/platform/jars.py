"""Checks Java, and fetches the JARs that a local Spark needs, once; then they are on disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lookback.core.errors import SetupError

# Spark 4.2 runs on Java 17, 21, 25 and the versions in between.
OLDEST_JAVA, NEWEST_JAVA = 17, 25
# Names of the JARs to keep. Spark already has the rest of what Ivy downloads.
_ANY_JAR = r".+\.jar"
_DELTA_JARS = r"(io\.delta|io\.unitycatalog)_.+\.jar"
_KAFKA_JARS = (
    r"(org\.apache\.kafka_kafka-clients|org\.apache\.commons_commons-pool2|org\.apache\.spark_spark-sql-kafka-).+\.jar"
)
# A part of Spark's Kafka source. Some repositories have few of its versions, but they differ little, and without
# delegation tokens (Kerberos) the source only asks it whether there are any.
_TOKENS = ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13")
_TOKENS_JAR = r"org\.apache\.spark_spark-token-provider-kafka-.+\.jar"
_OTHER_TOKENS = "4.1.0-preview1"
# Artifacts that Spark already has, or needs only on Hadoop clusters. Skipping them saves 60 MB.
PROVIDED = (
    "com.github.luben:zstd-jni", "com.google.code.findbugs:jsr305", "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime", "org.lz4:lz4-java", "at.yawk.lz4:lz4-java", "org.scala-lang:scala-library",
    "org.scala-lang.modules:scala-parallel-collections_2.13", "org.slf4j:slf4j-api", "org.xerial.snappy:snappy-java",
)  # fmt: skip
_INSTALL = "install Java 17, such as with `sudo apt-get install openjdk-17-jre-headless` or `brew install openjdk@17`"
_MARK = "resolved JARs: "
# Runs in a separate process, because Ivy resolves packages when a JVM starts with `spark.jars.packages`.
_RESOLVE = f"""
from pyspark import SparkConf, SparkContext
SparkContext._ensure_initialized()
print({_MARK!r} + SparkConf().get("spark.jars"))
"""


@dataclass(frozen=True)
class Artifacts:
    """JARs that are fetched together from a Maven repository.

    Attributes:
        name: The name of the folder for them, which includes their versions.
        coordinates: Group, name and version of each. Dependencies are fetched too.
        kept: A pattern for the names of the JARs to keep.
        excluded: Dependencies that are not fetched, as group:name.
    """

    name: str
    coordinates: tuple[tuple[str, str, str], ...]
    kept: str = _ANY_JAR
    excluded: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(":".join(artifact) for artifact in self.coordinates)

    @property
    def folder(self) -> Path:
        """The folder of the JARs, in LOOKBACK_JARS or ~/.cache/lookback/jars."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lookback" / "jars"
        return Path(os.environ.get("LOOKBACK_JARS") or cache).expanduser() / self.name

    def fetch(self, *, quiet: bool = True) -> list[Path]:
        """Returns the JARs on disk; fetches missing ones first. Raises SetupError if they cannot be fetched."""
        chosen = os.environ.get("LOOKBACK_JARS")
        # The user's own folder may contain all JARs of a session directly.
        beside = self._list_jars(Path(chosen).expanduser()) if chosen and self.kept != _ANY_JAR else []
        jars = beside or self._list_jars(self.folder)
        if jars:
            return jars
        if not quiet:
            print(f"Fetching {self} ...", file=sys.stderr, flush=True)
        _keep(_resolve(self), self.folder)
        return self._list_jars(self.folder)

    def _list_jars(self, folder: Path) -> list[Path]:
        return sorted(jar for jar in folder.glob("*.jar") if re.fullmatch(self.kept, jar.name, re.ASCII))


def check_java() -> int:
    """Returns the version (17, 21, ...) of the Java that Spark will use: from JAVA_HOME, or else the PATH.

    Raises SetupError, which says what to install, if Java is missing or Spark cannot run on it.
    """
    java = _find_java()
    version = _find_java_version(java) if java else None
    if version is None:
        home = os.environ.get("JAVA_HOME")
        where = f"JAVA_HOME is {home!r}, where no Java starts" if home else "the PATH contains none"
        raise SetupError(f"Spark needs Java, and {where}: {_INSTALL}.")
    if not OLDEST_JAVA <= version <= NEWEST_JAVA:
        raise SetupError(
            f"Spark runs on Java {OLDEST_JAVA} to {NEWEST_JAVA}, but {java} is Java {version}: {_INSTALL}, "
            "and point JAVA_HOME at it."
        )
    return version


def fetch_session_jars(*, quiet: bool = True) -> list[Path]:
    """Returns Delta's JARs. Fetches missing ones first (about 20 s, once).

    They are in LOOKBACK_JARS, or in a folder named after their versions in ~/.cache/lookback/jars. Raises SetupError if
    they cannot be fetched.
    """
    chosen = os.environ.get("LOOKBACK_JARS")
    # The session gets all JARs in the user's own folder.
    jars = sorted(Path(chosen).expanduser().glob("*.jar")) if chosen else []
    return jars or _choose_delta().fetch(quiet=quiet)


def fetch_kafka_jars(*, quiet: bool = True) -> list[Path]:
    """Returns the JARs of Spark's Kafka source. Fetches missing ones first (some seconds, once).

    They are stored beside Delta's. Raises SetupError if they cannot be fetched.
    """
    return [*_choose_kafka().fetch(quiet=quiet), *_fetch_tokens(quiet)]


def _find_java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        return java if java.exists() else None
    on_path = shutil.which("java")
    return Path(on_path) if on_path else None


def _find_java_version(java: Path) -> int | None:
    # Reading the release file, if there is one, avoids the 100 ms to start a JVM.
    release = java.resolve().parent.parent / "release"
    text = release.read_text(encoding="utf-8", errors="replace") if release.is_file() else ""
    match = re.search(r'JAVA_VERSION="(\d+)', text) or re.search(r'version "(\d+)', _run_java_version(java))
    return int(match.group(1)) if match else None


def _run_java_version(java: Path) -> str:
    try:
        return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _find_spark_version() -> str:
    return metadata.version("pyspark")


def _choose_delta() -> Artifacts:
    spark, delta = _find_spark_version(), metadata.version("delta-spark")
    # Since 4.1, Delta publishes one artifact per minor version of Spark.
    minor = "" if delta.startswith("4.0.") else "_" + ".".join(spark.split(".")[:2])
    return Artifacts(f"delta-{delta}-spark-{spark}", (("io.delta", f"delta-spark{minor}_2.13", delta),), _DELTA_JARS)


def _choose_kafka() -> Artifacts:
    spark = _find_spark_version()
    coordinates = (("org.apache.spark", "spark-sql-kafka-0-10_2.13", spark),)
    return Artifacts(f"kafka-spark-{spark}", coordinates, _KAFKA_JARS, (*PROVIDED, ":".join(_TOKENS)))


def _fetch_tokens(quiet: bool) -> list[Path]:
    """Fetches the delegation token part of Spark's Kafka source, in Spark's version or else a similar one."""
    versions = (_find_spark_version(), _OTHER_TOKENS)
    known = [
        Artifacts(f"kafka-tokens-{version}", ((*_TOKENS, version),), _TOKENS_JAR, PROVIDED) for version in versions
    ]
    there = [artifacts for artifacts in known if artifacts.folder.is_dir()]
    try:
        return (there or known)[0].fetch(quiet=quiet)
    except SetupError:
        if there:
            raise
        return known[1].fetch(quiet=quiet)


def _resolve(artifacts: Artifacts) -> list[Path]:
    """Returns the JARs that Ivy finds for the coordinates. Raises SetupError with Ivy's report on failure."""
    excluded = f"--exclude-packages {','.join(artifacts.excluded)} " if artifacts.excluded else ""
    arguments = f"--master local[1] --packages {artifacts} {excluded}pyspark-shell"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _RESOLVE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": arguments},
        check=False,
    )
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        report = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SetupError(
            f"{artifacts} cannot be fetched; can this machine reach a Maven repository? If not, copy the JARs from "
            f"{artifacts.folder} of another machine and set LOOKBACK_JARS to their folder. Ivy reported:\n{report}"
        )
    paths = [Path(re.sub(r"^file:(//)?", "", jar)) for jar in lines[-1].split(",")]
    return [path for path in paths if re.fullmatch(artifacts.kept, path.name, re.ASCII)]


def _keep(jars: list[Path], folder: Path) -> None:
    """Copies the JARs into the folder, which is created atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        complete = Path(temporary, "jars")
        complete.mkdir()
        for jar in jars:
            shutil.copyfile(jar, complete / jar.name)
        try:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            complete.rename(folder)
        except OSError:
            # Another process was faster; use its JARs.
            if not any(folder.glob("*.jar")):
                raise


def main() -> int:
    """Fetches missing JARs (with `--kafka` also Kafka's) and prints where they are. Returns the exit code."""
    try:
        check_java()
        for jars in (
            fetch_session_jars(quiet=False),
            *([fetch_kafka_jars(quiet=False)] if "--kafka" in sys.argv[1:] else []),
        ):
            print(f"{len(jars)} JARs in {jars[0].parent}")
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
