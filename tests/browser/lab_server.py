"""JupyterLab as a process of its own, for tests: on a free port, with a token, with its own folders for all that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import nbformat
import psutil

from dev.tools.pictures import inject
from lookback.spark.platform.jars import Artifacts

if TYPE_CHECKING:
    from pathlib import Path

_START_SECONDS = 60
_END_SECONDS = 20
# The folders that Jupyter, IPython and their libraries write into, by the variable that names each.
_FOLDERS = {
    "HOME": "home",
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
}
# The page hands out its application, by which tests run cells and choose the theme.
_CONFIG = {
    "LabApp": {"expose_app_in_browser": True, "extension_manager": "readonly", "news_url": None},
    "ServerApp": {"allow_root": True, "ip": "127.0.0.1", "open_browser": False, "port": 0},
}
# Nobody is asked whether they want news, and no copy is saved in the middle of a test.
_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


class LabServer:
    """Started with `start`; `stop` ends it, its kernels and their Spark.

    folder: a new one, below which lies all that it writes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notebooks = folder / "notebooks"
        self._log = folder / "lab.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port, self._token = 0, ""

    def start(self) -> None:
        """Starts it and waits until it answers."""
        for name in ("notebooks", *_FOLDERS.values()):
            (self._folder / name).mkdir(parents=True)
        config = self._folder / "config"
        (config / "labconfig").mkdir()
        (config / "labconfig/default_setting_overrides.json").write_text(json.dumps(_SETTINGS))
        (config / "jupyter_server_config.json").write_text(json.dumps(_CONFIG))
        # Kernels start Spark with the JARs of this machine, which are kept in the home of who runs the tests.
        jars = Artifacts("", ()).folder
        folders = {variable: str(self._folder / name) for variable, name in _FOLDERS.items()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={self._notebooks}"],
                cwd=self._folder, env={**os.environ, **folders, "LOOKBACK_JARS": str(jars)},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._await_answer(self._process)

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the file by which a server announces its port and token, and for an answer at that port."""
        announced = self._folder / "runtime" / f"jpserver-{process.pid}.json"
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert process.poll() is None, self.read_log()
            assert time.monotonic() < deadline, f"no JupyterLab in {_START_SECONDS} s: {self.read_log()}"
            with contextlib.suppress(OSError, ValueError):
                server = json.loads(announced.read_text(encoding="utf-8"))
                self._port, self._token = server["port"], server["token"]
                self._request("GET", "api/status")
                return
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the kernels, so that each ends its JVM, and the server; kills by its id whatever is left of them."""
        process, self._process = self._process, None
        if process is None:
            return
        descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        # A server that does not answer any more is ended all the same.
        with contextlib.suppress(OSError):
            self.end_kernels()
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in psutil.wait_procs(descendants, timeout=_END_SECONDS)[1]:
            each.kill()

    def end_kernels(self) -> None:
        """Ends all kernels, and with each its Spark."""
        for session in self._request("GET", "api/sessions"):
            self._request("DELETE", f"api/sessions/{session['id']}")

    def add_notebook(self, name: str, document: Any, **parameters: Any) -> str:
        """Puts a notebook where JupyterLab finds it, with parameters as a runner injects them. Returns its address."""
        if parameters:
            inject(document, **parameters)
        document.metadata.setdefault("kernelspec", {"name": "python3", "display_name": "Python 3"})
        nbformat.write(document, self._notebooks / name)
        return f"http://127.0.0.1:{self._port}/doc/tree/{quote(name)}?token={self._token}"

    def read_log(self) -> str:
        """Returns the end of what it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3_000:]

    def _request(self, method: str, path: str) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{path}", method=method, headers={"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=_END_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None
