"""Two builds of lorakernels timed side by side, and judged by the noise of the same run."""
