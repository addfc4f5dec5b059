"""`atoll export`, `generate`, `chat`, `evaluate`: use a model before, during and after its run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from peer.errors import UserError
from peer.printable import say
from peer.system.exit_signals import ending_signals, exiting_on_signals
from peer.system.output_files import named_path

if TYPE_CHECKING:
    from peer.use.generate import Sampling
    from peer.use.trained import Trained

INTERRUPTED = 130
SEQUENCES = 256
OF_TEXT, OF_TASKS = ("files", "sequences", "sequence_length"), ("task_folder", "limit")
DTYPES = ("fp32", "bf16", "fp16")
MODEL_HELP = "an exported model, a checkpoint, a peer's output folder, or the address of a swarm"
EXPORT = """\
Write a model as a folder that `AutoModelForCausalLM.from_pretrained` loads, with its tokenizer and a model card. MODEL
is a checkpoint, a peer's output folder (its newest checkpoint), or the address of a running swarm, whose state is
fetched and verified without training. Of a run with an adapter the adapter alone is written, for
`PeftModel.from_pretrained`; with --merged the whole model."""
GENERATE = """\
Continue a prompt, given or read from standard input."""
CHAT = """\
Talk with a model: in the chat template of its tokenizer, or, where it has none, by continuing the text. Ctrl-C ends an
answer, Ctrl-D the chat. From a pipe each line of standard input is answered."""
EVALUATE = """\
Loss, perplexity and bits per byte of a model on its run's validation text, or on files; or its scores on tasks of
lm-eval (pip install '.[eval]')."""
EXAMPLES = {
    "export": "  atoll export runs/peer --to model\n  atoll export /ip4/.../p2p/12D3Koo... --to model --dtype bf16",
    "generate": "  atoll generate runs/peer --prompt 'def main('\n  echo 'Once upon' | atoll generate model",
    "chat": "  atoll chat runs/peer\n  atoll chat model --system 'You are a poet.' < questions.txt",
    "evaluate": "  atoll evaluate runs/peer\n  atoll evaluate model --files 'books/*.txt' --json\n"
    "  atoll evaluate runs/peer --tasks hellaswag,arc_easy --limit 100",
}


def add_use_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to `atoll`."""
    export = _command(commands, "export", "write a model that transformers loads", EXPORT, _export)
    export.add_argument("--to", type=named_path, default=Path("export"), metavar="DIR",
                        help="a new folder (default: export)")  # fmt: skip
    export.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: fp32)")
    export.add_argument("--merged", action="store_true", help="add an adapter to its base: one model, without peft")
    export.add_argument("--push-to-hub", metavar="NAME", help="also upload it to this repository of the hub")
    generate = _command(commands, "generate", "text from a model", GENERATE, _generate)
    add = generate.add_argument
    add("--prompt", metavar="TEXT", help="text to continue; without it, standard input is read")
    _add_sampling(generate)
    chat = _command(commands, "chat", "talk with a model", CHAT, _chat)
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    _add_sampling(chat)
    evaluate = _command(commands, "evaluate", "how good a model is on text", EVALUATE, _evaluate)
    add = evaluate.add_argument
    add("--files", nargs="+", default=[], metavar="PATH", help="files, folders or globs, in place of the run's text")
    add("--sequences", type=int, metavar="N", help=f"windows to evaluate at most (default: {SEQUENCES})")
    add("--sequence-length", type=int, metavar="N", help="tokens of a window (default: the run's)")
    add("--tasks", metavar="A,B", help="of lm-eval, in place of text")
    add("--task-folder", type=named_path, metavar="DIR", help="of tasks of your own (YAML)")
    add("--limit", type=int, metavar="N", help="documents of a task at most")
    add("--json", action="store_true", help="print one JSON document")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=200, metavar="N", help="stop after so many tokens (default: 200)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (default: 0.8)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens of this share")
    add("--seed", type=int, default=0, metavar="N", help="another seed, another text (default: 0)")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:  # fmt: skip
    parser = commands.add_parser(
        name, help=help, description=description, epilog=f"examples:\n{EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--run", metavar="NAME", help="of the runs at that address this one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto)")
    parser.set_defaults(execute=run)
    return parser


def _opened(arguments: argparse.Namespace) -> Trained:
    with exiting_on_signals(INTERRUPTED):
        import transformers

        from peer.use.trained import open_trained
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if arguments.model.startswith("/") and "/p2p/" in arguments.model:
        from rich.console import Console

        from peer.protocol.address import parse_peer_address
        from peer.swarm.net.socket_folder import open_socket_folder
        from peer.use.fetch import fetch

        open_socket_folder()
        with Console(stderr=True).status("fetching the swarm's state"):  # on a terminal alone
            trained = fetch([parse_peer_address(arguments.model)], arguments.run)
    else:
        trained = open_trained(named_path(arguments.model))
    from peer.train.device import pick_device

    trained.model.to(pick_device(arguments.device))  # type: ignore[arg-type]
    return trained


def _export(arguments: argparse.Namespace) -> int:
    if arguments.to.exists() and not (arguments.to.is_dir() and not any(arguments.to.iterdir())):
        raise UserError(f"--to {arguments.to} exists already", "choose another folder, or remove this one")
    trained = _opened(arguments)
    from peer.outer.state.flat_layout import FlatLayout
    from peer.use.export import export, upload

    path = export(trained, arguments.to, arguments.dtype, merged=arguments.merged)
    print(f"{path}: {FlatLayout.of(trained.model).numel:,} parameters in {arguments.dtype}")
    if arguments.push_to_hub:
        print(upload(path, arguments.push_to_hub))
    return 0


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from peer.use.generate import Sampling

    return Sampling(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature,
                    top_p=arguments.top_p, seed=arguments.seed)  # fmt: skip


def _generate(arguments: argparse.Namespace) -> int:
    from peer.use.generate import generate

    sampling = _sampling(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read().rstrip("\n")
    trained = _opened(arguments)
    print(prompt, end="", flush=True)
    generate(trained, prompt, sampling, say)
    print()
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from peer.use.chat import Chat, Typed, converse

    chat, typed = Chat(_opened(arguments), _sampling(arguments), arguments.system), sys.stdin.isatty()
    if chat.without_template:
        print("the tokenizer has no chat template: the model continues what both have written", file=sys.stderr)
    for number in set(ending_signals()) - {signal.SIGINT}:  # these end the chat, and not an answer
        signal.signal(number, lambda *_: sys.exit(INTERRUPTED))
    converse(chat, Typed() if typed else (line.rstrip("\n") for line in sys.stdin), typed)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    for flag in ("sequences", "sequence_length", "limit"):
        if (value := getattr(arguments, flag)) is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}", "it must be at least 1")
    scores = arguments.tasks is not None
    for flag in OF_TEXT if scores else OF_TASKS:
        if getattr(arguments, flag):
            named = f"--{flag.replace('_', '-')}"
            what = f"{named} is for text, and --tasks are not scored on it" if scores else f"{named} is for --tasks"
            raise UserError(what, f"leave {named} out, or {'leave --tasks out' if scores else 'give --tasks A,B'}")
    if scores:
        return _score(arguments)
    trained = _opened(arguments)
    from peer.use.measure import measure

    found = measure(trained, arguments.files, arguments.sequences or SEQUENCES, arguments.sequence_length)
    if arguments.json:
        after = dataclasses.asdict(trained.after) if trained.after else {}
        print(json.dumps({**dataclasses.asdict(found), **after}, indent=2))
        return 0
    print(f"loss           {found.loss:.4f} nats a token")
    print(f"perplexity     {found.perplexity:.3f}")
    print(f"bits per byte  {found.bits_per_byte:.4f}")
    print(f"text           {found.text}, {found.tokens:,} tokens")
    return 0


def _score(arguments: argparse.Namespace) -> int:
    from peer.run.tasks import check_tasks, score

    check_tasks(arguments.task_folder)
    trained = _opened(arguments)
    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    with contextlib.redirect_stdout(sys.stderr):  # what lm-eval prints on its way
        found = score(trained.model, trained.tokenizer, tasks, arguments.task_folder, arguments.limit)
    if arguments.json:
        after = dataclasses.asdict(trained.after) if trained.after else {}
        print(json.dumps({"tasks": found, **after}, indent=2))
        return 0
    for task, scores in found.items():
        for name, value in scores.items():
            print(f"{task:24} {name:20} {value:.4f}")
    return 0
