"""The numbers that docs/security.md states are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap import follower
from peer.outer.compress import base
from peer.protocol import evidence, fork_choice, records, wire
from peer.protocol.manifest import WORK_BITS, RoundSpec, TrustSpec
from peer.protocol.tokenizer_spec import MAX_TOKENIZER_BYTES
from peer.swarm.catchup import chain_scout, claims, patience, readers
from peer.swarm.catchup.history_server import BULK_READERS, READERS, READERS_PER_PEER
from peer.swarm.group.invites import LAST_CALL
from peer.swarm.net import daemon, dht, directory, nearest, node, record_store, speed
from peer.swarm.round import deadline, group_streams, lateness, votes
from peer.swarm.runtime.timing import STANDARD as T
from peer.swarm.trust import audit_server, auditor, ban_list, debts, evidence_gossip, failed_round, recompute, strikes
from peer.swarm.trust.stalls import MISSED_IN_A_ROW
from peer.system import bounded_child

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "security.md").read_text().split())
KIB, MIB = 2**10, 2**20

STATED: list[tuple[str, float, float]] = [  # a sentence, a number that it states, and where the code has it
    # audits, evidence, strikes
    ("with probability 1 / members, but at least 0.05", 0.05, auditor.LEAST_PROBABILITY),
    ("four requests of a peer in a round", 4, audit_server.ASKS_OF_ONE),
    ("one slice of every member's contribution, at most 64 MiB", 64 * MIB, recompute.MAX_AUDIT_BYTES),
    ("until the next exchange begins, two minutes at most", 120, T.payloads_kept_s),
    ("it keeps the last 16 MiB", 16 * MIB, audit_server.KEPT_BYTES),
    ("accepts at most six offers a minute from one peer", 6, evidence_gossip.OFFERS_A_MINUTE),
    ("accepts at most six offers a minute from one peer", 60, T.offers_window_s),
    ("with the newest 1,024 of its kind", 1024, ban_list.MAX_NOTED),
    ("After three it refuses the sender a seat for a minute", 3, strikes.STRIKES),
    ("After three it refuses the sender a seat for a minute", 60, T.first_refusal_s),
    ("a seat for a minute, then for two, up to an hour", 3600, T.longest_refusal_s),
    # leaders, readers
    ("such a leader is not followed for a minute", 60, T.nonsense_s),
    ("the leader is passed over for six seconds", 6, T.gone_for_s),
    ("once a leader has wasted five seconds so", 5, T.sent_away_s),
    ("and ten more where too few", 10, T.support_s),
    ("Once it has wasted more than 20 s before", 20, T.wasted_s),
    ("for as long as it had wasted before, ten minutes at most", 600, T.longest_disbelief_s),
    ("A leader has 1.25 windows to form a group", 1.25, 2 - LAST_CALL),
    ("and four seconds more if the group forms", 4, T.solo_patience_s),
    ("it avoids the leader for half a minute", 30, T.unproven_s),
    ("at least two seconds, longer where a line is slow", 2, T.min_sending_s),
    # deadlines, words
    ("The deadline of an exchange is 5 s", 5, T.soft_exchange_s),
    ("5 s (10 s before three rounds are known)", 10, T.min_exchange_s),
    ("5 s (10 s before three rounds are known)", 3, deadline.ENOUGH),
    ("and four times what as many bytes took *most* members", 4, deadline.MULTIPLE),
    ("the median of the last nine exchanges", 9, deadline.REMEMBERED),
    ("(NaN, above 2^47 in a contribution", 2.0**47, base.LARGEST_CONTRIBUTION),
    ("or 2^48 in a reduced shard)", 2.0**48, base.LARGEST_VALUE),
    ("also ends the round within 0.1 s", 0.1, T.withheld_word_s),
    ("or a second after this peer has left the round", 1, T.stall_words_s),
    ("Disputes are remembered for ten minutes at least", 600, T.dispute_s),
    ("owes nothing until 0.4 s before the end", 0.4, T.late_join_s),
    # debts
    ("a *debt* of seven times the seconds that it cost", 7, debts.FACTOR),
    ("one second at least, which passes with time", 1, T.least_waste_s),
    ("14 times the new loss is added to that, then 28 times", 14, 2 * debts.FACTOR),
    ("has cost elsewhere count twice", 2, debts.ELSEWHERE),
    ("with six tenths of the members would have cost", 0.6, failed_round.MOST_IN_TURN),
    ("From the third round in a row that a peer misses", 3, MISSED_IN_A_ROW),
    ("later than most by more than a second, twice what the others took", 1, T.late_s),
    ("twice what the others took and 15% of the time", 2, lateness.MULTIPLE),
    ("twice what the others took and 15% of the time", 0.15, lateness.SHARE),
    ("from half of a second or of those 15% on", 0.5, lateness.EXCUSE),
    ("no fresh peer gets a seat for a minute, or for seven times", 60, T.fresh_pause_s),
    ("for a part of that where it cost less than five seconds", 5, T.soft_exchange_s),
    ("waits for the others a tenth as long as the round has taken", 0.1, votes.LAST_VOTE_SHARE),
    ("(`rounds.straggler_wait_s`, 30 s)", 30, RoundSpec().straggler_wait_s),
    # fork choice, checkpoints, claims
    ("the weight of those in the last ten links", 10, fork_choice.RECENT_LINKS),
    ("A peer gives up at most 1,000 links of its own", 1000, fork_choice.FINAL_LINKS),
    ("a wait without any round, awake, of ten minutes, or of four rounds", 600, T.abandoned_s),
    ("of ten minutes, or of four rounds as long as the last ones were", 4, patience.ABANDONED_ROUNDS),
    ("and signs every four rounds or once a minute", 4, follower.CHECKPOINT_ROUNDS),
    ("and signs every four rounds or once a minute", 60, follower.CHECKPOINT_S),
    ("at 2 ms each, or the straggler window, and 5 ms more", 0.002, T.least_step_s),
    ("at 2 ms each, or the straggler window, and 5 ms more", 0.005, T.least_exchange_s),
    ("with a thousand rounds' grace", 1000, chain_scout.GRACE_ROUNDS),
    ("four claims at a time", 4, claims.LOOKS_AT_ONCE),
    ("must deliver 50 links a second after ten seconds", 50, chain_scout.LEAST_LINK_RATE),
    ("must deliver 50 links a second after ten seconds", 10, T.claim_s),
    ("reads at most 4,096 links of another branch", 4096, chain_scout.MOST_LINKS),
    ("A donor that lied is not asked for a minute", 60, T.distrust_s),
    ("one that did not answer for ten seconds", 10, T.silent_donor_s),
    ("one whose chain is not followed for three", 3, T.not_heavier_s),
    ("or a second for each hundred of its links", 100, claims.LINKS_A_SECOND),
    ("waits nine times as long as the check took", 9, chain_scout.PAUSE),
    # identities and weights
    ("`trust: {identity_work: 21}`", 21, WORK_BITS),
    ("and three times the median of those that have passed probation", 3, TrustSpec().largest_weight),
    ("costs a liar a new key and ten rounds", 10, TrustSpec().probation_rounds),
    # manifests
    ("of known names and 32 MiB together", 32 * MIB, MAX_TOKENIZER_BYTES),
    ("in at most 60 s of CPU time and 2 GiB", 60, bounded_child.CPU_S),
    ("in at most 60 s of CPU time and 2 GiB", 2**31, bounded_child.MEMORY_BYTES),
    # quotas
    ("| bytes of a record | 4 KiB; of a peer record 1.25 KiB |", 4 * KIB, records.MAX_RECORD_BYTES),
    ("| bytes of a record | 4 KiB; of a peer record 1.25 KiB |", 1.25 * KIB, records.MAX_PEER_RECORD_BYTES),
    ("A read asks two of the five nodes nearest to its key", 2, nearest.ASKED[0]),
    ("and one other of the twenty nearest, by lot", 1, nearest.ASKED[1]),
    ("until one has answered, eight", 8, sum(nearest.ASKED_FIRST)),
    ("Every sixteenth use", 16, nearest.SEARCH_EVERY),
    ("reads from them every fourth time", 4, nearest.WIDELY_EVERY),
    ("A record lives for 15 seconds and is read every two", 15, records.PEER_TTL_S),
    ("A record lives for 15 seconds and is read every two", 2, T.refresh_period_s),
    ("that a peer repeats | 32 each |", 32, record_store.MAX_RECORDS_OF_A_PEER),
    ("| records of other runs than a node's own | 8 MiB |", 8 * MIB, record_store.MAX_FOREIGN_BYTES),
    ("what a reader takes of one | 256 KiB |", 256 * KIB, record_store.MAX_ANSWER_BYTES),
    ("| a call | 512 KiB, 32 records, 8 keys |", 512 * KIB, daemon.MAX_CALL_BYTES),
    ("| a call | 512 KiB, 32 records, 8 keys |", 32, dht.MAX_CALL_RECORDS),
    ("| a call | 512 KiB, 32 records, 8 keys |", 8, dht.MAX_CALL_KEYS),
    ("| peers that a directory shows | 512 |", 512, directory.MAX_PEERS),
    ("up to 32 invalid ones before it counts as silent", 32, dht.MAX_REFUSED),
    # streams
    ("A peer holds at most 32 streams of another and 512 in all", 32, node.MAX_STREAMS_PER_PEER),
    ("A peer holds at most 32 streams of another and 512 in all", 512, node.MAX_STREAMS),
    ("of peers that no round has seen, 16 and 256 more", 16, node.MAX_STREAMS_PER_STRANGER),
    ("of peers that no round has seen, 16 and 256 more", 256, node.MAX_OF_STRANGERS),
    ("A donor serves 16 readers of each kind", 16, READERS),
    ("offers of snapshots), four of one peer", 4, READERS_PER_PEER),
    ("of chunks 8 strangers and 4 others", 8, BULK_READERS[True]),
    ("of chunks 8 strangers and 4 others", 4, BULK_READERS[False]),
    ("if that is below 128 KiB a second after the first MiB", 128 * KIB, readers.LEAST_RATE),
    ("(16 KiB for chunks, after ten seconds)", 16 * KIB, readers.LEAST_BULK_RATE),
    ("(16 KiB for chunks, after ten seconds)", 10, T.bulk_reader_spared_s),
    ("anybody, once a minute; ten in a minute | 4.6 MB, in 6 s", 10, speed.SERVED_AT_MOST),
    ("anybody, once a minute; ten in a minute | 4.6 MB, in 6 s", 6, T.speed_s),
    ("anybody with a signed join of this run | 816 bytes, in 3 s", 816, wire.MAX_JOIN_BYTES),
    ("members of a group that failed, once each | 480 KiB", 480 * KIB, wire.MAX_WORDS_BYTES),
    ("64 for unknown groups, 2 of one peer", 64, group_streams.EARLY_STREAMS),
    ("64 for unknown groups, 2 of one peer", 2, group_streams.EARLY_STREAMS_OF_ONE),
    ("six times a minute | 256 KiB, in 10 s", 256 * KIB, evidence.MAX_EVIDENCE_BYTES),
    ("whose clock is more than 3 s off is refused", 3, records.CLOCK_SKEW_S),
]


@pytest.mark.parametrize(("sentence", "stated", "number"), STATED, ids=[f"{s[:40]}-{n:g}" for s, n, _ in STATED])
def test_a_number_of_the_page_is_that_of_the_code(sentence: str, stated: float, number: float) -> None:
    assert sentence in PAGE
    assert stated == number
