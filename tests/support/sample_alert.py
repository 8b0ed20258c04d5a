"""A row of the alerts table."""

from __future__ import annotations

import datetime as dt
from typing import Any

AT = dt.datetime(2026, 3, 1, 10, tzinfo=dt.timezone.utc)
ALERT: dict[str, Any] = {
    "alert_id": "0123456789abcdef0123456789abcdef", "revision": 0, "verdict": "raised", "rule_id": "day-spend",
    "rule_version": 2, "mode": "active", "severity": "high", "stream": "payments", "key": {"payer": "Zoë"}, "event_id": "17",
    "event_time": AT, "window_start": AT, "window_end": AT, "window_complete": True, "measures": {"total": "1200.50"},
    "message": "1,200.50 by Zoë", "evidence": [], "arrival": 7, "decided_at": AT, "change": 1,
    "queue": True, "entities": {}, "tags": ["attack.t1110"],
}  # fmt: skip
