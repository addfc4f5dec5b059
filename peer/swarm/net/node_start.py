"""Starts a host: its identity, its daemon, its place in the DHT, and what it answers from the first moment on."""

from __future__ import annotations

import asyncio

from hivemind.dht.protocol import ValidationError
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from peer.protocol.address import reach_of
from peer.swarm.net.daemon import (
    NodeConfig,
    explain_join_failure,
    is_client,
    refuse_taken_identity,
    start_daemon,
    stop_daemon,
)
from peer.swarm.net.dht import BoundedDHT, node_id_of
from peer.swarm.net.direct import DIRECT_NAME, DirectTransport
from peer.swarm.net.keys import load_or_create_identity
from peer.swarm.net.node import Node
from peer.swarm.net.reachability import REACH_NAME, DialBackServer
from peer.swarm.net.record_store import give_back_memory
from peer.swarm.net.speed import SPEED_NAME, SpeedServer


async def start_node(config: NodeConfig) -> Node:
    """Start the libp2p daemon and join the DHT.

    Raises:
        UserError: no initial peer answers, clocks differ by more than 3 s, the identity is in use elsewhere, or the
            daemon does not start.
    """
    existed = config.identity_path.exists()
    identity = load_or_create_identity(config.identity_path)
    if existed and config.initial_peers and config.check_identity:
        await refuse_taken_identity(config, identity)
    p2p = await start_daemon(config, str(config.identity_path))
    client = await is_client(config, p2p)
    if client:
        await stop_daemon(p2p, config.timing)
        p2p = await start_daemon(config, str(config.identity_path), client)
    try:
        dht = await BoundedDHT.create(
            p2p=p2p,
            client_mode=client,
            node_id=node_id_of(identity.peer_id),
            initial_peers=[Multiaddr(address) for address in config.initial_peers] or None,
            num_workers=2,
            backoff_rate=1.0,  # else a node that was away for ten minutes is asked for nothing for the next ten
            cache_locally=False,  # its cache has no bounds
            cache_nearest=0,
            cache_on_store=False,
        )
    except (ValidationError, RuntimeError) as error:
        await stop_daemon(p2p, config.timing)
        raise explain_join_failure(error, config.initial_peers) from None
    maddrs = tuple(sorted((str(address) for address in await p2p.get_visible_maddrs(latest=True)), key=reach_of))
    node = Node(config, identity, p2p, dht, maddrs, client, records=dht.protocol.storage)
    dht.introducers = [peer_id for peer_id in node.introducers if peer_id != identity.peer_id]
    introducers = map(PeerID.from_base58, dht.introducers)
    await asyncio.gather(*(dht.meet(one) for one in introducers if one not in dht.protocol.routing_table))
    if not client:
        await node.serve(REACH_NAME, "reach", DialBackServer(p2p, config.timing).answer)
        await node.serve(SPEED_NAME, "speed", SpeedServer(config.timing, node.clock).answer)
    if config.direct_port is not None:
        node.direct = DirectTransport(p2p, node.accept, config.timing)
        if not client:
            node.direct.listener.listen(config.host_maddrs, config.direct_port, config.mapped_port)
        await node.serve(DIRECT_NAME, "direct", node.direct.answer)
    node.spawn(node.keep_connected(), essential=True)
    node.spawn(give_back_memory(dht.protocol.storage, config.timing.trim_period_s), essential=True)
    return node
