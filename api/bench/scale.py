"""How much is played, and where it is looked at."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS = 256
SAMPLED_TOKENS = 256
TURN_TOKENS = PROMPT_TOKENS + SAMPLED_TOKENS
MOST_CONTEXT = 131_072  # the engine's window; nothing here comes near it

_LEAST_BAND_TURNS = 4


@dataclass(frozen=True, slots=True)
class Scale:
    """A run. contexts: where bands end, in tokens. sessions grow side by side, one turn each in every round."""

    contexts: tuple[int, ...]
    sessions: int
    repetitions: int
    floor_turns: int  # in each band of each repetition
    whole_renders: int

    @property
    def rounds(self) -> int:
        """Turns of a session."""
        return max(self.contexts) // TURN_TOKENS

    def band_end(self, context: int) -> int:
        """The round after which a session holds `context` tokens."""
        return context // TURN_TOKENS

    def band_start(self, context: int) -> int:
        """The round before the band's first. A band is short against its context, and has several turns."""
        end = self.band_end(context)
        return end - max(_LEAST_BAND_TURNS, end // 8)


FULL = Scale(contexts=(4096, 8192, 16_384, 32_768, 65_536), sessions=5, repetitions=5, floor_turns=10, whole_renders=2)
QUICK = Scale(contexts=(4096, 8192, 16_384), sessions=3, repetitions=1, floor_turns=4, whole_renders=1)
