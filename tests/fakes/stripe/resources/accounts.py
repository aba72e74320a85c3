"""Connect accounts (Express), their onboarding and its states, bank accounts, links to hosted pages."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fakes.stripe.errors import Json, invalid, refused
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.resources import payouts
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

LINK_S = 300
CAPABILITIES = ("transfers", "card_payments")
CURRENCIES = {
    "AE": "aed", "AU": "aud", "CA": "cad", "CH": "chf", "CZ": "czk", "DK": "dkk", "GB": "gbp", "HK": "hkd",
    "HU": "huf", "JP": "jpy", "MX": "mxn", "NO": "nok", "NZ": "nzd", "PL": "pln", "RO": "ron", "SE": "sek",
    "SG": "sgd", "TH": "thb", "US": "usd",
    **dict.fromkeys(("AT", "BE", "DE", "ES", "FI", "FR", "IE", "IT", "LU", "NL", "PT"), "eur"),
}  # fmt: skip
ASKED_FIRST = [
    "business_type",
    "external_account",
    "individual.address.city",
    "individual.dob.day",
    "individual.first_name",
    "individual.last_name",
    "tos_acceptance.date",
    "tos_acceptance.ip",
]
CREATE = (
    "type country email capabilities business_type business_profile metadata settings tos_acceptance default_currency "
    "external_account"
)
UPDATE = "email capabilities business_type business_profile metadata settings external_account default_currency"
REJECTIONS = ("fraud", "terms_of_service", "other")


@route("POST", "/v1/accounts", "AccountCreateParams", CREATE)
def create(world: World, call: Call) -> Json:
    params = call.params
    if params.choice("type", ["express"]) is None:
        raise params.absent("type")
    country = (params.text("country") or "US").upper()
    if country not in CURRENCIES:
        raise invalid(f"{country} is not currently supported by Stripe.", param="country", code="country_unsupported")
    capabilities = _requested(params)
    schedule = _schedule(params, {"delay_days": 2, "interval": "daily"})
    account = world.new(
        "acct",
        "account",
        world.platform,
        business_profile=params.plain("business_profile") or {"mcc": None, "name": None, "url": None},
        business_type=params.text("business_type"),
        capabilities=dict.fromkeys(capabilities, "inactive"),
        charges_enabled=False,
        controller={
            "fees": {"payer": "application_express"},
            "is_controller": True,
            "losses": {"payments": "application"},
            "requirement_collection": "stripe",
            "stripe_dashboard": {"type": "express"},
            "type": "application",
        },
        country=country,
        default_currency=params.text("default_currency") or CURRENCIES[country],
        details_submitted=False,
        email=params.text("email"),
        future_requirements=_requirements([]),
        metadata=params.metadata(),
        payouts_enabled=False,
        requirements=_requirements(ASKED_FIRST, "requirements.past_due"),
        settings={"payouts": {"debit_negative_balances": True, "schedule": schedule, "statement_descriptor": None}},
        tos_acceptance={"date": None, "ip": None, "user_agent": None, **params.inner("tos_acceptance").flat()},
        type="express",
    )
    account["external_accounts"] = _bank_list(account["id"], [])
    if params.text("external_account") is not None:
        add_bank(world, account, tells=False)
    return account


def _requested(params: Params) -> list[str]:
    given = params.inner("capabilities")
    given.check(frozenset(), CAPABILITIES)
    return [name for name in given.names() if given.inner(name).boolean("requested")]


def _schedule(params: Params, current: Json) -> Json:
    given = params.inner("settings").inner("payouts").inner("schedule")
    interval = given.choice("interval", ["manual", "daily", "weekly", "monthly"], current["interval"])
    schedule: Json = {**current, "interval": interval}
    if interval == "weekly":
        days = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
        anchor = given.texts("weekly_payout_days") or [given.text("weekly_anchor") or "monday"]
        if anchor[0] not in days:
            raise invalid("Invalid weekly_anchor.", param="settings[payouts][schedule][weekly_anchor]")
        schedule["weekly_anchor"] = anchor[0]
    return schedule


def _requirements(
    due: Iterable[str], disabled: str | None = None, *, past: bool = False, pending: Iterable[str] = ()
) -> Json:
    currently = list(due)
    return {
        "alternatives": [],
        "current_deadline": None,
        "currently_due": currently,
        "disabled_reason": disabled,
        "errors": [],
        "eventually_due": currently,
        "past_due": currently if past or disabled == "requirements.past_due" else [],
        "pending_verification": list(pending),
    }


def get(world: World, account_id: str, *, param: str = "id") -> Json:
    """A connected account of the platform."""
    return world.store.get(world.platform, "account", account_id, param=param)


# Banks


def _bank_list(account_id: str, banks: list[Json]) -> Json:
    url = f"/v1/accounts/{account_id}/external_accounts"
    return {"object": "list", "data": banks, "has_more": False, "total_count": len(banks), "url": url}


def add_bank(world: World, account: Json, *, currency: str | None = None, tells: bool = True) -> Json:
    """A working bank account that becomes the one for its currency."""
    chosen = currency or account["default_currency"]
    bank = world.new(
        "ba",
        "bank_account",
        account["id"],
        account=account["id"],
        account_holder_name=None,
        account_holder_type=None,
        available_payout_methods=["standard"],
        bank_name="STRIPE TEST BANK",
        country=account["country"],
        currency=chosen,
        default_for_currency=True,
        last4="6789",
        routing_number="110000000",
        status="new",
    )
    others = [each for each in account["external_accounts"]["data"] if each["currency"] != chosen]
    account["external_accounts"] = _bank_list(account["id"], [bank, *others])
    if tells:
        world.emit("account.external_account.created", bank, account["id"])
    return bank


@route("POST", "/v1/accounts/{id}/external_accounts", "AccountExternalAccountCreateParams", "external_account metadata")
def create_bank(world: World, call: Call) -> Json:
    account = get(world, call.path_ids[0])
    call.params.required_text("external_account")
    bank = add_bank(world, account)
    repair_bank(world, account)
    return bank


@route("GET", "/v1/accounts/{id}/external_accounts", None, "limit object")
def banks(world: World, call: Call) -> Json:
    return dict(get(world, call.path_ids[0])["external_accounts"])


def repair_bank(world: World, account: Json) -> None:
    """A new bank account lifts a stop that a failed payout had caused."""
    if account["requirements"]["currently_due"] == ["external_account"]:
        _set_state(world, account, requirements=_requirements([]), enabled=True)


# The account itself


@route("GET", "/v1/accounts/{id}")
def retrieve(world: World, call: Call) -> Json:
    return get(world, call.path_ids[0])


@route("GET", "/v1/account")
def own(world: World, call: Call) -> Json:
    if call.owner != world.platform:
        return get(world, call.owner)
    return {
        "id": world.platform,
        "object": "account",
        "charges_enabled": True,
        "country": "US",
        "default_currency": "usd",
        "details_submitted": True,
        "payouts_enabled": True,
        "type": "standard",
    }


@list_route("/v1/accounts", "AccountListParams")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "account")


@route("POST", "/v1/accounts/{id}", "AccountUpdateParams", UPDATE)
def update(world: World, call: Call) -> Json:
    account = get(world, call.path_ids[0])
    params = call.params
    states = {name: account["capabilities"].get(name, "inactive") for name in _requested(params)}
    changes: Json = {
        "metadata": params.metadata(account["metadata"]),
        "capabilities": {**account["capabilities"], **states},
        "settings": {
            "payouts": {
                **account["settings"]["payouts"],
                "schedule": _schedule(params, account["settings"]["payouts"]["schedule"]),
            }
        },
    }
    changes |= {name: params.text(name) for name in ("email", "business_type", "default_currency") if name in params}
    if "business_profile" in params:
        changes["business_profile"] = {**account["business_profile"], **params.inner("business_profile").flat()}
    previous = world.change(account, **changes)
    if params.text("external_account") is not None:
        add_bank(world, account)
        repair_bank(world, account)
    _tell(world, account, previous)
    payouts.plan_automatic(world, account)
    return account


@route("DELETE", "/v1/accounts/{id}")
def delete(world: World, call: Call) -> Json:
    account = get(world, call.path_ids[0])
    currencies = world.balances.currencies(account["id"])
    held = [world.balances.available(account["id"], each) for each in currencies]
    held += [world.balances.pending(account["id"], each) for each in currencies]
    if any(held):
        raise refused("You cannot delete this account because it has a balance that is not zero.")
    world.store.drop(account["id"])
    return {"id": account["id"], "object": "account", "deleted": True}


@route("POST", "/v1/accounts/{id}/reject", "AccountRejectParams", "reason")
def reject(world: World, call: Call) -> Json:
    account = get(world, call.path_ids[0])
    reason = call.params.choice("reason", REJECTIONS)
    if reason is None:
        raise call.params.absent("reason")
    close(world, account, reason)
    return account


# Onboarding and its states


def _set_state(world: World, account: Json, *, requirements: Json, enabled: bool, **changes: object) -> None:
    state = "active" if enabled else "pending" if requirements["pending_verification"] else "inactive"
    previous = world.change(
        account,
        capabilities=dict.fromkeys(account["capabilities"], state),
        charges_enabled=enabled and bool(account["capabilities"]),
        payouts_enabled=enabled,
        requirements=requirements,
        **changes,
    )
    _tell(world, account, previous)
    payouts.plan_automatic(world, account)


def _tell(world: World, account: Json, previous: Json) -> None:
    if not previous:
        return
    world.emit("account.updated", account, account["id"], previous)
    for name, state in account["capabilities"].items():
        if previous.get("capabilities", {}).get(name, state) != state:
            capability = {"id": name, "object": "capability", "account": account["id"], "status": state}
            world.emit("capability.updated", capability, account["id"])


def submit(world: World, account_id: str, *, verified: bool = True) -> Json:
    """The owner filled in the form: enabled at once, or after Stripe has verified them."""
    account = get(world, account_id)
    if not account["external_accounts"]["data"]:
        add_bank(world, account)
    pending = [] if verified else ["individual.verification.document"]
    _set_state(
        world,
        account,
        requirements=_requirements([], None if verified else "requirements.pending_verification", pending=pending),
        enabled=verified,
        details_submitted=True,
    )
    return account


def verify(world: World, account_id: str) -> Json:
    """Stripe verified what was pending; all is enabled."""
    account = get(world, account_id)
    _set_state(world, account, requirements=_requirements([]), enabled=True)
    return account


def require(world: World, account_id: str, due: list[str], *, past: bool) -> Json:
    """Stripe asks for more: with `past` the account is disabled until it is told."""
    account = get(world, account_id)
    reason = "requirements.past_due" if past else None
    _set_state(world, account, requirements=_requirements(due, reason, past=past), enabled=not past)
    return account


def require_bank(world: World, account_id: str) -> None:
    """A payout came back: no more of them until there is another bank account; transfers still arrive."""
    account = get(world, account_id)
    previous = world.change(account, payouts_enabled=False, requirements=_requirements(["external_account"]))
    _tell(world, account, previous)


def close(world: World, account: Json, reason: str) -> None:
    """Rejected for good."""
    _set_state(world, account, requirements=_requirements([], f"rejected.{reason}"), enabled=False)


# Hosted pages


@route("POST", "/v1/account_links", "AccountLinkCreateParams", "account refresh_url return_url type collection_options")
def create_link(world: World, call: Call) -> Json:
    params = call.params
    account = get(world, params.required_text("account"), param="account")
    kind = params.choice("type", ["account_onboarding", "account_update"])
    if kind is None:
        raise params.absent("type")
    if kind == "account_update":
        raise invalid("You cannot create `account_update` type Account Links for this account.", param="type")
    refresh, back = params.required_text("refresh_url"), params.required_text("return_url")
    token = world.ids.letters(16)
    expires_at = world.clock.now() + LINK_S
    world.store.add(
        world.platform,
        {
            "id": f"link_{account['id']}_{token}",
            "object": "stand_in.link",
            "account": account["id"],
            "expires_at": expires_at,
            "refresh_url": refresh,
            "return_url": back,
            "state": "fresh",
        },
    )
    url = f"{world.pages_url}/setup/e/{account['id']}/{token}"
    return {"object": "account_link", "created": world.clock.now(), "expires_at": expires_at, "url": url}


def open_link(world: World, account_id: str, token: str, *, consume: bool) -> Json | None:
    """The link's data if it may still be used: opened once, then finished once, within minutes."""
    record = world.store.find(f"link_{account_id}_{token}")
    link = record.data if record else None
    if link is None or world.clock.now() >= link["expires_at"]:
        return None
    if link["state"] != ("opened" if consume else "fresh"):
        return None
    link["state"] = "done" if consume else "opened"
    return link


def refresh_url(world: World, account_id: str) -> str:
    """Where the newest link of an account sends those who come too late."""
    links = [each for each in world.store.every(world.platform, "stand_in.link") if each["account"] == account_id]
    if not links:
        raise refused("This link is unknown.")
    return str(links[-1]["refresh_url"])


@route("POST", "/v1/accounts/{id}/login_links")
def create_login_link(world: World, call: Call) -> Json:
    account = get(world, call.path_ids[0])
    if not account["details_submitted"]:
        raise refused("Cannot create a login link for an account that has not completed onboarding.")
    url = f"{world.pages_url}/express/{world.ids.letters(16)}"
    return {"object": "login_link", "created": world.clock.now(), "url": url}
