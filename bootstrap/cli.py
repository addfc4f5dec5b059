"""`atoll-bootstrap`: start a run that others can join with one address."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from peer.errors import UserError
from peer.system.exit_signals import exit_on_signals
from peer.system.foreign_warnings import hush_deprecations
from peer.system.private_files import make_files_private
from peer.telemetry.process_log import StderrLog

COMMANDS = (  # of `bootstrap.organise`
    "pause", "resume", "finish", "extend", "announce", "invite", "revoke", "invited", "state", "init",
)  # fmt: skip
DESCRIPTION = """\
Start a run: build the initial model of MANIFEST, listen under a persistent identity, publish the signed manifest in
the DHT, and print the command to join it. The bootstrap never trains. If it goes offline, members continue to train;
restart it with the same --identity-path and they reconnect.

The organiser steers a run, while its node runs or before it starts again, with one of these in place of MANIFEST:
pause, resume, finish, extend, announce, invite, revoke, invited, state (each with --help); init writes a MANIFEST."""

EPILOG = """\
examples:
  atoll-bootstrap configs/runs/quickstart.yaml --http 127.0.0.1:8080
  atoll-bootstrap small.yaml large.yaml     # peers choose: atoll join ADDRESS --run NAME
  atoll-bootstrap run.yaml --from runs/peer/export
  atoll-bootstrap announce "the run pauses at noon"
  atoll-bootstrap pause
  atoll-bootstrap run.yaml --host-maddrs /ip4/0.0.0.0/tcp/31337 --announce-maddrs /ip4/203.0.113.7/tcp/31337"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of `atoll-bootstrap`."""
    parser = argparse.ArgumentParser(
        prog="atoll-bootstrap",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"atoll {version('atoll')}")
    add("manifests", type=Path, nargs="+", metavar="MANIFEST", help="YAML file that describes a run; several: one node")
    add("--from", type=Path, dest="base", metavar="DIR",
        help="continue an exported model: its weights and config in place of the manifest's model")  # fmt: skip
    add(
        "--host-maddrs",
        nargs="+",
        default=["/ip4/0.0.0.0/tcp/31337"],
        metavar="ADDR",
        help="where to listen (default: /ip4/0.0.0.0/tcp/31337; port 0: any free port)",
    )
    add("--announce-maddrs", nargs="+", default=[], metavar="ADDR", help="addresses at which others reach this node")
    add("--initial-peers", nargs="+", default=[], metavar="ADDR",
        help="other bootstraps or peers of the same run; or plain hivemind DHT nodes to announce it at")  # fmt: skip
    state_dir = Path("runs/bootstrap")
    add("--state-dir", type=Path, default=state_dir, metavar="DIR", help=f"identity and genesis (default: {state_dir})")
    add("--identity-path", type=Path, metavar="FILE", help="private key (default: identity.key in the state folder)")
    add("--archive", type=Path, metavar="DIR",
        help="keep the newest state there and serve it: a run outlives its peers")  # fmt: skip
    add("--push-to-hub", metavar="NAME",
        help="with --archive: upload the exported model to this repository of the hub, every few rounds")  # fmt: skip
    add("--push-every", type=int, default=100, metavar="N", help="so many rounds (default: 100), and at the run's end")
    add("--new-run", action="store_true", help="leave the run in the state folder for a new one")
    add("--no-nat-port-map", action="store_true", help="do not ask the router to forward the port (UPnP)")
    add("--http", metavar="HOST:PORT",
        help="serve a page about the run there, such as 127.0.0.1:8080; further runs: next ports")  # fmt: skip
    add("--json", action="store_true", help="print the address and then every status as one JSON object a line")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Console entry: exit code 0 after Ctrl-C or SIGTERM, 1 when the node broke, 2 on a user's error."""
    exit_on_signals(0)
    hush_deprecations()
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in COMMANDS:
        _organise(given)
    arguments = build_parser().parse_args(given)
    make_files_private()
    console = StderrLog()
    console.setLevel(logging.WARNING)  # the rest is in node.log
    logging.basicConfig(level=logging.INFO, handlers=[console])
    from bootstrap.serve import run  # heavy: a signal must find its handler meanwhile

    try:
        sys.exit(run(arguments))
    except UserError as error:
        print(error.render("atoll-bootstrap"), file=sys.stderr)
        sys.exit(2)


def _organise(argv: Sequence[str]) -> NoReturn:
    make_files_private()
    from bootstrap.organise import organise

    try:
        sys.exit(organise(argv))
    except UserError as error:
        print(error.render("atoll-bootstrap"), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
