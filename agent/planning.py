"""The shell of the agent's plans: tells the marketplace what could run here, looks whether there is room for what it
advises, and has the weights and the memory ready before an engine starts. The decisions are in plans."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.config import AgentConfig, ModelTable
from agent.plans import Room, kept_bytes
from agent.protocol import ABILITIES_S, Abilities, DeviceReport, DeviceTerms, Evict, Load, RunnableReport
from agent.records import EnginePhase, EngineState, LoadMode, engine_key
from agent.sizing.fit import llamacpp_need, round_context
from agent.sizing.gguf import GgufError
from agent.sizing.shape import read_shape
from agent.sizing.variants import EMBED

if TYPE_CHECKING:
    from agent.lookout import Lookout
    from agent.state import AgentState
    from agent.supervisor import Supervisor
    from agent.weights import WeightStore

MEMORY_WAIT_S: Final = 15.0
"""How long a start waits for the memory of engines that are being ended on its device."""
LEAST_PAUSE_S: Final = 5.0
"""Between two tellings, however often something changes."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Where the weights of a model come from that only a plan asks for."""

    store: WeightStore
    url: str
    sha256: str

    @property
    def here(self) -> bool:
        """True if the file lies in the store."""
        return self.store.path(self.sha256).is_file()

    def against(self, weights_bytes: int, keep: Collection[str]) -> str:
        """Why there is no room for it; empty if there is."""
        left = self.store.room_bytes(keep)
        if self.here or weights_bytes <= left:
            return ""
        return f"its file has {weights_bytes / 2**30:.1f} GiB, and weights.budget_gib leaves {left / 2**30:.1f}"


def needed_bytes(model: ModelTable, weights: Path | None, *, on_gpu: bool) -> int | None:
    """What an engine with this model takes of its device; None where only its own program, or nobody yet, could say."""
    if model.engine in ("vllm", "openai") or weights is None or not weights.is_file():
        return None
    try:
        shape = read_shape(weights)
    except (GgufError, OSError):
        return None
    # What embeds reads each input in one piece, with scratch memory for all of it.
    batch = {"micro_batch": round_context(model.context_per_slot)} if model.task == EMBED else {}
    return llamacpp_need(
        shape, slots=model.slots, context_per_slot=model.context_per_slot, on_gpu=on_gpu, **batch
    ).total  # fmt: skip


class Planning:
    """One agent's side of the plans. Not thread-safe."""

    def __init__(self, config: AgentConfig, lookout: Lookout, state: AgentState, fetches: Mapping[str, Fetch]) -> None:
        self.config = config
        self.gateway_plans = False
        """The gateway understands what is told here."""
        self._lookout = lookout
        self._state = state
        self._fetches = fetches
        self._told: tuple[object, ...] = ()
        self._told_at = float("-inf")

    # --- telling ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The connection is gone: the next one is told anew."""
        self._told, self._told_at, self.gateway_plans = (), float("-inf"), False

    def due(self, now: float) -> Abilities | None:
        """What could run here, if the gateway should be told now."""
        if not self.gateway_plans or now - self._told_at < LEAST_PAUSE_S:
            return None
        if not (self.config.plans.accept or self._told):
            return None  # an owner who takes no plans is not planned with
        abilities = self.abilities()
        facts = (abilities.accepts, *abilities.runnable)
        if facts == self._told and now - self._told_at < ABILITIES_S:
            return None
        self._told, self._told_at = facts, now
        return abilities

    def abilities(self) -> Abilities:
        """What could run here now."""
        return Abilities(
            accepts=self.config.plans.accept,
            runnable=[self._runnable(key, engine) for key, engine in self._state.engines.items()],
            devices=[self._terms(report) for report in self._lookout.devices if report.state == "ok"],
        )

    def _runnable(self, key: str, engine: EngineState) -> RunnableReport:
        served, fetch = engine.served, self._fetches.get(key)
        return RunnableReport(
            variant_sha256=served.variant,
            device_id=served.device_id,
            loaded=engine.wanted,
            pinned=served.load is LoadMode.ALWAYS,
            here=fetch is None or fetch.here,
            slots=served.slots,
            context_per_slot=served.context_per_slot,
            input_nano_usd_per_mtok=served.input_nano_usd_per_mtok,
            cached_input_nano_usd_per_mtok=served.cached_input_nano_usd_per_mtok,
            output_nano_usd_per_mtok=served.output_nano_usd_per_mtok,
            engine=served.engine,
            simulated=served.engine == "simulated",
            needed_bytes=served.needed_bytes,
            # Of what was told already: a figure that wavers is no news.
            decode_tokens_per_s=engine.told_speeds[1],
        )

    def _terms(self, report: DeviceReport) -> DeviceTerms:
        local = datetime.now().astimezone()
        policy, power = self._lookout.policy, self.config.power
        price = policy.usd_per_kwh(local)
        held = {"", report.device_id} & self._lookout.held.keys()
        circuit = next(
            (
                (str(number), entry.watts - entry.base_watts)
                for number, entry in enumerate(self.config.circuits)
                if report.kind == "gpu" and (not entry.devices or report.device_id in entry.devices)
            ),
            ("", None),
        )
        limit_w = None if report.power_limit_mw is None else report.power_limit_mw / 1000
        return DeviceTerms(
            device_id=report.device_id,
            memory_bytes=None if report.memory_total_bytes is None else report.memory_total_bytes - self._kept(report),
            offered_s=0.0 if held else policy.stays_s(local),
            nano_usd_per_kwh=None if price is None else int(price * 10**9),
            circuit=circuit[0],
            circuit_watts=circuit[1],
            idle_watts=power.idle_watts,
            load_watts=power.load_watts if power.load_watts is not None else limit_w,
        )

    def _kept(self, report: DeviceReport) -> int:
        owner = self.config.owner
        return kept_bytes(
            report, reserve_memory_mib=owner.reserve_memory_mib, reserve_gpu_share=owner.reserve_gpu_share
        )

    # --- advice -----------------------------------------------------------------------------------------------------

    def room(self, frame: Load | Evict, supervisors: Mapping[str, Supervisor]) -> Room:
        """What there is for a piece of advice, as the machine is now."""
        table = self.config.plans
        fetch = self._fetches.get(engine_key(frame.variant_sha256, frame.device_id))
        weights_bytes = frame.weights_bytes if isinstance(frame, Load) else 0
        return Room(
            accepts=table.accept,
            loads_at_once=table.loads_at_once,
            least_stay_s=table.least_stay_s,
            free_bytes=self._free_bytes(frame.device_id, supervisors),
            stays_s=self._lookout.policy.stays_s(datetime.now().astimezone()),
            disk="" if fetch is None else fetch.against(weights_bytes, self._kept_files()),
        )

    def _free_bytes(self, device_id: str, supervisors: Mapping[str, Supervisor]) -> int | None:
        report = next((entry for entry in self._lookout.devices if entry.device_id == device_id), None)
        if report is None or report.memory_total_bytes is None or report.memory_used_bytes is None:
            return None
        free = report.memory_total_bytes - report.memory_used_bytes - self._kept(report)
        for key, engine in self._state.engines.items():
            served = engine.served
            # Pages of a processor's weights count as free already.
            holds = (served.needed_bytes or 0) - (0 if report.kind == "gpu" else served.weights_bytes)
            if served.device_id != device_id or key not in supervisors:
                continue
            if engine.phase is EnginePhase.STARTING:
                free -= served.needed_bytes or 0
            elif engine.phase is EnginePhase.OFF and not supervisors[key].stopped.is_set():
                free += max(0, holds)
        return free

    def _kept_files(self) -> list[str]:
        """Hashes of files that no fetch may evict."""
        return [
            engine.served.variant
            for engine in self._state.engines.values()
            if engine.wanted or engine.served.load is not LoadMode.PLAN
        ]

    async def prepare(self, key: str, supervisors: Mapping[str, Supervisor]) -> None:
        """Before an engine starts: what is being ended on its device is gone, and its weights are here. Raises
        ConfigError for weights that are not to be had."""
        engines = self._state.engines
        leaving = [
            supervisors[other].stopped
            for other, engine in engines.items()
            if other != key
            and other in supervisors
            and engine.served.device_id == engines[key].served.device_id
            and engine.phase is EnginePhase.OFF
        ]
        deadline = time.monotonic() + MEMORY_WAIT_S
        for stopped in leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await stopped.wait()
        fetch = self._fetches.get(key)
        if fetch is not None:
            await fetch.store.fetch(fetch.url, fetch.sha256, keep=self._kept_files())
