"""The owner's terms in `config.toml`: when the machine is the owner's alone, and what the agent then does."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from agent.errors import ConfigError
from agent.hours import parse_window

MAX_ENTRIES: Final = 64
DESKTOP_PROGRAMS: Final = (
    *("nvidia-persiste", "Xorg", "Xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "sway"),
)

Watts = Annotated[float, msgspec.Meta(ge=0, le=100_000)]
Amount = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,7}(\.[0-9]{1,9})?$")]
"""USD as a decimal string."""
Mebibytes = Annotated[int, msgspec.Meta(ge=0, le=16 * 1024 * 1024)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_ENTRIES)]
Windows = Annotated[list[Name], msgspec.Meta(max_length=MAX_ENTRIES)]


class Action(StrEnum):
    """What a rule does. The strongest of those that hold counts."""

    IGNORE = "ignore"
    """Nothing."""
    PAUSE = "pause"
    """No new work; what runs ends by itself, and the model stays in memory."""
    DRAIN = "drain"
    """No new work; what runs may end within the grace, then the memory is freed."""
    EVICT = "evict"
    """The engine is killed now, and its memory is free."""

    @property
    def strength(self) -> int:
        """Larger is stronger."""
        return list(Action).index(self)


class DoesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[owner.does]`: the action of each rule."""

    hours: Action = Action.DRAIN
    """Outside your hours, or inside your quiet hours."""
    foreign_process: Action = Action.EVICT
    """Somebody else computes on the card, or draws much more on it than usual."""
    program: Action = Action.EVICT
    """One of your programs runs."""
    memory: Action = Action.EVICT
    """Less is free than you keep for yourself."""
    input: Action = Action.PAUSE
    """You use keyboard or mouse."""
    battery: Action = Action.DRAIN
    heat: Action = Action.DRAIN
    circuit: Action = Action.DRAIN
    """A circuit draws more than it may."""
    price: Action = Action.PAUSE
    """Your ask lies under your floor, or under what the power costs now."""
    tariff: Action = Action.DRAIN
    """Power costs more than you allow."""


class OwnerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[owner]`: when the machine is the owner's alone."""

    hours: Windows = []
    """Windows in which the node may work, such as `mon-fri 18:00-08:00`. Empty: always."""
    quiet_hours: Windows = []
    """Windows in which it may not, whatever `hours` says."""
    reserve_memory_mib: Mebibytes = 512
    """Give the machine back when less than this of main memory is free."""
    reserve_gpu_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Give a card back when less than this share of its memory is free."""
    max_temperature_c: Annotated[float, msgspec.Meta(gt=0, le=150)] = 95.0
    programs: Names = []
    """Names of programs, as `ps -o comm` shows them, that want the machine to themselves."""
    ignore_programs: Names = msgspec.field(default_factory=lambda: list(DESKTOP_PROGRAMS))
    """These may compute on a card without being in the way. A name holds at most 15 characters."""
    graphics_growth_mib: Mebibytes = 768
    """What the desktop may take on a card beyond what it usually does."""
    input_idle_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """How long keyboard and mouse must have rested. 0: they don't matter."""
    price_floor_usd_per_mtok: Amount | None = None
    """Least ask for output."""
    max_usd_per_kwh: Amount | None = None
    """Most that power may cost while the node works."""
    keep_awake: bool = True
    """The machine does not fall asleep while an answer is being made."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 2.0
    """How long running answers may finish when the owner takes the machine back."""
    return_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    """Quiet time before work is taken again; doubles if the node has to yield again soon."""
    does: DoesTable = DoesTable()


class PowerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[power]`: the owner's own figures. Watts are for a machine that cannot measure, and shown as declared."""

    idle_watts: Watts | None = None
    load_watts: Watts | None = None
    usd_per_kwh: Amount | None = None
    """What power costs outside the windows of `[[tariff]]`."""
    gpu_limit_watts: Annotated[float, msgspec.Meta(ge=1, le=10_000)] | None = None
    """A power limit to set on every card. Needs root; the driver forgets it at the next boot."""


class TariffTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[tariff]]`: what power costs in some hours. The first window that holds counts."""

    hours: Name
    usd_per_kwh: Amount


class CircuitTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[circuits]]`: cards behind one fuse. Over `watts`, the last of them rest first."""

    watts: Annotated[float, msgspec.Meta(gt=0, le=100_000)]
    devices: Names = []
    """UUIDs. Empty: all cards."""
    base_watts: Watts = 0.0
    """What else hangs on it."""


class Terms(msgspec.Struct, frozen=True):
    """All that the policy goes by. `check` before use."""

    owner: OwnerTable = OwnerTable()
    power: PowerTable = PowerTable()
    tariff: Annotated[list[TariffTable], msgspec.Meta(max_length=MAX_ENTRIES)] = []
    circuits: Annotated[list[CircuitTable], msgspec.Meta(max_length=MAX_ENTRIES)] = []

    def check(self) -> None:
        """Raise ConfigError for what the types cannot say."""
        for window in (*self.owner.hours, *self.owner.quiet_hours, *(entry.hours for entry in self.tariff)):
            parse_window(window)
        idle, load = self.power.idle_watts, self.power.load_watts
        if idle is not None and load is not None and load < idle:
            raise ConfigError("power.load_watts is under power.idle_watts.")


def usd(amount: str | None) -> Decimal | None:
    """The amount of a checked decimal string."""
    return None if amount is None else Decimal(amount)
