"""Finds the browser that the tests drive: a Chromium of this machine, never one that a package downloads.

As a command it says whether there is one, before `make test-browser` installs anything.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# LOOKBACK_CHROMIUM names one that is somewhere else.
_VARIABLE = "LOOKBACK_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_APPLICATIONS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
_INSTALLERS = {
    "apt-get": "sudo apt-get install chromium",
    "dnf": "sudo dnf install chromium",
    "brew": "brew install --cask chromium",
}


class NoChromium(Exception):
    """No Chromium was found; the message says how to get one."""


def find_chromium() -> Path:
    """Returns the executable of a Chromium or Chrome. Raises NoChromium."""
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise NoChromium(f"{_VARIABLE} is {chosen!r}, which is no program")
        return Path(chosen)
    on_path = filter(None, map(shutil.which, _NAMES))
    applications = (name for name in _APPLICATIONS if os.access(name, os.X_OK))
    found = next(iter([*on_path, *applications]), None)
    if found is None:
        raise NoChromium(
            f"No Chromium was found: {_suggest_installation()}. One that is not on the PATH can be named by {_VARIABLE}."
        )
    return Path(found)


def _suggest_installation() -> str:
    """Says how this machine installs it, by the first installer that it has."""
    known = (command for installer, command in _INSTALLERS.items() if shutil.which(installer))
    return next(known, "install the package `chromium` of your system")


def main() -> int:
    """Returns 0 if there is one; else 1, after a line that says which package brings it."""
    try:
        find_chromium()
    except NoChromium as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
