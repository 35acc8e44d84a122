"""The morning page: HTML, terminal, and the summary of a step of GitHub Actions. Pure."""
