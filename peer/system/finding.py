"""What one check of this machine, or of its way to a swarm, has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from peer.errors import UserError

Level = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `atoll doctor`. `fail`: no peer runs like this; `warn`: one does, but worse. `advice`: what to do."""

    check: str
    level: Level
    text: str
    advice: str = ""

    @property
    def in_words(self) -> str:
        """One line, with what to do."""
        return f"{self.text}: {self.advice}" if self.advice else self.text

    def require(self) -> Finding:
        """The same; raises UserError where the check failed."""
        if self.level == "fail":
            raise UserError(self.text, self.advice)
        return self


def checked(check: str, work: Callable[[], str | Finding]) -> Finding:
    """What `work` finds, or says in one line if all is well; the UserError that it raises is a failure."""
    try:
        found = work()
    except UserError as error:
        return Finding(check=check, level="fail", text=error.what, advice=error.hint)
    return found if isinstance(found, Finding) else Finding(check=check, level="pass", text=found)
