"""What gateways tell each other, and the worker, about their nodes: one blob a gateway in Valkey, alive by its TTL.

Ages are told without comparing clocks: the blob says how old its figures were when it was written, and Valkey's
remaining TTL says how long ago that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
import redis
from redis.exceptions import RedisError

from marketplace.core.valkey import Script, ValkeyDownError
from marketplace.fleet.reservations import slots_key
from marketplace.matching.types import DataTerms, OfferView, Rates

INDEX_KEY: Final = "fallow:fleet"
TTL_S: Final = 10.0
"""A gateway that stays silent for this long has died."""
SILENT_S: Final = 3.0
"""A gateway whose heart stopped for this long gets no queued work: its sockets are likely gone, and a lease there would
burn an attempt. Others go on seeing its nodes until TTL_S, or until their link to it breaks."""
BEAT_S: Final = 0.5
MAX_GATEWAYS: Final = 256


def gateway_key(gateway_id: str) -> str:
    """Where a gateway's blob is: a hash of its version and its bytes."""
    return f"fallow:fleet:{gateway_id}"


class PublishedOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One offer on the wire between gateways."""

    offer_id: bytes
    node_id: bytes
    owner_organisation_id: bytes
    device_id: str
    variant_id: bytes
    price_id: int
    rates: tuple[int, int, int]
    """Input, cached input, output."""
    slots: int
    slots_busy: int
    context_per_slot: int
    available: bool
    warm: bool
    simulated: bool
    prefix_cache_s: float
    sampled_age_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    memory_free_bytes: int | None
    unavailable_reason: str
    connected_at_us: int
    """When the node's socket was opened, by the database's clock: of two claims on a node, the later is right."""
    region: str = ""
    probation: bool = False
    memory_needed_bytes: int | None = None
    kv_step_s_per_token: float = 0.0
    power_fraction: float = 1.0
    headroom: float = 1.0
    gives_choices: bool = False
    data: tuple[str, int | None, bool | None, str, bool] = ("", None, None, "", False)
    """The fields of matching.types.DataTerms, in order."""

    @classmethod
    def of(cls, offer: OfferView, connected_at_us: int) -> PublishedOffer:
        return cls(
            offer_id=offer.offer_id.bytes,
            node_id=offer.node_id.bytes,
            owner_organisation_id=offer.owner_organisation_id.bytes,
            device_id=offer.device_id,
            variant_id=offer.variant_id.bytes,
            price_id=offer.price_id,
            rates=(offer.rates.input, offer.rates.cached_input, offer.rates.output),
            slots=offer.slots,
            slots_busy=offer.slots_busy,
            context_per_slot=offer.context_per_slot,
            available=offer.available,
            warm=offer.warm,
            simulated=offer.simulated,
            prefix_cache_s=offer.prefix_cache_s,
            sampled_age_s=offer.sampled_age_s,
            prefill_tokens_per_s=offer.prefill_tokens_per_s,
            decode_tokens_per_s=offer.decode_tokens_per_s,
            memory_free_bytes=offer.memory_free_bytes,
            unavailable_reason=offer.unavailable_reason,
            connected_at_us=connected_at_us,
            region=offer.region,
            probation=offer.probation,
            memory_needed_bytes=offer.memory_needed_bytes,
            kv_step_s_per_token=offer.kv_step_s_per_token,
            power_fraction=offer.power_fraction,
            headroom=offer.headroom,
            data=_data(offer.data),
            gives_choices=offer.gives_choices,
        )

    def view(self, gateway_id: str, elapsed_s: float) -> OfferView:
        """The offer as seen `elapsed_s` after it was published."""
        return OfferView(
            offer_id=UUID(bytes=self.offer_id),
            node_id=UUID(bytes=self.node_id),
            owner_organisation_id=UUID(bytes=self.owner_organisation_id),
            device_id=self.device_id,
            variant_id=UUID(bytes=self.variant_id),
            gateway_id=gateway_id,
            price_id=self.price_id,
            rates=Rates(*self.rates),
            slots=self.slots,
            slots_busy=self.slots_busy,
            context_per_slot=self.context_per_slot,
            available=self.available,
            warm=self.warm,
            simulated=self.simulated,
            prefix_cache_s=self.prefix_cache_s,
            sampled_age_s=self.sampled_age_s + elapsed_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_tokens_per_s=self.decode_tokens_per_s,
            memory_free_bytes=self.memory_free_bytes,
            unavailable_reason=self.unavailable_reason,
            region=self.region,
            probation=self.probation,
            memory_needed_bytes=self.memory_needed_bytes,
            kv_step_s_per_token=self.kv_step_s_per_token,
            power_fraction=self.power_fraction,
            headroom=self.headroom,
            data=DataTerms(*self.data),
            gives_choices=self.gives_choices,
        )


def _data(data: DataTerms) -> tuple[str, int | None, bool | None, str, bool]:
    return data.country, data.retention_days, data.trains, data.operator, data.attested


class GatewaySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that one gateway has."""

    gateway_id: str
    url: str
    offers: list[PublishedOffer]


class Received(NamedTuple):
    """A snapshot as read, and how old it is."""

    version: str
    snapshot: GatewaySnapshot
    elapsed_s: float


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GatewaySnapshot)

# KEYS: index, the gateway's blob. ARGV: gateway, version, blob, ttl in ms. An empty blob withdraws the gateway.
PUBLISH: Final = Script("""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
  return 1
end
redis.call('HSET', KEYS[2], 'v', ARGV[2], 'b', ARGV[3], 'h', now)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('ZADD', KEYS[1], now + ARGV[4], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return 1
""")

# KEYS: the gateway's blob. It lives, and has nothing new to say; a gateway that was withdrawn stays so.
BEAT: Final = Script("""
local t = redis.call('TIME')
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'h', t[1] * 1000 + math.floor(t[2] / 1000))
end
return 1
""")

# KEYS: index. ARGV: the prefix of blobs, then pairs of gateway and version that the reader has. Answers for each living
# gateway its id, version, remaining TTL in ms, the blob, empty where the reader has that version, and for how many ms
# its heart has been silent.
POLL: Final = Script(f"""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local known = {{}}
for i = 2, #ARGV, 2 do known[ARGV[i]] = ARGV[i + 1] end
local out = {{}}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, {MAX_GATEWAYS - 1})) do
  local key = ARGV[1] .. id
  local version = redis.call('HGET', key, 'v')
  if version then
    local blob = ''
    if known[id] ~= version then blob = redis.call('HGET', key, 'b') end
    local beat = redis.call('HGET', key, 'h')
    out[#out + 1] = {{id, version, redis.call('PTTL', key), blob, beat and now - beat or 0}}
  end
end
return out
""")


def publish_call(snapshot: GatewaySnapshot, version: str) -> tuple[list[Any], list[Any]]:
    """Keys and arguments of PUBLISH."""
    gateway_id = snapshot.gateway_id
    blob = _encoder.encode(snapshot)
    return [INDEX_KEY, gateway_key(gateway_id)], [gateway_id, version, blob, int(TTL_S * 1000)]


def withdraw_call(gateway_id: str) -> tuple[list[Any], list[Any]]:
    """Keys and arguments of PUBLISH that take the gateway out."""
    return [INDEX_KEY, gateway_key(gateway_id)], [gateway_id, "", b"", 0]


def poll_call(known: Sequence[tuple[str, str]]) -> tuple[list[Any], list[Any]]:
    """Keys and arguments of POLL, with the (gateway, version) pairs at hand."""
    return [INDEX_KEY], [gateway_key(""), *(part for pair in known for part in pair)]


def parse_row(row: Sequence[Any]) -> tuple[str, str, float, GatewaySnapshot | None]:
    """One row of POLL's answer: gateway, version, age in seconds, and the snapshot if it was sent and makes sense."""
    gateway_id, version, ttl_ms, blob, _ = row
    elapsed_s = max(0.0, TTL_S - int(ttl_ms) / 1000)
    snapshot: GatewaySnapshot | None = None
    if blob:
        try:
            snapshot = _decoder.decode(blob)
        except msgspec.DecodeError:
            # A gateway of another release; it is not ours to read.
            snapshot = None
    return gateway_id.decode(), version.decode(), elapsed_s, snapshot


def silent_s(row: Sequence[Any]) -> float:
    """For how long the gateway of a row of POLL has not given a sign of life."""
    return max(0.0, int(row[4]) / 1000)


def read_fleet(client: redis.Redis, *, silent_up_to_s: float = TTL_S) -> list[OfferView]:
    """Every offer of every living gateway, with live counts of taken slots: the worker's snapshot.

    Of a node that two gateways claim, the later connection counts. Raises ValkeyDownError.
    """
    try:
        keys, args = poll_call(())
        try:
            rows: Any = client.evalsha(POLL.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            rows = client.eval(POLL.source, len(keys), *keys, *args)
        offers = _merge([row for row in rows if silent_s(row) <= silent_up_to_s])
        return _with_live_counts(client, offers)
    except (RedisError, OSError) as error:
        raise ValkeyDownError(str(error)) from error


def _merge(rows: Sequence[Sequence[Any]]) -> list[OfferView]:
    latest: dict[UUID, tuple[int, OfferView]] = {}
    for row in rows:
        gateway_id, _, elapsed_s, snapshot = parse_row(row)
        for published in snapshot.offers if snapshot else ():
            offer = published.view(gateway_id, elapsed_s)
            known = latest.get(offer.offer_id)
            if known is None or published.connected_at_us > known[0]:
                latest[offer.offer_id] = (published.connected_at_us, offer)
    return [offer for _, offer in latest.values()]


def _with_live_counts(client: redis.Redis, offers: list[OfferView]) -> list[OfferView]:
    if not offers:
        return []
    seconds, micros = client.time()
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    pipeline = client.pipeline(transaction=False)
    for offer in offers:
        pipeline.zcount(slots_key(offer.offer_id), f"({now_ms}", "+inf")
    counts = pipeline.execute()
    return [
        replace(offer, slots_busy=max(offer.slots_busy, int(count)))
        for offer, count in zip(offers, counts, strict=True)
    ]
