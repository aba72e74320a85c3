"""What would my card have earned last week: one more node in the market, a stretch of demand, and a week's hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from marketplace.matching.simulate.fleet import Fleet, Hours, NodeSpec
from marketplace.matching.simulate.policies import Matcher
from marketplace.matching.simulate.report import FEE_PART, OwnerReport, report
from marketplace.matching.simulate.traces import Trace
from marketplace.matching.simulate.world import simulate
from marketplace.metering.pricing import Rates

WEEK_H: Final = 7 * 24
ASKS: Final = (0.8, 1.0, 1.25)
"""The ask as it is, and what a cheaper and a dearer one would have done."""
OWNER: Final = "you"


@dataclass(frozen=True, slots=True)
class Earning:
    """What one ask would have brought in a week of the owner's hours. USD; lowest, mean and highest over the seeds."""

    ask_factor: float
    usd_per_mtok_input: float
    usd_per_mtok_output: float
    offered_h: float
    least_usd: float
    net_usd: float
    most_usd: float
    gross_usd: float
    energy_usd: float
    rented: float
    busy: float
    tokens: float

    def sentence(self) -> str:
        """For a person."""
        return (
            f"At {self.usd_per_mtok_input:.3g} / {self.usd_per_mtok_output:.3g} USD a million tokens it would have "
            f"earned about {self.net_usd:.2f} USD in the week ({self.least_usd:.2f} to {self.most_usd:.2f}) after fee "
            f"and power, in {self.offered_h:.0f} offered hours, {self.busy:.0%} of them busy."
        )


def what_if(
    fleet: Fleet,
    card: NodeSpec,
    trace: Trace,
    *,
    seeds: Iterable[int],
    asks: Iterable[float] = ASKS,
    fee_part: float = FEE_PART,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Earning]:
    """Replay the demand with the card in the market all the time, for each ask, and scale to its offered week.

    The market would have been a little different with the card in it, and it is: its work is taken from the others.
    """
    found = []
    seeds = list(seeds)
    offered_h = WEEK_H * card.hours.share
    for factor in asks:
        mine = replace(card, owner=OWNER, hours=Hours(), rates=_scaled(card.rates, factor))
        shown = []
        for seed in seeds:
            progress(f"ask x {factor:g}, seed {seed}")
            run = report(simulate(replace(fleet, nodes=(*fleet.nodes, mine)), trace, Matcher, seed), fee_part)
            shown.append(next(owner for owner in run.owners if owner.owner == OWNER))
        found.append(_earning(factor, mine, offered_h, shown))
    return found


def _scaled(rates: Rates, factor: float) -> Rates:
    return Rates(round(rates.input * factor), round(rates.cached_input * factor), round(rates.output * factor))


def _earning(factor: float, card: NodeSpec, offered_h: float, shown: list[OwnerReport]) -> Earning:
    hours = [max(owner.offered_h, 1e-9) for owner in shown]
    net = [owner.net_usd / h * offered_h for owner, h in zip(shown, hours, strict=True)]

    def week(value: Callable[[OwnerReport], float]) -> float:
        return sum(value(owner) / h for owner, h in zip(shown, hours, strict=True)) / len(shown) * offered_h

    return Earning(
        ask_factor=factor,
        usd_per_mtok_input=card.rates.input / 1e9,
        usd_per_mtok_output=card.rates.output / 1e9,
        offered_h=offered_h,
        least_usd=min(net),
        net_usd=sum(net) / len(net),
        most_usd=max(net),
        gross_usd=week(lambda owner: owner.gross_usd),
        energy_usd=week(lambda owner: owner.energy_usd),
        rented=sum(owner.use.rented for owner in shown) / len(shown),
        busy=sum(owner.use.busy for owner in shown) / len(shown),
        tokens=week(lambda owner: owner.tokens),
    )
