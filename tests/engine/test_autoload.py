"""What the environment asks for, and what is said about it."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("broken", [pytest.param("handler", marks=pytest.mark.release("filter")), "filter"])
def test_what_logging_raises_has_no_place_in_an_import(forked, broken):
    """A handler of the user's that fails at every record: everything is imported and repaired all the same."""
    pytest.importorskip("bitsandbytes")
    out = forked(
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


def test_a_group_disables_the_patches_that_are_listed_in_it(caplog):
    from patches import REGISTRY

    with caplog.at_level(logging.WARNING, "bnb_patches"):
        found = Settings.read(REGISTRY.patches, {"PATCHES_DISABLE": "merge, peft-dora-cache"}).disabled
    merge = {patch.id for patch in REGISTRY.patches.values() if patch.groups[0] == "merge"}
    assert found == merge | {"peft-dora-cache"} and len(merge) > 5 and not caplog.records


def test_the_former_name_of_a_group_disables_it_and_is_told_once():
    from patches import REGISTRY
    from patches.symptoms import FORMER_GROUPS, GROUPS

    assert FORMER_GROUPS.items() >= {"asked": "from_pretrained"}.items() and FORMER_GROUPS.keys().isdisjoint(GROUPS)
    for former, present in FORMER_GROUPS.items():
        found = [Settings.read(REGISTRY.patches, {"PATCHES_DISABLE": name}) for name in (former, former, present)]
        assert found[0] == found[1] == found[2] and len(found[0].disabled) > 5
        told = f"the group {former} is called {present} now; both names are accepted"
        assert REGISTRY.report().notes.count(told) == 1


@pytest.fixture(scope="module")
def whole_stack(fresh):
    """What is logged while everything is imported, the patches that are applied then, and what programs do not import."""
    pytest.importorskip("bitsandbytes")
    out = fresh(
        """
        import contextlib, json, logging, sys
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append((record.levelno, record.getMessage()))
        logging.getLogger("bnb_patches").addHandler(handler)
        logging.getLogger("bnb_patches").setLevel("DEBUG")
        import bnb_patches_autoload
        import bitsandbytes
        bnb_patches_autoload.start()
        import transformers, peft, accelerate, bnb_patches
        from bnb_patches.engine import gate, needs
        from transformers import Trainer, AutoModelForCausalLM, BitsAndBytesConfig
        from transformers.quantizers import auto
        with contextlib.suppress(ImportError):
            from diffusers import FluxTransformer2DModel
        ours = [p for patch in bnb_patches.REGISTRY.patches.values() for p in patch.parts
                if p.package in ("bitsandbytes", "transformers", "peft", "accelerate", "diffusers", "torch")]
        ours = [p for p in ours if all(map(gate.installed_version, gate.packages(p)))]
        missing = {p.key: [sorted(needs.modules_not_imported(p)), sorted(needs.modules(p) - needs.modules_not_imported(p))] for p in ours}
        for patch in ours:
            bnb_patches.REGISTRY.import_targets(patch)
        applied = [r.id for r in bnb_patches.report().with_status(bnb_patches.Status.APPLIED)]
        print(json.dumps([said, applied, {i: lazy for i, lazy in missing.items() if i.partition(': ')[0] in applied}]))
        """,
        PATCHES_AUTOLOAD="1",
    )
    return json.loads(out.splitlines()[-1])


ONE_BY_ONE = {
    "peft-lora-bias-merge",  # before peft 0.16 also of LoRA on plain layers, which imports both modules
    "torch-broadcast-unknown-keys",  # what it edits in the imported module is called by the other one alone
}


def test_no_patch_waits_for_modules_that_a_program_may_import_one_without_the_other(whole_stack):
    """It would be applied when the last of them is imported, perhaps never; ``verify`` imports all, and finds it right."""
    waiting = {i: (lazy, there) for i, (lazy, there) in whole_stack[2].items() if lazy and i not in ONE_BY_ONE}
    assert {i: lazy for i, (lazy, _) in waiting.items() if len(lazy) > 1} == {}
    own = {i: [m for m in there if "." in m and _top(m) == _top(lazy[0])] for i, (lazy, there) in waiting.items()}
    assert {i: there for i, there in own.items() if there} == {}, "those functions run before the other module is there"
    assert len(waiting) > 5, "some modules are imported by those who use them alone"


def _top(module: str) -> str:
    return module.partition(".")[0]


def test_the_whole_stack_logs_three_lines(whole_stack):
    """How many defects were repaired; which, at DEBUG."""
    said, applied, _ = whole_stack
    info = [text for level, text in said if level == logging.INFO]
    assert 1 <= len(info) <= 3 and max(map(len, info)) <= 200, info
    assert all("python -m bnb_patches report" in line and "defect" in line for line in info)
    assert not any(patch_id in line for line in info for patch_id in applied)
    named = ", ".join(text for level, text in said if level == logging.DEBUG)
    assert len(applied) > 50 and all(patch_id in named for patch_id in applied)
    assert not [text for level, text in said if level > logging.INFO]
