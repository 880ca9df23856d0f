"""The site says what is so: what is generated, the messages that are quoted, and every link between pages."""

from __future__ import annotations

import functools
import json
import re
from pathlib import PurePosixPath

import pytest

import patches
from patches import REGISTRY
from patches.command_line import explain
from patches.engine import gate
from patches.symptoms import GROUPS
from tools.docs import DOCS, ROOT, figures, page, prose, reports, words
from tools.docs.__main__ import PAGES, files

ID = "bitsandbytes-int8-input-dimensions"
PATCH = REGISTRY.patches[ID]
FIGURES = json.loads(figures.FILE.read_text("utf-8"))


@functools.cache
def sources() -> dict[str, str]:
    """Every page by its path below ``docs``, those that the build writes included."""
    written = {path.relative_to(DOCS).as_posix(): text for path, text in files().items()}
    return {**{path.name: path.read_text("utf-8") for path in DOCS.glob("*.md")}, **written}


# -- the pages of patches ----------------------------------------------------------------------


def test_releases_that_are_left_out_are_named():
    found = words.releases(REGISTRY.patches["peft-expert-adapters-before-019"])
    assert " except 5.1.0, 5.6.0, 5.6.1 and 5.6.2, peft from 0.19" in found
    found = words.releases(REGISTRY.patches["peft-dora-replaces-weight"])
    assert found.endswith(", bitsandbytes from 0.46.1 except 0.47.0 and 0.48.0")


def test_every_patch_has_a_page_and_a_row_in_the_table():
    for patch in REGISTRY.patches.values():
        assert sources()[f"patches/{patch.id}.md"].startswith(f"# {patch.id}\n")
        group = patch.groups[0]
        assert f"[{patch.id}]({patch.id}.md)" in sources()[f"patches/group-{group}.md"]
    assert navigation(sources()["patches/index.md"]) == [f"group-{key}" for key in GROUPS]


def test_the_file_that_a_page_names_is_there():
    for patch in REGISTRY.patches.values():
        assert (ROOT / prose.file(patch)).is_file(), patch.id


def test_reports_without_changes_are_an_error(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"results": [{"changes": []}]}\'\n')
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="no page would have a diff"):
        reports.collect(str(python), tmp_path)


def test_the_pages_have_the_headings_of_explain_in_its_order():
    for patch_id in REGISTRY.patches:
        text = re.sub(r"^(`{3,}).*?^\1", "", sources()[f"patches/{patch_id}.md"], flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(explain.HEADINGS), patch_id


def test_a_page_has_the_summary_the_story_the_diff_of_this_release_and_the_reproducer():
    import bitsandbytes

    with patches.applied(ID):
        report = patches.report().to_dict()
    text = page.page(PATCH, FIGURES, reports.seen(ID, [report]))
    assert f"**A{PATCH.summary[1:]}.**" in text
    assert "`MatMul8bitLt` flattens an input of three dimensions, and passes any other to kernels for two:" in text
    assert (
        f"### On bitsandbytes {gate.installed_version('bitsandbytes')}\n" in text and bitsandbytes.__version__ in text
    )
    assert re.search(r"^-.* len\(grad_output\.shape\) == 3:$", text, re.MULTILINE)
    assert re.search(r"^\+.* len\(grad_output\.shape\) > 2:$", text, re.MULTILINE)
    assert "\ndef defect() -> Finding:\n" in text and FIGURES[ID]["unpatched"] in text


def test_without_the_packages_a_page_says_why_it_has_no_diff():
    assert f"python -m patches diff {ID}` shows it" in page.page(PATCH, {}, [])


def report(version: str, bnb: str, *diffs: str) -> dict:
    changes = [{"target": "x", "diff": diff} for diff in diffs]
    return {"results": [{"id": "a", "versions": {"peft": version, "bitsandbytes": bnb}, "changes": changes}]}


def test_releases_with_the_same_change_stand_together_whatever_its_lines():
    one = report("1.0", "0.46.1", "@@ -1,3 +1,3 @@ def f\n-a\n+b\n")
    moved = report("1.1", "0.47.0", "@@ -8,3 +8,3 @@ def f\n-a\n+b\n")
    other = report("1.1", "0.48.2", "@@ -8,3 +8,3 @@ def f\n-a\n+c\n")
    first, second = reports.seen("a", [one, moved, report("1.1", "0.47.1", "@@ -8,3 +8,3 @@ def f\n-a\n+b\n"), other])
    assert (first.releases, first.beside) == (["1.0", "1.1"], ["0.46.1", "0.47.0", "0.47.1"])
    assert first.diffs == ("@@ -8,3 +8,3 @@ def f\n-a\n+b\n",), "the lines of the newest"
    assert (second.releases, second.beside) == (["1.1"], ["0.48.2"])


def test_a_text_as_markdown():
    unmerge, copies = REGISTRY.patches["peft-unmerge"], REGISTRY.patches["peft-modules-to-save-offloaded"]
    rest = prose.markdown(unmerge.why, unmerge)
    assert "[`bitsandbytes-params4bit-meta`](bitsandbytes-params4bit-meta.md) repairs" in " ".join(rest.split())
    assert re.search(r"\[(trl )?#3466\]\(https://github\.com/huggingface/trl/issues/3466\)", rest)
    assert "[`peft-adapters-on-meta`](peft-adapters-on-meta.md) repairs" in " ".join(
        prose.markdown(copies.why, copies).split()
    )


def test_every_public_name_and_every_command_has_its_place():
    assert not [name for name in patches.__all__ if f":: patches.{name}\n" not in sources()["api.md"]]
    for command in ("list", "report", "diff", "verify", "explain"):
        assert f"usage: python -m patches {command} [-h]" in sources()["generated/commands.md"]


# -- figures -----------------------------------------------------------------------------------


def test_figures_are_of_patches_that_there_are():
    known = {figures.name(patch.id, part.name) for patch in REGISTRY.patches.values() for part in patch.parts}
    assert FIGURES.keys() <= known
    assert all(figure.keys() == {"on", "unpatched", "patched", "reproducer"} for figure in FIGURES.values())


def test_a_figure_of_another_reproducer_is_not_shown(tmp_path, monkeypatch):
    figure = {"on": {}, "unpatched": "a", "patched": "b", "reproducer": figures.digest(PATCH.parts[0])}
    old = {**figure, "reproducer": "another"}
    monkeypatch.setattr(figures, "FILE", tmp_path / "figures.json")
    figures.FILE.write_text(json.dumps({ID: figure, "peft-dora-cache": old, "gone": figure}), "utf-8")
    assert figures.read() == {ID: figure}


# -- links -------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and MyST make them."""
    titles = re.findall(
        r"^#{1,3} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def navigation(text: str) -> list[str]:
    """The pages that a page lists for the navigation."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def test_links_between_pages_lead_somewhere():
    pages = sources()
    for name, text in pages.items():
        folder = PurePosixPath(name).parent if not name.startswith("generated/") else PurePosixPath()
        prose_only = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose_only):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            to = (DOCS / folder / path).resolve()
            inside = to.is_relative_to(DOCS) and to.relative_to(DOCS).as_posix()
            assert not path or inside in pages or to.exists(), (name, target)
            assert not anchor or anchor in anchors(pages[inside] if path else text), (name, target)
        for target in re.findall(r'href="([^"]+)\.html"', text):
            assert f"{target}.md" in pages, (name, target)
        for line in navigation(text):
            assert (folder / f"{line}.md").as_posix() in pages, (name, line)


def test_every_page_is_in_the_navigation():
    listed = {PurePosixPath(line).name for text in sources().values() for line in navigation(text)}
    pages = {PurePosixPath(name).stem for name in sources() if not name.startswith("generated/")}
    assert pages <= listed | {"index"}


def test_what_is_included_is_there():
    for name, text in sources().items():
        for target in re.findall(r"\{(?:literalinclude|include)\} (\S+)", text):
            assert (DOCS / target).exists() or target in sources(), (name, target)


def test_links_to_other_sites_are_well_formed():
    for name, text in sources().items():
        for url in re.findall(r"https?://[^\s)>\"'`]+", text):
            assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/[\w./#%?=&:@+~-]*)?", url), (name, url)


def test_the_folders_that_are_built_are_not_committed():
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    assert {"build/", *(f"docs/{folder.name}/" for folder in (PAGES, DOCS / "generated"))} <= set(ignored)
