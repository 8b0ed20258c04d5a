"""Renders an example of each notebook, as docs/how-to/notebooks.md shows them: `make pictures`, about two minutes.

Runs the notebooks on the repository's sample, in a temporary folder, and writes docs/pictures/<notebook>.png: the title,
and below it the texts and pictures of the cells, without tables. The reviews follow the sample's own labels.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import pyarrow.parquet as pq
import yaml
from nbclient import NotebookClient
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path("samples/transactions.parquet")
RULES = ("customer-day-spend", "large-payment", "spend-against-usual")
# Notebook -> its parameters. The first notebook takes in the part of the sample that the preparation leaves.
NOTEBOOKS: dict[str, dict[str, Any]] = {
    "01_ingest": {},
    "02_author_rules": {"publish": True, "author": "kim"},
    "03_evaluate_stream": {},
    "04_review_alerts": {"disposition": "confirmed", "revision": "0", "reviewer": "kim", "note": "as the labels say"},
}
PARTS, PREPARED = 6, 5
_TIMEOUT = 300
_WIDTH, _MARGIN, _COLUMNS = 900, 16, 124
_INK, _PAPER, _BAND = "#222222", "#FFFFFF", "#EEF3F7"
_COLOURS = 96  # of a picture: text and lines keep their shades, and the file is a third as large
_SHOWN = re.compile(r'<img [^>]*base64,(?P<picture>[^"]+)"|<p>(?P<words>.*?)</p>|<pre>(?P<lines>.*?)</pre>', re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the notebooks and writes their pictures. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs/pictures", help="the folder of the pictures")
    folder = parser.parse_args(arguments).to
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        conf, root = _copy_conf(Path(place)), Path(place) / "lakehouse"
        _prepare(conf, root)
        for name, parameters in NOTEBOOKS.items():
            chosen = {"alert_id": _add_reviews(conf, root)} if name.startswith("04") else {}
            notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
            inject(notebook, root=str(root), conf=str(conf), **parameters, **chosen)
            NotebookClient(notebook, timeout=_TIMEOUT, kernel_name="python3").execute(cwd=str(ROOT / "notebooks"))
            path = folder / f"{name}.png"
            compose(notebook, without=f"{place}/").quantize(_COLOURS, dither=Image.Dither.NONE).save(
                path, optimize=True
            )
            sys.stdout.write(f"{path}: {path.stat().st_size / 1000:,.0f} kB\n")
    return 0


def inject(notebook: Any, **parameters: Any) -> None:
    """Puts a cell with values after the one that is tagged `parameters`, as papermill does."""
    at = next(n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    source = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in parameters.items())])
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]}))


def _copy_conf(place: Path) -> Path:
    """Copies conf/ and lets a batch take one commit, so that the pictures show several batches."""
    shutil.copytree(ROOT / "conf", place / "conf", ignore=shutil.ignore_patterns("jobs"))
    settings = yaml.safe_load((ROOT / "conf/settings.yml").read_text())
    settings["admission"] = {"maxFilesPerTrigger": 1}
    settings["spark"] = {"spark.driver.memory": "2g"}
    (place / "conf/settings.yml").write_text(yaml.safe_dump(settings))
    return place / "conf"


def _prepare(conf: Path, root: Path) -> None:
    """Makes tables with most of the sample, in several commits, and three of the rules in conf/."""
    from lookback import notebook

    workspace = notebook.open_workspace(str(root), conf=str(conf), stream="transactions")
    sample = pq.read_table(conf / SAMPLE)
    size = -(-len(sample) // PARTS)
    for part in range(PREPARED):
        pq.write_table(sample.slice(part * size, size), conf.parent / f"part-{part}.parquet")
        notebook.ingest_files(workspace, str(conf.parent / f"part-{part}.parquet"))
    notebook.import_labels(workspace, str(conf / SAMPLE), positive="is_fraud")
    for name in RULES:
        document = yaml.safe_load((conf / "rules" / f"{name}.yml").read_text())
        workspace.rules.push(document, status="active", author="kim")
    workspace.tables.spark.stop()


def _add_reviews(conf: Path, root: Path) -> str:
    """Reviews most alerts by the sample's labels. Returns the first alert of the queue."""
    from pyspark.sql import functions as F  # noqa: N812

    from lookback import notebook
    from lookback.spark.review import open_queue
    from lookback.spark.tables.schemas import REVIEWS

    workspace = notebook.open_workspace(str(root), conf=str(conf), stream="transactions")
    labels = workspace.tables.read("transactions").select(
        F.col("transaction_id").cast("string").alias("event_id"), "is_fraud"
    )
    known = (
        workspace.tables.read("alerts").join(labels, "event_id").orderBy("event_time").select("alert_id", "is_fraud")
    )
    now = datetime.now(timezone.utc)
    rows = [
        (row.alert_id, "confirmed" if row.is_fraud else "false_positive", 0, "kim", "as the labels say", now)
        for row in known.collect()
    ]
    reviewed = rows[: -max(1, len(rows) // 20)]
    workspace.tables.append(workspace.tables.spark.createDataFrame(reviewed, REVIEWS).coalesce(1), "reviews")
    first = str(open_queue(workspace.tables).head()["alert_id"])  # type: ignore[index]
    workspace.tables.spark.stop()
    return first


def compose(notebook: Any, without: str) -> Image.Image:
    """Composes one picture of a notebook that was run: its title, then the texts and pictures of its cells, in order.

    without: a temporary folder, which is removed from the texts.
    """
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    pieces = [_render_title(title), *(piece for cell in notebook.cells for piece in _render_outputs(cell, without))]
    whole = Image.new("RGB", (_WIDTH, sum(piece.height for piece in pieces) + _MARGIN), _PAPER)
    top = 0
    for piece in pieces:
        whole.paste(piece, (0, top))
        top += piece.height
    return whole


def _render_outputs(cell: Any, without: str) -> Iterator[Image.Image]:
    for output in cell.get("outputs", []):
        for shown in _SHOWN.finditer(output.get("data", {}).get("text/html", "")):
            if shown["picture"]:
                yield _scale(Image.open(io.BytesIO(base64.b64decode(shown["picture"]))).convert("RGB"))
            elif shown["words"]:
                yield _render_text(
                    "\n".join(textwrap.wrap(html.unescape(shown["words"]).replace(without, ""), _COLUMNS)),
                    "DejaVuSans.ttf",
                )
            else:
                lines = html.unescape(shown["lines"]).rstrip().splitlines()
                yield _render_text("\n".join(line[:_COLUMNS] for line in lines), "DejaVuSansMono.ttf")


def _scale(picture: Image.Image) -> Image.Image:
    return picture.resize((_WIDTH, round(picture.height * _WIDTH / picture.width)), Image.Resampling.LANCZOS)


def _render_title(title: str) -> Image.Image:
    return _render_text(title, "DejaVuSans-Bold.ttf", size=22, paper=_BAND)


def _render_text(text: str, font: str, *, size: int = 13, paper: str = _PAPER) -> Image.Image:
    letters = ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts/ttf" / font), size)
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    height = int(probe.multiline_textbbox((0, 0), text, font=letters, spacing=5)[3])
    image = Image.new("RGB", (_WIDTH, height + _MARGIN), paper)
    ImageDraw.Draw(image).multiline_text((_MARGIN, _MARGIN // 2), text, font=letters, fill=_INK, spacing=5)
    return image


if __name__ == "__main__":
    sys.exit(main())
