"""python -m pipelines.report sweep=<name|latest>: a sweep as one page, its tables and figures, and on the screen."""

import sys

from pipelines.reporting.report import main

if __name__ == "__main__":
    sys.exit(main())
