"""python -m pipelines.cancel: see `pipelines.cluster.cancel`."""

import sys

from pipelines.cluster.cancel import main

if __name__ == "__main__":
    sys.exit(main())
