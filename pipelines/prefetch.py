"""python -m pipelines.prefetch: see `pipelines.execution.prefetch`."""

import sys

from pipelines.execution.prefetch import main

if __name__ == "__main__":
    sys.exit(main())
