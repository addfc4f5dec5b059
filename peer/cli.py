"""The `atoll` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from peer.errors import UserError, did_you_mean
from peer.system.exit_signals import exit_on_signals, interrupt_on_signals
from peer.system.foreign_warnings import hush_deprecations

INTERRUPTED = 130
DESCRIPTION = "Train one language model together with people you share nothing with but the internet."

JOIN_DESCRIPTION = """\
Join the run at MULTIADDR and train until it ends. The address is all that is needed: the signed manifest, the model's
state and the other peers are found through it. Ctrl-C saves, exports the model and leaves;
other peers are not disturbed."""

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
    from peer.data.command import add_data_command
    from peer.explain.command import add_rounds_command
    from peer.explain.history_command import add_history_command
    from peer.run.coverage import add_coverage_command
    from peer.run.doctor import add_doctor_command
    from peer.run.receipts import add_receipts_command
    from peer.run.runs import add_runs_command
    from peer.run.tokenizer_command import add_tokenizer_command
    from peer.run.watch import add_watch_command
    from peer.sim.cli.commands import add_sim_commands
    from peer.sim.cli.plan_command import add_plan_command
    from peer.use.command import add_use_commands

    parser = argparse.ArgumentParser(prog="atoll", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"atoll {version('atoll')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_join_command(commands)
    _add_demo_command(commands)
    add_doctor_command(commands)
    add_watch_command(commands)
    add_rounds_command(commands)
    add_history_command(commands)
    add_receipts_command(commands)
    add_runs_command(commands)
    add_tokenizer_command(commands)
    add_coverage_command(add_data_command(commands))
    add_sim_commands(commands)
    add_use_commands(commands)
    add_plan_command(commands)
    return parser


def _add_join_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from peer.settings import add_setting_flags

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
    join.set_defaults(execute=_join)


def _add_demo_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from peer.demo.run import add_demo_flags

    demo = commands.add_parser(
        "demo",
        help="watch a swarm train on this machine",
        description=DEMO_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_demo_flags(demo)
    demo.set_defaults(execute=_demo)


def main(argv: Sequence[str] | None = None) -> None:
    """Console entry: 0 on success, 2 on a user's error, 130 when interrupted before training."""
    exit_on_signals(INTERRUPTED)
    hush_deprecations()
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if unknown and arguments.command in ("join", "doctor"):
            raise _unknown_setting(unknown[0])
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        execute: Callable[[argparse.Namespace], int] = arguments.execute
        if arguments.command != "join":  # which has more to end than Python knows of
            interrupt_on_signals()
        sys.exit(execute(arguments))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe; nothing more may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as rich does where it was writing


def _unknown_setting(option: str) -> UserError:
    from peer.settings import flag_name, known_settings

    names = [flag_name(name).lstrip("-") for name in known_settings()]
    return UserError(f"unknown option {option}", did_you_mean(option.lstrip("-").partition("=")[0], names))


def _join(arguments: argparse.Namespace) -> int:
    from peer.run.join import join

    return join(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from peer.demo.run import run_demo_command

    return run_demo_command(arguments)


if __name__ == "__main__":
    main()
