"""Before anything is spent: how long the prompt is, how long the answer may be, and what that can cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

from marketplace.accounts.auth import Principal
from marketplace.accounts.limits import LimitState
from marketplace.catalog.service import PromptCount, VariantView
from marketplace.core.amounts import usd
from marketplace.core.errors import BadRequest
from marketplace.core.tracing import Value
from marketplace.gateway.bodies import FLEX
from marketplace.gateway.choice import choice_of, choose_variant, is_alias, sorted_by_alias
from marketplace.gateway.embeddings.request import EmbeddingRequest, require_room
from marketplace.gateway.embeddings.vectors import Embedding
from marketplace.gateway.parse import Inference
from marketplace.gateway.prefixes import pack
from marketplace.gateway.services import Services
from marketplace.gateway.tasks import require_task
from marketplace.matching.choice import ANY, Choice
from marketplace.matching.types import Demand, OfferView, Ranked, Rates, Service
from marketplace.metering.pricing import BASIS_POINTS, affordable_output, price, worst_case
from marketplace.metering.tokens import TokenCounts


class ContextLengthExceeded(BadRequest):
    """The prompt, or prompt and answer, do not fit any slot that serves the model."""

    code = "context_length_exceeded"
    unmet: Demand | None = None
    """What larger slots would have run; None if it is more than the model itself can hold."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A request with its size."""

    chat: Inference
    variant: VariantView
    prompt_tokens: int
    prompt_packed: bytes
    """The leading token ids, as gateway.prefixes compares them."""
    max_output_tokens: int
    client_bound: bool
    """True if the client set the bound; else it is the model's default, which the balance may lower."""
    context: int
    """Tokens of the largest slot that serves the variant now."""
    list_offers: Callable[[], Sequence[OfferView]]
    choice: Choice = ANY
    model: str = ""
    """The name that the answer carries."""
    inputs: tuple[int, ...] = ()
    """Of an embeddings request, the tokens of each input."""

    @property
    def choices(self) -> int:
        """Answers that are wanted, each of `max_output_tokens` at most."""
        return self.chat.choices

    def worst_nano(self, rates: Rates, max_output_tokens: int | None = None) -> int:
        """The most that all answers can cost at these rates, in nano-USD."""
        return worst_case(rates, self.prompt_tokens, (max_output_tokens or self.max_output_tokens) * self.choices)

    def affordable_output(self, rates: Rates, balance_nano: int) -> int:
        """The largest bound of each answer whose worst case the balance covers; 0: not even one token each."""
        return affordable_output(rates, self.prompt_tokens, balance_nano) // self.choices

    @property
    def service_tier(self) -> str | None:
        """What the answer says of its tier; None where the client did not ask."""
        asked = self.chat.service_tier
        return "default" if asked == "auto" else asked

    @property
    def offers(self) -> Sequence[OfferView]:
        """What is offered of the variant now; for answers that tell of all of it, not for picking."""
        return self.list_offers()

    def new_embedding(self) -> Embedding | None:
        """What is due where vectors are asked for; None for any other request."""
        if not isinstance(self.chat, EmbeddingRequest):
            return None
        return Embedding(self.inputs, self.variant.dimensions, self.chat.encoding)

    def demand(
        self,
        organisation_id: UUID,
        *,
        ceiling: Rates | None = None,
        excluded: frozenset[UUID] = frozenset(),
        cached_tokens: Mapping[UUID, int] = MappingProxyType({}),
        max_output_tokens: int | None = None,
        most_nano: int | None = None,
        moving: bool = False,
    ) -> Demand:
        """What the matcher must find room for. What `moving` says was admitted already is never too late."""
        demand = Demand(
            variant_id=self.variant.id,
            prompt_tokens=self.prompt_tokens,
            max_output_tokens=max_output_tokens or self.max_output_tokens,
            ceiling=ceiling,
            organisation_id=organisation_id,
            excluded_nodes=excluded,
            service=Service.FLEX if self.chat.service_tier == FLEX else Service.INTERACTIVE,
            cached_tokens=cached_tokens,
            most_nano=most_nano,
            choices=self.choices,
            longest_input_tokens=max(self.inputs, default=None),
            ttft_target_s=math.inf if moving else None,
        )
        return demand if self.choice is ANY else self.choice.narrow(demand)


async def measure(services: Services, chat: Inference, principal: Principal) -> Measured:
    """Resolve the model within what the request and its key choose, count the prompt, bound the answer.

    Raises UnknownModel (404) with the nearest names, ModelNotAllowed, InvalidBody and ContextLengthExceeded (400).
    """
    choice = sorted_by_alias(chat, choice_of(chat.provider, principal.routing))
    variant = choose_variant(services, chat, choice, principal)
    principal.require_model(variant.model_id)
    require_task(services.catalog, variant, chat.task, principal.may_use)
    counted = await chat.count(variant)
    # Tokens of the largest slot that serves the variant now; without any, what the model was trained for.
    context = services.fleet.view.largest_context(variant.id) or variant.training_context
    try:
        most = bound_of(chat, variant.default_max_output, counted, context)
    except ContextLengthExceeded as error:
        if counted.tokens + (chat.max_tokens or 1) <= variant.training_context:
            error.unmet = Demand(variant.id, counted.tokens, chat.max_tokens or 1, None, principal.organisation_id)
        raise
    return Measured(
        chat=chat,
        variant=variant,
        prompt_tokens=counted.tokens,
        prompt_packed=pack(counted.ids),
        max_output_tokens=most,
        client_bound=chat.max_tokens is not None,
        context=context,
        list_offers=lambda: services.fleet.view.offers(variant.id),
        choice=choice,
        model=variant.model_id if is_alias(chat.model) else chat.model,
        inputs=counted.inputs,
    )


def asked(measured: Measured) -> dict[str, Value]:
    """What a request wants, as its span says it."""
    attributes: dict[str, Value] = {
        "gen_ai.request.model": measured.model,
        "gen_ai.request.max_tokens": measured.max_output_tokens,
        "gen_ai.usage.input_tokens": measured.prompt_tokens,
        "fallow.variant": measured.variant.name,
    }
    if measured.choices > 1:
        attributes["gen_ai.request.choice.count"] = measured.choices
    if measured.chat.stream:
        attributes["gen_ai.request.stream"] = True
    return attributes


def bound_of(chat: Inference, default: int, counted: PromptCount, context: int) -> int:
    """The most that the answer may have; nothing of an embeddings request, whose inputs must each fit a slot. Raises
    ContextLengthExceeded and InputTooLong (400)."""
    if counted.inputs:
        require_room(counted.inputs, context)
        return 0
    return bound_output(chat, default, counted.tokens, context)


async def take_tokens(services: Services, principal: Principal, limits: LimitState, measured: Measured) -> None:
    """Count the request's worst case against the key's tokens a minute, if those are limited. Raises RateLimited."""
    limit = principal.tokens_per_minute
    if limit is not None:
        prompt, choices = measured.prompt_tokens, measured.choices
        least = prompt + (measured.max_output_tokens if measured.client_bound else 1) * choices
        await services.limiter.take_tokens(limits, limit, prompt + measured.max_output_tokens * choices, least)


def bound_output(chat: Inference, default: int, prompt_tokens: int, context: int) -> int:
    """The most that the answer may have. Raises ContextLengthExceeded (400)."""
    asked = chat.max_tokens
    wanted = asked or 1
    if prompt_tokens + wanted > context:
        cure = f"Shorten the {chat.prompt_field}{' or lower max_tokens' if asked else ''}."
        raise ContextLengthExceeded(
            f"This model's slots hold {context} tokens, but the request needs {prompt_tokens + wanted}: "
            f"{prompt_tokens} for the prompt and {'' if asked else 'at least '}{wanted} for the answer. {cure}",
            param=chat.prompt_field,
        )
    return asked if asked is not None else min(default, context - prompt_tokens)


def dearest(services: Services, measured: Measured) -> Rates | None:
    """The highest rates at which the variant is offered now within the request's choice, class by class, and no more
    than that says: the ceiling of work that waits. None while nobody offers it so."""
    rules = services.fleet.rules
    return measured.choice.dearest([offer for offer in measured.offers if rules.allow_simulated or not offer.simulated])


@dataclass(frozen=True, slots=True)
class Purse:
    """What of the renter's own a quote depends on."""

    available_nano: int
    usual_output: tuple[int, int] | None
    """The median length of the renter's own answers of this variant, and of how many; None: no such answer yet."""
    cached_tokens: Mapping[UUID, int]
    """By node: leading tokens of this prompt that it has read for this renter lately."""


def quote(measured: Measured, ranked: Ranked, purse: Purse, basis_points: int = BASIS_POINTS) -> dict[str, Any]:
    """What POST /v1/quote answers: bounds over the offers that could run it now, or over all that are known, and what
    is likely at the best of them, at so many hundredths of a percent of their asks."""
    fitting = [replace(offer, rates=offer.rates.at_share(basis_points)) for offer in ranked.offers or measured.offers]
    prompt, output = measured.prompt_tokens, measured.max_output_tokens
    answer: dict[str, Any] = {
        "object": "quote",
        "model": measured.model,
        "service_tier": measured.service_tier or "default",
        "prompt_tokens": prompt,
        "max_output_tokens": output,
        "max_output_is_default": not measured.client_bound,
        "n": measured.choices,
        "currency": "usd",
        "rates_per_million_tokens": None,
        "cost": None,
        "balance": {"available": usd(purse.available_nano), "affordable_output_tokens": None},
        "capacity": {
            "available": bool(ranked.offers),
            "nodes": len({offer.node_id for offer in ranked.offers}),
            "predicted_ttft_s": round(ranked.ttft_s[0], 3) if ranked.offers else None,
            "predicted_tokens_per_s": _decode_speed(ranked, output * measured.choices),
            "refused": ranked.refusal.sentence() if not ranked.offers else None,
        },
    }
    if fitting:
        best = fitting[0].rates
        likely, basis = _likely_output(purse, output)
        cached = purse.cached_tokens.get(fitting[0].node_id, 0)
        counts = TokenCounts.of(prompt=prompt, cached=cached, output=likely * measured.choices)
        if not measured.inputs:
            answer["balance"]["affordable_output_tokens"] = min(
                measured.affordable_output(best, purse.available_nano), measured.context - prompt
            )
        answer["rates_per_million_tokens"] = {
            "input": usd(best.input),
            "cached_input": usd(best.cached_input),
            "output": usd(best.output),
        }
        answer["cost"] = {
            "likely": usd(price(counts, best, 0).gross_nano),
            "likely_output_tokens": likely,
            "likely_basis": basis,
            "at_least": usd(min(_least(offer.rates, prompt) for offer in fitting)),
            "at_most": usd(max(measured.worst_nano(offer.rates) for offer in fitting)),
        }
    return answer


def _likely_output(purse: Purse, bound: int) -> tuple[int, str]:
    """How long the answer will be as far as anybody can say, and where that is taken from."""
    if bound == 0:
        return 0, "an embedding has no output"
    if purse.usual_output is None:
        return bound, "the bound, since you have no answers of this model yet"
    length, answers = purse.usual_output
    return min(length, bound), f"the median of your last {answers} answers of this model"


def _decode_speed(ranked: Ranked, output: int) -> float | None:
    """Tokens a second at the best offer, under its load now."""
    if not ranked.offers or not ranked.end_s:
        return None
    decoding_s = ranked.end_s[0] - ranked.ttft_s[0]
    return round((output - 1) / decoding_s, 1) if output > 1 and 0 < decoding_s < float("inf") else None


def _least(rates: Rates, prompt_tokens: int) -> int:
    """A prompt that is all but cached, and the shortest answer."""
    cached = max(prompt_tokens - 1, 0) if rates.cached_input < rates.input else 0
    return price(TokenCounts.of(prompt=prompt_tokens, cached=cached, output=0), rates, 0).gross_nano
