"""Why a database is not migrated, by whose fault.

MigrationError
 ├─ DatabaseTooNew          a newer release migrated it: upgrade this one
 ├─ LedgerGap               a step is missing below one that was applied
 ├─ StepRenamed             a number was applied under another name: another program's database, or an edited step
 ├─ LedgerUnreadable        the ledger holds what no release wrote
 ├─ LockBusy                another runner works, and did not finish in time
 ├─ LockLost                this runner was away longer than its lock lasted; it stopped
 ├─ StepFailed              a step raised; those before it are applied, it is not
 └─ DatabaseUnavailable     Redis did not serve the command; a repeat is safe

Nothing here is recognised by its message: the facts are attributes.
"""

from __future__ import annotations


class MigrationError(Exception):
    """Root of the package's refusals; never raised itself."""


class DatabaseTooNew(MigrationError):
    """`labels` are applied steps that this release does not know."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        super().__init__(f"a newer release migrated this database ({', '.join(labels)}): upgrade this one")
        self.labels = labels


class LedgerGap(MigrationError):
    """`missing` are steps below the newest applied one that were never applied."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        super().__init__(
            f"{', '.join(missing)} never ran although a later step did: this database was changed by hand, "
            "or restored in part"
        )
        self.missing = missing


class StepRenamed(MigrationError):
    """The database knows a step's number under another name."""

    def __init__(self, recorded: str, ours: str) -> None:
        super().__init__(f"the database has {recorded} where this release has {ours}: is it this program's database?")
        self.recorded = recorded
        self.ours = ours


class LedgerUnreadable(MigrationError):
    """A field of the ledger that names no step."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field!r} in the ledger names no step")
        self.field = field


class LockBusy(MigrationError):
    """Another runner held the lock for all of `waited_s`."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"another migration is still running after {waited_s:g} s; run this again when it has ended")
        self.waited_s = waited_s


class LockLost(MigrationError):
    """The lock ran out under this runner; the step it was in is not recorded and may run again."""

    def __init__(self) -> None:
        super().__init__("the migration lock was lost, so nothing more is recorded; run this again")


class StepFailed(MigrationError):
    """The step `label` raised; its own error is the cause."""

    def __init__(self, label: str, words: str) -> None:
        super().__init__(f"{label} failed and stays pending: {words}")
        self.label = label


class DatabaseUnavailable(MigrationError):
    """Redis could not be reached, or refused the command."""
