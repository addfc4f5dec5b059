"""A conversation with a trained model, in its tokenizer's chat template; without one, its text is continued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from peer.errors import UserError
from peer.printable import printable, say
from peer.use.generate import Sampling, continue_ids, window_of
from peer.use.trained import Trained

Turn = dict[str, str]
_PROBE = "atoll-answer"


class Chat:
    """Remembers what was said; the oldest turns are forgotten once the model's window is full.

    Args:
        system: the system prompt.

    Raises:
        UserError: the tokenizer's chat template takes no such conversation.
    """

    def __init__(self, trained: Trained, sampling: Sampling, system: str | None = None) -> None:
        self._trained, self._sampling = trained, sampling
        self._encoder = trained.tokenizer.encoder()  # as in training: the same template, the same ids
        self._head = [{"role": "system", "content": self._checked(system)}] if system is not None else []
        self._turns: list[Turn] = []
        self._ends = self._ends_of_turns()

    @property
    def without_template(self) -> bool:
        """The tokenizer has none, so that text is continued."""
        return self._encoder.chat is None

    def answer(self, text: str, say: Callable[[str], None] = lambda _: None) -> str:
        """What the model says to that, piece by piece and as a whole.

        After a KeyboardInterrupt from within, what was said until then is part of the conversation.

        Raises:
            UserError: the text spells a control token, or the template refuses the conversation.
        """
        self._turns.append({"role": "user", "content": self._checked(text)})
        said: list[str] = []

        def tell(piece: str) -> None:
            said.append(piece)
            say(piece)

        sampling = replace(self._sampling, seed=self._sampling.seed + len(self._turns) // 2)  # another for each turn
        try:
            return continue_ids(self._trained, self._prompt(), sampling, tell, self._ends)
        finally:
            self._turns.append({"role": "assistant", "content": "".join(said)})

    def _prompt(self) -> np.ndarray:
        """Ids [n] of the conversation up to the next answer; without its oldest turns where it fills the window."""
        window = window_of(self._trained)
        room = window - min(self._sampling.max_new_tokens, window // 2)
        while len(ids := self._encode(self._render(self._head + self._turns))) > room and len(self._turns) > 1:
            del self._turns[:2]
        return ids

    def _encode(self, text: str) -> np.ndarray:
        if self._encoder.chat is None:
            return self._trained.tokenizer.encode(text)
        return self._encoder.encode_rendered(text)[0]

    def _render(self, turns: list[Turn], ask: bool = True) -> str:
        if self._encoder.chat is None:
            return "".join(turn["content"] + ("" if turn["role"] == "user" else "\n") for turn in turns)
        try:
            return self._encoder.chat.render(turns, prompts=ask)
        except ValueError as error:
            reason = printable(" ".join(str(error).split())[:200])
            hint = "leave out --system, or use atoll generate"
            raise UserError(f"the conversation is {reason}", hint) from None

    def _checked(self, text: str) -> str:
        if self._encoder.chat is not None and (token := self._encoder.chat.control_in(text)):
            raise UserError(f"the text spells {token!r}, a control token of the model", "write it another way")
        return text

    def _ends_of_turns(self) -> frozenset[int]:
        """The control token that the template puts after an answer, if it does."""
        if self._encoder.chat is None:
            return frozenset()
        said = [*self._head, {"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        after = self._render(said, ask=False).rpartition(_PROBE)[2].lstrip()
        token = self._encoder.chat.control_in(after)
        return frozenset(self._encode(token)[:1].tolist()) if token and after.startswith(token) else frozenset()


def converse(chat: Chat, lines: Iterator[str], asks: bool) -> None:
    """Answer line by line on standard output, until there are no more.

    Args:
        asks: the lines come from a person, who ends an answer with Ctrl-C, and the conversation with Ctrl-D.
    """
    while True:
        try:
            if (text := next(lines, None)) is None:
                return
            if text.strip():
                chat.answer(text, say)
                print(flush=True)
        except UserError as error:
            if not asks:
                raise
            print(f"  {error.what}: {error.hint}", flush=True)
        except KeyboardInterrupt:
            if not asks:
                raise
            print("  (Ctrl-D ends the chat)", flush=True)


class Typed:
    """The lines that a person types, after a prompt; they can be edited and recalled."""

    def __init__(self) -> None:
        import readline  # noqa: F401  # `input` uses it once it is imported

    def __iter__(self) -> Typed:
        return self

    def __next__(self) -> str:
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stdout)
            raise StopIteration from None
