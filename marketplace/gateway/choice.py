"""What a renter may choose: which owners and nodes, at which price, where, in which order; and the names that stand for
whichever model fits best now.

The vocabulary is OpenRouter's `provider` object. A provider here is an owner (`owner_...`) or a single node
(`node_...`), by the names that answers carry. What a request leaves open, its key's own default decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from agent.sizing.variants import EMBED
from marketplace.accounts.auth import Principal
from marketplace.catalog.service import VariantView
from marketplace.core.amounts import nano_per_mtok, usd
from marketplace.core.errors import BadRequest, NotFound
from marketplace.core.ids import parse as parse_id
from marketplace.core.ids import show
from marketplace.gateway.bodies import ProviderBody
from marketplace.gateway.parse import Inference
from marketplace.gateway.services import Services
from marketplace.gateway.strict import InvalidBody
from marketplace.matching.rank import rank, worst_nano
from marketplace.matching.types import DataTerms, Demand, Filter, OfferView, Ranked, Rates, Refusal, Sort
from marketplace.metering.pricing import worst_case

ALIASES: Final = {
    "fallow/auto": Sort.BALANCED,
    "fallow/cheapest": Sort.PRICE,
    "fallow/fastest": Sort.LATENCY,
}
"""Names that stand for the model that fits best now, by this order."""
MAX_CANDIDATES: Final = 32
"""Variants looked at for one of these names."""
NO_LIMIT: Final = 10**15
"""Nano-USD per million tokens: the ceiling of a class whose price was left open."""
CHARACTERS_PER_TOKEN: Final = 4
CLASSES: Final = {"int4": ("q4", "iq4", "awq", "gptq", "mxfp4"), "int8": ("q8",), "fp16": ("f16",), "fp32": ("f32",)}
"""OpenRouter's names of precision, by the beginnings of the formats that have it."""


class NoMatchingVariant(BadRequest):
    """No variant that is sold has what was asked for."""

    code = "no_matching_variant"


@dataclass(frozen=True, slots=True)
class Choice:
    """A checked `provider` object."""

    only: frozenset[UUID] = frozenset()
    """Owners and nodes; none: all."""
    ignored: frozenset[UUID] = frozenset()
    order: tuple[UUID, ...] = ()
    """These first, in this order."""
    fallbacks: bool = True
    """False: nobody but those of `order`; without it, nobody but the first pick."""
    quantisations: tuple[str, ...] = ()
    sort: Sort = Sort.BALANCED
    by_speed: bool = False
    """Sorted by tokens a second."""
    ceiling: Rates | None = None
    regions: frozenset[str] = frozenset()
    proven_only: bool = False
    private_only: bool = False

    @property
    def lists(self) -> bool:
        """True if offers must be looked at one by one."""
        return bool(self.only or self.ignored or self.order or self.strictly_sorted)

    @property
    def strictly_sorted(self) -> bool:
        """True if price or speed alone decides, and no load: as the renter's word says."""
        return self.by_speed or self.sort is Sort.PRICE

    def admits(self, offer: OfferView) -> bool:
        """True unless the lists keep the offer out."""
        names = {offer.node_id, offer.owner_organisation_id}
        if names & self.ignored or (self.only and not names & self.only):
            return False
        return self.fallbacks or not self.order or bool(names & set(self.order))

    def quantised(self, variant: VariantView) -> bool:
        """True if the variant's precision is one of those asked for."""
        if not self.quantisations:
            return True
        own = variant.quantisation.lower()
        return any(own == name or own.startswith(CLASSES.get(name, ("\0",))) for name in self.quantisations)

    def narrow(self, demand: Demand) -> Demand:
        """The demand within this choice. A tighter ceiling that it has already stays."""
        return replace(
            demand,
            ceiling=demand.ceiling or self.ceiling,
            regions=self.regions,
            proven_only=self.proven_only,
            private_only=self.private_only,
            sort=self.sort,
        )


ANY: Final = Choice()


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
    if not choice.lists:
        return services.fleet.rank(demand)
    offers = services.fleet.view.offers(demand.variant_id)
    admitted = [offer for offer in offers if choice.admits(offer)]
    resting = services.fleet.resting(demand.variant_id)
    ranked = rank(admitted, demand, services.rng, rules=services.fleet.rules, resting=resting)
    kept_out = len({offer.node_id for offer in offers} - {offer.node_id for offer in admitted})
    refusal = Refusal({**ranked.refusal.refused, Filter.CHOICE: kept_out}) if kept_out else ranked.refusal
    places = sorted(range(len(ranked.offers)), key=lambda at: (*_preference(ranked.offers[at], demand, choice), at))
    return replace(
        ranked,
        offers=tuple(ranked.offers[place] for place in places),
        ttft_s=tuple(ranked.ttft_s[place] for place in places),
        end_s=tuple(ranked.end_s[place] for place in places) if ranked.end_s else (),
        refusal=refusal,
        # Where the renter says who comes first, no emptier one may be taken instead.
        tied=1 if choice.order or choice.strictly_sorted else ranked.tied,
    )


def _preference(offer: OfferView, demand: Demand, choice: Choice) -> tuple[int, float]:
    names = (offer.node_id, offer.owner_organisation_id)
    place = min((choice.order.index(name) for name in names if name in choice.order), default=len(choice.order))
    if choice.by_speed:
        return place, -(offer.decode_tokens_per_s or 0.0)
    return place, worst_nano(offer.rates, demand) if choice.sort is Sort.PRICE else 0


def choose_variant(services: Services, chat: Inference, choice: Choice, principal: Principal) -> VariantView:
    """The variant that a request means: the one that it names, one of the precisions that it asks for, or the one
    that fits best now. Raises UnknownModel and NoMatchingVariant."""
    catalog = services.catalog
    if chat.task == EMBED and is_alias(chat.model):
        raise InvalidBody(
            "Name the model: vectors of different models cannot be compared, so none is chosen for you.", param="model"
        )
    named = None if is_alias(chat.model) else catalog.resolve(chat.model)
    if named is not None and not choice.quantisations:
        return named
    candidates = [
        variant
        for variant in ([named] if named is not None and set(":@") & set(chat.model) else catalog.all())
        if (named is None or variant.model_id == named.model_id)
        and choice.quantised(variant)
        and principal.may_use(variant.model_id)
        and (named is not None or variant.task == chat.task)
        and (variant.supports_tools or not chat.uses_tools)
    ][:MAX_CANDIDATES]
    if not candidates:
        raise NoMatchingVariant(
            "No variant that is sold here, and that this key may use, has what is asked for.",
            param="model" if not choice.quantisations else "provider.quantizations",
        )
    if len(candidates) == 1 or chat.task == EMBED:
        # The oldest one: which of them embeds must not change with the market.
        return candidates[0]
    return _best(services, chat, choice, candidates)


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
