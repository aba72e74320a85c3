"""What a renter may choose: which owners and nodes, at which price, where, in which order; and the names that stand for
whichever model fits best now.

The vocabulary is OpenRouter's `provider` object. A provider here is an owner (`owner_...`) or a single node
(`node_...`), by the names that answers carry. What a request leaves open, its key's own default decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from agent.sizing.variants import EMBED
from marketplace.accounts.auth import Principal
from marketplace.catalog.service import Catalog, VariantView
from marketplace.core.amounts import nano_per_mtok, usd
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.ids import parse as parse_id
from marketplace.core.ids import show
from marketplace.gateway.bodies import ProviderBody
from marketplace.gateway.parse import Inference
from marketplace.gateway.services import Services
from marketplace.gateway.strict import InvalidBody
from marketplace.matching.choice import ANY, NO_LIMIT, Choice, rank_within
from marketplace.matching.types import DataTerms, Demand, OfferView, Ranked, Rates, Sort
from marketplace.metering.pricing import worst_case

ALIASES: Final = {
    "fallow/auto": Sort.BALANCED,
    "fallow/cheapest": Sort.PRICE,
    "fallow/fastest": Sort.LATENCY,
}
"""Names that stand for the model that fits best now, by this order."""
MAX_CANDIDATES: Final = 32
"""Variants looked at for one of these names."""
CHARACTERS_PER_TOKEN: Final = 4


class NoMatchingVariant(BadRequest):
    """No variant that is sold has what was asked for."""

    code = "no_matching_variant"


def choice_of(asked: ProviderBody | None, default: Mapping[str, Any] | None) -> Choice:
    """Check what a request asks, over its key's default. Raises InvalidBody."""
    if default:
        own = msgspec.to_builtins(asked) if asked is not None else {}
        asked = msgspec.convert({**default, **own}, ProviderBody)
    if asked is None:
        return ANY
    return Choice(
        only=frozenset(_ids(asked.only, "only")),
        ignored=frozenset(_ids(asked.ignore, "ignore")),
        order=tuple(_ids(asked.order, "order")),
        fallbacks=asked.allow_fallbacks is not False,
        quantisations=tuple(name.lower() for name in asked.quantizations or ()),
        sort={"price": Sort.PRICE, "latency": Sort.LATENCY}.get(asked.sort or "", Sort.BALANCED),
        by_speed=asked.sort == "throughput",
        ceiling=_ceiling(asked),
        regions=frozenset(asked.regions or ()),
        proven_only=asked.data_collection == "deny",
        private_only=asked.data_collection == "deny",
    )


def _ids(names: Sequence[str] | None, field: str) -> Iterable[UUID]:
    for name in names or ():
        try:
            yield parse_id("node" if name.startswith("node_") else "owner", name)
        except NotFound:
            raise InvalidBody(
                f"`provider.{field}`: {name[:80]!r} is no provider. Name an owner (owner_...) or a node (node_...).",
                param=f"provider.{field}",
            ) from None


def _ceiling(asked: ProviderBody) -> Rates | None:
    if asked.max_price is None:
        return None
    prompt = _rate(asked.max_price.prompt, "prompt")
    return Rates(input=prompt, cached_input=prompt, output=_rate(asked.max_price.completion, "completion"))


def _rate(price: Decimal | None, field: str) -> int:
    if price is None:
        return NO_LIMIT
    name = f"provider.max_price.{field}"
    try:
        return nano_per_mtok(format(price, "f"))
    except ValueError as error:
        raise InvalidBody(f"`{name}`: {error}.", param=name) from None


# --- the market -----------------------------------------------------------------------------------------------------


def find(services: Services, demand: Demand, choice: Choice) -> Ranked:
    """Offers that can run the demand within the choice, best first. With lists of providers every offer of the variant
    is looked at; else the index answers."""
    return find_all(services, demand, choice) if choice.lists else services.fleet.rank(demand)


def find_all(services: Services, demand: Demand, choice: Choice = ANY) -> Ranked:
    """The same, with every offer looked at: in time that grows with their number, for answers that tell of all."""
    offers = services.fleet.view.offers(demand.variant_id)
    resting = services.fleet.resting(demand.variant_id)
    return rank_within(offers, demand, choice, services.rng, rules=services.fleet.rules, resting=resting)


def choose_variant(services: Services, chat: Inference, choice: Choice, principal: Principal) -> VariantView:
    """The variant that a request means: the one that it names, one of the precisions that it asks for, or the one
    that fits best now. Raises UnknownModel and NoMatchingVariant."""
    found = candidates(services.catalog, chat, choice, principal.may_use)
    if len(found) == 1 or chat.task == EMBED:
        # The oldest one: which of them embeds must not change with the market.
        return found[0]
    return _best(services, chat, choice, found)


def candidates(
    catalog: Catalog, chat: Inference, choice: Choice, may_use: Callable[[str], bool]
) -> Sequence[VariantView]:
    """Variants that a request may mean, the oldest first; the one alone that it names, unless it asks for a precision.
    `may_use` tells of a model whether the key may. Raises UnknownModel, NoMatchingVariant and InvalidBody."""
    if chat.task == EMBED and is_alias(chat.model):
        raise InvalidBody(
            "Name the model: vectors of different models cannot be compared, so none is chosen for you.", param="model"
        )
    named = None if is_alias(chat.model) else catalog.resolve(chat.model)
    if named is not None and not choice.quantisations:
        return [named]
    found = [
        variant
        for variant in ([named] if named is not None and set(":@") & set(chat.model) else catalog.all())
        if (named is None or variant.model_id == named.model_id)
        and choice.quantised(variant.quantisation)
        and may_use(variant.model_id)
        and (named is not None or variant.task == chat.task)
        and (variant.supports_tools or not chat.uses_tools)
    ][:MAX_CANDIDATES]
    if not found:
        raise NoMatchingVariant(
            "No variant that is sold here, and that this key may use, has what is asked for.",
            param="model" if not choice.quantisations else "provider.quantizations",
        )
    return found


def is_alias(model: str) -> bool:
    """True if the name stands for whichever model fits best."""
    return model.lower() in ALIASES


def sorted_by_alias(chat: Inference, choice: Choice) -> Choice:
    """The choice, in the order that an alias means, unless the request says another."""
    sort = ALIASES.get(chat.model.lower())
    return choice if sort is None or choice.sort is not Sort.BALANCED or choice.by_speed else replace(choice, sort=sort)


def _best(services: Services, chat: Inference, choice: Choice, candidates: Sequence[VariantView]) -> VariantView:
    """By a rough count of the prompt: the exact one is made for the variant that is chosen. Where none has room now,
    the first one, whose refusal says why."""
    prompt = max(1, len(chat.engine_body(1)) // CHARACTERS_PER_TOKEN)
    found: list[tuple[tuple[float, float], int]] = []
    for place, variant in enumerate(candidates):
        output = chat.max_tokens or variant.default_max_output
        demand = Demand(variant.id, prompt, min(output, variant.training_context), None, UUID(int=0))
        ranked = find(services, choice.narrow(demand), choice)
        if ranked.offers:
            price = float(worst_case(ranked.offers[0].rates, prompt, output))
            speed = -(ranked.offers[0].decode_tokens_per_s or 0.0) if choice.by_speed else ranked.ttft_s[0]
            found.append(((price, speed) if choice.sort is Sort.PRICE else (speed, price), place))
    return candidates[min(found)[1]] if found else candidates[0]


# --- what the answer says -------------------------------------------------------------------------------------------


def data_object(data: DataTerms) -> dict[str, Any]:
    """What an owner declares, as renters read it; null where it is not declared."""
    return {
        "country": data.country or None,
        "retention_days": data.retention_days,
        "trains": data.trains,
        "operator": data.operator or None,
        "attested": data.attested,
    }


def served_by(offer: OfferView, variant: VariantView) -> dict[str, Any]:
    """Who served an answer, and at which price: the `provider` member of an answer."""
    return {
        "name": show("node", offer.node_id),
        "owner": show("owner", offer.owner_organisation_id),
        "variant": variant.name,
        "quantization": variant.quantisation.lower(),
        "region": offer.region or None,
        "data": data_object(offer.data),
        "price": {
            "input": usd(offer.rates.input),
            "cached_input": usd(offer.rates.cached_input),
            "output": usd(offer.rates.output),
        },
    }


def served_headers(offer: OfferView, variant: VariantView) -> list[tuple[bytes, bytes]]:
    """The same as headers; prices in USD per million tokens."""
    rates = offer.rates
    price = f"input={usd(rates.input)}, cached_input={usd(rates.cached_input)}, output={usd(rates.output)}"
    return [
        (b"x-fallow-variant", variant.name.encode("ascii", "replace")),
        (b"x-fallow-node", show("node", offer.node_id).encode()),
        (b"x-fallow-price", price.encode()),
    ]
