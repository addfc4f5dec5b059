"""`atoll join`: what is checked before anything heavy is imported, and the start of the agent."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

from peer.errors import UserError
from peer.protocol.address import parse_peer_address
from peer.run.checks import machine_findings
from peer.settings import LATEST, PeerSettings, load_settings, setting_overrides
from peer.swarm.net.keys import check_identity
from peer.swarm.net.socket_folder import open_socket_folder
from peer.system.file_lock import lock_folder
from peer.system.gc_pause import starting
from peer.system.output_files import check_output_file, check_output_folder
from peer.system.preflight import (
    check_output_dir,
    check_reachable,
    check_resumable,
    lock_identity,
)
from peer.system.private_files import make_files_private
from peer.system.torchrun import under_torchrun

LOCK_NAME = "peer.lock"


def join(arguments: argparse.Namespace) -> int:
    """Check the settings and this machine, start the agent, and live; -> exit code.

    Raises:
        UserError: anything that a person can mend, before training starts.
    """
    make_files_private()
    settings = load_settings(setting_overrides(arguments), arguments.config, os.environ)
    if under_torchrun(os.environ) and os.environ["RANK"] != "0":
        from peer.run.rank import follow_torchrun

        follow_torchrun(settings.sharding == "fsdp")
    addresses = [parse_peer_address(address) for address in arguments.addresses]
    _check_paths(settings)
    open_socket_folder()
    check_output_dir(settings.output_dir)
    identity_path = settings.identity_path or settings.output_dir / "identity.key"
    with lock_identity(identity_path), lock_folder(settings.output_dir, "output_dir", LOCK_NAME):
        check_identity(identity_path)
        findings = [finding.require() for finding in machine_findings(settings, os.environ)]
        reachable = check_reachable(addresses)
        from peer.link.supervisor import AgentGoneError, AgentProcess
        from peer.run.limits import in_hours
        from peer.run.start_message import start_message

        start, told = start_message(settings, reachable, identity_path), in_hours(settings.active_hours)
        agent = AgentProcess(settings.output_dir / "agent.log")
        try:
            agent.start()
            if told:  # it looks for the run while this process imports for seconds
                agent.send(start)
        except AgentGoneError as gone:
            raise UserError(f"the agent process did not start: {gone}", "Free memory or end other programs.") from None
        with starting():
            from peer.run.lifecycle import live

        code = live(settings, start, agent, findings, told=told)
    # All is saved and closed. Unloading torch would take seconds more, and who stops a machine does not wait long.
    logging.shutdown()
    with contextlib.suppress(OSError):  # its reader may have exited
        sys.stdout.flush()
    os._exit(code)


def _check_paths(settings: PeerSettings) -> None:
    """What the settings name, before any folder is made."""
    if settings.report is not None:
        check_output_file(settings.report, "--report", settings.output_dir)
    if settings.resume_from_checkpoint not in (None, LATEST):
        check_resumable(Path(settings.resume_from_checkpoint).expanduser())
    if settings.identity_path is not None:
        try:
            check_output_folder(settings.identity_path.parent)
        except OSError as error:
            what = f"identity_path={settings.identity_path}: its folder cannot be written to: {error.strerror}"
            raise UserError(what, "Choose another file with --identity-path.") from None
