"""Statements, invoices and reports as documents: which figures stand on them, under which names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from marketplace.finance.document import Bar, Cell, Column, Document, Fact, Format, Part, Sheet, totalled
from marketplace.finance.economics import NodeEconomics
from marketplace.finance.heldback import Held
from marketplace.finance.invoice import Invoice
from marketplace.finance.platform import PlatformReport
from marketplace.finance.statement import Amounts, DeviceYield, State, VariantYield, YieldStatement

MONEY, COUNT, SHARE, HOURS = Format.MONEY, Format.COUNT, Format.SHARE, Format.HOURS

UTILISATION_NOTE = (
    "Rented: a job held the device. Busy: its engine worked, as the node reports. Tokens: output tokens over what could"
    " have been decoded at the measured speed. Each is a share of the offered hours; hours without a job are in it."
)
COST_NOTE = (
    "Over all hours in which the node was its owner's, offered or not. Idle loss: what the offered hours without a job"
    " cost. A dash rests on something that is not declared or not measured."
)
RETURN_NOTE = (
    "As a year of such hours would be. The break-even price pays for the period at this use, fee included; the"
    " break-even share is the rented share of the offered hours that pays for it at this income."
)
HELD_NOTE = "For each limit, what relaxing it alone would have let in. They overlap: do not add them up."
SIMULATED_NOTE = "Some of this was served by a simulated engine, in an environment that allows that. It is no income."


def statement_document(statement: YieldStatement, held: Sequence[Held] | None = None) -> Document:
    """An owner's statement. `held`: what held it back, if that was asked for."""
    total, account = statement.total, statement.account
    facts = (
        Fact("Opening balance", account.opening_nano, MONEY),
        Fact("Earned in the period, net", total.earnings.net_nano, MONEY),
        Fact("Payouts and corrections", account.other_nano, MONEY),
        Fact("Closing balance", account.closing_nano, MONEY),
        Fact("Rented share of offered hours", total.usage.rented_share, SHARE),
        Fact("Busy share of offered hours", total.usage.busy_share, SHARE),
        Fact("Token share", total.token_share, SHARE),
        Fact("Energy", total.energy.kwh, Format.KWH),
        Fact("Energy is", total.energy.source),
    )
    sheets = [
        _account_sheet(statement),
        _states_sheet(statement),
        _variants_sheet(statement.devices),
        _devices_sheet(statement.devices),
        _cost_sheet(statement.economics),
        _return_sheet(statement.economics),
    ]
    if held is not None:
        sheets.append(_held_sheet(held))
    notes = [*statement.problems, *([SIMULATED_NOTE] if total.simulated else [])]
    return Document(
        "Statement of yield",
        statement.owner_name,
        str(statement.period),
        facts,
        tuple(sheets),
        tuple(notes),
        (*_money_bars(total), *map(_hours_bar, sorted(statement.devices, key=lambda each: -each.usage.offered_us))),
    )


def _money_bars(total: DeviceYield) -> tuple[Bar, ...]:
    """What became of what renters paid; none where nothing was."""
    if not total.earnings.gross_nano:
        return ()
    amounts = reduce(add, (variant.amounts for variant in total.variants), Amounts())
    return (
        Bar(
            "What renters paid",
            (
                Part("yours", total.earnings.gross_nano - total.earnings.fee_nano, MONEY),
                Part("the platform's fee", total.earnings.fee_nano, MONEY),
            ),
        ),
        Bar(
            "What earned it",
            (
                Part("output", amounts.output_visible_nano + amounts.output_reasoning_nano, MONEY),
                Part("input", amounts.input_uncached_nano, MONEY),
                Part("cached input", amounts.input_cached_nano, MONEY),
            ),
        ),
    )


def _hours_bar(device: DeviceYield) -> Bar:
    usage = device.usage
    return Bar(
        f"Hours of {device.node_name}, {device.device_name or device.device_id}",
        (
            Part("working", usage.busy_us, HOURS),
            Part("held for a job, not working", max(0, usage.rented_us - usage.busy_us), HOURS),
            Part("offered, without a job", usage.offered_us - usage.rented_us, HOURS),
        ),
    )


def _account_sheet(statement: YieldStatement) -> Sheet:
    account = statement.account
    rows: list[tuple[Cell, ...]] = [("opening balance", "", None, account.opening_nano)]
    rows += [(line.name, line.kind, line.journals, line.nano) for line in account.lines]
    columns = (Column("Line"), Column("Kind of journal"), Column("Journals", COUNT), Column("USD", MONEY, summed=True))
    total = ("closing balance", None, None, account.closing_nano)
    earned = statement.total.earnings.net_nano
    note = ""
    if account.carried_in_nano or account.carried_out_nano or earned != account.settled_nano:
        note = (
            "Receipts settle seconds after delivery. Earned in the period, plus what was delivered before it and"
            " settled in it, less what was not yet settled at its end, is what settled."
        )
    return Sheet("Account", columns, tuple(rows), total, (note,) if note else ())


def _states_sheet(statement: YieldStatement) -> Sheet:
    columns = (Column("State"), Column("Opening USD", MONEY), Column("Closing USD", MONEY), Column("Meaning"))
    rows = tuple(
        (row.state.value, row.opening_nano, row.closing_nano, _MEANINGS[row.state]) for row in statement.account.states
    )
    return Sheet("States", columns, rows)


_MEANINGS = {
    State.PENDING: "earned; may not be paid out yet",
    State.AVAILABLE: "may be paid out",
    State.RESERVED: "kept back against disputes",
    State.IN_TRANSIT: "on its way to your bank",
    State.PAID: "arrived, since the beginning",
    State.OWED: "owed to the platform; counts against the rest",
}


def _variants_sheet(devices: Sequence[DeviceYield]) -> Sheet:
    columns = (
        *(Column("Node"), Column("Device"), Column("Model"), Column("Requests", COUNT, summed=True)),
        *(Column("Input tokens", COUNT, summed=True), Column("Cached input tokens", COUNT, summed=True)),
        *(Column("Output tokens", COUNT, summed=True), Column("Reasoning tokens", COUNT, summed=True)),
        *(Column("Input USD", MONEY, summed=True), Column("Cached input USD", MONEY, summed=True)),
        *(Column("Output USD", MONEY, summed=True), Column("Reasoning USD", MONEY, summed=True)),
        *(Column("Fee USD", MONEY, summed=True), Column("Adjustments USD", MONEY, summed=True)),
        Column("Net USD", MONEY, summed=True),
    )
    rows = [_variant_row(device, variant) for device in devices for variant in device.variants]
    note = (
        "Classes of tokens are disjoint. Adjustments are paid by the platform for work that its own failures kept from"
        " the renter; they are in the classes too, without a fee. Classes less fee is net."
    )
    return totalled("Earnings", columns, rows, note)


def _variant_row(device: DeviceYield, variant: VariantYield) -> tuple[Cell, ...]:
    tokens, amounts, earnings = variant.tokens, variant.amounts, variant.earnings
    name = f"{variant.name}, simulated" if variant.simulated else variant.name
    return (
        *(device.node_name, device.device_name, name, earnings.jobs),
        *(tokens.input_uncached, tokens.input_cached, tokens.output_visible, tokens.output_reasoning),
        *(amounts.input_uncached_nano, amounts.input_cached_nano),
        *(amounts.output_visible_nano, amounts.output_reasoning_nano),
        *(earnings.fee_nano, earnings.adjustments_nano, earnings.net_nano),
    )


def _devices_sheet(devices: Sequence[DeviceYield]) -> Sheet:
    columns = (
        *(Column("Node"), Column("Device"), Column("Offered h", HOURS, summed=True)),
        *(Column("Rented h", HOURS, summed=True), Column("Busy h", HOURS, summed=True)),
        *(Column("Rented share", SHARE), Column("Busy share", SHARE), Column("Token share", SHARE)),
        *(Column("Energy kWh", Format.KWH), Column("Energy is"), Column("Energy unknown h", HOURS, summed=True)),
        Column("Net USD", MONEY, summed=True),
    )
    return totalled("Devices", columns, [_device_row(device) for device in devices], UTILISATION_NOTE)


def _device_row(device: DeviceYield) -> tuple[Cell, ...]:
    usage, energy = device.usage, device.energy
    return (
        *(device.node_name, device.device_name, usage.offered_us, usage.rented_us, usage.busy_us),
        *(usage.rented_share, usage.busy_share, device.token_share, energy.kwh, energy.source, energy.unknown_us),
        device.earnings.net_nano,
    )


def _cost_sheet(nodes: Sequence[NodeEconomics]) -> Sheet:
    columns = (
        *(Column("Node"), Column("Hours", HOURS), Column("Revenue USD", MONEY, summed=True)),
        *(Column("Grid kWh", Format.KWH), Column("Electricity USD", MONEY, summed=True)),
        *(Column("Other cost USD", MONEY, summed=True), Column("Depreciation USD", MONEY, summed=True)),
        *(Column("Profit USD", MONEY, summed=True), Column("Idle loss USD", MONEY, summed=True)),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            *(node.node_name, node.hours_us, node.revenue_nano, node.grid_kwh, node.electricity_nano, node.other_nano),
            *(node.depreciation_nano, node.profit_nano, node.idle_loss_nano),
        )
        for node in nodes
    ]
    return totalled("Cost and profit", columns, rows, COST_NOTE)


def _return_sheet(nodes: Sequence[NodeEconomics]) -> Sheet:
    columns = (
        *(Column("Node"), Column("Net yield a year", SHARE), Column("Cash yield a year", SHARE)),
        *(Column("Payback, years", Format.YEARS), Column("USD cost a million output tokens", MONEY)),
        *(Column("USD break-even price a million", MONEY), Column("Break-even rented share", SHARE)),
        Column("Not told, because"),
    )
    return Sheet("Return on capital", columns, tuple(_return_row(node) for node in nodes), None, (RETURN_NOTE,))


def _return_row(node: NodeEconomics) -> tuple[Cell, ...]:
    missing = list(node.missing)
    if node.never_pays_back:
        missing.append("the cash never pays the capital back")
    return (
        *(node.node_name, node.yearly_yield, node.yearly_cash_yield, node.payback_years),
        *(node.cost_per_mtok_nano, node.break_even_mtok_nano, node.break_even_share, "; ".join(missing)),
    )


def _held_sheet(held: Sequence[Held]) -> Sheet:
    columns = (
        *(Column("Node"), Column("Limit"), Column("Hours", HOURS), Column("Requests", COUNT)),
        *(Column("At most USD", MONEY), Column("What, and what to do")),
    )
    rows = tuple(
        (row.node_name, row.limit.value, row.hours_us, row.requests, row.at_most_nano, row.sentence) for row in held
    )
    return Sheet("Held back", columns, rows, None, (HELD_NOTE,))


def invoice_document(invoice: Invoice) -> Document:
    """A renter's invoice."""
    bill = invoice.bill
    facts = [
        Fact("Charged", bill.total_nano, MONEY),
        Fact("Requests", bill.requests, COUNT),
        Fact("Credit before", bill.opening_nano, MONEY),
        Fact("Credit added", bill.added_nano, MONEY),
        Fact("Credit spent", bill.settled_nano, MONEY),
        Fact("Credit after", bill.closing_nano, MONEY),
    ]
    if bill.waived_jobs:
        facts.append(Fact("Not charged, by our fault", bill.waived_nano, MONEY))
    sheets = (_levers_sheet(invoice), _lines_sheet(invoice), *_growth_sheets(invoice), _hints_sheet(invoice))
    return Document("Invoice", bill.organisation_name, str(bill.period), tuple(facts), sheets)


def _levers_sheet(invoice: Invoice) -> Sheet:
    columns = (
        *(Column("Model"), Column("Lever"), Column("Tokens", COUNT, summed=True)),
        *(Column("USD a million", Format.RATE), Column("USD", MONEY, summed=True)),
    )
    rows = [
        (line.model_id, line.lever, line.tokens, line.rate_nano_usd_per_mtok, line.amount_nano)
        for line in invoice.bill.lines
    ]
    return totalled("Levers", columns, rows)


def _lines_sheet(invoice: Invoice) -> Sheet:
    columns = (
        *(Column("Day"), Column("Key"), Column("Model"), Column("Requests", COUNT, summed=True)),
        *(Column("Input tokens", COUNT, summed=True), Column("Cached input tokens", COUNT, summed=True)),
        *(Column("Output tokens", COUNT, summed=True), Column("Input USD", MONEY, summed=True)),
        *(Column("Cached input USD", MONEY, summed=True), Column("Output USD", MONEY, summed=True)),
        Column("USD", MONEY, summed=True),
    )
    rows = [
        (
            *(line.day.isoformat(), line.key_name, line.model_id, line.jobs),
            *(line.tokens.input_uncached, line.tokens.input_cached, line.tokens.output),
            *(line.amounts.input_uncached_nano, line.amounts.input_cached_nano, line.output_nano),
            line.amounts.total_nano,
        )
        for line in invoice.lines
    ]
    return totalled("By key, model and day", columns, rows)


def _growth_sheets(invoice: Invoice) -> tuple[Sheet, ...]:
    growth = invoice.growth
    columns = (Column("Why the bill changed"), Column("USD", MONEY, summed=True), Column("Meaning"))
    rows = [
        ("input", growth.input_nano, "more or fewer input tokens, at the earlier prices and mix"),
        ("output", growth.output_nano, "more or fewer output tokens, at the earlier prices and mix"),
        ("price", growth.price_nano, "the same tokens at other prices, caching included"),
        ("mix", growth.mix_nano, "other models than before"),
    ]
    note = f"Before: {growth.before}. The four add up to the change, to the nano."
    resent = invoice.resent
    split: tuple[tuple[Cell, ...], ...] = (
        ("new", resent.new_tokens, resent.new_before_tokens),
        ("re-sent", resent.resent_tokens, resent.resent_before_tokens),
        ("not told apart", resent.unknown_tokens, resent.unknown_before_tokens),
    )
    resent_note = (
        "A call is handed its whole conversation again. Re-sent is what the call before it in the same conversation had"
        " sent and received already; conversations are told apart by a keyed hash of their first messages."
    )
    input_columns = (
        Column("Input tokens"),
        Column("This period", COUNT, summed=True),
        Column("Before", COUNT, summed=True),
    )
    return totalled("Growth", columns, rows, note), totalled("Input", input_columns, split, resent_note)


def _hints_sheet(invoice: Invoice) -> Sheet:
    columns = (Column("What would save"), Column("Saves USD", MONEY), Column("How"))
    rows = tuple((hint.name, hint.saves_nano, hint.sentence) for hint in invoice.hints)
    return Sheet("Savings", columns, rows, None, ("Each alone; they overlap.",))


def platform_document(report: PlatformReport) -> Document:
    """The platform's own report."""
    facts = (
        Fact("Income from fees", report.fees_nano, MONEY),
        Fact("Losses", report.losses_nano, MONEY),
        Fact("Result", report.result_nano, MONEY),
        Fact("Deferred revenue (unspent credit)", report.deferred_nano, MONEY),
        Fact("Owed to owners", report.payable_nano, MONEY),
        Fact("Debits less credits", report.trial.sum_nano, MONEY),
    )
    trial_columns = (
        *(Column("Account"), Column("Kind"), Column("Currency"), Column("Debits", MONEY, summed=True)),
        *(Column("Credits", MONEY, summed=True), Column("Balance", MONEY)),
    )
    trial = [
        (row.code, row.kind.value, row.currency, row.debit_nano, row.credit_nano, row.balance_nano)
        for row in report.trial.rows
    ]
    movement_columns = (
        *(Column("Account"), Column("Kind of journal"), Column("Journals", COUNT)),
        Column("USD in the period", MONEY),
    )
    moved = tuple((row.code, row.journal_kind, row.journals, row.nano) for row in report.movements)
    ages = [(age.name, age.accounts, age.nano) for age in report.ages]
    age_columns = (Column("Owed to owners for"), Column("Owners", COUNT), Column("USD", MONEY, summed=True))
    sheets = (
        Sheet("Income and expense", movement_columns, moved),
        totalled(
            "Payables by age", age_columns, ages, "What came last is taken to be still owed: first in, first out."
        ),
        totalled("Trial balance", trial_columns, trial, "Before the end of the period."),
    )
    return Document("Platform report", "Fallow", str(report.period), facts, sheets)
