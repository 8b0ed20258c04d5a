"""Coverage-guided fuzzing: the tests of `test_fuzz_*.py`, each fed by libFuzzer (Atheris) in a process of its own.

`make fuzz-coverage` runs all of them. What fails is printed, and Hypothesis keeps it: the next run of the tests begins
with it. An input that takes more than 20 s or 2 GB fails too.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_LIMITS = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1"]


def tests() -> dict[str, str]:
    """The generated tests: name -> module."""
    found, generated = {}, False
    for file in sorted(HERE.glob("test_fuzz_*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            generated |= line.startswith("@given(")
            if line.startswith("def "):
                found.update({line[4:].partition("(")[0]: file.stem} if generated else {})
                generated = False
    return found


def fuzz(name: str, module: str, seconds: int, corpus: Path) -> None:
    """Feeds one test for so many seconds; ends the process."""
    import atheris

    sys.path[:0] = [str(folder) for folder in (HERE, HERE.parent, HERE.parents[1] / "support")]
    with atheris.instrument_imports(include=["lookback"]):
        test = getattr(importlib.import_module(module), name)
    atheris.Setup(
        [name, str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={corpus}-", *_LIMITS],
        test.hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


def main() -> int:
    """Runs one test, or each in turn. Returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test", help="only this one")
    parser.add_argument("--seconds", type=int, default=300, help="for each; default: %(default)s")
    parser.add_argument("--corpus", type=Path, help="where inputs that reached something new are kept for the next run")
    options = parser.parse_args()
    known = tests()
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="lookback-fuzz-"))
    if options.test:
        (corpus / options.test).mkdir(parents=True, exist_ok=True)
        fuzz(options.test, known[options.test], options.seconds, corpus / options.test)
    failed = [name for name in known if _run(name, options.seconds, corpus)]
    for name in failed:
        _say(f"failed: {name}")
    return 1 if failed else 0


def _run(name: str, seconds: int, corpus: Path) -> bool:
    """Whether the test failed, in a process of its own."""
    command = [sys.executable, __file__, "--test", name, "--seconds", str(seconds), "--corpus", str(corpus)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    lines = done.stdout.splitlines()
    if "Traceback" in done.stdout or done.returncode:
        _say(done.stdout[-5_000:])
        return True
    figures = [line for line in lines if line.startswith("stat::number_of_executed_units")]
    covered = [line.split("cov: ")[1].split()[0] for line in lines if "cov: " in line]
    _say(f"{name}: {' '.join(figures).split()[-1]} inputs, {covered[-1] if covered else 0} edges")
    return False


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
