"""What the tests' processes are set to before torch and Triton are imported.

Each worker of pytest computes with one thread: two workers of two threads each get in each other's way on two cores.
Triton runs in its interpreter where there is no GPU; it asks when it is imported, which other packages may do.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
