"""The pytest plugin: one test for every run of every case of every subject.

Loaded by the root conftest.py. Each feature is a module with its own hooks. The controller of a
distributed session plans the run, pins workers to GPUs and accounts for what they do. It never
initialises CUDA; only workers import kernels.
"""

pytest_plugins = (
    "loragate.plugin.options",
    "loragate.plugin.collection",
    "loragate.plugin.judging",
    "loragate.plugin.memory",
    "loragate.plugin.watchdog",
    "loragate.plugin.sticky",
    "loragate.plugin.pinning",
    "loragate.plugin.accounting",
)
