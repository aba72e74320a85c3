"""Which addresses may be called: https on the public internet and nothing else, whatever a name resolves to.

A renter chooses where we connect, from inside our network. So the name is resolved by us, every address that it has
must be public, and the connection goes to one of those very addresses (see post).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from typing import Final
from urllib.parse import SplitResult, urlsplit

from marketplace.core.errors import BadRequest

MAX_URL_CHARACTERS: Final = 2_048
HTTPS_PORT: Final = 443
LEAST_FREE_PORT: Final = 1_024
"""Below it, only https's own port: mail, shells and databases' front doors are no webhook endpoints."""
_PRINTABLE: Final = re.compile(r"[\x21-\x5b\x5d-\x7e]+")
"""No spaces, controls or backslashes, which parsers read in different ways."""
_WRAPPING: Final = tuple(
    IPv6Network(block)
    for block in ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")
)
"""Addresses that stand for an IPv4 address: compatible, mapped, NAT64, Teredo, 6to4. No public server needs one."""


class InvalidWebhookUrl(BadRequest):
    """The address is none that is called."""

    code = "invalid_webhook_url"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a delivery goes."""

    host: str
    port: int
    path: str
    """With the query."""
    tls: bool


def target_of(url: str, *, allow_private: bool = False) -> Target:
    """Read a URL. `allow_private` (tests and local work): http, any port, addresses that are not public.

    Raises InvalidWebhookUrl (400). What its name resolves to is not known here.
    """
    parts = _split(url)
    given = _port(parts)
    if parts.scheme != "https" and not (allow_private and parts.scheme == "http"):
        raise InvalidWebhookUrl("A webhook's URL begins with https://.", param="url")
    if "@" in parts.netloc or parts.fragment:
        raise InvalidWebhookUrl("A webhook's URL has no user, password or fragment.", param="url")
    host = parts.hostname
    if not host:
        raise InvalidWebhookUrl("A webhook's URL names a host.", param="url")
    tls = parts.scheme == "https"
    port = given if given is not None else HTTPS_PORT if tls else 80
    if not allow_private:
        if port != HTTPS_PORT and port < LEAST_FREE_PORT:
            raise InvalidWebhookUrl(f"A webhook's port is {HTTPS_PORT}, or {LEAST_FREE_PORT} or above.", param="url")
        if _is_literal(host) and not is_public(host):
            raise InvalidWebhookUrl("This address is not on the public internet.", param="url")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, port, path, tls)


def is_public(address: str) -> bool:
    """True if an IP address, as text, belongs to a host on the public internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and (
        parsed.scope_id is not None or parsed.is_site_local or any(parsed in block for block in _WRAPPING)
    ):
        return False
    return parsed.is_global and not (
        parsed.is_multicast
        or parsed.is_reserved
        or parsed.is_unspecified
        or parsed.is_loopback
        or parsed.is_link_local
        or parsed.is_private
    )


def _split(url: str) -> SplitResult:
    if len(url) > MAX_URL_CHARACTERS or not _PRINTABLE.fullmatch(url):
        raise InvalidWebhookUrl(
            f"A webhook's URL has at most {MAX_URL_CHARACTERS} printable ASCII characters, no spaces or backslashes.",
            param="url",
        )
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidWebhookUrl(f"This is no URL: {error}.", param="url") from None


def _port(parts: SplitResult) -> int | None:
    try:
        if parts.port != 0:
            return parts.port
        problem = "it is 0"
    except ValueError as error:
        problem = str(error)
    raise InvalidWebhookUrl(f"The port of a webhook's URL is no port: {problem}.", param="url")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
