"""``python -m attnspan`` is the command ``attnspan``."""

import sys

from attnspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
