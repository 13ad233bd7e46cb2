"""migrations upgrades: numbered, append-only steps between releases' stored formats; imports none of the rest."""

from migrations import m0001_schema
from migrations.base import Step
from migrations.errors import (
    DatabaseTooNew,
    DatabaseUnavailable,
    LedgerGap,
    LedgerUnreadable,
    LockBusy,
    LockLost,
    MigrationError,
    StepFailed,
    StepRenamed,
)
from migrations.plan import plan
from migrations.records import upgrade
from migrations.runner import Runner

STEPS: tuple[Step, ...] = (m0001_schema.STEP,)

__all__ = [
    "STEPS",
    "DatabaseTooNew",
    "DatabaseUnavailable",
    "LedgerGap",
    "LedgerUnreadable",
    "LockBusy",
    "LockLost",
    "MigrationError",
    "Runner",
    "Step",
    "StepFailed",
    "StepRenamed",
    "plan",
    "upgrade",
]
