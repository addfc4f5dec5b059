"""`atoll tokenizer train`: a tokenizer from the text of a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peer.errors import UserError
from peer.system.exit_signals import exiting_on_signals
from peer.system.output_files import check_output_folder, named_path

INTERRUPTED = 130
DEFAULT_MEGABYTES = 1024
HELD_OUT_BYTES = 2**20
DESCRIPTION = "Make the tokenizer of a run. It is a folder, which the run's manifest names."

TRAIN_DESCRIPTION = """\
Make a byte-level BPE tokenizer from the training text of MANIFEST, whatever tokenizer that names. The same text and
size give the same tokenizer. Any text can be written with it, and comes back whole."""

TRAIN_EPILOG = """\
examples:
  atoll tokenizer train configs/runs/quickstart.yaml --vocab-size 4096 --output words
  atoll tokenizer train run.yaml --vocab-size 32768 --output words --train-files book.txt notes/

Then write into the manifest, and atoll-bootstrap hands the folder's files to the run's peers:
  tokenizer: {kind: folder, name: words}"""


def add_tokenizer_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser("tokenizer", help="make a run's tokenizer", description=DESCRIPTION)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    train = kinds.add_parser(
        "train",
        help="from the run's own text",
        description=TRAIN_DESCRIPTION,
        epilog=TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = train.add_argument
    add("manifest", type=named_path, metavar="MANIFEST", help="YAML file that describes the run")
    vocab = "ids in all: the 256 bytes, 3 special tokens, and merged pieces for the rest"
    add("--vocab-size", type=int, required=True, metavar="N", help=vocab)
    add("--output", type=named_path, required=True, metavar="FOLDER", help="a new folder for the tokenizer")
    add("--train-files", nargs="+", default=[], metavar="FILE", help="read these, not the run's text")
    most = f"of text to read at most (default: {DEFAULT_MEGABYTES})"
    add("--megabytes", type=float, default=DEFAULT_MEGABYTES, metavar="MB", help=most)
    train.set_defaults(execute=_train)


@dataclass
class _Sample:
    """The first texts, up to a number of bytes, and what was read of them."""

    texts: Iterable[str]
    most_bytes: float
    documents: int = 0
    read_bytes: int = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            if self.read_bytes >= self.most_bytes:
                return
            self.documents += 1
            self.read_bytes += len(text.encode("utf-8", "replace"))
            yield text


def _train(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if arguments.megabytes <= 0:
        raise UserError(f"--megabytes {arguments.megabytes:g}: must be above 0", f"the default is {DEFAULT_MEGABYTES}")
    _check_output(output)
    with exiting_on_signals(INTERRUPTED):  # nothing is written before the end
        from peer.checkpoint.export import write_folder
        from peer.data.resident import texts_for
        from peer.data.train_bpe import train_bpe
        from peer.protocol.manifest import ALONE, read_manifest

        manifest = read_manifest(arguments.manifest, ALONE)
        train, held_out = (
            texts_for(manifest.data, tuple(arguments.train_files), validation=validation)
            for validation in (False, True)
        )
        sample, began = _Sample(train, arguments.megabytes * 1e6), time.monotonic()
        tokenizer = train_bpe(sample, arguments.vocab_size, show_progress=sys.stderr.isatty())
        seconds = time.monotonic() - began
        unseen = _Sample(held_out, HELD_OUT_BYTES)
        num_tokens = sum(tokenizer.encode(text).size for text in unseen)
    write_folder(output, tokenizer.save)
    if tokenizer.vocab_size < arguments.vocab_size:
        print(f"atoll: the text gives only {tokenizer.vocab_size} of {arguments.vocab_size} ids", file=sys.stderr)
    megabytes, size = sample.read_bytes / 1e6, tokenizer.vocab_size
    print(
        f"tokenizer  {size} ids, from {megabytes:.1f} MB in {sample.documents} documents, {seconds:.1f} s\n"
        f"held out   {unseen.read_bytes / max(1, num_tokens):.2f} bytes a token, of text that it was not made from\n"
        f"manifest   tokenizer: {{kind: folder, name: {output}}}\n"
        f"           and model.config.vocab_size, where it is written, at least {size}"
    )
    return 0


def _check_output(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output {output} exists already", "choose another folder, or remove this one")
    try:
        check_output_folder(output.absolute().parent)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}", "choose another folder") from None
