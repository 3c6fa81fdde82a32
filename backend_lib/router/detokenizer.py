"""Token ids to text, a few at a time, so that the pieces join to what decoding everything at once gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BROKEN = "\ufffd"

# A window longer than _SLIDE is cut back to about _KEEP tokens at the next place where no character is open. A valid
# character has at most four bytes, hence four tokens: a window past _FORCE holds bytes that are no text, and is cut
# anyway, or it would grow for as long as they come.
_KEEP = 5
_SLIDE = 16
_FORCE = 32

# Bytes of an unfinished character, each of which a byte-fallback decoder shows as one U+FFFD.
_MAX_OPEN = 3


class Detokenizer:
    """The text of one sequence, decoded incrementally at a cost per token that does not grow.

    A window of the last tokens is decoded again with each new one, and what is new at its end is the piece. Trailing
    U+FFFD are held back, because the next token may turn them into a character.

    The pieces join exactly to `tokenizer.decode(ids)`, with one exception: a byte-fallback decoder (SentencePiece
    models) turns a whole run of byte tokens into U+FFFD if any byte of the run is wrong, even characters already
    complete. Those have been given out by then and stay.

    Args:
        prompt_ids: what stands before. The pieces are then what decoding adds to the prompt's text: SentencePiece
            models strip the first space of a text, and a continuation is none.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that are given out
        if prompt_ids:
            self._begin_after(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete. Never part of a character."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What is still held back, as it stands. The sequence has ended."""
        piece = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return piece

    def _begin_after(self, prompt_ids: Sequence[int]) -> None:
        """The window is the prompt's end, from a place between two characters, and all of it is given out."""
        tail = [token_id for token_id in prompt_ids[-_FORCE:] if self._has_text(token_id)]
        # Never none of it: a window that is empty is the beginning of a text.
        starts = [tail[count:] for count in range(min(_MAX_OPEN + 1, len(tail)))]
        self._window = min(starts, key=lambda window: self._decode(window).count(_BROKEN), default=[])
        text = self._decode(self._window)
        self._given = len(text)
        self._slide(text)

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = self._settled(text)
        piece = text[self._given : settled]
        self._given = max(self._given, settled)
        if len(self._window) > _FORCE or (len(self._window) > _SLIDE and settled == len(text)):
            self._slide(text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _settled(self, text: str) -> int:
        """How many characters of the window's text later tokens cannot change."""
        if not text.endswith(_BROKEN):
            return len(text)
        whole = len(text.rstrip(_BROKEN))
        return max(whole, len(text) - _MAX_OPEN) if len(self._window) > _FORCE else whole

    def _slide(self, text: str) -> None:
        """Forget the window's oldest tokens.

        What stays must decode to the end of the text as it stood, or it begins inside a character. And to more than
        what is held back: so every byte that may be open stays, and a decoder that strips the first space of a text
        has had its way before the next token comes.
        """
        self._window = [token_id for token_id in self._window if self._has_text(token_id)]
        held = len(text) - self._given
        for count in range(_KEEP, min(_KEEP + 2 * _MAX_OPEN + 2, len(self._window))):
            tail = self._decode(self._window[-count:])
            if len(tail) > held and text.endswith(tail):
                self._window, self._given = self._window[-count:], len(tail) - held
                return

    def _has_text(self, token_id: int) -> bool:
        """Whether the decoder sees it; special and unknown tokens it does not. Twice: one space may be stripped."""
        return bool(self._decode([token_id, token_id]))
