"""A real swarm whose bootstrap and members each have a machine of their own on an `Internet`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.link.messages import Start
from peer.link.supervisor import AgentProcess
from tests.network.bootstraps import BootstrapProcess
from tests.network.chaos.namespaces import Internet
from tests.network.harness import TestSwarm

LISTEN = "/ip4/0.0.0.0/tcp/4001"


class WideSwarm(TestSwarm):
    """Members and the bootstrap run on the hosts of the internet that have their names.

    Args:
        timeout_s: the manifest's cap of one round.
    """

    __test__ = False

    def __init__(self, folder: Path, internet: Internet, *, timeout_s: int = 20, **options: Any) -> None:
        super().__init__(folder, **options)
        self.manifest_text = self.manifest_text.replace("timeout_s: 20", f"timeout_s: {timeout_s}")
        self.internet = internet

    def _start_bootstrap(self, folder: Path, initial_peers: Sequence[str], port: int) -> BootstrapProcess:
        with self.internet.hosts[folder.name].entered():
            bootstrap = BootstrapProcess(folder, self.manifest_text, initial_peers, port or 4001, host="0.0.0.0")
        _, peer_id = bootstrap.address.split("/p2p/")
        bootstrap.address = f"/ip4/{self.internet.addresses[folder.name]}/tcp/{bootstrap.port}/p2p/{peer_id}"
        return bootstrap

    def _start_of(self, name: str, address: str, folder: Path) -> Start:
        start = super()._start_of(name, address, folder)
        return start.model_copy(update={"host_maddrs": (LISTEN,), "nat_port_map": False})

    def _start_agent(self, name: str, agent: AgentProcess) -> None:
        with self.internet.hosts[name].entered():
            agent.start()
