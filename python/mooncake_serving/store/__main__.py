"""``python -m mooncake_serving.store``: the same as the command ``mooncake-store``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
