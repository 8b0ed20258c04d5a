"""The platform below the tables: the Spark session, JARs, secrets, owners of files, and remedies for Spark's failures.

This package must not know tables or streams.
"""

from __future__ import annotations

import logging

from lookback.core.values.texts import escape_unprintable


def _escape(record: logging.LogRecord) -> bool:
    """Escapes what a record of the log quotes from events, so that a value neither steers a terminal nor forges a line."""
    record.msg, record.args = escape_unprintable(record.getMessage()), ()
    return True


logging.getLogger("lookback").addFilter(_escape)
