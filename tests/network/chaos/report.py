"""The report of the chaos campaigns: counts by campaign and seed, their sums, and the figures to reach."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, describe_machine
from peer.errors import UserError

Counts = dict[str, Any]
ABOUT = "Kills, stops, partitions, bad links, attacks, floods, wrong clocks, failing disks and a soak, on real peers"
NOTES = (
    "Written by `make chaos`, not by `make bench`. Every count is the sum over the seeds that have run; the entries of "
    "`campaigns` in the JSON file are separate for each seed. A figure below its number of events was cut short by the "
    "time limit of a campaign: `make chaos RESUME=1` continues it. The slope of G13 is the largest of eight "
    "processes; the three agents have +1.06, +0.44 and -0.43 MB/h, at 218 MB after 38 newcomers and 114 restarts."
)
# The sums that a reader looks for, and where they come from.
TOTALS = (
    "kills_per_phase", "rounds", "hangs", "orphans", "digests_compared", "digest_mismatches", "stops", "inputs_fuzzed",
    "crashes", "attacks", "honest_wrongly_dropped", "parts_tampered",
)  # fmt: skip
LARGEST, SMALLEST = ("longest_", "largest_"), "smallest_"


def added(runs: Iterable[Mapping[str, Any]]) -> Counts:
    """The sum of several counts, key by key: numbers and mappings of numbers add up, lists follow each other. Of what
    is called longest or largest the largest stays, of what is called smallest the smallest.
    """
    total: Counts = {}
    for counts in runs:
        for key, value in counts.items():
            if key not in total:
                total[key] = dict(value) if isinstance(value, Mapping) else value
            elif isinstance(value, Mapping):
                total[key] = added([total[key], value])
            elif key.startswith(LARGEST):
                total[key] = max(total[key], value)
            elif key.startswith(SMALLEST):
                total[key] = min(total[key], value)
            else:
                total[key] = total[key] + value
    return total


class ChaosReport:
    """The document on disk. Every `put` reads it, replaces one entry and writes it whole: an interrupted campaign loses
    nothing, and two campaigns may keep one report.

    Args:
        path: where it is kept.
        command: that runs now; empty if it runs no campaign.
        forget: campaigns that begin at nothing; what others have counted stays.
    """

    def __init__(self, path: Path, command: str = "", forget: Iterable[str] = ()) -> None:
        self._path, self._command, self._machine = path, command, describe_machine()
        self.campaigns: dict[str, dict[str, Counts]] = {}
        self.commands: list[str] = []
        self._load()
        forgotten = set(forget)
        for name in forgotten:
            self.campaigns.pop(name, None)
        self.commands = [each for each in self.commands if not (run := _campaigns_of(each)) or run - forgotten]
        if command or self.campaigns:
            self._save()

    def _load(self) -> None:
        if self._path.exists():
            before = _read(self._path)
            self.campaigns, self.commands = before["campaigns"], before["commands"]

    def done(self, campaign: str) -> Counts:
        """What earlier runs of this campaign have counted."""
        return added(self.campaigns.get(campaign, {}).values())

    def free_seed(self, campaign: str, seed: int) -> int:
        """The first seed from here on that this campaign has not used."""
        used = self.campaigns.get(campaign, {})
        while str(seed) in used:
            seed += 1
        return seed

    def put(self, campaign: str, seed: int | str, counts: Counts) -> None:
        """Replace the counts of one seed."""
        self._load()
        self.campaigns.setdefault(campaign, {})[str(seed)] = counts
        self._save()

    def merge(self, name: str, other: Path) -> None:
        """Take in what another command has counted: a JSON object of numbers, or one whose `counts` is, and which may
        tell its `command`.
        """
        document = _read(other)
        if (command := document.get("command")) and command not in self.commands:
            self.commands.append(str(command))
            self._save()
        self.put(name, str(document.get("seed", "merged")), document.get("counts", document))

    def _save(self) -> None:
        if self._command and self._command not in self.commands:
            self.commands.append(self._command)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        os.replace(temporary, self._path)

    def to_dict(self) -> dict[str, Any]:
        """A JSON document; `benchmarks.table` shows it."""
        everything = added(run for name in sorted(self.campaigns) for run in self.campaigns[name].values())
        seeds = sorted({int(seed) for runs in self.campaigns.values() for seed in runs if seed.isdigit()})
        return {
            "benchmark": "chaos",
            "about": ABOUT,
            "command": "\n    ".join(self.commands),
            "seed": ", ".join(map(str, seeds)),
            "machine": self._machine,
            "notes": NOTES,
            "figures": [figure.to_dict() for figure in figures(self.campaigns)],
            **{key: everything[key] for key in TOTALS if key in everything},
            "seeds": seeds,
            "commands": self.commands,
            "campaigns": self.campaigns,
        }


def figures(campaigns: Mapping[str, Mapping[str, Counts]]) -> list[Figure]:
    """What each campaign that has run must reach."""
    rows: list[Figure] = []
    for name, targets in TARGETS.items():
        counts = with_ratios(added(campaigns.get(name, {}).values()))
        for key, label, unit, limit, at_most in targets:
            if key in counts:
                value = min(counts[key].values()) if isinstance(counts[key], Mapping) else counts[key]
                rows.append(Figure(name=f"{name} {label}", value=value, unit=unit, limit=limit, at_most=at_most))
    return rows


def with_ratios(counts: Counts) -> Counts:
    """What follows from sums."""
    if counts.get("parts_tampered"):
        counts["share_caught"] = counts["parts_caught"] / counts["parts_tampered"]
    if "within" in counts:
        counts["healed_late"] = counts["trials"] - counts["within"]
        counts["still_apart"] = counts["trials"] - counts["one_state"]
    if counts.get("members_looked_for"):
        counts["share_shown"] = counts["members_shown"] / counts["members_looked_for"]
    if places := counts.get("places"):
        shares = {condition: 100 * counts["seats"][condition] / count for condition, count in places.items()}
        counts["seated"], counts["seated_least"] = sum(shares.values()) / len(shares), min(shares.values())
    if "kills_per_phase" in counts:
        counts["kills"] = sum(counts["kills_per_phase"].values())
    return counts


Target = tuple[str, str, str, float | None, bool]
TARGETS: dict[str, tuple[Target, ...]] = {
    "G2": (
        ("break_point_runs", "runs with two to seven Byzantine peers of 16", "", 18, False),
        ("smallest_borne", "Byzantine peers up to which no run lost 2%", "", 4, False),
        ("smallest_bounded", "Byzantine peers up to which no run lost 100%", "", None, True),
    ),
    "G3": (
        ("kills", "kills", "", 500, False),
        ("kills_per_phase", "kills in the phase with the fewest", "", 40, False),
        ("rounds", "rounds committed meanwhile", "", 300, False),
        ("hangs", "hangs", "", 0, True),
        ("orphans", "processes left after 5 s", "", 0, True),
        ("digests_compared", "states compared", "", None, True),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "G4": (
        ("stops", "stops", "", 200, False),
        ("late_others", "stops after which the others missed their deadline", "", 0, True),
        ("late_returns", "returns after more than 2 rounds of 5 s or more, refused by none", "", 0, True),
        ("refused_returns", "later returns, refused for rounds that earlier stops cost", "", None, True),
        ("slow_peer_rounds", "rounds with a 10 times slower peer", "", 1, False),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "G4-quick": (
        ("stops", "stops", "", 200, False),
        ("late_others", "stops after which the others missed their deadline", "", 0, True),
        ("late_returns", "returns after more than 2 rounds, with rounds of 2 s or more", "", None, True),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "G5": (
        ("trials", "partitions that healed", "", 50, False),
        ("split", "of them into two lineages", "", None, True),
        ("healed_late", "not on one lineage within 3 rounds", "", 0, True),
        ("still_apart", "after which states differed", "", 0, True),
        ("unexplained_tokens", "tokens given up and not told, or told and not given up", "", 0, True),
        ("longest_until_one_s", "until all are on one lineage, the longest", "s", None, True),
        ("longest_until_all_s", "until a round of all, the longest", "s", None, True),
    ),
    "G6": (
        ("conditions", "kinds of bad links", "", 7, False),
        ("committed", "rounds committed, by member", "", None, True),
        ("aborted", "rounds aborted, by member", "", None, True),
        ("late", "of them after their deadline", "", 0, True),
        ("longest_s", "the longest round", "s", None, True),
        ("seated", "seats that members had, of all in those rounds, mean over losses", "%", None, False),
        ("seated_least", "the same with the loss that cost most", "%", None, False),
        ("back_s", "until a round of all once the links are good again, the longest", "s", None, True),
    ),
    "stalls": (
        ("share_known", "rounds with one member that stalls, in the worst way", "%", 80, False),
        ("share_fresh", "rounds with identities that stall one after the other", "%", 50, False),
        ("fresh_identities", "such identities", "", None, True),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "G7": (
        ("absences", "absences of the bootstrap", "", 21, False),
        ("longest_away_s", "the longest", "s", 600, False),
        ("rounds_committed", "rounds committed meanwhile, by member", "", None, True),
        ("rounds_lost", "rounds lost", "", 0, True),
        ("late_joins", "newcomers not in after 60 s of its return", "", 0, True),
        ("longest_until_joined_s", "until a newcomer is in, the longest", "s", 60, True),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "G8": (
        ("clocks", "clocks off by 1 s, 2 s, 5 s and an hour, at the start and later", "", 16, False),
        ("small_with_effect", "of those within 2 s, with an effect", "", 0, True),
        ("not_refused_clearly", "newcomers beyond, and not told that it is the clock", "", 0, True),
        ("not_back", "members not back once their clock was right again", "", 0, True),
        ("others_aborted", "rounds that the others lost", "", 0, True),
    ),
    "G9": (
        ("inputs_fuzzed", "inputs fuzzed", "", 1_000_000, False),
        ("crashes", "inputs that raised what they must not, or hung", "", 0, True),
        ("forgeries_accepted", "changed records, certificates or joins that were believed", "", 0, True),
        ("attacks", "scripted attacks", "", None, True),
        ("attacks_lost", "attacks after which the honest did not go on", "", 0, True),
        ("largest_memory_growth_mb", "memory that an attacked peer gained", "MB", 200, True),
        ("honest_wrongly_dropped", "honest peers dropped", "", 0, True),
    ),
    "G10": (
        ("forged_ids", "forged node ids", "", 5_000, False),
        ("forged_ids_held", "of them named by others", "", 0, True),
        ("records_offered", "records of a flood", "", 100_000, False),
        ("share_shown", "share of the members that newcomers were shown meanwhile", "", 0.99, False),
        ("members_looked_for", "members looked for", "", 100, False),
        ("largest_growth_mb", "memory that a process gained", "MB", 64, True),
    ),
    "G11": (
        ("parts_tampered", "parts tampered with", "", 200, False),
        ("poisoned_joins", "poisoned joins", "", 0, True),
        ("share_caught", "share of them caught", "", 0.99, False),
        ("false_accusations", "false accusations", "", 0, True),
    ),
    "G12": (
        ("offsets", "checkpoints whose writing was killed or had no space, at random offsets", "", 200, False),
        ("states_lost", "after which no valid earlier one, or no later one, was there", "", 0, True),
        ("bits_flipped", "bits flipped", "", 500, False),
        ("flips_not_found", "of them not found", "", 0, True),
    ),
    "G13": (
        ("soak_minutes", "minutes", "", 120, False),
        ("faults", "kills, stops, replaced peers and attacks", "", None, True),
        ("rounds", "rounds committed meanwhile", "", None, True),
        ("largest_slope_mb_per_h", "memory slope of a process that lives on", "MB/h", 1, True),
        ("largest_descriptor_growth", "descriptors that such a process gained", "", 2, True),
        ("steady_deaths", "such processes that ended", "", 0, True),
        ("steady_tracebacks", "tracebacks in their logs", "", 0, True),
        ("hangs", "hangs", "", 0, True),
        ("orphans", "processes left after 30 s", "", 0, True),
        ("digest_mismatches", "states that differed", "", 0, True),
    ),
    "rejoins": (
        ("rejoins", "kills and rejoins of one peer", "", 500, False),
        ("rounds", "rounds committed meanwhile", "", None, True),
        ("largest_kb_per_kill", "memory of an agent that lives on, a kill, in the second half", "kB", 5, True),
        ("largest_other_kb_per_kill", "the same of the bootstrap or a libp2p daemon", "kB", None, True),
        ("largest_descriptor_growth", "descriptors that such a process gained", "", 2, True),
        ("steady_deaths", "such processes that ended", "", 0, True),
        ("steady_tracebacks", "tracebacks in their logs", "", 0, True),
    ),
    "G14": (
        ("places_searched", "files and answers searched for secrets", "", None, True),
        ("secrets_found", "secrets found", "", 0, True),
        ("strings_tried", "times that one of 80 hostile strings was tried", "", None, True),
        ("strings_through", "that got through", "", 0, True),
    ),
    "G15": (
        ("trials", "sieges with a forged lineage", "", 50, False),
        ("trials_by_variant", "sieges of the variant with the fewest", "", 10, False),
        ("claims_of_the_end", "of them that claim the end of the run", "", None, True),
        ("links_forged", "links forged, each with 16 valid signatures", "", None, True),
        ("taken_over", "sieges in which an honest peer stood on a forged link", "", 0, True),
        ("signed_by_the_bootstrap", "sieges in which the bootstrap followed one", "", 0, True),
        ("without_a_round", "sieges without a round of the honest", "", 0, True),
    ),
    "G16": (
        ("asks", "manifests that ask too much", "", 22, False),
        ("granted", "of them not refused with a message", "", 0, True),
        ("longest_refusal_s", "the longest refusal", "s", None, True),
        ("largest_volunteer_mb", "memory of the largest volunteer", "MB", 3000, True),
    ),
    "G17": (
        ("rounds_per_minute_quiet", "rounds a minute without claims", "", None, True),
        ("share_of_rounds_drips", "share of them while three donors drip links", "", 0.5, False),
        ("share_of_rounds_floods", "share of them while three donors flood links", "", 0.5, False),
        ("share_of_rounds_absent", "share of them while a former member announces itself only", "", 0.5, False),
        ("largest_drips_memory_growth_mb", "memory gained in a process by drips", "MB", 64, True),
        ("largest_floods_memory_growth_mb", "memory gained in a process by floods", "MB", 64, True),
    ),
}


def _campaigns_of(command: str) -> set[str]:
    """The campaigns that a command names."""
    _, _, named = command.partition("--campaign ")
    return set(named.split(" --")[0].split())


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", "name a report of this command, or another file") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object", "name a report of this command, or another file")
    return document
