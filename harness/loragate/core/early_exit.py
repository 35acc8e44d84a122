"""A process that is ended in the middle of its work has not ended well, whatever it says.

`os._exit(0)` in a library, or in what it calls, skips all that would judge, record and clean up,
and leaves an exit code that stands for success.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from loragate.core.verdict import ExitCode


@contextmanager
def early_exit_is(code: ExitCode) -> Iterator[None]:
    """Within, `os._exit(0)` of this process ends it with `code`, and says where it was called.

    Other codes stay, and forks of this process end as they like.
    """
    owner, leave = os.getpid(), os._exit
    # a copy, because pytest captures the original while a test runs
    with os.fdopen(os.dup(2), "w") as terminal:

        def say_and_leave(status: int) -> NoReturn:
            if os.getpid() == owner and status == ExitCode.OK:
                where = "".join(traceback.format_stack()[:-1])
                terminal.write(f"loragate: os._exit(0) before the work was done:\n{where}")
                terminal.flush()
                status = code
            leave(status)

        os._exit = say_and_leave
        try:
            yield
        finally:
            os._exit = leave
