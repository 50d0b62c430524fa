"""A PyTorch checkout that a branch is added to without touching its files or its index."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from codegen.upstream import Rendered, StagingError


def git_environment() -> dict[str, str]:
    """For git in a repository that is named by its folder: a hook, or a command of git rebase, runs
    with variables that name another."""
    return {name: value for name, value in os.environ.items() if name not in _git_variables()}


@functools.cache
def _git_variables() -> frozenset[str]:
    command = ["git", "rev-parse", "--local-env-vars"]
    return frozenset(subprocess.run(command, capture_output=True, text=True).stdout.split())


class Checkout:
    """The commit that is checked out in a git repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = self._git("rev-parse", "--verify", "HEAD^{commit}").strip()

    def read(self, path: str) -> str | None:
        """The text of a file in the commit, or None if it is not there."""
        if not self._listed([path]):
            return None
        return self._git("cat-file", "blob", f"{self.base}:{path}")

    def changes(self) -> list[str]:
        """Tracked files that differ from the commit, submodules aside."""
        status = self._git(
            "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"
        )
        return [line[3:] for line in status.splitlines()]

    def branch(self, name: str) -> str | None:
        """The commit that a branch is at, or None if there is no such branch."""
        try:
            return self._git("rev-parse", "--verify", "--quiet", f"refs/heads/{name}").strip()
        except StagingError:
            return None

    def create_branch(self, name: str, commit: str) -> None:
        """Fails if there is one of that name."""
        self._git("update-ref", f"refs/heads/{name}", commit, "0" * len(commit))

    def path_in_repository(self, name: str) -> Path:
        """Where git keeps a file of that name beside the repository's own."""
        return self.folder / self._git("rev-parse", "--git-path", name).strip()

    def write(self, commits: Iterable[Rendered]) -> str:
        """Adds the commits to the repository, on top of the one checked out, and returns the last.

        No branch leads to them yet. Their dates are that of the commit checked out, so the same
        commits have the same names.
        """
        date = self._git("show", "--no-patch", "--format=%cI", self.base).strip()
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                "GIT_INDEX_FILE": str(Path(folder) / "index"),
                "GIT_AUTHOR_DATE": date,
                "GIT_COMMITTER_DATE": date,
            }
            last = self.base
            self._git("read-tree", self.base, environment=environment)
            for commit in commits:
                modes = self._listed(commit.files)
                entries = ""
                for path, text in commit.files.items():
                    blob = self._git("hash-object", "-w", "--stdin", text=text).strip()
                    entries += f"{modes.get(path, '100644')} {blob}\t{path}\n"
                self._git("update-index", "--index-info", text=entries, environment=environment)
                tree = self._git("write-tree", environment=environment).strip()
                last = self._git(
                    "commit-tree",
                    tree,
                    "-p",
                    last,
                    text=f"{commit.title}\n\n{commit.body}",
                    environment=environment,
                ).strip()
            return last

    def _listed(self, paths: Iterable[str]) -> dict[str, str]:
        """The modes of those that are in the commit that is checked out."""
        listed = self._git("ls-tree", "--full-tree", self.base, "--", *paths).splitlines()
        return {line.partition("\t")[2]: line.split()[0] for line in listed}

    def _git(
        self,
        *arguments: str,
        text: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.folder), *arguments],
            input=(text or "").encode(),
            capture_output=True,
            env={**git_environment(), **(environment or {})},
        )
        if done.returncode != 0:
            raise StagingError(
                f"git {arguments[0]} in {self.folder}: {done.stderr.decode().strip()}"
            )
        return done.stdout.decode()
