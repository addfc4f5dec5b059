"""Every duration of the protocol in one value, with its unit in its name and its reason beside it.

What peers must agree on stands elsewhere: how long records live in `peer.protocol.records`, the straggler window and
the longest exchange in the manifest. `docs/architecture.md` has this table in its section "Timing".
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from peer.protocol.records import PEER_TTL_S


def _lasts(seconds: float, meaning: str) -> Any:
    return field(default=seconds, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long one peer waits, retries and remembers; all fields are seconds. One value serves a whole process."""

    # shared by several rooms
    recheck_s: float = _lasts(0.5, "between looks at something that nothing announces")
    first_frame_s: float = _lasts(5.0, "for the first frame of a stream that another peer has opened")
    frame_timeout_s: float = _lasts(30.0, "for one frame of up to 4 MiB: at least 140 kB/s")
    probe_timeout_s: float = _lasts(3.0, "for a peer to show in matchmaking that it is awake")

    # runtime
    buffer_kept_s: float = _lasts(30.0, "that a round's memory is kept for the next round")
    round_untouched_s: float = _lasts(5.0, "of an exchange in which no donor work is done at all")

    # net
    open_timeout_s: float = _lasts(10.0, "to open a stream, or for the libp2p daemon to answer")
    daemon_start_s: float = _lasts(15.0, "for the libp2p daemon to start")
    daemon_end_s: float = _lasts(5.0, "for the libp2p daemon or the DHT node to end before it is killed")
    daemon_idle_s: float = _lasts(120.0, "that the daemon lives without a first call of the DHT")
    reconnect_period_s: float = _lasts(5.0, "between looks whether the bootstrap nodes are connected")
    client_recheck_s: float = _lasts(0.1, "between looks whether a client has dialled this peer")
    finish_timeout_s: float = _lasts(5.0, "for the other end to read what was said last and to close")
    dial_timeout_s: float = _lasts(3.0, "for one dial-back to a machine that asks whether it is reachable")
    dial_back_answer_s: float = _lasts(10.0, "for a question about reachability, and for its answer")
    dial_back_pause_s: float = _lasts(2.0, "between two such questions: a router takes seconds to forward a port")
    direct_connect_s: float = _lasts(1.2, "to connect directly: a lost first packet is sent again after a second")
    direct_greet_s: float = _lasts(3.0, "for TLS and the greeting: a silent host must leave time for libp2p")
    direct_timeout_s: float = _lasts(5.0, "for a handshake, an entry or an answer of a direct connection")
    direct_shut_s: float = _lasts(60.0, "that a peer without a direct way is not tried again, doubled each time")
    direct_longest_shut_s: float = _lasts(3600.0, "that it is not tried again at most")
    accept_pause_s: float = _lasts(0.2, "after a connection could not be accepted")
    stale_socket_s: float = _lasts(60.0, "of age before a daemon's socket file that nothing listens on is removed")
    refresh_period_s: float = _lasts(2.0, "between two reads of the directory, and between two announcements")
    announce_pause_s: float = _lasts(1.0, "between announcements that are wanted soon: each costs several DHT calls")
    fresh_s: float = _lasts(PEER_TTL_S / 2, "of age up to which a record shows that others are there now")
    report_pause_s: float = _lasts(3.0, "between two reports of a peer, if a round has ended")
    report_period_s: float = _lasts(10.0, "between two reports of a peer otherwise")
    manifest_period_s: float = _lasts(30.0, "between two publications of the manifest at most, at least half of it")
    manifest_timeout_s: float = _lasts(10.0, "to find a manifest in the DHT")
    manifest_answer_s: float = _lasts(5.0, "for a peer to hand out the manifest of its run")
    trim_period_s: float = _lasts(30.0, "between two looks whether a flood of records has left memory to give back")
    speed_s: float = _lasts(6.0, "for one measurement of a line's speed")
    speed_enough_s: float = _lasts(0.4, "of a measurement before more bytes say no more")
    speed_pause_s: float = _lasts(60.0, "in which a peer serves one newcomer one such measurement, and ten in all")
    dht_timeout_s: float = _lasts(10.0, "for one read or write of the DHT")

    # group
    solo_patience_s: float = _lasts(4.0, "that a leader waits without a group, and a group for late answers")
    support_s: float = _lasts(10.0, "that a leader waits for those that would not follow a round of so few")
    leader_recheck_s: float = _lasts(0.25, "between two looks of a leader at who has come")
    awake_period_s: float = _lasts(1.0, "between two statuses of a leader to a member that waits")
    leader_silent_s: float = _lasts(1.5, "of a leader's silence before another one that invites is followed")
    sent_away_s: float = _lasts(5.0, "of being sent away by one leader before it is passed over")
    wasted_s: float = _lasts(20.0, "wasted by one leader before it is disbelieved: one group may be bad luck")
    longest_disbelief_s: float = _lasts(600.0, "that such a leader is disbelieved at most")
    nonsense_s: float = _lasts(60.0, "that a leader is disbelieved after it has broken the protocol")
    gone_for_s: float = _lasts(6.0, "that a silent peer is passed over")
    announced_for_s: float = _lasts(2.0, "that a peer which comes from behind is expected: it has caught up by then")
    seen_period_s: float = _lasts(30.0, "between two times that a silent leader is believed to be back")
    relay_doubt_s: float = _lasts(120.0, "that a client's relay is doubted after a round failed through it")
    return_period_s: float = _lasts(2.0, "between two times that a group hears of a member's return")
    first_regroup_wait_s: float = _lasts(2.0, "before a peer that did not come is tried again, doubled each time")
    longest_regroup_wait_s: float = _lasts(120.0, "before it is tried again at most")
    interrupt_pause_s: float = _lasts(10.0, "between two waits that a group gives up for the same newcomer")
    excuse_period_s: float = _lasts(30.0, "between two absences of a returning peer that are excused")

    # catchup
    least_step_s: float = _lasts(0.002, "of a step of the smallest model: rounds of a chain cannot follow faster")
    least_exchange_s: float = _lasts(0.005, "of the rest of a round, for the same")
    claim_s: float = _lasts(10.0, "for a donor's first links: after that it must send fifty a second")
    abandoned_s: float = _lasts(600.0, "without a round before a chain that few established peers signed will do")
    checkpoint_answer_s: float = _lasts(5.0, "for the newest checkpoint, or control record, of another node")
    checkpoint_period_s: float = _lasts(5.0, "between two reads of the checkpoints in the DHT")
    control_period_s: float = _lasts(2.0, "between two reads of the organiser's control record in the DHT")
    reader_idle_s: float = _lasts(0.5, "that a reader may take to ask for more before it makes room")
    reader_spared_s: float = _lasts(0.5, "of a slow reader before it makes room: what is short is read to its end")
    bulk_reader_spared_s: float = _lasts(10.0, "the same where minutes are read")
    busy_period_s: float = _lasts(5.0, "between two words of a donor that it still writes its snapshot")
    writing_s: float = _lasts(30.0, "for a donor to write its snapshot before another one is asked; it writes on")
    lease_s: float = _lasts(600.0, "without a certified part of leased data before another peer may take it over")
    tokenizer_patience_s: float = _lasts(60.0, "without a donor of the tokenizer's next file before a newcomer ends")
    watch_period_s: float = _lasts(0.25, "between two looks for a slow donor")
    slow_floor_s: float = _lasts(2.0, "that any donor may take for a chunk, however fast the others are")
    busy_retry_s: float = _lasts(1.0, "before a busy donor is asked again")
    busy_patience_s: float = _lasts(60.0, "without any chunk before busy donors are given up")
    next_donor_s: float = _lasts(1.0, "of a donor's silence before the next one is asked as well")
    new_donors_s: float = _lasts(10.0, "in which donors are added to one attempt: a Byzantine peer may invent many")
    not_heavier_s: float = _lasts(3.0, "without a donor whose lineage is not heavier, or not agreed on")
    unreachable_s: float = _lasts(1.0, "without a donor that went away")
    silent_donor_s: float = _lasts(10.0, "without a donor that did not answer")
    distrust_s: float = _lasts(60.0, "without a donor that lied")
    ask_timeout_s: float = _lasts(3.0, "for a member to say whether a round continued")
    hearsay_s: float = _lasts(0.5, "for the same of a member that another one says is asleep")
    state_recheck_s: float = _lasts(0.25, "before a member that has not applied the round is asked again")
    state_patience_s: float = _lasts(10.0, "for members to name their state, and longer for large states")
    quorum_grace_s: float = _lasts(1.0, "for the other members once two thirds have named their state")
    voted_s: float = _lasts(2.0, "for the same where members have just voted, so that they know it")

    # round
    min_exchange_s: float = _lasts(10.0, "that an exchange may take at least, however small it is")
    soft_exchange_s: float = _lasts(5.0, "of an exchange at least, once it is known what exchanges take")
    late_roster_s: float = _lasts(1.0, "that a roster may come later than the first stream of its group")
    late_s: float = _lasts(1.0, "that one member may make the others wait, however short rounds are")
    late_join_s: float = _lasts(0.4, "of the window to join, at its end, in which one that has not joined is late")
    withheld_word_s: float = _lasts(0.1, "for the word of a member whose join was waited for, as others end the round")
    min_sending_s: float = _lasts(2.0, "for a slow reader once there is a certificate, if the round was shorter")
    late_vote_s: float = _lasts(1.0, "after the deadline from which votes do not count: this machine has slept")
    abort_timeout_s: float = _lasts(1.0, "to tell a member that a round is given up")

    # lineage
    look_around_s: float = _lasts(1.0, "for the last group to answer a member that has slept")
    caught_up_s: float = _lasts(2.0, "after catching up in which the others need not be asked where they are")
    alone_recheck_s: float = _lasts(15.0, "that a peer which is alone waits before it tries a round")
    first_backoff_s: float = _lasts(0.1, "half of the longest pause after a first failed round, doubled each time")
    max_backoff_s: float = _lasts(5.0, "of pause at most, however many rounds have failed in a row")
    unproven_s: float = _lasts(30.0, "without a peer that says this one is behind and shows nothing; doubled each time")
    last_round_s: float = _lasts(15.0, "beyond its wait for others that a round may take which ends a run")
    unheard_s: float = _lasts(10.0, "that a member which has slept asks what became of its round")

    # gossip
    signed_timeout_s: float = _lasts(60.0, "for a signed state: its owner may have to write it first")
    gossip_answer_s: float = _lasts(4.0, "beyond the straggler window to answer a call, and for records to be read")
    roster_wait_s: float = _lasts(10.0, "for members to say with whom they continue")
    last_wait_s: float = _lasts(4.0, "for a member that another one has given up on")
    line_pause_s: float = _lasts(60.0, "between two measurements of lines whose speed is known")
    renewed_after_s: float = _lasts(30.0, "that several newcomers are given the same snapshot")

    # state
    file_held_s: float = _lasts(30.0, "that a snapshot is kept after an offer or its last reader")
    longest_file_held_s: float = _lasts(600.0, "that it is kept at most, even while it is read")

    # trust
    first_refusal_s: float = _lasts(60.0, "that a peer which broke the protocol gets no seat, doubled each time")
    longest_refusal_s: float = _lasts(3600.0, "that it gets no seat at most")
    dispute_s: float = _lasts(600.0, "that it is known which members said of each other that a round failed there")
    stall_words_s: float = _lasts(1.0, "for the members of a failed round to say what they lacked")
    least_waste_s: float = _lasts(1.0, "that a failed round costs at least: a group forms again")
    fresh_pause_s: float = _lasts(60.0, "without fresh peers at least after a newcomer has cost a deadline")
    payloads_kept_s: float = _lasts(120.0, "that payloads are kept for audits when no round follows")
    audit_ask_s: float = _lasts(10.0, "for the first answer to an audit's question")
    audit_timeout_s: float = _lasts(60.0, "for one audit, and for one payload of it")
    evidence_answer_s: float = _lasts(10.0, "for evidence that was announced")
    offer_timeout_s: float = _lasts(60.0, "for one offer of evidence with its payloads")
    offers_window_s: float = _lasts(60.0, "in which one peer may offer evidence six times")

    # agent
    swarm_period_s: float = _lasts(1.0, "between two reports of the live peers to the trainer")
    close_timeout_s: float = _lasts(2.0, "for the rounds, and for the node, to end when the peer leaves")
    organiser_period_s: float = _lasts(10.0, "between two looks whether the bootstrap still serves this run")
    linger_recheck_s: float = _lasts(0.25, "between looks of a leaving peer whether others have what it has")

    @property
    def io_turn_s(self) -> float:
        """that a chunk waits for rounds at most: its reader gives the donor up after `frame_timeout_s`"""
        return self.frame_timeout_s / 3

    @property
    def preopened_kept_s(self) -> float:
        """that a stream opened ahead is used: the donor closes it after `first_frame_s`"""
        return 0.6 * self.first_frame_s

    @property
    def invited_s(self) -> float:
        """that a peer which invites is expected: the directory has heard of it by then"""
        return 3 * self.refresh_period_s

    @property
    def join_patience_s(self) -> float:
        """for the first record of another peer: a little more than `refresh_period_s`"""
        return 1.25 * self.refresh_period_s

    def least_round_s(self, steps: int, straggler_wait_s: float) -> float:
        """that rounds take on average: one begins with half of a contribution of `steps`, or when the window ends"""
        return self.least_exchange_s + min(self.least_step_s * steps / 2, straggler_wait_s)

    @property
    def state_retry_s(self) -> float:
        """between two attempts to get a first state"""
        return 4 * self.recheck_s

    def scaled(self, factor: float) -> Timing:
        """All durations times `factor`."""
        return replace(self, **{each.name: factor * getattr(self, each.name) for each in fields(self)})


STANDARD = Timing()
