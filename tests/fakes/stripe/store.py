"""Objects by id, each of one account: the platform's, or a connected account's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from tests.fakes.stripe.errors import Json, missing

NAMES = {
    "payment_method": "PaymentMethod",
    "checkout.session": "checkout.session",
    "account": "account",
}


@dataclass(frozen=True)
class Record:
    """An object and whose it is; `number` grows with each object and orders lists."""

    owner: str
    number: int
    data: Json


class Store:
    """Ids are unique across accounts; an object of another account does not exist for a caller."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._numbers = itertools.count(1)
        self._by_kind: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, owner: str, data: Json) -> Json:
        """Keep a new object; its `id` and `object` say what it is."""
        identifier = data["id"]
        if identifier in self._records:
            raise AssertionError(f"{identifier} exists already")
        self._records[identifier] = Record(owner, next(self._numbers), data)
        self._by_kind[owner, data["object"]].append(identifier)
        return data

    def get(self, owner: str, kind: str, identifier: str, *, param: str = "id") -> Json:
        """The live object; raises Stripe's resource_missing."""
        record = self._records.get(identifier)
        if record is None or record.owner != owner or record.data["object"] != kind:
            raise missing(NAMES.get(kind, kind), identifier, param=param)
        return record.data

    def find(self, identifier: str) -> Record | None:
        return self._records.get(identifier)

    def every(self, owner: str, kind: str) -> list[Json]:
        """All of one kind, oldest first."""
        return [self._records[identifier].data for identifier in self._by_kind[owner, kind]]

    def drop(self, identifier: str) -> None:
        """Forget an object that Stripe no longer keeps."""
        record = self._records[identifier]
        self._by_kind[record.owner, record.data["object"]].remove(identifier)
        del self._records[identifier]
