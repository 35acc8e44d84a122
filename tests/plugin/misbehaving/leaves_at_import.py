"""A module that ends whoever imports it at once, with the exit code that a variable names."""

import os

os._exit(int(os.environ["LEAVES_WITH"]))
