"""How long a transfer takes on a simulated network, and how many bytes it sends; pure functions of the profiles.

The backbone is never the bottleneck: what a member sends is bounded by its uplink, what it receives by its downlink
(full duplex), and each connection by loss and round-trip time. All transfers of a phase run at once, each at a rate
in proportion to its size, which is the best that any schedule reaches; then a phase takes as long as the slowest
uplink, downlink or connection, and the longest one-way latency comes on top. Connections start slowly, once in each
exchange. Where packets are lost, the first exchange of a set of members takes O(members^2) time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from peer.outer.policy.claims import UNLIMITED_BYTES_S
from peer.outer.topology.topologies import Links
from peer.sim.world.scenario import PeerProfile

Floats = NDArray[np.float64]

SEGMENT_BYTES = 1460                # TCP payload of one 1500-byte packet over IPv4
MATHIS_CONSTANT = math.sqrt(3 / 2)  # periodic loss, every packet acknowledged; delayed acknowledgements: sqrt(3/4)
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES  # of a connection, RFC 6928; and after a long pause (RFC 2861)
STREAMS = 1                         # libp2p carries all streams between two peers over one TCP connection


def effective_rate(sender: PeerProfile, receiver: PeerProfile, streams: int = STREAMS) -> float:
    """Bytes/s of one transfer that has both links to itself: min(up, down, streams MSS C / (RTT sqrt(p))).

    RTT = 2 (l_i + l_j) and p = 1 - (1 - loss_i)(1 - loss_j). The last term is equation 3 of Mathis, Semke, Mahdavi
    and Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm" (1997). It describes Reno; CUBIC
    and BBR do better on long lossy paths, so it errs on the slow side. inf when nothing bounds it.
    """
    unit_s = connection_unit_s(sender, receiver, streams)
    return min(sender.up_bytes_s, receiver.down_bytes_s, 1 / unit_s if unit_s > 0 else math.inf)


def connection_unit_s(sender: PeerProfile, receiver: PeerProfile, streams: int = STREAMS) -> float:
    """Seconds per byte that loss and round-trip time alone cost; 0 without either."""
    latency_s = sender.latency_s + receiver.latency_s
    return _unit_s(latency_s, 1 - (1 - sender.loss) * (1 - receiver.loss), streams)


def slow_start_seconds(num_bytes: float, seconds: float, round_trip_s: float) -> float:
    """What a transfer takes longer than `seconds`, its time at the full rate, as its connection starts slowly.

    The window W doubles each round trip from FIRST_WINDOW_BYTES until it holds rate x round trip. W - first bytes are
    sent in log2(W / first) round trips; fewer, n, in log2(n / first + 1).
    """
    if round_trip_s <= 0.0 or num_bytes <= 0.0:
        return 0.0
    window = num_bytes * round_trip_s / seconds if seconds > 0.0 else math.inf
    if window <= FIRST_WINDOW_BYTES:
        return 0.0
    if num_bytes + FIRST_WINDOW_BYTES < window:
        return max(0.0, round_trip_s * math.log2(num_bytes / FIRST_WINDOW_BYTES + 1.0) - seconds)
    return round_trip_s * (math.log2(window / FIRST_WINDOW_BYTES) - 1.0 + FIRST_WINDOW_BYTES / window)


def agreement_seconds(profiles: Sequence[PeerProfile]) -> float:
    """Seconds in which members say before an exchange that they take part, and vote after it: words from all to all."""
    return 2.0 * _farthest_s(profiles)


def send_seconds(sender: PeerProfile, receiver: PeerProfile, num_bytes: float, streams: int = STREAMS) -> float:
    """Seconds until the last of `num_bytes` has arrived: num_bytes / effective_rate + l_i + l_j, and slow start."""
    seconds = num_bytes / effective_rate(sender, receiver, streams)
    latency_s = sender.latency_s + receiver.latency_s
    return seconds + latency_s + slow_start_seconds(num_bytes, seconds, 2.0 * latency_s)


def pair_seconds(
    first: PeerProfile, second: PeerProfile, first_bytes: float, second_bytes: float, streams: int = STREAMS
) -> float:
    """Seconds until two peers, sending at the same time, have each other's bytes."""
    return max(send_seconds(first, second, first_bytes, streams), send_seconds(second, first, second_bytes, streams))


def reduce_seconds(
    profiles: Sequence[PeerProfile],
    payload_bytes: float,
    update_bytes: float,
    shares: Sequence[float] | None = None,
    streams: int = STREAMS,
) -> float:
    """Seconds of a butterfly all-reduce: members scatter their shards, then return what they reduced.

    Member i reduces shares[i] of the vector. Scatter: it sends payload (1 - s_i) and receives payload s_i (R - 1).
    Return, which starts when all is scattered: it sends update s_i (R - 1) and receives update (1 - s_i).

    Args:
        profiles: the R members; one alone takes no time.
        payload_bytes: size of one encoded contribution.
        update_bytes: size of the encoded aggregate.
        shares: [R], at least 0, adding up to 1; None for equal shares.
        streams: parallel connections between two members.

    Raises:
        ValueError: shares of another length or sum.
    """
    others = len(profiles) - 1
    shards = _shares(len(profiles), shares)
    if others < 1:
        return 0.0
    slowest = _slowest_unit_s(tuple(profiles), streams)
    scatter_s = _phase_s(
        profiles, sent=payload_bytes * (1 - shards), received=payload_bytes * shards * others,
        connections_s=float((payload_bytes * shards * slowest).max()),
    )
    return_s = _phase_s(
        profiles, sent=update_bytes * shards * others, received=update_bytes * (1 - shards),
        connections_s=float((update_bytes * shards * slowest).max()),
    )
    latency_s = _farthest_s(profiles)
    start_s = slow_start_seconds(payload_bytes * float(shards.max()), scatter_s, 2.0 * latency_s)
    return scatter_s + return_s + start_s + 2.0 * latency_s


def gather_seconds(
    profiles: Sequence[PeerProfile], payload_bytes: Sequence[float], streams: int = STREAMS
) -> float:
    """Seconds until all peers have all payloads: i sends (R - 1) n_i and receives the sum of the others' n.

    Args:
        profiles: the R members; one alone takes no time.
        payload_bytes: [R], the size of each member's own payload.
        streams: parallel connections between two members.

    Raises:
        ValueError: another number of payloads than members.
    """
    if len(profiles) != len(payload_bytes):
        raise ValueError(f"{len(payload_bytes)} payloads for {len(profiles)} members: must be equal")
    if len(profiles) < 2:
        return 0.0
    own = np.asarray(payload_bytes, dtype=np.float64)
    seconds = _phase_s(
        profiles, sent=gather_traffic(payload_bytes), received=own.sum() - own,
        connections_s=float((own * _slowest_unit_s(tuple(profiles), streams)).max()),
    )
    latency_s = _farthest_s(profiles)
    return seconds + latency_s + slow_start_seconds(float(own.max()), seconds, 2.0 * latency_s)


def reduce_traffic(
    num_members: int, payload_bytes: float, update_bytes: float, shares: Sequence[float] | None = None
) -> Floats:
    """Bytes that each member sends in `reduce_seconds`, [R]: payload (1 - s_i) + update s_i (R - 1).

    With equal shares that is (R - 1) / R of the payload and (R - 1) / R of the update.

    Raises:
        ValueError: shares of another length or sum.
    """
    shards = _shares(num_members, shares)
    return payload_bytes * (1 - shards) + update_bytes * shards * (num_members - 1)


def gather_traffic(payload_bytes: Sequence[float]) -> Floats:
    """Bytes that each member sends in `gather_seconds`, [R]: (R - 1) n_i."""
    own = np.asarray(payload_bytes, dtype=np.float64)
    return own * max(0, len(own) - 1)


def ring_allreduce_bytes(numel: int, members: int, bytes_per_value: int = 4) -> float:
    """Bytes that each member of a ring sends for one all-reduce: 2 (R - 1) / R b P.

    The cheapest that any all-reduce sends (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002), and what
    data-parallel training in fp32 sends each step.
    """
    return 2 * (members - 1) * bytes_per_value * numel / members


def _shares(num_members: int, shares: Sequence[float] | None) -> Floats:
    if num_members < 1:
        raise ValueError(f"{num_members} members: must be at least 1")
    if shares is None:
        return np.full(num_members, 1 / num_members)
    shards = np.asarray(shares, dtype=np.float64)
    if len(shards) != num_members or not (shards >= 0).all() or abs(shards.sum() - 1) > 1e-6:
        raise ValueError(
            f"{len(shards)} shares with sum {shards.sum()} for {num_members} members: one each, at least 0, of sum 1"
        )
    return shards


def _unit_s(latency_s: float, loss: float, streams: int) -> float:
    return 2 * latency_s * math.sqrt(loss) / (streams * SEGMENT_BYTES * MATHIS_CONSTANT)


def _phase_s(profiles: Sequence[PeerProfile], *, sent: Floats, received: Floats, connections_s: float) -> float:
    """Without latency."""
    up = np.array([profile.up_bytes_s for profile in profiles])
    down = np.array([profile.down_bytes_s for profile in profiles])
    return max(float((sent / up).max()), float((received / down).max()), connections_s)


def _farthest_s(profiles: Sequence[PeerProfile]) -> float:
    """One way between the two members that are farthest from each other."""
    farthest, second = sorted((profile.latency_s for profile in profiles), reverse=True)[:2]
    return farthest + second


@lru_cache(maxsize=16)
def _slowest_unit_s(profiles: tuple[PeerProfile, ...], streams: int) -> Floats:
    """Seconds per byte of each member's slowest connection to another, [R]; a connection is alike in both directions.

    The same members exchange again and again, and R^2 connections take a while.
    """
    latency = np.array([profile.latency_s for profile in profiles])
    kept = np.array([1 - profile.loss for profile in profiles])
    slowest = np.zeros(len(profiles))
    if (kept == 1).all():
        return slowest
    for index in range(len(profiles)):
        unit = (latency[index] + latency) * np.sqrt(1 - kept[index] * kept)
        unit[index] = 0.0
        slowest[index] = unit.max()
    return slowest * _unit_s(1.0, 1.0, streams)


def links_of(profiles: Sequence[PeerProfile]) -> Links:
    """What topologies and allocators know of the peers' links; an unlimited one counts as 1e15 bytes/s."""
    return Links(
        up=tuple(min(profile.up_bytes_s, UNLIMITED_BYTES_S) for profile in profiles),
        down=tuple(min(profile.down_bytes_s, UNLIMITED_BYTES_S) for profile in profiles),
    )
