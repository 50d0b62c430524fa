"""Renders the change of PyTorch that codegen/group_norm.yaml describes under ``upstream``.

A base is one of the PyTorch versions that a branch can start from. A tree, real or not, is given as
a function from a path to the text of that file, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from codegen.generate import ROOT
from codegen.model import Addition, Commit, Edit, Excerpt, Upstream

Read = Callable[[str], "str | None"]

_NATIVE = re.compile(r'(#include )"native/([\w./]+)"|native/((?:\w+/)+[\w.]+)')
_INCLUDES = re.compile(r"(?:^#include .*\n){2,}", re.MULTILINE)
# What must not be left of this repository in a rendered file.
_LEFT = re.compile(
    r"gn_override|GN_OVERRIDE|\bCPU\b|(?<!ATen/)native/(?:binding|cpu|kernels|launch|plan)/"
    r"|\b(?:kernels|sweep|tune|fused)-[a-z0-9]+|\b(?=[a-f]*\d)[0-9a-f]{12}\b"
)


class StagingError(ValueError):
    """The change does not fit the checkout; nothing was staged."""


@dataclass(frozen=True)
class Rendered:
    """A commit with the whole text of each file that it adds or edits."""

    title: str
    body: str
    files: Mapping[str, str]


def recognise(upstream: Upstream, read: Read) -> str:
    """The first base whose signs the tree shows. Raises StagingError if there is none, with what
    each base misses."""
    missed = []
    for base, signs in upstream.bases.items():
        for sign in signs:
            text = read(sign.file)
            if text is None or (sign.text in text) != sign.contained:
                wanted = "contain" if sign.contained else "lack"
                missed.append(f"\n  {base}: {sign.file} does not {wanted} {sign.text!r}")
                break
        else:
            return base
    raise StagingError("the checkout is none of the known bases" + "".join(missed))


def render(upstream: Upstream, base: str, read: Read) -> list[Rendered]:
    """The commits for a base, on top of the tree.

    Raises StagingError, with file, anchor and base, for an anchor that is missing or there more
    than once, a file that is missing, and one that would be added but is there.
    """
    present: dict[str, str] = {}

    def now(path: str) -> str | None:
        return present.get(path) or read(path)

    rendered = []
    for commit in commits(upstream, base):
        files: dict[str, str] = {}
        for addition in commit.additions:
            if now(addition.path) is not None:
                raise StagingError(f"{base}: {addition.path}: is there already")
            files[addition.path] = _source(upstream, addition)
        for edit in commit.edits:
            text = files.get(edit.file) or now(edit.file)
            if text is None:
                raise StagingError(f"{base}: {edit.file}: there is no such file")
            files[edit.file] = _edited(text, edit, f"{base}: {edit.file}")
        present |= files
        rendered.append(Rendered(commit.title, commit.body, files))
    return rendered


def commits(upstream: Upstream, base: str) -> list[Commit]:
    """Those that are for the base."""
    return [commit for commit in upstream.commits if base in commit.bases]


def skeleton(upstream: Upstream, base: str) -> dict[str, str]:
    """The least tree that the base's edits fit: of each file its signs and anchors, no more."""
    before = {sign.file: "" for sign in upstream.bases[base]}
    for sign in upstream.bases[base]:
        before[sign.file] += f"{sign.text}\n" if sign.contained else ""
    after = dict(before)
    for commit in commits(upstream, base):
        for edit in commit.edits:
            text = after.setdefault(edit.file, "")
            if edit.anchor not in text:  # else what an earlier edit left
                part = f"{edit.anchor}\n"
                before[edit.file] = before.get(edit.file, "") + part
                text += part
            after[edit.file] = _edited(text, edit, edit.file)
    return before


def _edited(text: str, edit: Edit, where: str) -> str:
    count = text.count(edit.anchor)
    if count != 1:
        found = f"is there {count} times" if count else "is not there"
        raise StagingError(f"{where}: the anchor {found}: {edit.anchor!r}\n  edit: {edit.why}")
    start = text.index(edit.anchor)
    end = start + len(edit.anchor)
    if edit.until:
        after = text.find(edit.until, end)
        if after < 0:
            raise StagingError(
                f"{where}: nothing after the anchor {edit.anchor!r} reads {edit.until!r}\n"
                f"  edit: {edit.why}"
            )
        end = after + len(edit.until)
    new = edit.text if isinstance(edit.text, str) else _excerpt(edit.text) + edit.anchor
    return text[:start] + new + text[end:]


def _excerpt(excerpt: Excerpt) -> str:
    text = _read(excerpt.source)
    for end in (excerpt.after, excerpt.before):
        if text.count(end) != 1:
            raise StagingError(f"{excerpt.source}: {end!r} is not there exactly once")
    return text.split(excerpt.after)[1].split(excerpt.before)[0]


def _read(source: str) -> str:
    """The text of a file of this repository."""
    file = ROOT / source
    if not file.is_file():
        raise StagingError(f"there is no file {source}")
    return file.read_text()


def _source(upstream: Upstream, addition: Addition) -> str:
    """The text of a new file: rendered if it comes from native/, else as it is."""
    text = _read(addition.source)
    for edit in addition.edits:
        text = _edited(text, edit, addition.source)
    if not addition.source.startswith("native/"):
        return text
    headers = {a.source: a.path for commit in upstream.commits for a in commit.additions}

    def path_in_pytorch(match: re.Match[str]) -> str:
        include, header, mentioned = match.groups()
        if include is None:
            return mentioned
        path = headers.get(f"native/{header}")
        if path is None:
            raise StagingError(
                f"{addition.source}: includes native/{header}, which is not part of the change"
            )
        return f"{include}<{path.removeprefix('aten/src/')}>"

    for pattern, new in upstream.rewrite.items():
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    text = _NATIVE.sub(path_in_pytorch, text)
    text = _INCLUDES.sub(lambda block: _sorted_includes(block[0].splitlines(True)), text)
    left = _LEFT.search(text)
    if left:
        line = text[: left.start()].count("\n") + 1
        raise StagingError(
            f"{addition.source}: still says {left[0]!r} in line {line} of what is rendered"
        )
    if addition.path.endswith((".cu", ".cpp")):
        text = f"#ifndef {upstream.guard}\n{text}#endif // {upstream.guard}\n"
    return text


def _sorted_includes(lines: Iterable[str]) -> str:
    """In the order of .clang-format: <*.h> before the others."""
    return "".join(sorted(lines, key=lambda line: (not line.endswith(".h>\n"), line)))
