"""Java, and the JARs that Spark lacks on this machine: resolved once, on disk from then on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from lookback.core.errors import SetupError

# Spark 4.2 runs on 17, 21 and 25, and on what lies between.
OLDEST_JAVA, NEWEST_JAVA = 17, 25
# Of all that Ivy brings, Spark lacks these alone.
_NEEDED = re.compile(r"(io\.delta|io\.unitycatalog|com\.globalmentor)_.+\.jar", re.ASCII)
# Local files by Java's own calls. Hadoop starts a `chmod` for each file that it makes, some 20 of them in a micro-batch.
_LOCAL_FILES = ("com.globalmentor", "hadoop-bare-naked-local-fs", "0.1.0")
_INSTALL = "install Java 17, such as with `sudo apt-get install openjdk-17-jre-headless` or `brew install openjdk@17`"
_MARK = "resolved JARs: "
# Runs in a process of its own: starting a JVM with `spark.jars.packages` is what makes Ivy resolve.
_RESOLVE = f"""
from pyspark import SparkConf, SparkContext
SparkContext._ensure_initialized()
print({_MARK!r} + SparkConf().get("spark.jars"))
"""


def check_java() -> int:
    """The version (17, 21, ...) of the Java that Spark will start: JAVA_HOME's, else the one on the PATH.

    Raises SetupError, one sentence with what to install, where there is none or Spark cannot run on it.
    """
    java = _java()
    version = _version_of(java) if java else None
    if version is None:
        home = os.environ.get("JAVA_HOME")
        where = f"JAVA_HOME is {home!r}, where no Java starts" if home else "there is no Java on the PATH"
        raise SetupError(f"Spark needs Java, and {where}: {_INSTALL}.")
    if not OLDEST_JAVA <= version <= NEWEST_JAVA:
        raise SetupError(
            f"Spark runs on Java {OLDEST_JAVA} to {NEWEST_JAVA}, and {java} is Java {version}: {_INSTALL}, "
            "and point JAVA_HOME at it."
        )
    return version


def extra_jars(*, quiet: bool = True) -> list[Path]:
    """The JARs on disk: Delta's, and one for local files; fetched first if need be (about 20 s, once).

    They lie in LOOKBACK_JARS, or in a folder of their versions below ~/.cache/lookback/jars.
    Raises SetupError where they are missing and cannot be fetched.
    """
    folder = _folder()
    jars = sorted(folder.glob("*.jar"))
    if jars:
        return jars
    if not quiet:
        print(f"Fetching {_coordinates()} ...", file=sys.stderr, flush=True)
    _keep(_resolve(), folder)
    return sorted(folder.glob("*.jar"))


def local_files_jar(jars: Iterable[Path]) -> Path | None:
    """Of the JARs the one with a faster local file system; None where a folder of one's own lacks it."""
    group, name, _ = _LOCAL_FILES
    return next((jar for jar in jars if jar.name.startswith(f"{group}_{name}-")), None)


def _java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        return java if java.exists() else None
    found = shutil.which("java")
    return Path(found) if found else None


def _version_of(java: Path) -> int | None:
    # The release file spares the 100 ms of starting a JVM; not every distribution has one.
    release = java.resolve().parent.parent / "release"
    text = release.read_text(encoding="utf-8", errors="replace") if release.is_file() else ""
    match = re.search(r'JAVA_VERSION="(\d+)', text) or re.search(r'version "(\d+)', _told_by(java))
    return int(match.group(1)) if match else None


def _told_by(java: Path) -> str:
    try:
        return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _folder() -> Path:
    chosen = os.environ.get("LOOKBACK_JARS")
    if chosen:
        return Path(chosen).expanduser()
    *_, delta = _delta()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "lookback" / "jars" / f"delta-{delta}-spark-{_spark_version()}-files-{_LOCAL_FILES[-1]}"


def _spark_version() -> str:
    return metadata.version("pyspark")


def _delta() -> tuple[str, str, str]:
    # Delta publishes one artifact for each minor version of Spark.
    minor = ".".join(_spark_version().split(".")[:2])
    return "io.delta", f"delta-spark_{minor}_2.13", metadata.version("delta-spark")


def _coordinates() -> str:
    return ",".join(":".join(artifact) for artifact in (_delta(), _LOCAL_FILES))


def _resolve() -> list[Path]:
    """The JARs that Ivy finds for the coordinates; its report is shown only when it fails."""
    packages = _coordinates()
    environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": f"--master local[1] --packages {packages} pyspark-shell"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _RESOLVE], capture_output=True, text=True, env=environment, check=False
    )
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        report = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SetupError(
            f"{packages} cannot be fetched; is a Maven repository within reach? On a machine without one, copy the "
            f"JARs of another machine's {_folder()} and set LOOKBACK_JARS to their folder. Ivy said:\n{report}"
        )
    paths = [Path(re.sub(r"^file:(//)?", "", jar)) for jar in lines[-1].split(",")]
    return [path for path in paths if _NEEDED.fullmatch(path.name)]


def _keep(jars: list[Path], folder: Path) -> None:
    """Copies the JARs into the folder, which appears whole or not at all."""
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
            # Another process was first; what it put there is as good.
            if not any(folder.glob("*.jar")):
                raise


def main() -> int:
    """Fetches the JARs if they are not there and says where they are. Returns the exit code."""
    try:
        check_java()
        jars = extra_jars(quiet=False)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(jars)} JARs in {jars[0].parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
