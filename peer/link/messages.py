"""What trainer and agent say to each other: one JSON object a line over a socket pair.

The bulk (snapshot, anchor, outer buffers) never travels here; it lies in `peer.link.memory`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from peer.outer.record import RoundRecord
from peer.protocol.line_limits import LineLimits
from peer.protocol.manifest import Digest, Name, Spec
from peer.protocol.ranges import Range, RangesText
from peer.protocol.records import PeerRecord
from peer.protocol.reports import TrainerFigures

MAX_LINE_BYTES = 4 * 1024 * 1024


class Start(Spec):
    """First message to an agent: how to find the swarm, and this peer's identity. `restarted`: an earlier agent of this
    trainer had the same identity, so that the check for another peer with it is skipped. `direct_port`: where to
    accept direct connections, which others reach at `mapped_port`; None: there are none. `nickname`: None: made of the
    host's name and the peer id.
    """

    kind: Literal["start"] = "start"
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...] = ()
    identity_path: str
    nickname: Name | None
    directory: str
    run_id: str | None = None
    run: Name | None = None
    nat_port_map: bool = True
    client_mode: bool | None = None
    direct_port: int | None = 0
    mapped_port: int = 0
    limits: LineLimits = LineLimits()
    invitation: str = ""
    restarted: bool = False


class Published(Spec):
    """The agent found and verified the manifest. `client`: this machine accepts no connection."""

    kind: Literal["published"] = "published"
    manifest: dict[str, Any]
    organiser: str
    peer_id: str
    nickname: Name
    maddrs: tuple[str, ...]
    client: bool = False


class TokenizerFetched(Spec):
    """The files of the run's tokenizer are in this peer's folder; said only where the manifest names files."""

    kind: Literal["tokenizer"] = "tokenizer"


class Mapped(Spec):
    """The trainer built the model; the shared memory has its size and holds the genesis anchor or a resumed state.
    `shapes`: of the parameters, in the order of the flat vector. `fragments`: elements of each, if there are several.
    `hidden`: places of the matrices inside transformer blocks.
    """

    kind: Literal["mapped"] = "mapped"
    numel: int
    num_buffers: int
    shapes: tuple[tuple[int, ...], ...] = ()
    fragments: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    chain_path: str | None = None


class Progress(Spec):
    """How far the trainer is; sent about twice a second. `due_in_s` is None where any peer may call for a round."""

    kind: Literal["progress"] = "progress"
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    due_in_s: float | None
    unsent_tokens: int
    seconds_waiting: float


class Figures(Spec):
    """What those who watch the run may see of this trainer; sent with log lines and after a validation."""

    kind: Literal["figures"] = "figures"
    figures: TrainerFigures


class Snapshot(Spec):
    """The local parameters were copied into the shared snapshot: of the next round's fragment; `tokens` were trained
    since its last contribution, on these `ranges` of the run's data.
    """

    kind: Literal["snapshot"] = "snapshot"
    sequence: int
    tokens: int
    ranges: RangesText = ""


class WantSnapshot(Spec):
    """The agent asks for a snapshot at the next step. `after` is the last one it knows of, which is void now; the
    trainer ignores the wish when a newer one is already on its way.
    """

    kind: Literal["want_snapshot"] = "want_snapshot"
    after: int


class Anchor(Spec):
    """The shared anchor is new. `contributed` is the snapshot that went into it, None when the peer only caught up;
    `fragment` is the only one that is new, None: any may be; `swarm_tokens` are those of all peers that have been
    committed up to it. `steps`: what this peer makes from its merge to the next contribution, where work is divided by
    speed; None: as before. `earlier`: an earlier life of this peer has contributed since the state that it resumed.
    """

    kind: Literal["anchor"] = "anchor"
    round: int
    lineage_id: Digest
    contributed: int | None
    fragment: int | None = None
    swarm_tokens: int = 0
    steps: int | None = None
    earlier: bool = False


class DataUse(Spec):
    """How far the trainer is with the run's data. `open`: what it still has to train; `pending`: what it has trained
    and no certificate holds; `wanted`: pieces of each source that it wants open; `heard`: number of the last answer.
    """

    kind: Literal["data_use"] = "data_use"
    open: tuple[Range, ...] = ()
    pending: tuple[Range, ...] = ()
    wanted: tuple[int, ...] = ()
    heard: int = 0


class Leased(Spec):
    """Pieces of the run's data that this peer has leased, to train after the others, and those that it has lost."""

    kind: Literal["leased"] = "leased"
    number: int
    taken: tuple[Range, ...] = ()
    lost: tuple[Range, ...] = ()


class Merged(Spec):
    """The trainer has read the anchor of `round`; the agent may write the next one."""

    kind: Literal["merged"] = "merged"
    round: int


class RoundEnded(Spec):
    """A round ended, committed or not."""

    kind: Literal["round"] = "round"
    record: RoundRecord


class LivePeers(Spec):
    """The peers that the directory shows now, this one included, for the live table; and addresses of those that this
    peer is connected to, through which a restarted agent finds the swarm while the bootstrap is away.
    """

    kind: Literal["swarm"] = "swarm"
    peers: dict[str, PeerRecord]
    addresses: tuple[str, ...] = ()


class Steered(Spec):
    """What the organiser has decided, and where the run ends by that; `finished`: the rounds have ended with it;
    `expelled`: this peer is no longer invited, for this `reason`.
    """

    kind: Literal["steered"] = "steered"
    state: Literal["running", "paused", "finished", "expelled"]
    reason: str = ""
    rounds_total: int | None = None
    tokens_total: int | None = None


class Notice(Spec):
    """What the person at this peer should know, though the peer continues."""

    kind: Literal["notice"] = "notice"
    text: str


class Save(Spec):
    """Write the outer state (safetensors) and the chain into `path`."""

    kind: Literal["save"] = "save"
    path: str


class Saved(Spec):
    kind: Literal["saved"] = "saved"
    path: str
    round: int
    lineage_id: Digest
    problem: str | None = None


class Stop(Spec):
    """Leave the swarm; serve peers that lag for at most `linger_s`."""

    kind: Literal["stop"] = "stop"
    linger_s: float = 0.0


class Stopped(Spec):
    """Last message of an agent: its totals."""

    kind: Literal["stopped"] = "stopped"
    round: int
    lineage_id: Digest | None
    state_digest: Digest | None
    round_bytes_sent: int
    round_bytes_received: int
    state_bytes_sent: int
    state_bytes_received: int


class Fatal(Spec):
    """The agent cannot continue; `what` and `hint` are for the user."""

    kind: Literal["fatal"] = "fatal"
    what: str
    hint: str = ""


ToAgent = Start | Mapped | Progress | Figures | Snapshot | DataUse | Merged | Save | Stop
ToTrainer = (
    Published | TokenizerFetched | WantSnapshot | Anchor | RoundEnded | LivePeers | Leased | Steered | Notice | Saved
    | Stopped | Fatal
)
Message = ToAgent | ToTrainer

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps(message.model_dump(mode="json"), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Parse one line; raises pydantic.ValidationError (both ends are ours: anything malformed is a bug)."""
    return _ADAPTER.validate_json(line)
