"""Where rules and torch's operator database are tested; ``nox -s gpu`` says "cuda"."""

import os

DEVICE = os.environ.get("VESCALE_TEST_DEVICE", "cpu")
