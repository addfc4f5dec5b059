"""`atoll receipts`: write a signed statement of what one peer has contributed, and verify one without any network."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peer.errors import ProtocolError, UserError
from peer.protocol.lineage import Certificate
from peer.protocol.receipt import Statement, certificate_lines, check_receipt, sign_receipt
from peer.protocol.records import parse_json
from peer.system.output_files import named_path, replace_file

if TYPE_CHECKING:
    from peer.swarm.state.certificate_file import CertificateFile

DESCRIPTION = """\
A receipt says how many rounds and tokens one peer has contributed to a run. It holds the certified rounds that prove
it, each signed by at least two thirds of its members, and its writer signs it: the organiser for all to
trust, or any peer of the run, from the chain that it has checked itself."""

EPILOG = """\
examples:
  atoll receipts write runs/peer
  atoll receipts write runs/bootstrap --peer 12D3KooW... --to ada.receipt
  atoll receipts verify ada.receipt --signer 12D3KooW..."""
MAX_LINE_BYTES = 1 << 20


def add_receipts_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser(
        "receipts", help="write and verify statements of what a peer has contributed", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    write = actions.add_parser("write", help="from the folder of a peer or of a bootstrap")
    add = write.add_argument
    add("folder", nargs="?", type=named_path, default=Path("runs/peer"), metavar="DIR",
        help="output folder of a peer, or state folder of a bootstrap (default: runs/peer)")  # fmt: skip
    add("--peer", metavar="ID", help="whose contribution (default: that of the folder's own key)")
    add("--run-id", metavar="ID", help="of which run, or the beginning of it, where the folder holds several")
    add("--to", type=named_path, metavar="FILE", help="where to write (default: PEER.receipt in this folder)")
    write.set_defaults(execute=_write)
    verify = actions.add_parser("verify", help="check a receipt, offline")
    verify.add_argument("file", type=named_path, metavar="FILE")
    verify.add_argument("--signer", metavar="ID", help="who must have signed it, such as the organiser")
    verify.set_defaults(execute=_verify)


def _write(arguments: argparse.Namespace) -> int:
    from peer.swarm.net.keys import load_or_create_identity

    key = arguments.folder / "identity.key"
    if not key.exists():
        raise UserError(f"{arguments.folder} holds no key", "name the output folder of a peer, or a bootstrap's")
    identity = load_or_create_identity(key)
    peer_id = arguments.peer or identity.peer_id
    file = _chain(arguments.folder, arguments.run_id)
    tally = file.tally
    if not tally.rounds[peer_id]:
        raise UserError(f"{peer_id} is in none of the run's {tally.links} rounds", "check --peer")
    try:
        lines = list(certificate_lines(file.chain, peer_id))
    except ProtocolError as error:
        raise UserError(f"{file.path} is damaged: {error}", "take the folder of another peer") from None
    statement = Statement(
        run_id=file.read(0).link.run_id, peer_id=peer_id, rounds=tally.rounds[peer_id], tokens=tally.tokens[peer_id],
        of_rounds=tally.links, of_tokens=tally.weight, lineage_id=file.id(tally.links - 1),
        certificates=hashlib.sha256(b"".join(lines)).hexdigest(), signed_at=time.time(),
    )  # fmt: skip
    path = arguments.to or Path(f"{peer_id}.receipt")
    try:
        replace_file(path, sign_receipt(identity, statement) + b"".join(lines))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another file with --to") from None
    print(f"{path}: {statement.tokens:,} tokens in {statement.rounds:,} of {statement.of_rounds:,} rounds")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    try:
        with arguments.file.open("rb") as file:
            signed = check_receipt(iter(lambda: file.readline(MAX_LINE_BYTES), b""))
    except OSError as error:
        raise UserError(f"cannot read {arguments.file}: {error.strerror}") from None
    except ProtocolError as error:
        raise UserError(f"{arguments.file} is no valid receipt: {error}", "ask for a new copy of it") from None
    if arguments.signer not in (None, signed.signer):
        raise UserError(f"{arguments.file} is signed by {signed.signer}, not by {arguments.signer}",
                        "ask the organiser for a receipt")  # fmt: skip
    said = signed.statement
    share = said.tokens / max(1, said.of_tokens)
    print(f"valid   {said.peer_id}\nrun     {said.run_id}\ngave    {said.tokens:,} tokens ({share:.1%} of the run) in "
          f"{said.rounds:,} of {said.of_rounds:,} rounds\nsigned  {signed.signer}, "
          f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(said.signed_at))}")  # fmt: skip
    return 0


def _chain(folder: Path, run_id: str | None) -> CertificateFile:
    """The chain that a folder holds of a run, as far as its links follow each other."""
    from peer.run.kept_chain import find_chain
    from peer.swarm.state.certificate_file import CertificateFile

    path = find_chain(folder, run_id)
    try:
        with path.open("rb") as file:
            genesis = parse_json(Certificate, file.readline(MAX_LINE_BYTES)).link.parent
        chain = CertificateFile(path, genesis)
        chain.load()
    except (OSError, ProtocolError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return chain
