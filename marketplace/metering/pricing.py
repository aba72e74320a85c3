"""What tokens cost. Pure, integers only: nano-USD (1e-9 USD), rates in nano-USD per million tokens.

A receipt is rounded once, half to even. Its parts are whole nanos that add up to it: the classes by largest remainder,
the fee half to even, and the owner's share is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from marketplace.metering.tokens import TokenCounts

TOKENS_PER_RATE = 1_000_000
BASIS_POINTS = 10_000
MAX_AFFORDABLE_TOKENS = 2**31 - 1
"""What a balance affords where output costs nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """An ask, in nano-USD per million tokens."""

    input: int
    cached_input: int
    output: int

    def within(self, ceiling: Rates) -> bool:
        """True if no class costs more than in `ceiling`."""
        return (
            self.input <= ceiling.input and self.cached_input <= ceiling.cached_input and self.output <= ceiling.output
        )

    def at_most(self, ceiling: Rates) -> Rates:
        """Class by class, the lower of these and of `ceiling`."""
        return Rates(
            min(self.input, ceiling.input),
            min(self.cached_input, ceiling.cached_input),
            min(self.output, ceiling.output),
        )

    def at_share(self, basis_points: int) -> Rates:
        """These rates at so many hundredths of a percent, rounded down class by class."""
        return Rates(
            self.input * basis_points // BASIS_POINTS,
            self.cached_input * basis_points // BASIS_POINTS,
            self.output * basis_points // BASIS_POINTS,
        )

    def before_share(self, basis_points: int) -> Rates:
        """The highest rates that `at_share` brings within these: as a ceiling for what is not yet reduced."""
        return Rates(
            *(((rate + 1) * BASIS_POINTS - 1) // basis_points for rate in (self.input, self.cached_input, self.output))
        )


@dataclass(frozen=True, slots=True)
class Priced:
    """The price of one receipt. The four classes add up to `gross_nano`, and so do fee and owner's share."""

    input_uncached_nano: int
    input_cached_nano: int
    output_visible_nano: int
    output_reasoning_nano: int
    gross_nano: int
    fee_nano: int
    owner_nano: int


def price(tokens: TokenCounts, rates: Rates, fee_basis_points: int) -> Priced:
    """Price what was delivered. Raises ValueError on a negative rate or a fee outside 0..10,000 basis points."""
    if min(rates.input, rates.cached_input, rates.output) < 0:
        raise ValueError(f"rates cannot be negative: {rates}")
    if not 0 <= fee_basis_points <= BASIS_POINTS:
        raise ValueError(f"a fee is 0 to {BASIS_POINTS} basis points, not {fee_basis_points}")
    exact = (
        tokens.input_uncached * rates.input,
        tokens.input_cached * rates.cached_input,
        tokens.output_visible * rates.output,
        tokens.output_reasoning * rates.output,
    )
    gross = divide_half_even(sum(exact), TOKENS_PER_RATE)
    uncached, cached, visible, reasoning = _largest_remainder(exact, gross)
    fee = divide_half_even(gross * fee_basis_points, BASIS_POINTS)
    return Priced(
        input_uncached_nano=uncached,
        input_cached_nano=cached,
        output_visible_nano=visible,
        output_reasoning_nano=reasoning,
        gross_nano=gross,
        fee_nano=fee,
        owner_nano=gross - fee,
    )


def worst_case(rates: Rates, prompt_tokens: int, max_output_tokens: int) -> int:
    """The most, in nano-USD, that an answer can cost: all of the prompt at its dearer rate, all of the output. No
    receipt of such a job rounds to more."""
    return divide_half_even(_worst_input(rates, prompt_tokens) + max_output_tokens * rates.output, TOKENS_PER_RATE)


def affordable_output(rates: Rates, prompt_tokens: int, balance_nano: int) -> int:
    """The largest `max_output_tokens` whose worst case `balance_nano` covers; 0 if it does not cover one token of
    output, MAX_AFFORDABLE_TOKENS at most."""
    if balance_nano < 0:
        return 0
    # The largest sum of millionths that still rounds to the balance: a tie goes to the even side.
    limit = balance_nano * TOKENS_PER_RATE + TOKENS_PER_RATE // 2 - balance_nano % 2
    left = limit - _worst_input(rates, prompt_tokens)
    if left < 0:
        return 0
    if rates.output == 0:
        return MAX_AFFORDABLE_TOKENS
    return min(left // rates.output, MAX_AFFORDABLE_TOKENS)


def divide_half_even(numerator: int, denominator: int) -> int:
    """numerator / denominator (> 0), rounded to the nearest integer, a tie to the even one."""
    quotient, remainder = divmod(numerator, denominator)
    twice = 2 * remainder
    if twice > denominator or (twice == denominator and quotient % 2):
        quotient += 1
    return quotient


def _worst_input(rates: Rates, prompt_tokens: int) -> int:
    return prompt_tokens * max(rates.input, rates.cached_input)


def _largest_remainder(exact: tuple[int, ...], total: int) -> list[int]:
    """Whole parts of `exact` millionths that add up to `total`, which is their sum rounded."""
    parts = [value // TOKENS_PER_RATE for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: -(exact[i] % TOKENS_PER_RATE))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts
