"""python -m pipelines.cancel sweep=<name|latest>: stop the jobs of a sweep; what is finished stays."""

import sys

from pipelines.cluster.cancel import main

if __name__ == "__main__":
    sys.exit(main())
