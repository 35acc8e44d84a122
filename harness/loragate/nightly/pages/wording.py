"""Figures of the morning page as text, the same on each page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loragate.core.plural import counted
from loragate.core.verdict import ExitCode
from loragate.nightly.morning import Finding, Morning, cost_s
from loragate.nightly.quarantine import Held
from loragate.nightly.states import GroupState, Scope, Status
from loragate.report.wording import duration

TITLES: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.OK: "Quiet",
        ExitCode.WRONG: "Look at this",
        ExitCode.INCOMPLETE: "Incomplete",
    }
)


def meaning(page: Morning) -> str:
    """The page in one sentence."""
    new = sum(finding.is_new for finding in page.findings)
    if page.exit_code is ExitCode.WRONG:
        bad = [f for f in page.findings if f.state.status in (Status.WRONG, Status.FLAKY)]
        are = "is not as it" if len(bad) == 1 else "are not as they"
        return f"{counted(len(bad), 'path')} {are} should be; {counted(new, 'new finding')}"
    if page.unexplained:
        return f"{counted(len(page.unexplained), 'path')} with something that is not explained yet"
    if page.idle:
        return f"the last run judged nothing on {', '.join(page.idle)}"
    if page.never:
        return f"{counted(len(page.never), 'case')} never judged"
    if page.stopped:
        return f"the last run judged {counted(len(page.stopped), 'case')} in none of its trials"
    if not page.trials:
        return "nothing was tried"
    return "no path is known to be flaky or wrong"


def clocks(page: Morning) -> str:
    """What is wrong with the clocks of machines; "" for nothing."""
    if not page.ahead:
        return ""
    what = "a run of a day to come, which counts as the last one until then"
    return f"the clock was wrong on {', '.join(page.ahead)}: there is {what}"


def rate(state: GroupState) -> str:
    """3 of 120, at most 7.4 %"""
    return f"{state.failures} of {state.trials}, at most {percent(state.bound.high)}"


def percent(share: float) -> str:
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def since(finding: Finding) -> str:
    return finding.origin.text() if finding.origin else ""


def health(finding: Finding) -> str:
    """The state of the GPU in the trial that was odd; "" where none was read."""
    numbers = (f"{name} {value:g}" for name, value in finding.example.health.items())
    text = ", ".join(numbers)
    return f"GPU at that time: {text}" if text else ""


def bits(state: GroupState) -> str:
    """The bits of a path in a few words."""
    if not state.bits and not state.scopes:
        return "not compared"
    if state.scopes:
        order = [scope for scope in Scope if scope in state.scopes]
        return f"changes {', '.join(order)}"
    return "the same"


def cost(state: GroupState) -> str:
    """What it takes to decide an undecided path."""
    return f"{counted(state.missing, 'trial')}, {duration(cost_s(state))}"


def hold(each: Held) -> str:
    """How an entry of the quarantine stands."""
    age = counted(each.age_days, "day")
    need = each.entry.clean_runs
    if each.released:
        return f"released after {counted(each.clean, 'clean run')}; take it out of the file ({age})"
    seen = f"{each.failures} of {each.trials} trials failed"
    return f"{age}, {each.clean} of {need} clean runs in a row, {seen}"


def marks(finding: Finding) -> tuple[str, ...]:
    return tuple(
        name
        for name, holds in (("new", finding.is_new), ("in quarantine", finding.is_held))
        if holds
    )
