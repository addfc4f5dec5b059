"""What tests of audits do in a circle: let a reducer lie, and audit it."""

from __future__ import annotations


def lies(circle, index, tampering):
    """Let one seat reduce with another aggregator than it says."""
    circle.seats[index].exchange._work._aggregator = tampering


def heard(circle, index):
    """What a member was told in the round that has just ended."""
    return circle.seats[index].guard._showing._heard


def units_of(circle, index, reducer):
    return len(heard(circle, index).reduced[circle.seats[reducer].peer_id][1])


async def audit(circle, auditor, reducer, unit):
    seat = circle.seats[auditor]
    return await seat.guard._auditor.audit(heard(circle, auditor), circle.seats[reducer].peer_id, unit)
