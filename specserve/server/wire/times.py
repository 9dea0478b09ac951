"""Moments as JSON has them in APIs that write no seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(seconds: float | None = None) -> str:
    """A moment in RFC 3339, now or so many seconds after 1970."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
