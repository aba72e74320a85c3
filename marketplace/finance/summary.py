"""A statement in words and figures for people. What is unknown says so."""

from __future__ import annotations

import ledger
from marketplace.finance.statement import MICROS_PER_HOUR, DeviceYield, YieldStatement

MICROS_PER_MINUTE = 60_000_000


def usd(nano: int) -> str:
    """`$0.001234`: exact, with two decimals or more."""
    return f"{'-' if nano < 0 else ''}${ledger.format_nano(abs(nano))}"


def share(value: float | None) -> str:
    """`12.3%`, or `unknown`."""
    return "unknown" if value is None else f"{value:.1%}"


def duration(time_us: int) -> str:
    """`1.25 h`, or minutes and seconds below an hour."""
    if time_us >= MICROS_PER_HOUR:
        return f"{time_us / MICROS_PER_HOUR:,.2f} h"
    minutes, rest_us = divmod(time_us, MICROS_PER_MINUTE)
    return f"{minutes} min {rest_us / 1_000_000:.1f} s" if minutes else f"{rest_us / 1_000_000:.1f} s"


def energy(device: DeviceYield) -> str:
    """`0.0042 kWh (declared)`, or `unknown`: a declared figure never looks like a measured one."""
    drawn = device.energy
    if drawn.kwh is None:
        return "unknown"
    missing = f" for {duration(drawn.unknown_us)}" if drawn.unknown_us else ""
    return f"{drawn.kwh:.6f} kWh ({drawn.source}{missing})"


def summary(statement: YieldStatement) -> list[tuple[str, str]]:
    """(name, figure) of a statement's total, in the order in which an owner asks."""
    total, account = statement.total, statement.account
    tokens, earnings, usage = total.tokens, total.earnings, total.usage
    rows = [
        ("period", str(statement.period)),
        ("requests served", f"{earnings.jobs:,}" + (" (simulated engine)" if total.simulated else "")),
        ("tokens in", f"{tokens.input:,}, of which cached {tokens.input_cached:,}"),
        ("tokens out", f"{tokens.output:,}, of which reasoning {tokens.output_reasoning:,}"),
        ("gross", usd(earnings.gross_nano)),
        ("fee", usd(-earnings.fee_nano)),
        ("paid for our failures", usd(earnings.adjustments_nano)),
        ("net", usd(earnings.net_nano)),
        ("offered", duration(usage.offered_us)),
        ("rented share of that", f"{share(usage.rented_share)} ({duration(usage.rented_us)}: a job held the device)"),
        ("busy share of that", f"{share(usage.busy_share)} ({duration(usage.busy_us)}: its engine worked)"),
        ("token share of that", f"{share(total.token_share)} (of the tokens that it could have written)"),
        ("energy", energy(total)),
        ("balance before", usd(account.opening_nano)),
        ("settled in the period", usd(account.settled_nano)),
    ]
    if account.carried_in_nano:
        rows.append(("of which delivered before", usd(account.carried_in_nano)))
    if account.carried_out_nano:
        rows.append(("delivered, not yet settled", usd(account.carried_out_nano)))
    if account.other_nano:
        rows.append(("payouts and corrections", usd(account.other_nano)))
    return [*rows, ("balance after", usd(account.closing_nano))]
