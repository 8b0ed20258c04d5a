"""The platform below the tables: the Spark session, JARs, secrets, file owners, and remedies for Spark's failures.

This package must not know tables or streams.
"""

from __future__ import annotations

import logging

from lookback.core.values.texts import escape_unprintable


def _escape(record: logging.LogRecord) -> bool:
    """Escapes values from events in a log record, so that they cannot control a terminal or forge a line."""
    record.msg, record.args = escape_unprintable(record.getMessage()), ()
    return True


logging.getLogger("lookback").addFilter(_escape)
