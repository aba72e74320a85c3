"""Where a webhook may go: a table of what people try, and what holds for every address."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.webhooks.addresses import InvalidWebhookUrl, Target, is_public, target_of
from marketplace.gateway.webhooks.post import NotCalled, checked_addresses

PUBLIC = "93.184.215.14"

REFUSED = (
    "http://example.org/",
    "ftp://example.org/",
    "file:///etc/passwd",
    "gopher://example.org/",
    "//example.org/",
    "example.org",
    "https://",
    "https:///path",
    "https://user@example.org/",
    "https://user:password@example.org/",
    "https://example.org@127.0.0.1/",
    "https://example.org/#fragment",
    "https://example.org:22/",
    "https://example.org:80/",
    "https://example.org:0/",
    "https://example.org:65536/",
    "https://example.org:x/",
    "https://example.org/a b",
    "https://example.org/\n",
    "https://example.org\\@127.0.0.1/",
    "https://exämple.org/",
    "https://[::1/",
    "https://127.0.0.1/",
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data/",
    "https://100.64.0.1/",
    "https://0.0.0.0/",
    "https://255.255.255.255/",
    "https://224.0.0.1/",
    "https://240.0.0.1/",
    "https://192.0.2.1/",
    "https://198.18.0.1/",
    "https://[::]/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:93.184.215.14]/",
    "https://[::127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b:1::1]/",
    "https://[2002:7f00:1::1]/",
    "https://[2001:0:7f00:1::1]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fec0::1]/",
    "https://[fc00::1]/",
    "https://[ff02::1]/",
    "https://[2001:db8::1]/",
    f"https://example.org/{'a' * 2_048}",
)

RESOLVED = (
    ("2130706433", ["127.0.0.1"]),
    ("0x7f000001", ["127.0.0.1"]),
    ("0177.0.0.1", ["127.0.0.1"]),
    ("127.1", ["127.0.0.1"]),
    ("localhost", ["127.0.0.1", "::1"]),
    ("metadata.example.org", ["169.254.169.254"]),
    ("half.example.org", [PUBLIC, "10.0.0.1"]),
    ("mapped.example.org", ["::ffff:10.0.0.1"]),
    ("scoped.example.org", ["fe80::1%eth0"]),
    ("empty.example.org", []),
)
"""What a resolver makes of names, numbers among them, that are no IP addresses as text."""


class TestAUrl:
    @pytest.mark.parametrize("url", REFUSED)
    def test_is_refused(self, url: str) -> None:
        with pytest.raises(InvalidWebhookUrl):
            target_of(url)

    def test_is_read_as_it_is_called(self) -> None:
        assert target_of("https://Hooks.Example.org") == Target("hooks.example.org", 443, "/", tls=True)
        assert target_of("https://example.org:8443/a?b=c") == Target("example.org", 8443, "/a?b=c", tls=True)
        assert target_of(f"https://{PUBLIC}/") == Target(PUBLIC, 443, "/", tls=True)
        assert target_of("https://[2606:4700::1111]/").host == "2606:4700::1111"

    def test_may_be_private_only_where_that_is_set(self) -> None:
        assert target_of("http://127.0.0.1:80/", allow_private=True) == Target("127.0.0.1", 80, "/", tls=False)


class TestAName:
    @pytest.mark.parametrize(("host", "addresses"), RESOLVED)
    def test_is_refused_for_any_address_that_is_not_public(self, host: str, addresses: list[str]) -> None:
        with pytest.raises(NotCalled):
            checked_addresses(target_of(f"https://{host}/"), lambda host, port: addresses, allow_private=False)

    def test_that_does_not_resolve_is_no_error_of_ours(self) -> None:
        def fails(host: str, port: int) -> list[str]:
            raise OSError(-2, "Name or service not known")

        with pytest.raises(NotCalled, match="Name or service not known"):
            checked_addresses(target_of("https://example.org/"), fails, allow_private=False)

    def test_of_public_addresses_is_called_at_these(self) -> None:
        found = checked_addresses(
            target_of("https://example.org/"), lambda host, port: [PUBLIC, "2606:4700::1111"], allow_private=False
        )
        assert found == [PUBLIC, "2606:4700::1111"]


class TestAnAddress:
    @given(st.ip_addresses(v=4))
    def test_is_never_public_when_an_ipv6_address_only_wraps_it(self, address: ipaddress.IPv4Address) -> None:
        number = int(address)
        wrapped = [
            ipaddress.IPv6Address(number),
            ipaddress.IPv6Address((0xFFFF << 32) | number),
            ipaddress.IPv6Address((0x64FF9B << 96) | number),
            ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
        ]
        assert not any(is_public(str(each)) for each in wrapped)

    @given(
        st.sampled_from(["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16", "100.64.0.0/10"]), st.data()
    )
    def test_within_a_private_block_is_not_public(self, block: str, data: st.DataObject) -> None:
        network = ipaddress.IPv4Network(block)
        offset = data.draw(st.integers(0, network.num_addresses - 1))
        assert not is_public(str(network[offset]))

    @given(st.text(max_size=40))
    def test_that_is_none_is_not_public(self, text: str) -> None:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            assert not is_public(text)
