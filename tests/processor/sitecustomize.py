"""Python imports this at the start of every process that a test starts: see the package it lies in."""

import os

if kind := os.environ.get("PATCHES_TEST_PROCESSOR"):
    from tests.processor import pretend

    pretend(kind)
