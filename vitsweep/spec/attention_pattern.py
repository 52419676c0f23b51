"""Which products attention takes: what its FLOPs follow from (no torch)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """How the tokens of a sequence attend to one another.

    Attributes:
        causal: a token attends to itself and those before it.
        linear: through a state of (K, K) per head instead of scores.
        segments: parts of the sequences along the first axis, each attending to itself only.
    """

    causal: bool = False
    linear: bool = False
    segments: int = 1

    def pairs(self, tokens: int, *, first_axis: bool) -> int:
        """Return how many pairs of query and key a sequence of `tokens` has."""
        segments = self.segments if first_axis else 1
        longest = -(-tokens // segments)
        lengths = [min(longest, max(0, tokens - i * longest)) for i in range(segments)]
        return sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)


SOFTMAX = AttentionPattern()
"""Every token to every token."""
