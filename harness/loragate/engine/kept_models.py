"""Models under a path that depends on their files alone, in the user's cache folder.

vLLM finds a graph that it has compiled by the path of the model among other things. In a folder of
its own for each trial it would compile the same graph in each of them, and would never load one, as
it does wherever a server is started again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from loragate.core.files import lock_of, replace_folder
from loragate.core.user_cache import user_cache
from loragate.engine.folders import digests


def kept(folder: Path) -> Path:
    """A folder with the same files as `folder`, which later calls with the same files return, too;
    `folder` itself where nothing can be kept. Nobody may write to it."""
    root = user_cache("models")
    if root is None:
        return folder
    files = digests(folder)
    place = root / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:32]
    try:
        with lock_of(place):
            # one that somebody has changed would be another model
            if not place.exists() or digests(place) != files:
                replace_folder(place, lambda new: shutil.copytree(folder, new, dirs_exist_ok=True))
    except OSError:
        # a home that is read-only or full
        return folder
    return place
