"""The `atoll` command."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.errors import UserError, did_you_mean
from peer.protocol.address import parse_peer_address
from peer.settings import (
    LATEST,
    add_setting_flags,
    flag_name,
    known_settings,
    load_settings,
    setting_overrides,
)
from peer.swarm.net.keys import check_identity
from peer.system.file_lock import lock_folder
from peer.system.gc_pause import starting
from peer.system.output_files import check_output_file
from peer.system.preflight import check_host_ports, check_output_dir, check_reachable, check_resumable, lock_identity

LOCK_NAME = "peer.lock"
DESCRIPTION = "Train one language model together with people you share nothing with but the internet."

JOIN_DESCRIPTION = """\
Join the run at MULTIADDR and train until it ends. The address is all that is needed: the signed manifest, the model's
state and the other peers are found through it. Ctrl-C shuts the peer down cleanly; other peers are not disturbed."""

JOIN_EPILOG = """\
examples:
  atoll join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
  atoll join ADDR --device cuda --per-device-train-batch-size 32 --output-dir runs/mine
  atoll join ADDR --resume-from-checkpoint
  atoll join ADDR --host-maddrs /ip4/0.0.0.0/tcp/31338 --announce-maddrs /ip4/198.51.100.4/tcp/31338"""

DEMO_DESCRIPTION = """\
A whole swarm on this machine, about three minutes on two cores: a bootstrap and three peers train a small language
model over a real DHT; a fourth peer joins while it runs, one is killed, and the others never stop."""


def build_parser() -> argparse.ArgumentParser:
    """The command line of `atoll`."""
    from peer.demo.run import add_demo_flags
    from peer.explain.command import add_rounds_command
    from peer.sim.cli.commands import add_sim_commands

    parser = argparse.ArgumentParser(prog="atoll", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    join = commands.add_parser(
        "join",
        help="join a run and train",
        description=JOIN_DESCRIPTION,
        epilog=JOIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # each setting has two spellings, and argparse takes them for two settings
    )
    join.add_argument("addresses", nargs="+", metavar="MULTIADDR", help="address of the bootstrap, or of any peer")
    add_setting_flags(join)
    join.set_defaults(run=_join)
    demo = commands.add_parser(
        "demo",
        help="watch a swarm train on this machine",
        description=DEMO_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_demo_flags(demo)
    demo.set_defaults(run=_demo)
    add_rounds_command(commands)
    add_sim_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Console entry: 0 on success, 2 on a user's error, 130 when interrupted before training."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if unknown and arguments.command == "join":
            raise _unknown_setting(unknown[0])
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        run: Callable[[argparse.Namespace], int] = arguments.run
        sys.exit(run(arguments))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _unknown_setting(option: str) -> UserError:
    names = [flag_name(name).lstrip("-") for name in known_settings()]
    return UserError(f"unknown option {option}", did_you_mean(option.lstrip("-").partition("=")[0], names))


def _join(arguments: argparse.Namespace) -> int:
    # Child processes started before training die with this process; an exception raised during an import can be lost.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    settings = load_settings(setting_overrides(arguments), arguments.config, os.environ)
    addresses = [parse_peer_address(address) for address in arguments.addresses]
    if settings.report is not None:
        check_output_file(settings.report, "--report", settings.output_dir)
    check_output_dir(settings.output_dir)
    if settings.resume_from_checkpoint not in (None, LATEST):
        check_resumable(Path(settings.resume_from_checkpoint).expanduser())
    identity_path = settings.identity_path or settings.output_dir / "identity.key"
    with lock_identity(identity_path), lock_folder(settings.output_dir, "output_dir", LOCK_NAME):
        check_identity(identity_path)
        check_host_ports(settings.host_maddrs)
        reachable = check_reachable(addresses)
        from peer.link.supervisor import AgentProcess

        agent = AgentProcess(settings.output_dir / "agent.log")
        agent.start()  # it imports for seconds, and so does this process
        with starting():
            from peer.run.lifecycle import live

        code = live(settings, reachable, identity_path, agent)
    # Everything is saved and closed. Unloading torch would take seconds more, and a shutdown does not wait that long.
    logging.shutdown()
    with contextlib.suppress(OSError):  # whoever read it may have gone
        sys.stdout.flush()
    os._exit(code)


def _demo(arguments: argparse.Namespace) -> int:
    from peer.demo.run import run_demo_command

    return run_demo_command(arguments)


if __name__ == "__main__":
    main()
