"""`atoll data`, and the flags of `atoll data preview`."""

from __future__ import annotations

import argparse
import json

from peer.system.exit_signals import exiting_on_signals

DESCRIPTION = """\
What a peer of this manifest would read: for each source the documents, the skipped ones and why, tokens a second on
this machine, an estimate of all tokens, and a packed sequence as the model sees it."""

EPILOG = """\
examples:
  atoll data preview configs/runs/quickstart.yaml
  atoll data preview mine.yaml --train-files 'books/*.txt' chats.jsonl
  atoll data preview mine.yaml --megabytes 50 --json

In the sequence, | stands where one document ends and the next one begins."""

INTERRUPTED = 130
DEFAULT_MEGABYTES = 4.0


def add_data_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add the command to `atoll`; -> its actions."""
    data = commands.add_parser("data", help="see what a run trains on", description="See what a run trains on.")
    inner = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    parser = inner.add_parser(
        "preview", help="documents, tokens and skipped text of a manifest", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("manifest", metavar="MANIFEST", help="a run's manifest")
    add("--train-files", nargs="+", default=[], metavar="PATH", help="read these in place of the manifest's sources")
    add("--megabytes", type=float, default=DEFAULT_MEGABYTES, metavar="N",
        help=f"of text to read of each source (default: {DEFAULT_MEGABYTES:g})")
    add("--private-urls", action="store_true", help="let the data lie on a server of your own network")
    add("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(execute=_preview)
    return inner


def _preview(arguments: argparse.Namespace) -> int:
    with exiting_on_signals(INTERRUPTED):
        from peer.data.preview import preview
        from peer.protocol.manifest import ALONE, read_manifest
    manifest = read_manifest(arguments.manifest, ALONE)
    found = preview(
        manifest, tuple(arguments.train_files), arguments.megabytes, private_urls=arguments.private_urls
    )
    if arguments.json:
        print(json.dumps([one.document() for one in found], indent=2))
        return 0
    print("\n\n".join(one.in_words() for one in found))
    return 0
