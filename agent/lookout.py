"""Looks around once a second: samples the devices and the machine, reads the owner's file again when it changed, and
lets the policy say what is held. The daemon tells the state machine what changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from agent import config as configuration
from agent import home as folder
from agent import surroundings
from agent.config import AgentConfig, ConfigError
from agent.events import OwnerChanged
from agent.policy import MACHINE, Policy, Sight, Sold, Verdict
from agent.protocol import DeviceReport
from agent.surroundings import Desktop, Programs
from agent.telemetry.energy import EnergyTally
from agent.telemetry.port import Processes, Source
from agent.telemetry.watched import Watched
from agent.terms import Action

log = logging.getLogger("fallow.agent")

SLOW_EVERY_S: Final = 5.0
"""How often battery and keyboard are asked."""


@dataclass(slots=True)
class Looked:
    """What one look found."""

    changes: list[OwnerChanged] = field(default_factory=list)
    config: AgentConfig | None = None
    """Set when the owner's file changed and can be used."""


class Lookout:
    """The agent's eyes. Not thread-safe."""

    def __init__(
        self,
        home: Path,
        config: AgentConfig,
        sources: Sequence[Source],
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._home = home
        self._sources = sources
        self._root = root
        self._stamp = _stamp(home)
        self._desktop = Desktop(root)
        self._slow_at = float("-inf")
        self._input_idle_s: float | None = None
        self._on_battery: bool | None = None
        self._held: dict[str, Verdict] | None = None
        self.devices: list[DeviceReport] = []
        self.energy = EnergyTally()
        self.config_error = ""
        self._use(config)

    def _use(self, config: AgentConfig) -> None:
        self._policy = Policy(config.terms)
        self._programs = Programs(config.owner.programs, self._root)

    @property
    def held(self) -> dict[str, Verdict]:
        """What is held now, by scope."""
        return self._held or {}

    @property
    def problems(self) -> list[str]:
        """What is wrong with the devices' drivers."""
        return [source.problem for source in self._sources if source.problem]

    @property
    def needs_restart(self) -> bool:
        """True if a driver's library is stuck in this process."""
        return any(source.needs_restart for source in self._sources)

    @property
    def policy(self) -> Policy:
        """The owner's terms in force."""
        return self._policy

    def listen(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, when somebody came to a card or left it."""
        for source in self._sources:
            if isinstance(source, Watched):
                source.on_news = callback

    def look(self, sold: Iterable[Sold], engine_pids: Iterable[int]) -> Looked:
        """Take one sample, and tell what changed since the last."""
        found = Looked(config=self._changed_config())
        self.devices = [report for source in self._sources for report in source.sample()]
        processes: Processes = {}
        for source in self._sources:
            processes |= source.processes()
        now = self._clock()
        self.energy.add(self.devices, now)
        self._look_slowly(now)
        pids = {entry.pid for entries in processes.values() for entry in entries or ()}
        held = self._policy.decide(
            Sight(
                now=now,
                local=datetime.now().astimezone(),
                asked=folder.asked(self._home),
                devices=self.devices,
                processes=processes,
                known=surroundings.whose(pids, (*engine_pids, os.getpid()), self._root) if pids else {},
                program=self._programs.running(),
                input_idle_s=self._input_idle_s,
                on_battery=self._on_battery,
                sold=tuple(sold),
            )
        )
        if self._policy.suspicious:
            self._hurry()
        found.changes = self._compare(held, now)
        return found

    def close(self) -> None:
        """Let go of the drivers."""
        for source in self._sources:
            source.close()

    def _look_slowly(self, now: float) -> None:
        if now < self._slow_at:
            return
        self._slow_at = now + SLOW_EVERY_S
        self._on_battery = surroundings.on_battery(self._root)
        self._input_idle_s = self._desktop.idle_s()

    def _hurry(self) -> None:
        for source in self._sources:
            if isinstance(source, Watched):
                source.hurry()

    def _compare(self, held: dict[str, Verdict], now: float) -> list[OwnerChanged]:
        before, self._held = self._held, held
        if before is None:
            # The first look: the state machine waits to be told that it may begin.
            before = {} if held.get(MACHINE) else {MACHINE: Verdict(Action.PAUSE, "")}
        changes = [_freed(scope, now) for scope in before.keys() - held.keys()]
        changes += [_held(scope, verdict, now) for scope, verdict in held.items() if before.get(scope) != verdict]
        for change in changes:
            log.info(
                "availability scope=%s available=%s reason=%r",
                change.scope or "machine",
                change.available,
                change.reason,
            )
        # Parts first: when the machine comes free, what is held apart must be known already.
        return sorted(changes, key=lambda change: change.scope == MACHINE)

    def _changed_config(self) -> AgentConfig | None:
        stamp = _stamp(self._home)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            config = configuration.load(self._home)
            self._use(config)
        except ConfigError as error:
            # Half a file, or a slip: what was in force stays so, and the owner reads why.
            self.config_error = str(error)
            log.warning("config_not_used reason=%r", self.config_error)
            return None
        self.config_error = ""
        log.info("config_read")
        return config


def _held(scope: str, verdict: Verdict, now: float) -> OwnerChanged:
    keep = verdict.action is Action.PAUSE
    return OwnerChanged(False, verdict.reason, verdict.grace_s, now, scope=scope, keep_loaded=keep, fault=verdict.fault)


def _freed(scope: str, now: float) -> OwnerChanged:
    return OwnerChanged(True, "", 0.0, now, scope=scope)


def _stamp(home: Path) -> tuple[int, int] | None:
    try:
        stat = (home / "config.toml").stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
