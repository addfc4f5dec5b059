"""How old a contribution is: the rounds of its fragment since the last that held what this peer had trained."""

from __future__ import annotations

from peer.outer.policy.straggler import StragglerPolicy
from peer.outer.state.fragments import Turns


class Staleness:
    """Of one peer of a swarm.

    Args:
        policy: what stale contributions weigh.
        turns: what each round of the run is of.
        fragments: how many there are.
        nominal_tokens: the most that one contribution weighs.
    """

    def __init__(self, policy: StragglerPolicy, turns: Turns, fragments: int, nominal_tokens: int) -> None:
        self._policy, self._turns, self._fragments, self._most = policy, turns, fragments, nominal_tokens
        self._counted: dict[int, int] = {}
        self._joined = 0

    def join(self, rounds: int) -> None:
        """This peer starts from the state of so many rounds."""
        self._joined = rounds
        self._counted.clear()

    def count(self, rounds: int) -> None:
        """Round number `rounds` of the run held this peer's contribution."""
        turn = self._turns(rounds - 1)
        self._counted[turn.fragment] = turn.rounds + 1

    def of(self, rounds: int) -> int:
        """s of a contribution to the round after so many; 0 on a shorter lineage than the one it was counted on."""
        turn = self._turns(rounds)
        if turn.fragment in self._counted:
            return max(0, turn.rounds - self._counted[turn.fragment])
        return max(0, rounds - self._joined) // self._fragments

    def weigh(self, tokens: int, rounds: int) -> int:
        """Tokens of a contribution to the round after so many -> its weight."""
        factor = self._policy.weight(self.of(rounds))
        return tokens if factor == 1.0 else max(1, round(min(tokens, self._most) * factor))
