"""The greeting of two gateways."""

from __future__ import annotations

from marketplace.fleet.wire import Parties, decode_from_caller, prove, proves

PARTIES = Parties("gw-a", "gw-b", b"n" * 32, b"m" * 32)


def test_a_proof_fits_its_secret_its_role_and_its_parties_only() -> None:
    proof = prove("secret", "caller", PARTIES)
    assert proves(proof, prove("secret", "caller", PARTIES))
    others = [
        prove("another", "caller", PARTIES),
        prove("secret", "home", PARTIES),
        prove("secret", "caller", PARTIES._replace(caller="gw-b", home="gw-a")),
        prove("secret", "caller", PARTIES._replace(home_nonce=b"x" * 32)),
        # The same bytes, cut elsewhere.
        prove("secret", "caller", PARTIES._replace(caller="gw-ag", home="w-b")),
    ]
    assert not any(proves(proof, other) for other in others)
    assert len({proof, *others}) == 6


def test_an_empty_message_is_no_frame() -> None:
    assert decode_from_caller(b"\x90") == []
