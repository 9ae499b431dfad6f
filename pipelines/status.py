"""python -m pipelines.status [sweep=latest] [watch=true]: where every cell and every job of a sweep stands."""

import sys

from pipelines.cluster.status import main

if __name__ == "__main__":
    sys.exit(main())
