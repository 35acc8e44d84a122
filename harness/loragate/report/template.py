"""The template of the HTML page. Invariant: whatever it places is escaped, and stands on one line
with an escape for each character that cannot be seen; only `lines` keeps the ends of lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from loragate.core.clipped import clipped
from loragate.matrix.case_run import trial_name
from loragate.report.host_tests import rerun_command
from loragate.report.text import headline, one_line, printable
from loragate.report.wording import duration, outcome_name

# of one stack or one test's output
_TEXT_LIMIT = 20_000


def safe_environment(load: Callable[[str], str]) -> Environment:
    """An environment whose templates keep to the invariant above; `load` gives one by its name."""
    return Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_on_one_line,
        loader=FunctionLoader(load),
    )


@cache
def template() -> Template:
    environment = safe_environment(packaged)
    environment.filters.update(duration=duration, headline=headline, lines=_lines, name=one_line)
    environment.filters.update(outcome=outcome_name, trial=lambda trial: trial_name(*trial))
    environment.filters.update(rerun=rerun_command)
    return environment.get_template("index.html.j2")


def packaged(name: str) -> str:
    """A template, style or script of the reports."""
    return files("loragate.report").joinpath("templates", name).read_text(encoding="utf-8")


def _on_one_line(value: object) -> object:
    # what is marked comes from a macro or from `lines`
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _lines(text: str) -> Markup:
    return escape(clipped(printable(text), _TEXT_LIMIT))
