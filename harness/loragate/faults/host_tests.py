"""Host tests in a planted process: `python -m loragate.faults.host_tests ORDER TRANSCRIPT`.

They run as in the host leg of the gate, with a sighting for each test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loragate.core.checkout import project_root
from loragate.core.verdict import Failure, Verdict
from loragate.faults.model import Part, Sighting
from loragate.faults.order import IMPORT, Begun, Order, Recorder, check_planted, read_order

# tests ran, whether or not all of them passed
_RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def main(order_path: str, transcript_path: str) -> int:
    order, recorder = read_order(Path(order_path)), Recorder(Path(transcript_path))
    recorder.begin(Begun(IMPORT))
    check_planted(Path(order_path))
    root = project_root()
    options = [f"--rootdir={root}", f"--config-file={root / 'pyproject.toml'}", "--quiet"]
    options += ["-p", "no:cacheprovider", *(["--exitfirst"] if order.first_only else [])]
    tests = [str(root / test) for test in order.tests]
    code = pytest.main([*options, *tests], plugins=[_Reporter(order, recorder)])
    # the last one has reported: whatever comes now is not its doing
    recorder.begin(Begun(IMPORT))
    return 0 if code in _RAN else int(code)


class _Reporter:
    def __init__(self, order: Order, recorder: Recorder) -> None:
        self._wanted, self._recorder = frozenset(order.tests), recorder

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._recorder.begin(Begun(self._judge(nodeid), "", Part.HOST_TEST))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(report.longrepr).strip().splitlines()
            said = next((line for line in reversed(text) if line.startswith("E ")), "")
            self._record(report, Verdict.FAIL, said.removeprefix("E ").strip() or text[-1])
        elif report.skipped:
            self._record(report, Verdict.SKIP, str(report.longrepr))
        elif report.when == "call":
            self._record(report, Verdict.PASS, "")

    def _record(self, report: pytest.TestReport, verdict: Verdict, message: str) -> None:
        self._recorder.record(
            Sighting(
                judge=self._judge(report.nodeid),
                case="",
                verdict=verdict,
                failure=Failure.WRONG_ANSWER if verdict is Verdict.FAIL else None,
                message=message,
                part=Part.HOST_TEST,
            )
        )

    def _judge(self, nodeid: str) -> str:
        return nodeid if nodeid in self._wanted else nodeid.partition("[")[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
