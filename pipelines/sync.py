"""python -m pipelines.sync [sweep=all]: upload the offline W&B runs of a store."""

import sys

from pipelines.tracking.upload import main

if __name__ == "__main__":
    sys.exit(main())
