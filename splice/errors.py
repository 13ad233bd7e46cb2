"""What the core refuses, by whose fault it is.

SpliceError
 ├─ InvalidRequest          the caller sent something that has no meaning here
 ├─ TemplateRejected        the chat template raised on these messages
 └─ GenerationInvalid       the engine's ids or log probs cannot be trusted

Nothing here is recognised by its message: the facts are attributes.
"""

from __future__ import annotations


class SpliceError(Exception):
    """Root of the core's refusals; never raised itself."""


class InvalidRequest(SpliceError):
    """A request field that cannot be used. `field` is its path in the caller's body."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class TemplateRejected(SpliceError):
    """The chat template raised, ran too long or wrote too much; `words` are its own.

    `runaway`: it was stopped at a bound, so that trying it on other messages is not worth the time.
    """

    def __init__(self, words: str, *, runaway: bool = False) -> None:
        super().__init__(f"the chat template refused these messages: {words}")
        self.words = words
        self.runaway = runaway


class GenerationInvalid(SpliceError):
    """The engine's answer breaks its contract. `field` names the part, `problem` says how."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
