"""Triton runs in its interpreter where there is no GPU: it asks when it is imported, which other packages may do."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
