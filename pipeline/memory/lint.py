"""Settings that are known to do harm, or nothing, where people hope to save memory: each with its reason and source.

What is known of a run is handed in as `Facts`; what is not known is None or left out, and no rule fires on it.
"""

from __future__ import annotations

from pipeline.memory import allocator_rules, training_rules
from pipeline.memory.conf import allocator_options
from pipeline.memory.facts import Facts, Finding, Rule, Severity

__all__ = ["RULES", "Facts", "Finding", "Rule", "Severity", "allocator_options", "lint"]

RULES = (*allocator_rules.RULES, *training_rules.RULES)


def lint(facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong, the worst first."""
    seen = ((rule, rule.found(facts)) for rule in RULES)
    findings = [
        Finding(rule.code, rule.severity, what, rule.why, rule.remedy, rule.source) for rule, what in seen if what
    ]
    return tuple(sorted(findings, key=lambda finding: tuple(Severity).index(finding.severity)))
