"""Payouts to banks: asked for or by schedule, paid when they arrive, and failing even after that."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.fakes.stripe.balances import PAYOUT, PAYOUT_CANCEL, PAYOUT_FAILURE
from tests.fakes.stripe.clock import DAY_S, midnight
from tests.fakes.stripe.currencies import WHOLE_PAYOUTS, check_currency, check_payout
from tests.fakes.stripe.errors import Json, refused
from tests.fakes.stripe.render import listing, time_filter
from tests.fakes.stripe.resources.transfers import insufficient
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

FAILURES = {
    "account_closed": "The bank account has been closed.",
    "account_frozen": "The bank account has been frozen.",
    "could_not_process": "The bank could not process this payout.",
    "declined": "The bank has declined this payout.",
    "incorrect_account_holder_name": "The name of the account holder does not match.",
    "invalid_account_number": "The routing number seems correct, but the account number is invalid.",
    "no_account": "The bank account could not be located.",
}
FAILABLE = frozenset({"pending", "in_transit", "paid"})


@route(
    "POST",
    "/v1/payouts",
    "PayoutCreateParams",
    "amount currency description destination metadata method statement_descriptor",
)
def create(world: World, call: Call) -> Json:
    params = call.params
    amount = params.required_integer("amount")
    currency = check_currency(params.required_text("currency"))
    check_payout(amount, currency)
    params.choice("method", ["standard"])
    metadata = params.metadata()
    destination = _bank(world, call.owner, currency, params.text("destination"))
    if call.balance_declined or world.spendable(call.owner, currency) < amount:
        raise insufficient()
    return start(
        world,
        call.owner,
        amount,
        currency,
        destination,
        description=params.text("description"),
        metadata=metadata,
        statement_descriptor=params.text("statement_descriptor"),
    )


def _bank(world: World, owner: str, currency: str, wanted: str | None) -> str | None:
    """The bank account that is paid; the platform's own is not shown. Raises what forbids a payout."""
    if owner == world.platform:
        return wanted
    account = world.store.get(world.platform, "account", owner)
    if not account["payouts_enabled"]:
        raise refused(
            "Payouts are not enabled for this account. Check the account's requirements.", code="payouts_not_allowed"
        )
    for bank in account["external_accounts"]["data"]:
        if bank["currency"] == currency and wanted in (None, bank["id"]):
            if bank["status"] == "errored":
                raise refused(
                    "The bank account provided cannot be used for payouts. A different bank account must be used.",
                    code="bank_account_unusable",
                )
            return str(bank["id"])
    raise refused(f"Sorry, you don't have any external accounts in that currency ({currency}).", param="currency")


def start(
    world: World,
    owner: str,
    amount: int,
    currency: str,
    destination: str | None,
    *,
    automatic: bool = False,
    **fields: object,
) -> Json:
    """Take the money from the balance; it arrives after the bank's days."""
    payout = world.new(
        "po",
        "payout",
        owner,
        amount=amount,
        application_fee=None,
        application_fee_amount=None,
        arrival_date=world.later(world.terms.payout_days),
        automatic=automatic,
        currency=currency,
        description="STRIPE PAYOUT" if automatic else None,
        destination=destination,
        failure_balance_transaction=None,
        failure_code=None,
        failure_message=None,
        metadata={},
        method="standard",
        original_payout=None,
        payout_method=None,
        reconciliation_status="in_progress" if automatic else "not_applicable",
        reversed_by=None,
        source_type="card",
        statement_descriptor=None,
        status="pending",
        trace_id=None,
        type="bank_account",
    )
    payout.update({name: value for name, value in fields.items() if value is not None})
    if automatic:
        world.payout_lines[payout["id"]] = _unpaid_lines(world, owner, currency)
    transaction = world.balances.post(
        owner, PAYOUT, -amount, currency, source=payout["id"], description="STRIPE PAYOUT"
    )
    payout["balance_transaction"] = transaction["id"]
    world.emit("payout.created", payout, owner)
    world.schedule(midnight(world.clock.now()) + DAY_S, lambda: _send(world, owner, payout))
    world.schedule(payout["arrival_date"], lambda: arrive(world, owner, payout))
    return payout


def _unpaid_lines(world: World, owner: str, currency: str) -> list[Json]:
    taken = {line["id"] for lines in world.payout_lines.values() for line in lines}
    return [
        line
        for line in world.store.every(owner, "balance_transaction")
        if line["currency"] == currency and line["status"] == "available" and line["id"] not in taken
    ]


def transactions_of(world: World, owner: str, payout: Json) -> list[Json]:
    """What an automatic payout pays out, with its own line; manual ones are not itemised."""
    if not payout["automatic"]:
        raise refused(
            "Balance transaction history can only be filtered on automatic transfers, not manual.", param="payout"
        )
    own = world.store.get(owner, "balance_transaction", payout["balance_transaction"])
    return [*world.payout_lines[payout["id"]], own]


def _send(world: World, owner: str, payout: Json) -> None:
    if payout["status"] == "pending":
        world.emit("payout.updated", payout, owner, world.change(payout, status="in_transit"))


def arrive(world: World, owner: str, payout: Json) -> None:
    """The bank is expected to have the money: paid, though it may still come back."""
    if payout["status"] not in {"pending", "in_transit"}:
        return
    world.change(payout, status="paid")
    world.emit("payout.paid", payout, owner)
    if payout["automatic"]:
        world.change(payout, reconciliation_status="completed")
        world.emit("payout.reconciliation_completed", payout, owner)


def fail(world: World, owner: str, payout: Json, code: str = "account_closed", *, disables_bank: bool = True) -> None:
    """The bank sends the money back, before or after `paid`; the bank account then needs replacing."""
    if payout["status"] not in FAILABLE:
        raise refused(f"This payout cannot fail: {payout['status']}.")
    returned = world.balances.post(
        owner,
        PAYOUT_FAILURE,
        payout["amount"],
        payout["currency"],
        source=payout["id"],
        description="STRIPE PAYOUT FAILURE",
    )
    previous = world.change(
        payout,
        status="failed",
        failure_code=code,
        failure_message=FAILURES[code],
        failure_balance_transaction=returned["id"],
    )
    world.emit("payout.failed", payout, owner, previous)
    if disables_bank and owner != world.platform:
        _disable_bank(world, owner, payout)


def _disable_bank(world: World, owner: str, payout: Json) -> None:
    from tests.fakes.stripe.resources import accounts

    record = world.store.find(payout["destination"])
    if record is not None:
        world.emit("account.external_account.updated", record.data, owner, world.change(record.data, status="errored"))
    accounts.require_bank(world, owner)


@route("GET", "/v1/payouts/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "payout", call.path_ids[0])


@list_route("/v1/payouts", "PayoutListParams", "status destination arrival_date")
def every(world: World, call: Call) -> Json:
    timely = time_filter("arrival_date", call.params)
    payouts = [each for each in world.store.every(call.owner, "payout") if timely(each["arrival_date"])]
    return listing(world, call, "payout", "status", "destination", source=payouts)


@route("POST", "/v1/payouts/{id}", "PayoutUpdateParams", "metadata")
def update(world: World, call: Call) -> Json:
    payout = world.store.get(call.owner, "payout", call.path_ids[0])
    previous = world.change(payout, metadata=call.params.metadata(payout["metadata"]))
    world.emit("payout.updated", payout, call.owner, previous)
    return payout


@route("POST", "/v1/payouts/{id}/cancel")
def cancel(world: World, call: Call) -> Json:
    payout = world.store.get(call.owner, "payout", call.path_ids[0])
    if payout["status"] != "pending" or payout["automatic"]:
        raise refused(f"Payouts can be canceled only while pending; this one has a status of {payout['status']}.")
    world.balances.post(
        call.owner,
        PAYOUT_CANCEL,
        payout["amount"],
        payout["currency"],
        source=payout["id"],
        description="STRIPE PAYOUT CANCEL",
    )
    world.change(payout, status="canceled")
    world.emit("payout.canceled", payout, call.owner)
    return payout


# Automatic payouts of connected accounts


def plan_automatic(world: World, account: Json) -> None:
    """Look at the account each midnight for as long as it has a schedule."""
    if account["id"] in world.scheduled or account["settings"]["payouts"]["schedule"]["interval"] == "manual":
        return
    world.scheduled.add(account["id"])
    world.schedule(midnight(world.clock.now()) + DAY_S, lambda: _run_automatic(world, account))


def _run_automatic(world: World, account: Json) -> None:
    world.scheduled.discard(account["id"])
    if world.store.find(account["id"]) is None:
        return
    schedule = account["settings"]["payouts"]["schedule"]
    if account["payouts_enabled"] and _is_day(world.clock.now(), schedule):
        for currency in world.balances.currencies(account["id"]):
            _pay_available(world, account, currency)
    plan_automatic(world, account)


def _is_day(now: int, schedule: dict[str, str]) -> bool:
    today = datetime.fromtimestamp(now, UTC)
    if schedule["interval"] == "weekly":
        return today.strftime("%A").lower() == schedule["weekly_anchor"]
    if schedule["interval"] == "monthly":
        return today.day == 1
    return schedule["interval"] == "daily"


def _pay_available(world: World, account: Json, currency: str) -> None:
    step = 100 if currency in WHOLE_PAYOUTS else 1
    amount = world.spendable(account["id"], currency) // step * step
    banks = [each for each in account["external_accounts"]["data"] if each["currency"] == currency]
    if amount > 0 and banks and banks[0]["status"] != "errored":
        start(world, account["id"], amount, currency, banks[0]["id"], automatic=True)
