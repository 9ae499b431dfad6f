"""python -m pipelines.status: see `pipelines.cluster.status`."""

import sys

from pipelines.cluster.status import main

if __name__ == "__main__":
    sys.exit(main())
