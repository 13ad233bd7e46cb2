"""What follows an assistant turn, read off any chat template by probing it."""

from splice.boundary.proof import Proof, difference
from splice.boundary.report import TemplateReport
from splice.boundary.splicer import Prompt, Refusal, Splicer

__all__ = ["Prompt", "Proof", "Refusal", "Splicer", "TemplateReport", "difference"]
