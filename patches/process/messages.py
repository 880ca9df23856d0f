"""The log in which the plugin tells a user of its work."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("bnb_patches")
