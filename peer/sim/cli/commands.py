"""`atoll recipes`, `atoll simulate`, `atoll compare`: their flags."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peer.errors import UserError, did_you_mean
from peer.system.exit_signals import exiting_on_signals
from peer.system.output_files import named_path

if TYPE_CHECKING:
    from peer.sim.campaign.label import Choice

RECIPES_DESCRIPTION = """\
Every published algorithm that Atoll knows as a choice of parts; with NAME, all parts and numbers of one."""

RECIPES_EPILOG = """\
examples:
  atoll recipes
  atoll recipes sparseloco
  atoll recipes --json | python -m json.tool"""

SIMULATE_DESCRIPTION = """\
A whole swarm in this process: real training, the production code of the recipes, simulated computers and network.
MANIFEST is a run's manifest, or the name of a shipped task (default: demo, a byte-level Llama of 0.1M parameters)."""

SIMULATE_EPILOG = """\
examples:
  atoll simulate --peers 4
  atoll simulate configs/runs/quickstart.yaml --peers 8 --network home
  atoll simulate --peers 8 --recipe streaming-diloco:compressor=int8,schedule.num_fragments=3 --tokens 1.2M
  atoll simulate --peers 12 --network spot --plot loss.png
  atoll simulate configs/runs/quickstart.yaml --peers 1000 --network home --timing-only

--recipe takes a name of 'atoll recipes', and behind a colon what differs from the published numbers: keys of the
manifest's recipe section (compressor, steps_per_round, outer_learning_rate, outer.momentum, topology, ...) and,
with 'inner.' in front, of its inner section."""

COMPARE_DESCRIPTION = """\
Train with several recipes on the same text, the same peers and the same tokens: loss, traffic, time, side by side.
RECIPE is a name of 'atoll recipes' or name:key=value,...; 'all' is every one. Data parallelism with fp32 gradients at
every step is always among them, with AdamW and with Muon inside: gaps are to the better of both, see --baseline."""

COMPARE_EPILOG = """\
examples:
  atoll compare diloco sparseloco --peers 4 --tokens 1M
  atoll compare all --peers 4 --tokens 2M --seeds 3 --report all.json --plots pictures
  atoll compare diloco diloco:compressor=int8 diloco:compressor=int4,steps_per_round=60 --peers 8 --tokens 4M
  atoll compare muloco --baseline ddp:inner.optimizer=muon --peers 4 --tokens 4M --train-files book.txt
  atoll compare all --peers 4 --tokens 2M --seeds 3 --report all.json --resume

Keys behind the colon are those of the manifest's recipe section; a dot reaches into a part (outer.momentum=0.8,
schedule.num_fragments=4), and 'inner.' into the manifest's inner section (inner.learning_rate=0.004)."""

INTERRUPTED = 130
BASELINES = ("ddp", "ddp:inner.optimizer=muon")
DEFAULT_PEERS, DEFAULT_EVALUATIONS, DEFAULT_STEP_S, DEFAULT_NETWORK = 4, 10, 1.0, "ideal"


def add_sim_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the three commands to `atoll`."""
    recipes = _command(commands, "recipes", "list the published algorithms", RECIPES_DESCRIPTION, RECIPES_EPILOG)
    recipes.add_argument("name", nargs="?", metavar="NAME", help="show all parts of this one")
    recipes.add_argument("--json", action="store_true", help="a JSON list, each recipe with its parts")
    recipes.set_defaults(execute=_recipes)
    simulate = _command(
        commands, "simulate", "one recipe on a simulated swarm", SIMULATE_DESCRIPTION, SIMULATE_EPILOG
    )
    simulate.add_argument("manifest", nargs="?", metavar="MANIFEST", help="a manifest or the name of a shipped task")
    _add_simulate_flags(simulate)
    simulate.set_defaults(execute=_simulate)
    compare = _command(commands, "compare", "recipes side by side", COMPARE_DESCRIPTION, COMPARE_EPILOG)
    compare.add_argument("recipes", nargs="+", metavar="RECIPE", help="name, name:key=value,... or all")
    _add_compare_flags(compare)
    compare.set_defaults(execute=_compare)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=help, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--peers", type=int, default=DEFAULT_PEERS, metavar="K", help=f"how many (default: {DEFAULT_PEERS})")
    add("--network", default=DEFAULT_NETWORK, metavar="NAME|FILE",
        help="scenario: what the computers and the network are like; home, cloud, spot, straggler, partition, "
             f"byzantine, ... or a file (default: {DEFAULT_NETWORK})")
    add("--tokens", metavar="T", help="that all peers together learn from: 1228800, 1.2M, 300k (default: the "
        "manifest's rounds, else 300 steps of each peer)")
    add("--step-seconds", type=float, default=DEFAULT_STEP_S, metavar="S", dest="step_s",
        help=f"simulated seconds of one inner step at speed 1 (default: {DEFAULT_STEP_S:g})")
    add("--train-files", nargs="+", default=[], metavar="PATH", help="train on these in place of the manifest's text")
    add("--evaluations", type=int, default=DEFAULT_EVALUATIONS, metavar="N",
        help=f"points of the loss curve (default: {DEFAULT_EVALUATIONS})")
    add("--device", default="cpu", metavar="NAME", help="where inner steps are made: cpu, cuda, cuda:1 or auto; the "
        "figures of a GPU differ from those of a CPU in rounding (default: cpu)")
    add("--report", type=named_path, metavar="FILE", help="write all figures to this JSON file")


def _add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    _add_shared_flags(parser)
    add = parser.add_argument
    add("--recipe", metavar="SPEC", help="in place of the manifest's own: name or name:key=value,...")
    add("--seed", type=int, metavar="N", help="of weights, data orders, topology (default: the manifest's)")
    add("--timing-only", action="store_true", help="simulate time and traffic alone, without training: for many peers")
    add("--plot", type=named_path, metavar="FILE", help="draw the loss over the tokens to this PNG")


def _add_compare_flags(parser: argparse.ArgumentParser) -> None:
    _add_shared_flags(parser)
    add = parser.add_argument
    add("--manifest", metavar="FILE", help="model, text and inner settings (default: the shipped task demo)")
    add("--baseline", nargs="+", default=[*BASELINES], metavar="RECIPE", dest="baselines", help="gaps are to the best "
        f"of these (default: {' '.join(BASELINES)})")
    add("--seeds", type=int, nargs="+", default=[1], metavar="N", help="one number counts seeds, several name them "
        "(default: 1, which is seed 0)")
    add("--steps-per-round", type=int, metavar="H", help="for recipes with longer rounds (default: a tenth of the "
        "steps of each peer)")
    add("--jobs", type=int, metavar="N", help="runs at the same time (default: one per core)")
    add("--resume", action="store_true", help="keep the runs that --report already has, and make the others")
    add("--plots", type=named_path, metavar="FOLDER", help="write loss-tokens.png and loss-bytes.png there")
    add("--plot-tokens", type=named_path, metavar="FILE", help="draw the loss over the tokens to this PNG")
    add("--plot-bytes", type=named_path, metavar="FILE", help="draw the loss over the bytes of each peer to this PNG")


def _recipes(arguments: argparse.Namespace) -> int:
    with exiting_on_signals(INTERRUPTED):
        from peer.outer.recipe.published import RECIPES
        from peer.outer.recipe.recipe import describe
        from peer.sim.cli.tables import recipe_table, recipes_table, simulator_console
    name = arguments.name
    if name is not None and name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}", did_you_mean(name, RECIPES))
    chosen = list(RECIPES.values()) if name is None else [RECIPES[name]]
    if arguments.json:
        print(json.dumps([describe(recipe) for recipe in chosen], indent=2))
        return 0
    console = simulator_console()
    console.print(recipes_table(chosen, console.width) if name is None else recipe_table(chosen[0]))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    with exiting_on_signals(INTERRUPTED):
        _checked_choices([arguments.recipe or BASELINES[0]], (), arguments.network)
        from peer.sim.cli.simulate import SimulateOptions, run_simulate
    return _without_teardown(lambda: run_simulate(SimulateOptions(
        manifest=arguments.manifest, command=_as_typed(arguments), peers=arguments.peers, network=arguments.network,
        recipe=arguments.recipe, tokens=arguments.tokens, seed=arguments.seed, step_s=arguments.step_s,
        evaluations=arguments.evaluations, train_files=tuple(arguments.train_files), timing_only=arguments.timing_only,
        report=arguments.report, plot=arguments.plot, device=arguments.device,
    )))


def _compare(arguments: argparse.Namespace) -> int:
    with exiting_on_signals(INTERRUPTED):
        choices = _checked_choices(arguments.recipes, arguments.baselines, arguments.network)
        from peer.sim.cli.compare import CompareOptions, parse_seeds, run_compare
    tokens_png, bytes_png = arguments.plot_tokens, arguments.plot_bytes
    if arguments.plots is not None:
        tokens_png = tokens_png or arguments.plots / "loss-tokens.png"
        bytes_png = bytes_png or arguments.plots / "loss-bytes.png"
    seeds = parse_seeds(arguments.seeds)
    return _without_teardown(lambda: run_compare(CompareOptions(
        choices=choices, command=_as_typed(arguments), peers=arguments.peers, tokens=arguments.tokens,
        manifest=arguments.manifest, network=arguments.network, seeds=seeds,
        steps_per_round=arguments.steps_per_round, step_s=arguments.step_s, jobs=arguments.jobs,
        train_files=tuple(arguments.train_files), report=arguments.report, resume=arguments.resume,
        plot_tokens=tokens_png, plot_bytes=bytes_png, plots=arguments.plots,
        evaluations=arguments.evaluations, device=arguments.device, baselines=tuple(dict.fromkeys(arguments.baselines)),
    )))


def _checked_choices(labels: Sequence[str], baselines: Sequence[str], network: str) -> list[Choice]:
    """The recipes as typed; misspelt words are refused before torch and transformers are loaded."""
    from peer.sim.campaign.label import parse_labels
    from peer.sim.world.scenario import load_scenario

    load_scenario(network)
    return parse_labels(labels, baselines)


def _without_teardown(run: Callable[[], int]) -> int:
    """Exit without unloading torch, which can take more than a second after Ctrl-C."""
    try:
        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        sys.stdout.flush()
        os._exit(code)
    return code


def _as_typed(arguments: argparse.Namespace) -> str:
    return shlex.join(["atoll", *getattr(arguments, "argv", ())])
