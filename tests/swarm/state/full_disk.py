"""Rounds on a disk of one MiB that something else fills; `test_full_disk` runs this where it may mount one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peer.swarm.state.chain import ChainStore
from tests.chain_files import read_chain
from tests.outer.reference import reduced
from tests.swarm.runs import Run, contributions

NUMEL, ROUNDS = 20_000, 12


def fill(disk: Path) -> None:
    """Take all that is left."""
    with (disk / "other").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def updates(run: Run) -> list[bool]:
    """Of which rounds, in order, the update is kept."""
    return [run.history.update(one.link.update_digest) is not None for one in run.history.chain]


def record(run: Run) -> None:
    """A round, of which the chain's line is all that reaches the disk."""
    state = run.state
    update = reduced(state, contributions(state, 3, state.round), [1, 1, 1])
    certificate = run.certify(update)
    run.history.append(certificate)
    state.apply(update, state.round + 1, certificate.link.id)


def main(disk: Path) -> None:
    """Every assertion is one of the test's."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    run = Run(disk / "history", numel=NUMEL).commit(ROUNDS)
    path = run.history.chain_path
    while path.stat().st_size % 4096 < 3000:  # the next line takes another block: half of it would fit
        record(run)
    fill(disk)
    before = len(run.history.chain)
    record(run)
    assert read_chain(path) == run.history.chain, "the line is there, and whole"
    assert updates(run)[:ROUNDS] == [False] + [True] * (ROUNDS - 1), "the oldest update has made room"
    fill(disk)
    run.commit()
    assert updates(run)[-1], "the newest update is worth more than older ones"
    fill(disk)
    again = ChainStore(run.history.folder, run.history.genesis)
    assert again.load(path, run.history.lineage_id(before)), "the next life takes the chain, less its last rounds"
    assert len(read_chain(path)) == before
    for one in run.history.folder.glob("update-*.bin"):
        one.unlink()
    fill(disk)
    whole = path.read_bytes()
    last = ChainStore(run.history.folder, run.history.genesis)
    assert last.load(path, run.history.lineage_id(before)), "what is there already is not written again"
    while read_chain(path) == last.chain:
        last.append(run.history.chain[0])
    assert path.read_bytes().startswith(whole)
    assert path.read_bytes().endswith(b"\n")
    assert read_chain(path) == last.chain[:-1], "nothing of the line that did not fit is left, and the round counts"
    last.append(run.history.chain[0])
    with pytest.raises(OSError, match="No space left on device"):
        last.write_pending()
    (disk / "other").unlink()
    last.append(run.history.chain[0])
    assert read_chain(path) == last.chain, "all is written when there is space again"
    assert not list(run.history.folder.glob("*.tmp"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
