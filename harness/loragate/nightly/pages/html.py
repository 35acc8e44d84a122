"""The morning page as one file of HTML: no network, no framework, readable in light and dark."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Template

from loragate.nightly.morning import Morning, day_of
from loragate.nightly.pages import wording
from loragate.nightly.pages.plots import HEIGHT, WIDTH, plots
from loragate.report.template import packaged, safe_environment
from loragate.report.text import headline
from loragate.report.wording import duration

# of one finding; all of them have the same cause
_CASES_SHOWN = 5


def render_html(page: Morning) -> str:
    """The whole page as text."""
    return _template().render(
        page=page,
        title=wording.TITLES[page.exit_code],
        meaning=wording.meaning(page),
        words=wording,
        plots=plots(page.nights),
        size=(WIDTH, HEIGHT),
        cases_shown=_CASES_SHOWN,
    )


@cache
def _template() -> Template:
    environment = safe_environment(_load)
    environment.filters.update(day=day_of, duration=duration, headline=headline)
    return environment.get_template("morning.html.j2")


def _load(name: str) -> str:
    own = files("loragate.nightly.pages").joinpath("templates", name)
    return own.read_text(encoding="utf-8") if own.is_file() else packaged(name)
