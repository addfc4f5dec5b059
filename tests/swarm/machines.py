"""Machines whose lines go down and whose processes are killed, with whole peers on them, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import SimpleNamespace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.protocol.identity import Identity
from peer.swarm.net.directory import Directory
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.runtime.timing import STANDARD
from tests.swarm.lines import Lines
from tests.swarm.network import MemoryNetwork
from tests.swarm.training import TOKENS, Pace, TrainingPeer, manifest_of
from tests.swarm.virtual_time import MACHINE, Sleeper

EPOCH = 1.8e9  # wall-clock seconds at the beginning
TIMEOUT_S, LOOK_S, SPARE_S = 120.0, 5.0, 30.0


@dataclass(frozen=True)
class Programme:
    """What happens to a swarm.

    Attributes:
        peers, newcomers: that are there from the beginning, and that come in the first half, one after the other.
        train_s, step_s: of all trainers, within a tenth; those of the last one are `slow` times as long.
        away_every_s: on average, between two faults of a machine; 0: there are none.
        away_s: the shortest and the longest.
        together: how likely each other machine goes away at the same time.
        one_line: how likely only the line to one other machine goes; half of these one way only.
        killed: how likely the machine's processes die, and start again after as long.
        asleep: how likely the machine sleeps.
        halves_every_s: on average, between two partitions of all machines into halves; 0: there are none.
    """

    peers: int = 4
    newcomers: int = 0
    min_group: int = 2
    max_group: int = 16
    window_s: float = 30.0
    train_s: float = 60.0
    step_s: float = 0.5
    slow: float = 1.0
    away_every_s: float = 300.0
    away_s: tuple[float, float] = (3.0, 60.0)
    together: float = 0.0
    one_line: float = 0.0
    killed: float = 0.0
    asleep: float = 0.0
    halves_every_s: float = 0.0

    @property
    def patience_s(self) -> float:
        """Without a round, though enough machines are there: the longest training, a group that fails, another."""
        return 1.1 * self.slow * self.train_s + 2 * self.window_s + SPARE_S


@dataclass
class Outcome:
    """What became of a swarm.

    Attributes:
        rounds: of the longest chain.
        shares: of each machine, what it could have trained since it came, its faults included, that the chain counts.
        pause_s, pause_at_s: the longest time without a round though enough machines were there, and when it ended.
        refused_s: how long peers were refused, all together.
        healed_s: from the end of the last fault to a round of all; None: there was none in four longest pauses.
    """

    rounds: int
    shares: list[float]
    faults: int
    refused_s: float
    pause_s: float
    pause_at_s: float
    healed_s: float | None


class PlayedDHT:
    """The table of all records, as a machine sees it whose line is up."""

    def __init__(self, table, clock, up):
        self._table, self._clock, self._up = table, clock, up

    async def store(self, key, value, expiration_time, subkey):
        if self._up():
            self._table.setdefault(key, {})[subkey] = SimpleNamespace(value=value, expires_at=expiration_time)
        return self._up()

    async def get(self, key, **_):
        now, records = self._clock(), self._table.get(key, {}) if self._up() else {}
        found = {owner: record for owner, record in records.items() if record.expires_at > now}
        return SimpleNamespace(value=found) if found else None


class Machine(Sleeper):
    """One that may be away or asleep, and whose peer may be killed."""

    def __init__(self, swarm, number, pace, folder):
        super().__init__()
        self.swarm, self.number, self.pace, self.folder = swarm, number, pace, folder
        seed = hashlib.sha256(f"{swarm.seed} {number}".encode()).digest()
        self.identity = Identity._of(Ed25519PrivateKey.from_private_bytes(seed))
        self.away, self.memory, self.peer, self.running = False, None, None, None
        self.came_at = swarm.loop.time()

    @property
    def name(self):
        return self.identity.peer_id

    async def start(self):
        """A peer, with what an earlier one left; all that it does is done by this machine."""
        context = contextvars.copy_context()
        context.run(MACHINE.set, self)
        await self.swarm.loop.create_task(self._start(), context=context)

    async def _start(self):
        swarm, up = self.swarm, lambda: swarm.network.lines.up(self.name, "the DHT")
        node = swarm.network.node(self.identity, PlayedDHT(swarm.table, swarm.wall_clock, up))
        directory = Directory(node, swarm.manifest.run_id, swarm.wall_clock)
        self.peer = TrainingPeer(
            self.number, node, directory, swarm.manifest, self.folder, self.pace, memory=self.memory, heard=self._heard
        )
        self.memory = self.peer.memory
        history = self.peer.store.history
        directory.known = lambda peer_id: history.seen[peer_id] > 0
        await self.peer.start()
        directory.follow()
        directory.announce(lambda: self.peer.record(directory.expiry()))
        self.running = node.spawn(self.peer.run(), essential=True)

    def _heard(self, record):
        if record.status == "committed":
            self.swarm.on_commit(len(record.members))

    async def kill(self):
        """Its streams end at once, and nothing of it runs any more."""
        peer, network = self.peer, self.swarm.network
        self.peer = None
        peer.rest()
        network.hosts.pop(self.name)
        await network.lines.break_off(self.name)
        await cancel_and_wait(list(peer.node._tasks))

    @property
    def there(self):
        return self.peer is not None and not self.away and not self.asleep


class Swarm:
    """All machines, and the time in which enough of them were there without a round."""

    def __init__(self, programme, seed, folder):
        self.programme, self.seed, self.folder, self.rng = programme, seed, folder, random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.network = MemoryNetwork(STANDARD, self.loop.time, Lines())
        self.manifest = manifest_of(programme.window_s, TIMEOUT_S, programme.min_group, programme.max_group)
        self.table, self.machines, self.tasks = {}, [], []
        self.faults, self._looked, self._without, self._longest = 0, 0.0, 0.0, (0.0, 0.0)
        self.together = asyncio.Event()

    def wall_clock(self):
        return EPOCH + self.loop.time()

    def look(self):
        """Count the time since this was last called."""
        now = self.loop.time()
        if sum(machine.there for machine in self.machines) >= self.programme.min_group:
            self._without += now - self._looked
            self._longest = max(self._longest, (self._without, now))
        self._looked = now

    def on_commit(self, members):
        """A peer has committed a round of so many."""
        self.look()
        self._without = 0.0
        if members == min(len(self.machines), self.programme.max_group):
            self.together.set()

    @property
    def chain(self):
        """The longest there is."""
        return max((m.peer.store.history.chain for m in self.machines if m.peer is not None), key=len)

    def share(self, machine):
        """Of a machine's time, what the chain counts."""
        members = (member for certificate in self.chain for member in certificate.link.roster)
        tokens = sum(member.tokens for member in members if member.peer_id == machine.name)
        return tokens / TOKENS * machine.pace.train_s / (self.loop.time() - machine.came_at)

    async def come(self):
        """One more machine."""
        programme, number = self.programme, len(self.machines)
        slow = programme.slow if number == programme.peers - 1 else 1.0
        train_s = programme.train_s * slow * self.rng.uniform(1.0, 1.1)
        machine = Machine(self, number, Pace(train_s, programme.step_s * slow), self.folder / str(number))
        self.machines.append(machine)
        await machine.start()
        if programme.away_every_s:
            self.tasks.append(asyncio.ensure_future(self._faults_of(machine)))

    async def _faults_of(self, machine):
        programme, rng = self.programme, self.rng
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / programme.away_every_s))
            seconds = rng.uniform(programme.away_s[0], rng.choice([10.0, programme.away_s[1]]))
            self.look()
            if not machine.there:
                continue
            self.faults += 1
            others = [other for other in self.machines if other is not machine and other.there]
            kind = rng.random()
            if kind < programme.killed:
                await machine.kill()
                await asyncio.sleep(seconds)
                self.look()
                await machine.start()
            elif kind < programme.killed + programme.asleep:
                machine.asleep = True
                await asyncio.sleep(seconds)
                self.look()
                machine.peer.slept(seconds)
                machine.wake()
            elif others and kind < programme.killed + programme.asleep + programme.one_line:
                await self._line(machine.name, rng.choice(others).name, seconds, both=rng.random() < 0.5)
            else:
                await self._away([machine, *(other for other in others if rng.random() < programme.together)], seconds)

    async def _halves(self):
        programme, rng = self.programme, self.rng
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / programme.halves_every_s))
            names = [machine.name for machine in self.machines]
            half = set(rng.sample(names, len(names) // 2))
            ways = [(one, other) for one in names for other in names if (one in half) != (other in half)]
            self.faults += 1
            with self.network.lines.down(*ways):
                await asyncio.sleep(rng.uniform(*programme.away_s))

    async def _line(self, source, sink, seconds, *, both):
        with self.network.lines.down((source, sink), *([(sink, source)] if both else [])):
            await asyncio.sleep(seconds)

    async def _away(self, machines, seconds):
        with ExitStack() as stack:
            for machine in machines:
                machine.away = True
                stack.callback(setattr, machine, "away", False)
            stack.enter_context(self.network.lines.down(*(machine.name for machine in machines)))
            await asyncio.sleep(seconds)
            self.look()

    async def live(self, hours):
        """All of it; -> `Outcome`, but for what was logged."""
        for _ in range(self.programme.peers):
            await self.come()
        if self.programme.halves_every_s:
            self.tasks.append(asyncio.ensure_future(self._halves()))
        coming = sorted(self.rng.uniform(0.0, 1800.0 * hours) for _ in range(self.programme.newcomers))
        while self.loop.time() < 3600.0 * hours:
            await asyncio.sleep(LOOK_S)
            self.look()
            while coming and coming[0] < self.loop.time():
                coming.pop(0)
                await self.come()
            for machine in self.machines:
                if machine.peer is not None and machine.running.done():
                    machine.running.result()
                    raise AssertionError(f"machine {machine.number} left")
        self.look()
        pause_s, pause_at_s = self._longest
        return Outcome(
            rounds=len(self.chain), faults=self.faults, refused_s=0.0, pause_s=pause_s, pause_at_s=pause_at_s,
            shares=[round(self.share(machine), 3) for machine in self.machines],
            healed_s=await self._heal(),
        )  # fmt: skip

    async def _heal(self):
        """Seconds until all make a round together, once nothing fails any more."""
        await cancel_and_wait(self.tasks)
        for machine in self.machines:
            machine.wake()
            if machine.peer is None:
                await machine.start()
        self.together.clear()
        began = self.loop.time()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.together.wait(), 4 * self.programme.patience_s)
            return round(self.loop.time() - began)
