"""The limits that a person sets for a peer, and what of the run does not fit them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from peer.protocol.line_limits import BITS_PER_MBIT, BYTES_PER_GB, ActiveHours, LineLimits
from peer.settings import PeerSettings
from peer.system.clock import Clock
from peer.telemetry.figures import human_bytes, human_duration

if TYPE_CHECKING:
    from peer.outer.recipe.plan import RunPlan

log = logging.getLogger(__name__)
MONTH_DAYS = 30.0
DOES_NOT_FIT = "that does not fit"
RECHECK_S = 5.0


def in_hours(text: str | None, clock: Clock = time.time) -> bool:
    """Whether now is within the hours that a person has set, if any."""
    return text is None or ActiveHours.parse(text).now(clock)


def await_hours(text: str | None, clock: Clock = time.time, pause: Callable[[float], None] = time.sleep) -> None:
    """Return at once in the hours that a person has set, or once they come."""
    if not in_hours(text, clock):
        log.info("waiting for the hours %s (active_hours)", text)
        while not in_hours(text, clock):
            pause(RECHECK_S)


def limits_of(settings: PeerSettings) -> LineLimits:
    """Those of the settings."""
    return LineLimits(
        up_mbit=settings.max_upload_mbit, down_mbit=settings.max_download_mbit,
        monthly_gb=settings.monthly_traffic_gb, hours=settings.active_hours,
    )  # fmt: skip


def limits_in_words(limits: LineLimits, plan: RunPlan, numel: int) -> Iterator[str]:
    """What the limits mean for a run of a model with so many parameters, a line for each.

    A member of a large group sends about twice its contribution in a round, once to the reducers and once as one; where
    payloads are gathered, once to each other member.
    """
    gathers = plan.recipe.exchange == "gather"
    payload = (1.0 if gathers else 2.0) * plan.recipe.codec().wire_bytes(-(-numel // plan.recipe.num_fragments))
    each = " for each other member" if gathers else ""
    state = 4.0 * numel * (1 + plan.recipe.optimizer.num_buffers)
    longest_s = plan.manifest.rounds.timeout_s
    for flag, mbit, verb in (
        ("--max-upload-mbit", limits.up_mbit, "sends"), ("--max-download-mbit", limits.down_mbit, "receives"),
    ):  # fmt: skip
        if mbit is not None:
            seconds = payload / (mbit * BITS_PER_MBIT / 8)
            line = f"{flag} {mbit:g}: a round {verb} about {human_bytes(payload)}{each}, in {human_duration(seconds)}"
            if seconds > longest_s:
                line += f"; {DOES_NOT_FIT}: the run gives up a round after {longest_s:g} s"
            yield line
    if limits.down_mbit is not None:
        yield f"the state of {human_bytes(state)} comes in {human_duration(state / (limits.down_mbit * 125_000))}"
    if limits.monthly_gb is not None:
        rounds = (limits.monthly_gb * BYTES_PER_GB - state) / (2 * payload) / MONTH_DAYS
        beside = " with one other member" if gathers else ""
        line = f"--monthly-traffic-gb {limits.monthly_gb:g}: enough for {max(0.0, rounds):,.0f} rounds a day{beside}"
        yield line if rounds >= 1 else f"{line}; {DOES_NOT_FIT}: the state alone is {human_bytes(state)}"
    if limits.hours is not None:
        yield f"--active-hours {limits.hours}: trains {ActiveHours.parse(limits.hours).hours:g} hours a day"
