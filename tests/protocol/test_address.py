from __future__ import annotations

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.protocol.address import (
    HOST_EXAMPLE,
    PEER_EXAMPLE,
    HostAddress,
    PeerAddress,
    parse_host_address,
    parse_peer_address,
)

RSA_ID = base58.b58encode(b"\x12\x20" + bytes(range(32))).decode()
ED25519_ID = base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + bytes(range(32))).decode()
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{RSA_ID}"


@pytest.mark.parametrize("peer_id", [RSA_ID, ED25519_ID])
@pytest.mark.parametrize(
    ("host", "kind", "name", "transport", "port"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "ip4", "203.0.113.7", "tcp", 31337),
        ("/ip6/2001:db8::1/tcp/1", "ip6", "2001:db8::1", "tcp", 1),
        ("/dns/boot.example.org/tcp/65535", "dns", "boot.example.org", "tcp", 65535),
        ("/dns4/bootstrap/udp/9/quic-v1", "dns4", "bootstrap", "udp", 9),
        ("/dns6/a-b.c_d/tcp/80", "dns6", "a-b.c_d", "tcp", 80),
    ],
)
def test_every_form_is_parsed_and_written_back(peer_id, host, kind, name, transport, port):
    text = f"{host}/p2p/{peer_id}"
    address = parse_peer_address(text)
    assert address == PeerAddress(host_kind=kind, host=name, transport=transport, port=port, peer_id=peer_id)
    assert str(address) == text


def test_a_host_address_has_no_peer_id_and_may_leave_the_port_to_the_system():
    expected = HostAddress(host_kind="ip4", host="0.0.0.0", transport="tcp", port=0)
    assert parse_host_address("/ip4/0.0.0.0/tcp/0") == expected
    assert str(parse_host_address("/ip6/::/udp/0/quic-v1")) == "/ip6/::/udp/0/quic-v1"


def test_the_two_kinds_of_peer_id_begin_as_people_know_them():
    assert RSA_ID.startswith("Qm")
    assert ED25519_ID.startswith("12D3KooW")


def test_the_examples_in_messages_are_valid():
    assert str(parse_peer_address(PEER_EXAMPLE)) == PEER_EXAMPLE
    assert str(parse_host_address(HOST_EXAMPLE)) == HOST_EXAMPLE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must start with '/'"),
        ("203.0.113.7:31337", "must start with '/'"),
        (ADDRESS + "/", "empty part"),
        (ADDRESS.replace("/tcp", "//tcp"), "empty part"),
        ("/ipv4" + ADDRESS[4:], "starts with /ipv4; known: /ip4, /ip6, /dns, /dns4, /dns6"),
        ("/ip4/203.0.113.7/tcp", "needs a host, /tcp or /udp, and a port"),
        (ADDRESS.replace("203.0.113.7", "203.0.113.256"), "'203.0.113.256' is not an IPv4 address"),
        (ADDRESS.replace("203.0.113.7", "203.0.113.07"), "'203.0.113.07' is not an IPv4 address"),
        (ADDRESS.replace("203.0.113.7", "example.org"), "use /dns4 for a name"),
        ("/ip6/fe80::1%eth0" + ADDRESS[16:], "has a zone"),
        ("/ip6/1.2.3.4" + ADDRESS[16:], "is not an IPv6 address"),
        ("/dns4/203.0.113.7" + ADDRESS[16:], "is not a host name"),
        ("/dns4/-x.org" + ADDRESS[16:], "is not a host name"),
        ("/dns4/b\u00fccher.org" + ADDRESS[16:], "is not a host name"),
        (ADDRESS.replace("tcp", "tpc"), "needs /tcp or /udp, but has /tpc"),
        (ADDRESS.replace("31337", "65536"), "port '65536' must be a number from 0 to 65535"),
        (ADDRESS.replace("31337", "-1"), "port '-1' must be a number"),
        (ADDRESS.replace("31337", "0080"), "port '0080' must be a number"),
        (ADDRESS.replace("31337", "\u0663"), "must be a number"),
        (ADDRESS.replace("31337", "0"), "port 0 cannot be dialled"),
        (ADDRESS.replace("/tcp/31337", "/udp/31337"), "must be followed by /quic-v1"),
        (ADDRESS.replace("/tcp/31337", "/tcp/31337/quic-v1"), "needs /p2p/<peer id>, but has /quic-v1/p2p"),
        ("/ip4/203.0.113.7/tcp/31337", "needs /p2p/<peer id>, but has nothing"),
        ("/ip4/203.0.113.7/tcp/31337/p2p", "needs /p2p/<peer id>, but has /p2p"),
        (ADDRESS.replace("/p2p/", "/ipfs/"), "needs /p2p/<peer id>"),
        (ADDRESS + "/p2p-circuit", "/p2p-circuit after the peer id is not supported"),
        (ADDRESS[:-1], "has 45 characters; it must have 46 (Qm...) or 52 (12D3KooW...)"),
        (ADDRESS[:-1] + "0", "is not base58"),
        (ADDRESS[:-46] + "z" * 46, "neither a SHA2-256 nor an Ed25519 multihash"),
        (ADDRESS[:-46] + "1" * 50, "neither a SHA2-256 nor an Ed25519 multihash"),
        ("/" + "x" * 10_000_000, "has 10000001 characters; the limit is 512"),
    ],
)
def test_a_malformed_peer_address_is_shown_with_its_wrong_part_and_an_example(text, problem):
    with pytest.raises(UserError) as caught:
        parse_peer_address(text)
    assert problem in caught.value.what
    assert "is not a peer address" in caught.value.what
    assert repr(text[:100])[1:-1] in caught.value.what
    assert len(caught.value.what) < 500
    assert caught.value.hint == f"Example: {PEER_EXAMPLE}"


def test_a_host_address_refuses_a_peer_id():
    with pytest.raises(UserError, match="a host address: it must end after the port, but continues with /p2p/Qm"):
        parse_host_address(ADDRESS)


WORDS = st.sampled_from(["", "ip4", "1.2.3.4", "tcp", "udp", "1", "quic-v1", "p2p", RSA_ID])


@given(st.text(max_size=80) | st.lists(WORDS).map(lambda parts: "/" + "/".join(parts)))
def test_any_text_is_either_an_address_that_writes_back_or_a_user_error(text):
    for parse in (parse_peer_address, parse_host_address):
        try:
            address = parse(text)
        except UserError:
            continue
        assert str(address) == text
