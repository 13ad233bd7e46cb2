"""What came of a soak, as a value, as a table and as an exit code."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tests.faults.checker import KINDS, Report, tally
from tests.faults.soak.growth import Size
from tests.faults.soak.plan import Plan

_SHOWN = 20
KEYS_LEFT = 2  # after the last phase: its run's listing, and for a moment its worker's liveness


class Expiry(msgspec.Struct, frozen=True, kw_only=True):
    """Keys before a phase of short-lived sessions, at its end, and after their time."""

    sessions: int
    turns: int
    stuck: int
    keys_before: int
    keys_full: int
    keys_after: int
    listed_after: int

    @property
    def leaked(self) -> int:
        """Keys that stayed."""
        return max(0, self.keys_after - self.keys_before - KEYS_LEFT)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What did not go, or did not go on."""
        found = {"keys leaked": self.leaked, "still listed": self.listed_after, "stuck": self.stuck}
        return tuple(f"{count} {name} among sessions that expire" for name, count in found.items() if count)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a soak found out."""

    plan: Plan
    report: Report
    harm: dict[str, int]
    attempts: dict[str, int]  # how they ended
    played_s: float
    checked_s: float
    sizes: tuple[Size, ...]
    cpu_s: dict[str, float]
    boot_s: float  # median
    failed_starts: tuple[str, ...]  # of workers, the last words of each
    expiry: Expiry | None

    @property
    def rate(self) -> float:
        """Answered turns a second."""
        return self.report.answered / self.played_s

    @property
    def complaints(self) -> tuple[str, ...]:
        """Why the run fails. In memory mode losing what Redis held is the contract, being silent about it is not."""
        counts = tally(self.report)
        if self.plan.durability == "memory":
            silent = sum(finding.kind == "broken" and finding.silent for finding in self.report.findings)
            found = {"broken without saying so": silent, "stuck": counts["stuck"] if not counts["lost"] else 0}
        else:
            found = {kind: counts[kind] for kind in KINDS}
        said = [f"{count} {name}" for name, count in found.items() if count]
        return (*said, *(self.expiry.complaints if self.expiry is not None else ()))

    @property
    def exit_code(self) -> int:
        """For the shell."""
        return 1 if self.complaints else 0

    def as_json(self) -> bytes:
        """Everything, the findings included."""
        own = msgspec.to_builtins(self)
        return msgspec.json.format(
            msgspec.json.encode(own | {"counts": dict(tally(self.report)), "complaints": self.complaints})
        )

    def lines(self) -> Iterator[str]:
        """The table."""
        report, counts = self.report, tally(self.report)
        yield f"durability {self.plan.durability}, {self.plan.sessions} sessions at once, {self.plan.workers} workers"
        rows = {
            "played": f"{self.played_s:.0f} s, {self.rate:.1f} answered turns a second",
            "checked": f"in {self.checked_s:.0f} s",
            "rollouts": f"{report.rollouts}, sessions in the store {report.sessions}",
            "acknowledged turns": f"{report.acknowledged}, of which {report.answered} were gone on from",
            "attempts": f"{report.attempts}, replayed {report.replayed}",
            "extensions compared": str(report.extensions),
            "generations": f"{report.generations}, finished without becoming a turn {report.unheard}",
            "turns in the store": f"{report.stored}, whose reply reached nobody {report.unanswered}",
            "CPU seconds": ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.cpu_s.items()),
            "worker ready after": f"{self.boot_s:.1f} s (median); starts that failed {len(self.failed_starts)}",
        }
        yield from (f"  {name:22}{value}" for name, value in rows.items())
        yield from _block("harm", self.harm)
        yield from _block("attempts ended", self.attempts)
        yield from (f"    a worker did not start: {words}" for words in self.failed_starts)
        yield from self._growth()
        yield from _block("found", {kind: counts[kind] for kind in KINDS})
        for finding in report.findings[:_SHOWN]:
            yield f"    {finding.kind}: {finding.where}: {finding.words}{'' if finding.silent else ' (said so)'}"
        if len(report.findings) > _SHOWN:
            yield f"    and {len(report.findings) - _SHOWN} more, in the JSON"
        yield "passed" if not self.complaints else "FAILED: " + ", ".join(self.complaints)

    def _growth(self) -> Iterator[str]:
        names = Size.__struct_fields__
        yield "  growth    " + " ".join(f"{name:>18}" for name in names)
        for size in _first_middle_last(self.sizes):
            yield "            " + " ".join(f"{getattr(size, name)!s:>18}" for name in names)
        if (expiry := self.expiry) is not None:
            yield (
                f"  expiry    {expiry.sessions} sessions of {expiry.turns} turns: keys {expiry.keys_before} -> "
                f"{expiry.keys_full} -> {expiry.keys_after} after their TTL, {expiry.listed_after} listed"
            )


def _block(title: str, counts: dict[str, int]) -> Iterator[str]:
    yield f"  {title}"
    yield from (f"    {name:34}{count:>8}" for name, count in counts.items())


def _first_middle_last(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    if len(sizes) < 3:
        return sizes
    return sizes[0], sizes[len(sizes) // 2], sizes[-1]
