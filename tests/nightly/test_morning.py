"""The morning page, from a history that is made up: what it says, and how a browser shows it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from loragate.core.verdict import ExitCode
from loragate.history import Outcome, Purpose, ScanRun, TrialRecord, open_history
from loragate.nightly.morning import Morning, morning
from loragate.nightly.origin import Changed, origin
from loragate.nightly.pages.html import render_html
from loragate.nightly.pages.plots import plots
from loragate.nightly.pages.summary import render_markdown
from loragate.nightly.pages.terminal import render_terminal
from loragate.nightly.quarantine import Quarantined
from loragate.nightly.states import Status
from loragate.report.colour import Colour

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_TODAY = date(2026, 11, 23)
_DAY = 86400.0
_DIFFERENT = {"outcome": Outcome.DIFFERENT, "message": "the second run has other bits"}
_WRONG = {"outcome": Outcome.WRONG, "measure": "judged", "digest": "", "message": "off by 4"}


class _Nights:
    """Runs of a scan, one a day, and trials in each."""

    def __init__(self, new_run: NewRun, new_trial: NewTrial) -> None:
        self._run, self._trial = new_run, new_trial
        self.runs: list[ScanRun] = []
        self.trials: list[TrialRecord] = []

    def begin(self, **changes: Any) -> None:
        number = len(self.runs)
        given = {"started_at": 1.7e9 + number * _DAY, "commit": f"c{number}" * 20}
        self.runs.append(self._run(f"night-{number}", **given | changes))

    def add(self, count: int = 1, **changes: Any) -> None:
        run = self.runs[-1]
        for _ in range(count):
            number = len(self.trials)
            given = {"at": run.started_at + number, "process": number, "duration_s": 0.25}
            self.trials.append(self._trial(number, run.uid, **given | changes))

    def page(self, quarantine: tuple[Quarantined, ...] = (), **changes: Any) -> Morning:
        return morning(self.runs, self.trials, quarantine, today=_TODAY, **changes)


@pytest.fixture
def nights(scan_run: NewRun, trial: NewTrial) -> _Nights:
    found = _Nights(scan_run, trial)
    found.begin()
    return found


def test_a_quiet_night_is_quiet(nights: _Nights) -> None:
    nights.add(120)
    page = nights.page()
    assert page.exit_code is ExitCode.OK
    assert page.findings == ()
    assert page.counts == {Status.STABLE: 1}
    assert "Quiet" in render_terminal(page, Colour.OFF)


def test_a_case_that_was_never_judged_is_no_quiet_night(nights: _Nights) -> None:
    nights.add(120)
    nights.add(1, measure="judged", digest="")
    nights.add(1, case="broken", path="q", measure="judged", outcome=Outcome.INFRA, digest="")
    nights.add(1, case="compared")
    page = nights.page(cases=["some.dense_delta.dtype-bf16", "broken", "absent", "compared"])
    assert page.exit_code is ExitCode.INCOMPLETE
    # bits that are the same twice may be wrong twice
    assert page.never == ("absent", "broken", "compared")
    assert page.infra == 1
    assert morning([], [], today=_TODAY).exit_code is ExitCode.INCOMPLETE


def test_a_case_that_the_last_run_judged_in_none_of_its_trials_makes_no_quiet_night(
    nights: _Nights,
) -> None:
    nights.add(120)
    nights.add(120, case="other", path="q")
    assert nights.page().exit_code is ExitCode.OK
    nights.begin()
    nights.add(5)
    nights.add(5, case="other", path="q", outcome=Outcome.UNKNOWN, digest="")
    assert nights.page().stopped == ()
    nights.add(5, case="other", path="q", outcome=Outcome.INFRA, digest="")
    page = nights.page()
    assert page.exit_code is ExitCode.INCOMPLETE
    assert (page.stopped, page.idle, page.never) == (("other",), (), ())
    for text in _pages(page):
        assert "he last run judged 1 case in none of its trials" in text
    assert "Not judged by the last run" in render_terminal(page, Colour.OFF)
    assert "Not judged by the last run" in render_html(page)
    # one trial that was judged is enough, and an earlier run is no matter
    nights.add(1, case="other", path="q")
    assert nights.page().stopped == ()


@pytest.mark.parametrize("failure", ["hang", "crash", "wrong_answer"])
def test_what_was_wrong_once_and_is_not_explained_makes_no_quiet_night(
    nights: _Nights, failure: str
) -> None:
    nights.add(120)
    nights.add(1, outcome=Outcome.WRONG, failure=failure, digest="", message="it did not end")
    page = nights.page()
    assert page.exit_code is ExitCode.INCOMPLETE
    assert "1 path with something that is not explained yet" in render_terminal(page, Colour.OFF)
    assert "Quiet" not in render_terminal(page, Colour.OFF)


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        ({"outcome": Outcome.DIFFERENT}, ExitCode.OK),
        ({"outcome": Outcome.WRONG, "failure": "hang", "digest": ""}, ExitCode.INCOMPLETE),
    ],
)
def test_what_is_not_explained_wakes_nobody_in_quarantine_unless_it_is_wrong(
    nights: _Nights, seen: dict[str, Any], code: ExitCode
) -> None:
    nights.add(120)
    nights.add(1, **seen)
    entry = Quarantined(
        case="some.dense_delta.dtype-bf16",
        reason="r",
        owner="o",
        since=_TODAY,
        clean_runs=5,
    )
    assert nights.page((entry,)).exit_code is code
    assert nights.page().exit_code is ExitCode.INCOMPLETE


def test_a_night_that_judged_nothing_is_no_quiet_night_whatever_earlier_ones_found(
    nights: _Nights,
) -> None:
    nights.add(120)
    nights.begin()
    nights.add(3, outcome=Outcome.INFRA, digest="")
    page = nights.page()
    assert page.exit_code is ExitCode.INCOMPLETE
    assert page.idle == (nights.runs[-1].machine,)
    assert "judged nothing" in render_terminal(page, Colour.OFF)


def test_a_flake_has_its_rate_its_bound_and_a_command(nights: _Nights) -> None:
    nights.add(40)
    nights.add(4, **_DIFFERENT)
    page = nights.page()
    (finding,) = page.findings
    assert page.exit_code is ExitCode.WRONG
    assert (finding.state.status, finding.state.failures, finding.is_new) == (
        Status.FLAKY,
        4,
        True,
    )
    for text in _pages(page):
        assert "4 of 44, at most 29 %" in text
        assert "loragate replay some" in text
        assert "the second run has other bits" in text


def test_a_finding_shows_how_its_gpu_was_in_the_odd_trial(nights: _Nights) -> None:
    nights.add(40, health={"sm_clock_mhz": 1980.0})
    quiet = nights.page()
    nights.add(1, **_DIFFERENT, health={"sm_clock_mhz": 345.0, "last_xid": 79.0})
    for text, before in zip(_pages(nights.page()), _pages(quiet), strict=True):
        assert "GPU at that time: sm_clock_mhz 345, last_xid 79" in text
        assert "at that time" not in before


def test_a_finding_without_readings_of_its_gpu_says_nothing_of_it(nights: _Nights) -> None:
    nights.add(40)
    nights.add(1, **_DIFFERENT)
    assert all("at that time" not in text for text in _pages(nights.page()))


def _pages(page: Morning) -> Iterator[str]:
    yield render_terminal(page, Colour.OFF)
    yield render_markdown(page)
    yield html.unescape(re.sub(r"<[^>]*>", "", render_html(page)))


def test_a_flake_of_earlier_nights_is_not_new(nights: _Nights) -> None:
    nights.add(4, **_DIFFERENT)
    nights.begin()
    nights.add(4)
    (finding,) = nights.page().findings
    assert not finding.is_new


def test_the_first_bad_commit_is_named_where_the_source_changed(nights: _Nights) -> None:
    nights.add(9, path_key="old")
    nights.begin()
    nights.add(9, path_key="new")
    nights.add(3, path_key="new", **_DIFFERENT)
    page = nights.page()
    (finding,) = page.findings
    assert finding.origin is not None
    assert finding.origin.changed is Changed.CODE
    for text in _pages(page):
        assert "first bad commit c1c1c1c1c1c1, last good one c0c0c0c0c0c0" in text


def test_the_environment_is_named_where_the_source_is_the_same(nights: _Nights) -> None:
    nights.runs[0] = replace(nights.runs[0], environment={"driver": "1", "torch": "2.13"})
    nights.add(9)
    nights.begin(environment={"driver": "2", "torch": "2.13"})
    nights.add(9, digest="cc")
    nights.add(3, **_DIFFERENT)
    page = nights.page()
    (finding,) = page.findings
    assert finding.origin is not None
    assert finding.origin.changed is Changed.ENVIRONMENT
    for text in _pages(page):
        assert "environment changed, not the code: driver 1 -> 2" in text
    # other bits on another driver are no flake by themselves
    assert finding.state.failures == 3


def test_a_rare_flake_blames_neither(nights: _Nights) -> None:
    nights.add(9)
    nights.begin()
    nights.add(3, **_DIFFERENT)
    suspects = {(t.run, t.number) for t in nights.trials if t.outcome is Outcome.DIFFERENT}
    found = origin(nights.trials, suspects, nights.runs)
    assert found is not None
    assert (found.changed, found.clean) == (Changed.NOTHING, 9)
    # in the first night nothing is known of before
    found = origin(nights.trials[9:], suspects, nights.runs)
    assert found is not None
    assert found.changed is Changed.UNKNOWN


def test_a_diagnosis_is_shown_with_its_cause(nights: _Nights) -> None:
    nights.add(3, **_DIFFERENT)
    found = {"cause": "order", "message": "it changes after x", "purpose": Purpose.DIAGNOSE}
    nights.add(1, outcome=Outcome.DIFFERENT, **found)
    page = nights.page()
    for text in _pages(page):
        assert "order" in text
        assert "it changes after x" in text


def test_quarantine_excuses_a_flake_and_never_a_wrong_answer(nights: _Nights) -> None:
    entry = Quarantined(
        case="some.dense_delta.dtype-bf16", reason="atomics", owner="ada", since=date(2026, 11, 1)
    )
    nights.add(3, **_DIFFERENT)
    page = nights.page((entry,))
    assert page.exit_code is ExitCode.OK
    for text in _pages(page):
        assert "in quarantine" in text
        assert "22 days, 0 of 10 clean runs in a row, 3 of 3 trials failed" in text
    # another case of the path is not excused
    nights.add(1, case="another", **_DIFFERENT)
    assert nights.page((entry,)).exit_code is ExitCode.WRONG
    del nights.trials[-1]
    nights.add(2, **_WRONG)
    assert nights.page((entry,)).exit_code is ExitCode.WRONG


def test_a_released_case_is_excused_no_more(nights: _Nights) -> None:
    entry = Quarantined(
        case="some.dense_delta.dtype-bf16",
        reason="atomics",
        owner="ada",
        # the day of the first night
        since=date(2023, 11, 14),
        clean_runs=2,
    )
    nights.add(3, **_DIFFERENT)
    for _ in range(2):
        nights.begin()
        nights.add(3)
    page = nights.page((entry,))
    assert page.quarantine[0].released
    assert page.exit_code is ExitCode.WRONG
    assert "released after 2 clean runs" in render_terminal(page, Colour.OFF)


def test_what_is_undecided_has_its_price_and_the_most_expensive_comes_first(
    nights: _Nights,
) -> None:
    nights.add(40, path="cheap")
    nights.add(40, path="dear", duration_s=10.0)
    page = nights.page()
    assert [state.key.path for state in page.undecided] == ["dear", "cheap"]
    assert "60 trials, 10 min" in render_terminal(page, Colour.OFF)


def test_nights_are_plotted_from_the_second_one_on(nights: _Nights) -> None:
    nights.add(9)
    assert plots(nights.page().nights) == ()
    nights.begin()
    nights.add(6)
    nights.add(3, **_DIFFERENT)
    odd, trials, _ = plots(nights.page().nights)
    assert [bar.height for bar in odd.bars] == [0.0, 80.0]
    assert odd.top == "333"
    assert [bar.height for bar in trials.bars] == [80.0, 80.0]


def test_names_of_a_run_are_text_on_every_page(nights: _Nights) -> None:
    nights.add(3, **_DIFFERENT | {"message": "<script>\x1b[2J\n::error::x", "replay": "a`b|c"})
    page = nights.page()
    assert "<script>\x1b" not in render_html(page)
    assert "&lt;script&gt;" in render_html(page)
    assert "\x1b" not in render_terminal(page, Colour.OFF)
    assert "replay `` a`b|c " in render_markdown(page)


_BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome", "chromium-browser")
# what a browser measures once the page is there
_PROBE = """<script>addEventListener("load", () => {
  const style = getComputedStyle(document.body);
  const tall = (e) => e.getBoundingClientRect().height > 1;
  const wide = [...document.querySelectorAll("main *")].filter((e) => !e.closest(".scroll, details")
    && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className);
  document.body.dataset.seen = JSON.stringify({
    ink: style.color, paper: style.backgroundColor, width: innerWidth,
    over: document.documentElement.scrollWidth - innerWidth, wide,
    findings: document.querySelectorAll("article").length,
    rows: document.querySelectorAll("#all tr").length,
    bars: [...document.querySelectorAll(".plots rect")].filter(tall).length,
    buttons: [...document.querySelectorAll("[data-copy]")].filter((e) => e.offsetWidth > 0).length,
  });
});</script>"""


def _browser() -> str:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    return found


def _seen(page: Path, profile: Path, *, dark: bool, width: int) -> dict[str, Any]:
    """What the browser shows of a page."""
    scheme = "--blink-settings=preferredColorScheme=0" if dark else "--disable-gpu"
    command = [
        *(_browser(), "--headless", "--disable-gpu", "--hide-scrollbars", scheme),
        # a container may not have name spaces of its own
        *(["--no-sandbox"] if os.getuid() == 0 else []),
        *(f"--user-data-dir={profile}", f"--window-size={width},1000", "--dump-dom"),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def _brightness(colour: str) -> float:
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


@pytest.mark.parametrize(
    ("dark", "width"), [(False, 1200), (True, 1200), (False, 500)], ids=["light", "dark", "narrow"]
)
def test_a_browser_shows_the_page(nights: _Nights, tmp_path: Path, dark: bool, width: int) -> None:
    nights.add(120, path="dense_delta eager " + "+".join(["a_kernel_of_a_long_name"] * 9))
    nights.begin(environment={"driver": "2"})
    nights.add(9, replay="loragate replay " + "x" * 400)
    nights.add(3, **_DIFFERENT | {"replay": "loragate replay " + "x" * 400})
    page = tmp_path / "morning.html"
    text = render_html(nights.page())
    page.write_text(text.replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    seen = _seen(page, tmp_path / "profile", dark=dark, width=width)
    assert seen["width"] == width
    # nothing has to be scrolled sideways but tables
    assert (seen["over"], seen["wide"]) == (0, [])
    assert (seen["findings"], seen["rows"], seen["bars"], seen["buttons"]) == (1, 2, 5, 1)
    paper, ink = _brightness(seen["paper"]), _brightness(seen["ink"])
    assert (paper < 60 < 180 < ink) if dark else (ink < 60 < 180 < paper)


def test_the_command_reads_a_history_and_writes_its_pages(
    tmp_path: Path,
    scan_run: NewRun,
    trial: NewTrial,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from loragate.cli import main

    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        for number in range(3):
            history.add(trial(number, outcome=Outcome.DIFFERENT))
    step = tmp_path / "step.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    command = ["morning", f"--history={tmp_path / 'h.db'}", f"--report={tmp_path / 'out'}"]
    quarantine = tmp_path / "q.yaml"
    command.append(f"--quarantine={quarantine}")
    quarantine.write_text("# nothing\n", encoding="utf-8")
    assert main(command) == ExitCode.WRONG.value
    assert "FLAKY" in capsys.readouterr().out
    assert "FLAKY" in step.read_text(encoding="utf-8")
    assert (tmp_path / "out" / "morning.md").is_file()
    entry = "- {case: %s, reason: r, owner: o, since: 2026-11-01}\n"
    quarantine.write_text(entry % "some.dense_delta.dtype-bf16", encoding="utf-8")
    assert main(command) == ExitCode.OK.value
    # reading all cases that are shipped takes seconds
    few = (Path(__file__).parent / "planted" / "planted.yaml",)
    monkeypatch.setattr("loragate.commands.morning.default_files", lambda root: few)
    quarantine.write_text(entry % "some.dense_delta.dtype-bf17", encoding="utf-8")
    assert main(command) == ExitCode.USAGE.value
    assert "did you mean some.dense_delta.dtype-bf16?" in capsys.readouterr().err


def test_the_history_command_merges_exports_imports_and_prunes(
    tmp_path: Path,
    scan_run: NewRun,
    trial: NewTrial,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from loragate.cli import main

    for uid in ("a", "b"):
        with open_history(tmp_path / f"{uid}.db") as history:
            history.add_run(scan_run(uid))
            history.take((), (), [trial(0, uid), trial(1, uid)])
    here = f"--history={tmp_path / 'a.db'}"
    lines = tmp_path / "all.jsonl"
    assert main(["history", here, "merge", str(tmp_path / "b.db")]) == 0
    assert main(["history", here, "export", str(lines)]) == 0
    assert len(lines.read_text(encoding="utf-8").splitlines()) == 7
    assert main(["history", f"--history={tmp_path / 'c.db'}", "import", str(lines)]) == 0
    assert "4 new trials" in capsys.readouterr().out
    assert main(["history", here, "prune", "--days", "1"]) == 0
    # the first and the last one of their case
    with open_history(tmp_path / "a.db") as history:
        assert history.count() == 2
    assert main(["history", here, "merge", str(tmp_path / "none.db")]) == ExitCode.USAGE.value
    assert main(["history", here, "import", str(tmp_path / "none")]) == ExitCode.USAGE.value
    lines.write_text("no record\n", encoding="utf-8")
    assert main(["history", here, "import", str(lines)]) == ExitCode.USAGE.value
    assert "all.jsonl:1: no record of a history" in capsys.readouterr().err
    lines.write_text("{}\n", encoding="utf-8")
    assert main(["history", here, "import", str(lines)]) == ExitCode.USAGE.value
    missing = "all.jsonl:1: no record of a history: the first line must be as"
    assert missing in capsys.readouterr().err
