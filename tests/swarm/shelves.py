"""What tests of snapshots look at."""

from __future__ import annotations

NUMEL = 4 * 1024  # four columns, where chunks are small


def content(state):
    return b"".join(tensor.numpy().tobytes() for tensor in (state.anchor, *state.buffers))


def on_disk(run):
    return {path.name for path in run.history.folder.glob("snapshot*")}


def names(*lineage_ids):
    return {f"snapshot-{lineage_id[:16]}.bin" for lineage_id in lineage_ids}


def lineage(run, round):
    return run.history.lineage_id(round)


def take(run, other):
    """The other lineage, as who yields to it does."""
    run.history.replace(other.history.chain)
    for mine, theirs in zip((run.state.anchor, *run.state.buffers),
                            (other.state.anchor, *other.state.buffers), strict=True):
        mine.copy_(theirs)
    run.state.round, run.state.lineage_id, run.states = other.state.round, other.state.lineage_id, other.states
