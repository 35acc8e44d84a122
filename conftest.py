"""Loads the plugin, nothing else."""

pytest_plugins = ["loragate.plugin"]
