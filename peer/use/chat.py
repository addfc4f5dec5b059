"""A conversation with a trained model, in its tokenizer's chat template; without one, its text is continued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from jinja2 import TemplateError

from peer.data.tokenizer import as_transformers
from peer.errors import UserError
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
        self._tokenizer = as_transformers(trained.tokenizer)
        self._head = [{"role": "system", "content": system}] if system is not None else []
        self._turns: list[Turn] = []
        self._ends = self._ends_of_turns() if self._tokenizer.chat_template else frozenset[int]()

    def answer(self, text: str, say: Callable[[str], None] = lambda _: None) -> str:
        """What the model says to that, piece by piece and as a whole.

        After a KeyboardInterrupt from within, what was said until then is part of the conversation.
        """
        self._turns.append({"role": "user", "content": text})
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
        if not self._tokenizer.chat_template:
            return self._trained.tokenizer.encode(text)
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)

    def _render(self, turns: list[Turn], ask: bool = True) -> str:
        if not self._tokenizer.chat_template:
            return "".join(turn["content"] + ("" if turn["role"] == "user" else "\n") for turn in turns)
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask))
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            hint = "leave out --system, or use atoll generate"
            raise UserError(f"the tokenizer's chat template refuses the conversation: {reason}", hint) from None

    def _ends_of_turns(self) -> frozenset[int]:
        """The control token that the template puts after an answer, if it does."""
        said = [*self._head, {"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        after = self._encode(self._render(said, ask=False).rpartition(_PROBE)[2].lstrip())[:1].tolist()
        return frozenset(after) & frozenset(self._tokenizer.added_tokens_decoder)


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
                chat.answer(text, lambda piece: print(piece, end="", flush=True))
                print(flush=True)
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
