"""The pytest plugin: one test for every attempt at every case of every subject.

Loaded by the root conftest.py. One module a feature; each holds its own hooks. The controller of
a distributed session plans, pins and keeps the record, and never initialises CUDA; only workers
import kernels.
"""

pytest_plugins = (
    "loragate.plugin.options",
    "loragate.plugin.collection",
    "loragate.plugin.judging",
    "loragate.plugin.memory",
    "loragate.plugin.watchdog",
    "loragate.plugin.sticky",
    "loragate.plugin.pinning",
    "loragate.plugin.ledger",
)
