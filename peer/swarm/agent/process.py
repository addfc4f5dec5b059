"""The agent: a process of its own that keeps a trainer in the swarm. Started by `peer.link.supervisor`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import socket
import sys

from peer.swarm.runtime.malloc import trim_malloc_arenas
from peer.system.death_signal import children_die_with_us, die_with_parent
from peer.system.gc_pause import starting
from peer.system.private_files import make_files_private
from peer.telemetry.process_log import StderrLog


def main() -> None:
    """Process entry. Arms the death signal before anything heavy is imported."""
    parser = argparse.ArgumentParser(prog="python -m peer.swarm.agent.process", description="started by `atoll join`")
    for name in ("channel", "memory", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    children_die_with_us()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer drains and then stops its agent
        signal.signal(number, signal.SIG_IGN)
    make_files_private()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog(rotates=True)])
    trim_malloc_arenas()

    with starting():
        import torch
        import uvloop

        from peer.errors import UserError
        from peer.link.channel import Channel
        from peer.link.messages import Fatal
        from peer.swarm.agent.session import AgentSession
        from peer.swarm.runtime.tasks import hush_foreign_noise, use_few_threads

    torch.set_num_threads(1)
    torch.set_flush_denormal(False)  # replicas must not differ where a library turned it on
    uvloop.install()
    channel = socket.socket(fileno=arguments.channel)

    async def run() -> int:
        use_few_threads()
        asyncio.get_running_loop().set_exception_handler(hush_foreign_noise)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _print_tasks)
        link = await Channel.over(channel)
        try:
            code = await AgentSession(link, arguments.memory, random.Random()).run()
        except UserError as error:
            link.tell(Fatal(what=error.what, hint=error.hint))
            await link.flush()
            return 2
        except EOFError as error:
            logging.info("%s; so is this agent", error)
            return 0
        # Returning would cancel every task once and wait for all; one that misses it (`wait_for` before Python 3.12
        # can swallow a cancellation) would keep a useless agent alive, and its trainer from starting another.
        logging.shutdown()
        os._exit(code)

    sys.exit(asyncio.run(run()))


def _print_tasks() -> None:
    """On SIGUSR1: what every task waits for, into the log; the way to see why a round hangs."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
