"""`atoll rounds`: its flags."""

from __future__ import annotations

import argparse
import os

from peer.system.output_files import named_path

DESCRIPTION = """\
The outcome of this machine's rounds: members, seconds of each phase, bytes and weights; for a failed round the phase,
the reason, the culprit and what the peer did next. RUN-FOLDER is the --output-dir of a peer; without it, the peer with
the newest records under runs/. Works while the peer runs and after it has ended."""

EPILOG = """\
examples:
  atoll rounds
  atoll rounds runs/peer --last 50
  atoll rounds runs/peer --failed
  atoll rounds runs/demo/alpha --follow
  atoll rounds --json --last 1000 | python -m json.tool

The records are the lines of rounds.jsonl in the folder; full files are kept as rounds.1.jsonl, rounds.2.jsonl, ..."""

DEFAULT_LAST = 10


def add_rounds_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser(
        "rounds",
        help="why the last rounds went as they did",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", nargs="?", type=named_path, metavar="RUN-FOLDER", help="the folder of a peer (default: the newest)")
    add("--last", type=int, default=DEFAULT_LAST, metavar="N", help=f"how many (default: {DEFAULT_LAST}); 0: all")
    add("--failed", action="store_true", help="only rounds that were not committed")
    add("--json", action="store_true", help="a JSON list of the records; with --follow, one record a line")
    add("--follow", action="store_true", help="print each new round as it ends, until Ctrl-C")
    parser.set_defaults(execute=_rounds)


def _rounds(arguments: argparse.Namespace) -> int:
    from peer.explain.folder import RUNS, find_folder
    from peer.explain.show import RoundsOptions, show_rounds

    options = RoundsOptions(
        last=arguments.last, failed=arguments.failed, as_json=arguments.json, follow=arguments.follow
    )
    return show_rounds(find_folder(arguments.folder, RUNS, os.environ, wait=options.follow), options)
