"""`atoll-bootstrap init`: questions or flags become a commented manifest for a size of model and an audience."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peer.errors import UserError, did_you_mean
from peer.protocol.manifest import ORGANISER, parse_manifest


@dataclass(frozen=True)
class Size:
    """A llama of about so many parameters, with the settings of its steps."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    context: int
    batch: int
    rate: str

    @property
    def intermediate(self) -> int:
        """8/3 of the width, as a multiple of 64."""
        return (8 * self.hidden // 3 + 63) // 64 * 64


SIZES = {
    "tiny": Size(128, 4, 4, 4, 256, 8, "1.0e-3"),
    "30m": Size(384, 8, 6, 6, 512, 32, "1.0e-3"),
    "125m": Size(768, 12, 12, 12, 1024, 64, "6.0e-4"),
    "350m": Size(1024, 24, 16, 16, 1024, 128, "4.0e-4"),
    "1b": Size(2048, 20, 32, 8, 2048, 256, "3.0e-4"),
}
AUDIENCES = {
    "strangers": "anyone may join, on home connections: few bits a value, and gates against peers that lie",
    "invited": "those whom you invite, on home connections",
    "friends": "people who know each other: every member is trusted",
    "cluster": "your own machines, on fast lines: frequent rounds",
}
_TRUST = {
    "strangers": "trust: {mode: open}        # each identity costs a second of computing; newcomers weigh little",
    "invited": "trust: {invited: true}     # `atoll-bootstrap invite NAME` prints a token",
    "friends": "trust: {mode: private}",
    "cluster": "trust: {mode: private}",
}
_LOCAL = "each peer's --train-files; without them the source of Python's standard library"
_SLOW_LINES = "recipe: {name: lagoon}     # two bits a value both ways, a round every 68 steps"
_FAST_LINES = "recipe: {name: diloco, compressor: int8, steps_per_round: 30}"
_QUESTIONS = {
    "name": "Name of the run (a-z, 0-9, . _ -)",
    "size": "Size of the model: " + ", ".join(SIZES),
    "audience": "Who takes part: " + ", ".join(AUDIENCES),
    "data": "Text: 'local' (each peer's --train-files, else Python's standard library), or a data set of the hub "
            "such as HuggingFaceFW/fineweb-edu",
    "rounds": "Rounds after which it ends (0: never)",
}
DEFAULTS = {"name": "my-run", "size": "125m", "audience": "strangers", "data": "local", "rounds": "0"}


def add_init_flags(parser: argparse.ArgumentParser) -> None:
    """The flags; what is not given is asked for at a terminal, and else as usual."""
    parser.add_argument("file", nargs="?", type=Path, default=Path("run.yaml"), metavar="FILE",
                        help="where to write (default: run.yaml)")  # fmt: skip
    for key, question in _QUESTIONS.items():
        parser.add_argument(f"--{key}", metavar=key.upper(), help=f"{question} (default: {DEFAULTS[key]})")


def init(arguments: argparse.Namespace, ask: Callable[[str], str] = input) -> str:
    """Write the manifest; -> what to do next.

    Raises:
        UserError: a value that is none, or a file that exists.
    """
    path: Path = arguments.file
    if path.exists():
        raise UserError(f"{path} exists", "name another file, or remove it")
    given = {key: getattr(arguments, key) for key in _QUESTIONS}
    if any(value is None for value in given.values()) and (sys.stdin.isatty() or ask is not input):
        try:
            asked = {key: f"{_QUESTIONS[key]} [{DEFAULTS[key]}]: " for key in given}
            given = {key: value or ask(asked[key]).strip() for key, value in given.items()}
        except EOFError:
            raise UserError("the questions were not answered", "give the flags, see --help") from None
    text = manifest_text({key: value or DEFAULTS[key] for key, value in given.items()})
    parse_manifest(text, str(path), ORGANISER)
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another file") from None
    return f"{path} is written; look at it, and open the run: atoll-bootstrap {path}"


def manifest_text(answers: Mapping[str, str]) -> str:
    """The commented manifest.

    Args:
        answers: one for each question.

    Raises:
        UserError: one that is none.
    """
    for key, known in (("size", SIZES), ("audience", AUDIENCES)):
        if answers[key] not in known:
            raise UserError(f"--{key} {answers[key]}: there is none of that name", did_you_mean(answers[key], known))
    if not answers["rounds"].isdecimal():
        raise UserError(f"--rounds {answers['rounds']} is not a number", "such as 2000, or 0 for a run without an end")
    size, local = SIZES[answers["size"]], answers["data"] == "local"
    vocabulary = 264 if local else 50257
    tokens = ("bos_token_id: null, eos_token_id: 1, pad_token_id: 0" if local
              else "bos_token_id: 50256, eos_token_id: 50256, pad_token_id: null")  # fmt: skip
    ends = f"total: {answers['rounds']}, " if answers["rounds"] != "0" else ""
    source = "" if local else f"\n  sources: [{{kind: hub, name: {answers['data']}}}]"
    return f"""\
# {answers['name']}: a llama ({answers['size']}) for {answers['audience']}: {AUDIENCES[answers['audience']]}.
# Everything here is equal on all peers; every key is in the reference, docs/reference/manifest.md.
name: {answers['name']}
model:
  architecture: llama
  config: {{vocab_size: {vocabulary}, hidden_size: {size.hidden}, intermediate_size: {size.intermediate},
           num_hidden_layers: {size.layers}, num_attention_heads: {size.heads},
           num_key_value_heads: {size.key_value_heads}, max_position_embeddings: {size.context},
           tie_word_embeddings: true, {tokens}}}
tokenizer: {"{kind: bytes}           # one token a byte" if local else "{kind: hub, name: openai-community/gpt2}"}
data:                      # {_LOCAL if local else "streamed from the hub"}
  sequence_length: {size.context}{source}
inner: {{learning_rate: {size.rate}, batch_sequences: {size.batch}, schedule: wsd, warmup_steps: 200}}
{_FAST_LINES if answers['audience'] == 'cluster' else _SLOW_LINES}
rounds: {{{ends}straggler_wait_s: {10 if answers['audience'] == 'cluster' else 60}, timeout_s: 300}}
{_TRUST[answers['audience']]}
"""
