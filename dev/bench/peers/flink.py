"""Apache Flink as a peer: the Java sources in flink/, compiled once, in a cluster inside one JVM with parallelism 2.

`demo` is the pattern of Flink's well-known demo of dynamic rules: rules as a broadcast stream, all events of a key in a
map, gone through for each event. `tuned` is what one writes by hand for just these two rules: running sums in primitive
arrays (heap), small chunks of bytes (RocksDB). With `--durable` there is a checkpoint every second and the alerts go
through Flink's FileSink; without it they are collected in memory. Every other `KEY=VALUE` goes to Flink's configuration.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).resolve().with_suffix("")
_CACHE = Path(__file__).resolve().parents[1] / ".data"
_VARIANTS = ["demo-heap", "demo-rocksdb", "tuned-heap", "tuned-rocksdb"]
_REMEDY = "run `make bench-peers`, or install the package apache-flink-libraries into this environment"
# For what Flink does by reflection on JDK 17, as its own scripts have it.
_OPENED = ["lang", "net", "io", "nio", "lang.reflect", "text", "time", "util", "util.concurrent"]
_JVM = [
    "-Xms4g",
    "-Xmx8g",
    "-XX:+UseParallelGC",
    "--add-exports=java.base/sun.net.util=ALL-UNNAMED",
    *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENED),
    "--add-opens=java.base/java.util.concurrent.atomic=ALL-UNNAMED",
    "--add-opens=java.base/java.util.concurrent.locks=ALL-UNNAMED",
]
# Beyond the limit: the start of the JVM, the end of the job and the writing of the alerts.
_GRACE_SECONDS = 180


def _jars() -> tuple[str, str]:
    """Returns the class path of Flink and its version; ends the program if the package is missing."""
    found = importlib.util.find_spec("pyflink")
    for place in (found.submodule_search_locations or []) if found else []:
        libraries = Path(place) / "lib"
        dist = [*libraries.glob("flink-dist-*.jar")]
        if dist:
            # Tables and the Python API stay out: the jobs are of the DataStream API.
            jars = [dist[0], *libraries.glob("flink-connector-files-*.jar"), *libraries.glob("log4j-*.jar")]
            return os.pathsep.join(map(str, sorted(jars))), dist[0].stem.removeprefix("flink-dist-")
    sys.exit(f"The Flink peer needs Flink's jars, which are not there: {_REMEDY}.")


def _tool(name: str) -> str:
    """A program of the JDK, of JAVA_HOME if that is set."""
    home = os.environ.get("JAVA_HOME")
    tool = shutil.which(name, path=str(Path(home) / "bin") if home else None)
    if tool is None:
        sys.exit(f"The Flink peer needs {name} of a JDK 17: install openjdk-17-jdk-headless, or set JAVA_HOME.")
    return tool


def _classes(class_path: str, version: str) -> Path:
    """Returns the folder of the compiled classes; compiles them if it is missing or the sources have changed."""
    javac = _tool("javac")
    sources = sorted(_SOURCES.rglob("*.java"))
    digest = hashlib.sha256(version.encode())
    for source in sources:
        digest.update(f"\0{source.relative_to(_SOURCES)}\0".encode() + source.read_bytes())
    target = _CACHE / f"flink-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        _CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="flink-", dir=_CACHE) as name:
            made = Path(name) / "classes"
            sys.stderr.write("flink: compiling\n")
            arguments = [javac, "--release", "17", "-nowarn", "-d", str(made), "-cp", class_path, *map(str, sources)]
            if subprocess.run(arguments, check=False, stdout=sys.stderr).returncode:  # noqa: S603 - javac, on files of ours
                sys.exit("The Java sources of the Flink peer do not compile; see above.")
            made.rename(target)
    return target


def _run(options: argparse.Namespace, class_path: str, classes: Path) -> dict[str, Any]:
    """Runs the job in a JVM. Returns what it printed last."""
    with tempfile.TemporaryDirectory(prefix="bench-flink-") as work:
        scratch = Path(work) / "tmp"
        scratch.mkdir()
        command = [
            _tool("java"),
            *_JVM,
            f"-Djava.io.tmpdir={scratch}",
            f"-Dlog4j2.configurationFile={_SOURCES / 'log4j2.properties'}",
            *("-cp", f"{classes}{os.pathsep}{class_path}", "peer.Peer"),
            *(f"{key}={value}" for key in ("variant", "input", "rules", "alerts") for value in [getattr(options, key)]),
            f"durable={str(options.durable).lower()}",
            f"work={work}",
            *options.flink,
        ]
        seconds = None
        if options.limit_seconds is not None:
            command.append(f"limit-seconds={options.limit_seconds}")
            seconds = options.limit_seconds + _GRACE_SECONDS
        try:
            ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=seconds)  # noqa: S603
        except subprocess.TimeoutExpired:
            sys.exit("The Flink job did not stop in time and was ended.")
    if ended.returncode:
        sys.exit(f"The Flink job failed with exit code {ended.returncode}; see above.")
    outcome: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return outcome


def _setting(text: str) -> str:
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)+=.*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no setting of Flink, KEY=VALUE with dots in the key")
    return text


def main() -> None:
    """Runs the job that the command line names and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench.peers.flink", description=__doc__)
    parser.add_argument("--variant", choices=_VARIANTS, default="tuned-heap")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--alerts", type=Path, required=True)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--limit-seconds", type=float)
    parser.add_argument("flink", nargs="*", type=_setting, metavar="KEY=VALUE", help="settings of Flink, for trials")
    options = parser.parse_args()
    class_path, version = _jars()
    outcome = _run(options, class_path, _classes(class_path, version))
    outcome["settings"] |= {"jvm": [flag for flag in _JVM if flag.startswith("-X")], "cores": os.cpu_count()}
    outcome["seconds"] = round(outcome["seconds"], 3)
    outcome["steady_events_per_s"] = round(outcome["steady_events_per_s"])
    result = {"peer": "flink", "variant": options.variant, **outcome, "version": version}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
