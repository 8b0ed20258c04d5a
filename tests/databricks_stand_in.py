"""Stands in for the Databricks CLI in tests: answers `bundle summary` as it does, and refuses everything else.

The file that STAND_IN names says what it knows: {"default": the target without --target, "targets": {name: summary},
"required": the variables without a value}. "stderr" with "code", "stdout" or "seconds" replace the answer. Each call is
appended to the file beside it, so that a test sees what was passed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"Error: {message}\n\n")
    sys.exit(1)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def main() -> None:
    parser = Parser(allow_abbrev=False)
    parser.add_argument("group", choices=["bundle"])
    parser.add_argument("command", choices=["summary"])
    parser.add_argument("--force-pull", action="store_true")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--target", default=os.environ.get("DATABRICKS_BUNDLE_TARGET"))
    parser.add_argument("--profile", default=os.environ.get("DATABRICKS_CONFIG_PROFILE"))
    options = parser.parse_args()
    place = Path(os.environ["STAND_IN"])
    with place.with_suffix(".calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    known = json.loads(place.read_text())
    time.sleep(known.get("seconds", 0))
    if "code" in known:
        sys.stderr.write(known["stderr"])
        sys.exit(known["code"])
    if not Path("databricks.yml").is_file():
        fail("unable to locate bundle root: databricks.yml not found")
    target = options.target or known.get("default") or fail("please specify target")
    if target not in known["targets"]:
        fail(f"{target}: no such target. Available targets: {', '.join(known['targets'])}")
    if not (options.profile or os.environ.get("DATABRICKS_TOKEN")):
        fail("cannot resolve bundle auth configuration: default auth: cannot configure default credentials")
    for name in known.get("required", []):
        if f"BUNDLE_VAR_{name}" not in os.environ:
            fail(
                f"no value assigned to required variable {name}. Variables are usually assigned in databricks.yml, and they "
                f'can be overridden using "--var", BUNDLE_VAR_{name} environment variable, or variable-overrides.json'
            )
    if not options.force_pull or options.output != "json":
        fail("the stand-in prints JSON of the deployment's state in the workspace alone")
    sys.stderr.write("Warning: unknown field: alerts\n  at resources\n  in databricks.yml:4:3\n\n")
    sys.stdout.write(known.get("stdout") or json.dumps(known["targets"][target], indent=2))


if __name__ == "__main__":
    main()
