"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch; whoever sets it has the last word.
os.environ.setdefault("OMP_NUM_THREADS", "2")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real default model. Skips when it was not pulled; with SPECSERVE_REQUIRE_MODEL=1 that fails."""
    from specserve.errors import ModelError
    from specserve.models import catalog

    try:
        return catalog.resolve("smollm2-135m", offline=True)
    except ModelError as error:
        if os.environ.get("SPECSERVE_REQUIRE_MODEL") == "1":
            pytest.fail(f"SPECSERVE_REQUIRE_MODEL=1, but: {error}")
        pytest.skip(f"The real model is not here: {error}")
