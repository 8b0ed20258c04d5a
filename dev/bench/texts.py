"""Generated rules and events in the shape of public detection rules on process creation.

Counted in public collections: a rule names one or two images in nine of ten cases, and one to three texts of a command
line; half of its parts are alternatives, a third has an exception, and 0.3 to 4 % of the rules fit an event in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lookback.core.streams.declaration import Stream

STREAM = Stream.from_dict(
    {
        "stream": "processes", "event_id": "event_id", "event_time": "event_time", "max_out_of_orderness": "10 seconds",
        "allowed_lateness": "1 hour",
        "fields": {"event_id": "bigint", "event_time": "timestamp", "image": "string", "parent": "string", "cmd": "string", "account": "string"},
    }
)  # fmt: skip
_IMAGES, _WORDS, _WORDS_OF_LINE = 400, 5_000, 12


def make_rules(count: int) -> Iterator[dict[str, Any]]:
    """Makes event rules, the same ones each time."""
    random = np.random.default_rng(11)

    def image() -> str:
        return rf"\\\\tool{random.integers(_IMAGES)}.exe"

    def word() -> str:
        return f"w{random.integers(_WORDS):04x}"

    for number in range(count):
        where = [
            lambda: f"image ilike '%{image()}' and cmd ilike '%{word()}%'",
            lambda: (
                f"(image ilike '%{image()}' or image ilike '%{image()}') and cmd ilike any ('%{word()}%', '%{word()}%') "
                "and not account ilike '%system%'"
            ),
            lambda: f"parent ilike '%{image()}' and image ilike '%{image()}'",
            lambda: f"cmd ilike all ('%{word()}%', '%{word()}%', '%-{word()}%')",
        ][number % 4]()
        yield {"where": where}


def make_texts(count: int, seed: int) -> dict[str, Any]:
    """Makes the texts of events, by field, each of shape (count,)."""
    random = np.random.default_rng(seed)
    words = np.array([f"w{number:04x}" for number in range(_WORDS)], dtype=object)
    lines = words[random.integers(0, _WORDS, (count, _WORDS_OF_LINE))]
    images = np.array([f"C:\\Windows\\System32\\Tool{number}.EXE" for number in range(_IMAGES)], dtype=object)
    accounts = np.array([f"CORP\\user{number}" for number in range(50)], dtype=object)
    texts = np.empty(count, dtype=object)
    texts[:] = [" -".join(line) for line in lines.tolist()]
    return {
        "image": images[random.integers(0, _IMAGES, count)],
        "parent": images[random.integers(0, _IMAGES, count)],
        "cmd": texts,
        "account": accounts[random.integers(0, 50, count)],
    }
