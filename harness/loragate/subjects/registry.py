"""The subjects that come with the harness. A subject of your own is named `module:object`."""
