"""A worker whose device no longer answers reports the case that broke it, then exits.

One illegal access poisons the CUDA context of the process, so that every later case would fail
(NVIDIA/cuml #7906 counted 1054 of those). The worker exits right after the call report, where no
other case is lost; `accounting` ignores the crash that the controller then reports.
"""

from __future__ import annotations

import os

import pytest

from loragate.plugin.options import SETTINGS, Role

_PROPERTY = ("loragate_device", "lost")


def mark_device_lost(item: pytest.Item) -> None:
    """Make the session act once the report of `item` is out."""
    item.user_properties.append(_PROPERTY)


def lost_device(report: pytest.TestReport) -> bool:
    return _PROPERTY in report.user_properties


class StickyGuard:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not lost_device(report):
            return
        role = self._config.stash[SETTINGS].role
        if role is Role.WORKER:
            os._exit(1)
        if role is Role.ALONE:
            session = self._config.pluginmanager.get_plugin("session")
            assert isinstance(session, pytest.Session)
            session.shouldstop = "the device no longer answers and there are no workers"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(StickyGuard(config), "loragate-sticky")
