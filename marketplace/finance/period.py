"""Periods: half-open, from local midnight to local midnight in an IANA time zone. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from marketplace.core.errors import BadRequest

_NAMED = re.compile(r"(?P<year>[0-9]{4})(?:-(?P<month>[0-9]{2})(?:-(?P<day>[0-9]{2}))?)?", re.ASCII)
FIRST_YEAR, LAST_YEAR = 2000, 9000
"""Of a period that is named: the one before it and the one after it exist in every zone."""


class InvalidPeriod(BadRequest):
    """No period: its end is not after its start, a time lacks its zone, or the zone does not exist."""

    code = "invalid_period"


def zone(name: str) -> ZoneInfo:
    """The IANA time zone of this name. Raises InvalidPeriod."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidPeriod(f"There is no time zone {name[:80]!r}; an example is 'Europe/Berlin'.") from None


def within_hour(text: str, zone_name: str, *, now: datetime) -> datetime:
    """A moment within the hour that is meant: `2026-11-30T13` by the clocks of the zone, or with an offset of its own;
    empty: the last whole one. Raises InvalidPeriod."""
    if not text:
        return now - timedelta(hours=1)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidPeriod(f"{text[:40]!r} is no hour: write it like 2026-11-30T13.", param="hour") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=zone(zone_name))


@dataclass(frozen=True, slots=True)
class Period:
    """[start, end): what happened at `start` is inside, what happened at `end` is not. Shown in `zone_name`."""

    start: datetime
    end: datetime
    zone_name: str = "UTC"

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise InvalidPeriod("The bounds of a period carry their time zone.")
        # Two times of one zone would be compared by their clock faces, which repeat an hour a year.
        if self.start.astimezone(UTC) >= self.end.astimezone(UTC):
            raise InvalidPeriod(f"The period ends at {self.end} and begins at {self.start}.")
        zone(self.zone_name)

    @classmethod
    def of_days(cls, first: date, end: date, zone_name: str) -> Period:
        """From the first moment of `first` to the first moment of `end`, by the clocks of the zone."""
        return cls(_midnight(first, zone_name), _midnight(end, zone_name), zone_name)

    @classmethod
    def named(cls, text: str, zone_name: str) -> Period:
        """`2026`, `2026-03` or `2026-03-14`, by the clocks of the zone. Raises InvalidPeriod."""
        match = _NAMED.fullmatch(text.strip())
        try:
            if match is None or not FIRST_YEAR <= int(match["year"]) <= LAST_YEAR:
                raise ValueError
            first = date(int(match["year"]), int(match["month"] or 1), int(match["day"] or 1))
            return cls.of_days(first, _next(first, match), zone_name)
        except (ValueError, OverflowError):
            raise InvalidPeriod(f"{text[:40]!r} is no period; give a year, a month (2026-03) or a day.") from None

    def before(self) -> Period:
        """The period before: by name where this is a day, a month or a year of its zone, else of the same length."""
        first, end = self.local_start, self.local_end
        if (first.time(), end.time()) == (time(), time()):
            earlier = _earlier(first.date(), end.date())
            if earlier is not None:
                return Period(_midnight(earlier, self.zone_name), self.start, self.zone_name)
        return Period(self.start - (self.end - self.start), self.start, self.zone_name)

    @property
    def local_start(self) -> datetime:
        return self.start.astimezone(zone(self.zone_name))

    @property
    def local_end(self) -> datetime:
        return self.end.astimezone(zone(self.zone_name))

    def __str__(self) -> str:
        return f"{self.local_start:%Y-%m-%d %H:%M:%S} to {self.local_end:%Y-%m-%d %H:%M:%S} ({self.zone_name})"


def _earlier(first: date, end: date) -> date | None:
    """Where the period before [first, end) begins, if that is a day, a month or a year; else None."""
    if end == first + timedelta(days=1):
        return first - timedelta(days=1)
    if first.day == end.day == 1 and (end.year * 12 + end.month) - (first.year * 12 + first.month) == 1:
        return (first - timedelta(days=1)).replace(day=1)
    if (first.month, first.day, end.month, end.day, end.year) == (1, 1, 1, 1, first.year + 1):
        return date(first.year - 1, 1, 1)
    return None


def _midnight(day: date, zone_name: str) -> datetime:
    # Where clocks skip midnight, fold=0 names one same instant as the end of one day and the start of the next.
    return datetime.combine(day, time(), tzinfo=zone(zone_name)).astimezone(UTC)


def _next(first: date, match: re.Match[str]) -> date:
    if match["day"]:
        return first + timedelta(days=1)
    if match["month"]:
        return date(first.year + first.month // 12, first.month % 12 + 1, 1)
    return date(first.year + 1, 1, 1)
