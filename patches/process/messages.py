"""The log that the plugin tells a user in what it does."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("bnb_patches")
