"""Looking at an address before it is registered: its name is resolved, by a server that its renter may have chosen."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from uuid import UUID
from weakref import WeakValueDictionary

from marketplace.gateway.webhooks.addresses import InvalidWebhookUrl, target_of
from marketplace.gateway.webhooks.post import NotCalled, Resolve, checked_addresses, resolve

AT_ONCE: Final = 8
"""Names that are looked up at the same time, each of another organisation."""


class AddressChecks:
    """One gateway's. A name that is slow holds up its own organisation's registrations and nothing else: it takes one
    of these threads, and none of those that the rest of the gateway needs. One event loop."""

    def __init__(self, *, allow_private: bool, resolver: Resolve = resolve) -> None:
        self._allow_private = allow_private
        self._resolver = resolver
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook-check")
        self._turns: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()

    async def require(self, organisation_id: UUID, url: str) -> None:
        """Raises InvalidWebhookUrl for what would not be called."""
        turn = self._turns.setdefault(organisation_id, asyncio.Lock())
        async with turn:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._check, url)

    def close(self) -> None:
        """Take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, url: str) -> None:
        target = target_of(url, allow_private=self._allow_private)
        try:
            checked_addresses(target, self._resolver, allow_private=self._allow_private)
        except NotCalled as error:
            raise InvalidWebhookUrl(error.message, param="url") from None
