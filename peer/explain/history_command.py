"""`atoll history export`: the history that a bootstrap's page keeps, as tables of files."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.system.output_files import named_path

DESCRIPTION = """\
Write the history of a run, as `atoll-bootstrap --http` keeps it, into two tables: points (figures over time) and rounds
(rounds and other events in words). Works while the bootstrap runs, and changes nothing."""

EPILOG = """\
examples:
  atoll history export
  atoll history export runs/bootstrap --format csv --out history"""
FORMATS = ("parquet", "csv")
FOLDER = Path("runs/bootstrap")


def add_history_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser("history", help="export the history that a bootstrap's page keeps")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser(
        "export",
        help="as Parquet or CSV",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = export.add_argument
    add("source", nargs="?", type=named_path, default=FOLDER, metavar="STATE-DIR",
        help=f"the bootstrap's --state-dir, or a history.sqlite (default: {FOLDER})")  # fmt: skip
    add("--format", choices=FORMATS, default=FORMATS[0], help=f"of the files (default: {FORMATS[0]})")
    add("--out", type=named_path, default=Path("."), metavar="DIR", help="where to write (default: here)")
    export.set_defaults(execute=_export)


def _export(arguments: argparse.Namespace) -> int:
    for path, rows in export_history(arguments.source, arguments.out, arguments.format):
        print(f"{path}: {rows:,} rows")
    return 0


def export_history(source: Path, out: Path, kind: str) -> list[tuple[Path, int]]:
    """Write the tables; -> their files, each with its number of rows.

    Raises:
        UserError: there is no history, there are several, or a file cannot be written.
    """
    from peer.explain.history import History

    history = History(find_history(source), read_only=True)
    try:
        names, points = history.names(), history.curve(10**9)
        rounds = [
            {**event, "teller": names.get(event["teller"], event["teller"]), "teller_id": event["teller"],
             "members": [names.get(peer_id, peer_id) for peer_id in event["members"]], "member_ids": event["members"],
             "seconds": event["seconds"].get("total")}
            for event in reversed(history.events(10**9))
        ]  # fmt: skip
    finally:
        history.close()
    tables: dict[str, dict[str, list[Any]]] = {"points": points}
    tables["rounds"] = {key: [row[key] for row in rounds] for key in (rounds[0] if rounds else ())}
    write = _write_parquet if kind == "parquet" else _write_csv
    written = []
    for name, columns in tables.items():
        path = out / f"{name}.{kind}"
        try:
            out.mkdir(parents=True, exist_ok=True)
            write(path, columns)
        except OSError as error:
            what = f"{path}: cannot be written: {error.strerror or error}"
            raise UserError(what, "check --out and the disk") from None
        written.append((path, len(next(iter(columns.values()), []))))
    return written


def find_history(source: Path) -> Path:
    """The history in a bootstrap's folder, or the file itself.

    Raises:
        UserError: none, or several.
    """
    from peer.explain.history import FILE_NAME

    if source.is_file():
        return source
    found = sorted({*source.glob(FILE_NAME), *source.glob(f"history/*/{FILE_NAME}")})
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{source}: no history", "Name the --state-dir of a bootstrap that was started with --http.")
    raise UserError(f"{source}: {len(found)} runs have a history", "Name one: " + ", ".join(map(str, found[:8])))


def _write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")


def _write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in zip(*columns.values(), strict=True))


def _cell(value: Any) -> Any:
    """One value of a table: lists as text; nothing that a spreadsheet would compute."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = "; ".join(map(str, value))
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
