"""Hosted pages: Checkout, 3-D Secure and Connect onboarding, as plain forms that a person or a browser test can use."""

from __future__ import annotations

import html
import re
from urllib.parse import urlsplit

from tests.fakes.stripe.dispatch import Reply, Request
from tests.fakes.stripe.errors import StripeError, missing
from tests.fakes.stripe.forms import Params, decode
from tests.fakes.stripe.resources import accounts, checkout
from tests.fakes.stripe.world import World

CHECKOUT = re.compile(r"/c/pay/(\w+)$")
ONBOARDING = re.compile(r"/setup/e/(\w+)/(\w+)$")
PAYABLE_WITH = (
    "pm_card_visa",
    "pm_card_mastercard",
    "pm_card_chargeDeclined",
    "pm_card_authenticationRequired",
    "pm_card_createDispute",
    "pm_usBankAccount",
)


def serve_page(world: World, request: Request) -> Reply:
    """Show a page, or do what its form says and send the browser on."""
    path = urlsplit(request.target).path
    with world.lock:
        world.run_due()
        found = CHECKOUT.match(path)
        if found:
            return _checkout(world, request, found.group(1))
        found = ONBOARDING.match(path)
        if found:
            return _onboarding(world, request, found.group(1), found.group(2))
    raise missing("page", path)


def _checkout(world: World, request: Request, session_id: str) -> Reply:
    session = world.store.get(world.platform, "checkout.session", session_id)
    if request.method != "POST":
        return _form(f"Pay {_amount(session)}", "card", PAYABLE_WITH)
    params = Params(decode(request.body.decode("utf-8", "replace")))
    try:
        checkout.complete(world, session, card=params.text("card") or "pm_card_visa", email="ada@example.com")
    except StripeError as error:
        if error.status != 402:
            raise
        return _form(f"{error} Pay {_amount(session)}", "card", PAYABLE_WITH)
    return _see(session["success_url"].replace("{CHECKOUT_SESSION_ID}", session_id))


def _onboarding(world: World, request: Request, account_id: str, token: str) -> Reply:
    link = accounts.open_link(world, account_id, token, consume=request.method == "POST")
    if link is None:
        return _see(accounts.refresh_url(world, account_id))
    if request.method != "POST":
        return _form("Tell the stand-in who you are", "outcome", ("verified", "pending"))
    params = Params(decode(request.body.decode("utf-8", "replace")))
    accounts.submit(world, account_id, verified=params.text("outcome") != "pending")
    return _see(link["return_url"])


def _amount(session: dict[str, object]) -> str:
    return f"{session['amount_total']} {session['currency']}" if session["mode"] == "payment" else "later"


def _form(title: str, name: str, options: tuple[str, ...]) -> Reply:
    choices = "".join(f"<option>{html.escape(option)}</option>" for option in options)
    text = (
        f"<!doctype html><title>Stand-in Stripe</title><h1>{html.escape(title)}</h1>"
        f'<form method="post"><select name="{name}">{choices}</select><button>Go on</button></form>'
    )
    return Reply(200, text.encode(), content_type="text/html; charset=utf-8")


def _see(url: str) -> Reply:
    return Reply(303, headers={"Location": url})
