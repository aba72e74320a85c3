"""The balance and its transactions."""

from __future__ import annotations

from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.resources import payouts
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


@route("GET", "/v1/balance")
def retrieve(world: World, call: Call) -> Json:
    return world.balance(call.owner)


@route("GET", "/v1/balance_transactions/{id}")
def retrieve_transaction(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "balance_transaction", call.path_ids[0])


@list_route("/v1/balance_transactions", "BalanceTransactionListParams", "currency source type payout")
def every_transaction(world: World, call: Call) -> Json:
    payout = call.params.text("payout")
    source = None
    if payout is not None:
        known = world.store.get(call.owner, "payout", payout, param="payout")
        source = payouts.transactions_of(world, call.owner, known)
    return listing(world, call, "balance_transaction", "currency", "source", "type", source=source)
