"""`atoll plan`: its flags."""

from __future__ import annotations

import argparse

from peer.errors import UserError
from peer.system.exit_signals import exiting_on_signals
from peer.system.output_files import named_path

INTERRUPTED = 130
DEFAULT_PEERS = ("8:up=100,down=100,latency=20",)
DESCRIPTION = """\
What a run will need, before anything is rented: for each recipe the share of the time that is computing, seconds a
round, GB a day that a peer sends, days and cost until a goal of tokens, what limits it, and a recommendation. The model
of time and traffic is the simulator's (`atoll simulate --timing-only`). With --target-utilization: the bandwidth that
each recipe needs, beside the published table of Streaming DiLoCo (arXiv 2501.18512)."""

EPILOG = """\
examples:
  atoll plan --params 1e9 --gpu "RTX 4090" --peers 8:up=100,down=500,price=0.4 --tokens 20e9
  atoll plan run.yaml --step-time 2.5 --peers 4:up=40,down=250,latency=15 4:up=1000,down=1000,gpu=H100,price=2.5
  atoll plan --params 1e9 --step-time 0.1 --recipes lagoon diloco:compressor=int4 --plot plan.png
  atoll plan --params 1e9 --step-time 0.1 --target-utilization 0.95 --json

PEERS is COUNT:key=value,...: up and down in Mbit/s, latency in ms to the backbone, price an hour, gpu. A GPU's step
time is 6 x parameters x tokens / (MFU x peak in bf16); peaks are of the makers' datasheets (--gpus lists them)."""


def add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `atoll`."""
    parser = commands.add_parser(
        "plan", help="time, traffic and cost of a run, in advance", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("manifest", nargs="?", metavar="MANIFEST", help="the run's YAML file, or a shipped task; or give --params")
    add("--params", metavar="N", help="plan for a decoder of so many parameters: 1e9, 350M")
    add("--step-time", type=float, metavar="S", help="seconds of a step of one peer")
    add("--gpu", metavar="NAME", help="in place of --step-time: the card of all peers, such as 'RTX 4090'")
    add("--gpus", action="store_true", help="list the known cards with their sources, and exit")
    add("--mfu", type=float, metavar="F", help="share of the card's peak that training reaches (default: 0.4)")
    add("--tokens-per-step", type=int, metavar="N", help="of one peer (default: the manifest's, else 32768)")
    add("--tokens", metavar="T", help="the goal, for days and cost: 20e9, 300M")
    add("--peers", nargs="+", default=list(DEFAULT_PEERS), metavar="PEERS",
        help=f"COUNT:key=value,... (default: {' '.join(DEFAULT_PEERS)})")  # fmt: skip
    add("--recipes", nargs="+", default=[], metavar="RECIPE", help="names of 'atoll recipes', or name:key=value,... "
        "(default: all)")  # fmt: skip
    add("--steps-per-round", type=int, metavar="H", help="for all recipes with rounds of several steps")
    add("--target-utilization", type=float, metavar="U", help="print the bandwidth that each recipe needs for it")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=named_path, metavar="FILE", help="draw the plan to this PNG")
    parser.set_defaults(execute=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.gpus:
        return _list_gpus()
    with exiting_on_signals(INTERRUPTED):
        from peer.sim.cli.plan import PlanOptions, run_plan

    if arguments.tokens_per_step is not None and arguments.tokens_per_step < 1:
        raise UserError(f"--tokens-per-step={arguments.tokens_per_step}: must be at least 1")
    return run_plan(PlanOptions(
        manifest=arguments.manifest, parameters=arguments.params, step_s=arguments.step_time, gpu=arguments.gpu,
        mfu=arguments.mfu, tokens_per_step=arguments.tokens_per_step, goal_tokens=arguments.tokens,
        peers=tuple(arguments.peers), recipes=tuple(arguments.recipes), steps_per_round=arguments.steps_per_round,
        target=arguments.target_utilization, as_json=arguments.json, plot=arguments.plot,
    ))


def _list_gpus() -> int:
    from peer.sim.forecast.gpus import SOURCES
    from peer.train.utilisation import PEAK_TFLOPS

    for name, (bf16, _) in PEAK_TFLOPS.items():
        print(f"{name:10}  {bf16:6.0f} TFLOP/s in bf16  {SOURCES[name]}")
    return 0
