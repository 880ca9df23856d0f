"""The checkpoint that the tests of image models load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny FLUX transformer, in float32."""
    from patches.repairs.reproducers import image_models

    folder = tmp_path_factory.mktemp("flux")
    image_models.save_flux(str(folder))
    return folder
