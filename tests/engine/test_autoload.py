"""What the environment asks for, and what is said about it."""

from __future__ import annotations

import logging

import pytest

from patches.autoload import Settings

KNOWN = ["bitsandbytes-one", "bitsandbytes-two"]


def test_defaults():
    assert Settings.read(KNOWN, {}) == Settings(autoload=True, strict=False, untested=False, disabled=frozenset())


def test_values(caplog):
    environ = {"PATCHES_AUTOLOAD": "off", "PATCHES_STRICT": " 1 ", "PATCHES_DISABLE": "bitsandbytes-two, "}
    settings = Settings.read(KNOWN, environ)
    assert (settings.autoload, settings.strict, settings.disabled) == (False, True, {"bitsandbytes-two"})
    assert not caplog.records


@pytest.mark.parametrize("name", ["PATCHES_AUTOLOAD", "PATCHES_STRICT", "PATCHES_UNTESTED"])
def test_a_value_that_means_nothing_is_a_warning_that_lists_what_it_could_be(caplog, name):
    with caplog.at_level(logging.WARNING, "bnb_patches"):
        assert Settings.read(KNOWN, {name: "maybe"}) == Settings()
    (record,) = caplog.records
    assert name in record.getMessage() and "'maybe'" in record.getMessage() and "yes" in record.getMessage()


def test_an_unknown_id_is_a_warning_that_names_the_nearest(caplog):
    with caplog.at_level(logging.WARNING, "bnb_patches"):
        assert Settings.read(KNOWN, {"PATCHES_DISABLE": "bitsandbytes-tow"}).disabled == frozenset()
    assert "bitsandbytes-two" in caplog.text


@pytest.mark.parametrize("broken", ["handler", "filter"])
def test_what_logging_raises_has_no_place_in_an_import(fresh, broken):
    """A handler of the user's that fails at every record: everything is imported and repaired all the same."""
    pytest.importorskip("bitsandbytes")
    out = fresh(
        """
        import logging, sys
        logger = logging.getLogger("bnb_patches")
        logger.setLevel("INFO")

        def fails(record):
            raise ValueError("broken")

        handler = logging.Handler()
        handler.emit = fails
        logger.addHandler(handler) if sys.argv[1] == "handler" else logger.addFilter(fails)
        import bnb_patches_autoload
        bnb_patches_autoload.start()
        import bitsandbytes, patches
        print(len(patches.report().with_status(patches.Status.APPLIED)))
        """,
        broken,
        PATCHES_AUTOLOAD="1",
        PATCHES_DISABLE="no-such-patch",
    )
    assert int(out.split()[-1]) > 10
