"""The upstream half: rendering and staging onto checkouts, which are made up from the anchors of
group_norm.yaml and the operator definitions of the installed torch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stage_upstream
from processes import run_python
from shapes import EDGE_CASES, KERNEL_CASES, MODEL_CASES, Case

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # after what is installed
model = importlib.import_module("codegen.model")
upstream = importlib.import_module("codegen.upstream")
verify = importlib.import_module("codegen.verify")
StagingError = upstream.StagingError

CHANGE = model.load().upstream
BASES = list(CHANGE.bases)
KERNEL = "aten/src/ATen/native/cuda/group_norm_kernel.cu"
TEMPLATE = stage_upstream.TEMPLATE


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def state(folder: Path) -> tuple[str, ...]:
    """All of a checkout that staging could change by accident: where HEAD is, files, branches."""
    return (
        git(folder, "symbolic-ref", "HEAD"),
        git(folder, "status", "--porcelain"),
        git(folder, "for-each-ref"),
        git(folder, "worktree", "list"),
    )


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--all", "--message", "another")


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checkout(tmp_path: Path, base: str) -> Path:
    """A made-up checkout of each base in turn."""
    folder = tmp_path / "pytorch"
    stage_upstream.make_up_checkout(folder, base)
    return folder


@pytest.fixture
def main_checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "pytorch"
    stage_upstream.make_up_checkout(folder, "main")
    return folder


def refused(folder: Path, **options: object) -> str:
    """The error of staging, after which the checkout is as it was."""
    before = state(folder)
    with pytest.raises(StagingError) as caught:
        stage_upstream.stage(folder, **options)
    assert state(folder) == before
    return str(caught.value)


# --- staging ---------------------------------------------------------------------------------


def test_stages_a_branch(checkout, base):
    head, status, _, worktrees = state(checkout)
    lines = stage_upstream.stage(checkout)
    branch = stage_upstream.BRANCH
    after = state(checkout)
    assert (after[0], after[1], after[3]) == (head, status, worktrees)

    commits = upstream.commits(CHANGE, base)
    titles = git(checkout, "log", "--reverse", "--format=%s", f"HEAD..{branch}").splitlines()
    assert titles == [commit.title for commit in commits]
    expected = {a.path for c in commits for a in c.additions}
    expected |= {e.file for c in commits for e in c.edits}
    assert set(git(checkout, "diff", "--name-only", "HEAD", branch).splitlines()) == expected
    added = "\n".join(
        line for line in git(checkout, "diff", "HEAD", branch).splitlines() if line[:1] == "+"
    )
    assert "gn_override" not in added
    assert f"base {base}" in lines[0] and "is ready" in lines[-1]


def test_edits_touch_nothing_else(checkout):
    """Every line that is taken away belongs to an edit's anchor."""
    stage_upstream.stage(checkout)
    diff = git(checkout, "diff", "--unified=0", "HEAD", stage_upstream.BRANCH)
    gone = re.findall(r"^-(?!--)(.+)$", diff, re.MULTILINE)
    quoted = "".join(e.anchor for c in CHANGE.commits for e in c.edits)
    assert gone and all(line in quoted for line in gone)


def test_a_folder_of_a_checkout(main_checkout):
    """Is as good as its top: nothing is added, and nothing loses its mode."""
    (main_checkout / KERNEL).chmod(0o755)
    commit(main_checkout)
    stage_upstream.stage(main_checkout / "aten")
    listed = git(main_checkout, "ls-tree", stage_upstream.BRANCH, KERNEL)
    assert listed.startswith("100755 ")


def test_hooks_are_behind_the_stubs(main_checkout):
    stage_upstream.stage(main_checkout)
    text = git(main_checkout, "show", f"{stage_upstream.BRANCH}:{KERNEL}")
    assert text.count("#ifndef USE_ROCM\n  if (group_norm_channels_last") == 2
    assert "#include <ATen/native/cuda/group_norm_channels_last.h>\n" in text


def test_cases_stand_apart():
    text = rendered("main")["test/test_nn.py"]
    assert "\n\n    def test_GroupNorm_empty(" in text and "\n\n\n" not in text
    assert text.count("    def test_GroupNorm_channels_last") >= 6
    assert "instantiate_device_type_tests" not in text


def test_older_kernels_get_no_channels_last_tensors(base):
    """Until 2.14 they take NCHW tensors: what the new ones leave is converted."""
    text = rendered(base)[KERNEL]
    assert text.count("if (!X.is_contiguous()) {") == (2 if base == "2.14" else 0)


def test_layout_rules_are_for_the_older_base_only():
    files = {
        base: {e.file for c in upstream.commits(CHANGE, base) for e in c.edits} for base in BASES
    }
    layout = {
        "aten/src/ATen/native/group_norm.cpp",
        "torch/_decomp/decompositions.py",
        "torch/_refs/__init__.py",
    }
    assert files["2.14"] - files["main"] == layout and not files["main"] - files["2.14"]


def test_second_run_changes_nothing(checkout):
    stage_upstream.stage(checkout)
    before = state(checkout)
    assert "is there already" in stage_upstream.stage(checkout)[-1]
    assert state(checkout) == before
    stage_upstream.stage(checkout, check=True)


def test_text_of_the_pull_request_is_beside_the_branch(main_checkout):
    line = stage_upstream.stage(main_checkout, branch="someone/norm")[-1]
    page = Path(line.rpartition(": ")[2])
    assert page.read_text() == stage_upstream.pull_request("main")
    assert ".git" in page.parts and page.name == "someone-norm.md"


@pytest.mark.parametrize("lost", [True, False])
def test_another_text_of_the_pull_request_is_written_again(main_checkout, lost):
    page = Path(stage_upstream.stage(main_checkout)[-1].rpartition(": ")[2])
    page.unlink() if lost else page.write_text("another")
    assert "is not what would be staged" in refused(main_checkout, check=True)
    assert "is ready" in stage_upstream.stage(main_checkout)[-1]
    assert page.read_text() == stage_upstream.pull_request("main")


def test_dry_run_changes_nothing(checkout):
    before = state(checkout)
    lines = stage_upstream.stage(checkout, dry_run=True)
    assert f"    {KERNEL}" in lines
    assert state(checkout) == before


def test_check(main_checkout):
    assert "is not what would be staged" in refused(main_checkout, check=True)
    stage_upstream.stage(main_checkout)
    branch = stage_upstream.BRANCH
    git(main_checkout, "update-ref", f"refs/heads/{branch}", f"{branch}~1")
    assert "is not what would be staged" in refused(main_checkout, check=True)


def test_a_branch_that_holds_something_else_is_refused(main_checkout):
    git(main_checkout, "branch", stage_upstream.BRANCH)
    assert "is there and holds something else" in refused(main_checkout)


def test_on_the_branch_itself_nothing_is_staged_twice(main_checkout):
    stage_upstream.stage(main_checkout)
    git(main_checkout, "checkout", "--quiet", stage_upstream.BRANCH)
    assert "problem.h: is there already" in refused(main_checkout, branch="again")


def test_dirty_checkout(main_checkout):
    file = main_checkout / KERNEL
    file.write_text(file.read_text() + "// of mine\n")
    error = refused(main_checkout)
    assert "uncommitted changes" in error and KERNEL in error
    stage_upstream.stage(main_checkout, allow_dirty=True)
    assert "// of mine" in file.read_text()
    assert "// of mine" not in git(main_checkout, "show", f"{stage_upstream.BRANCH}:{KERNEL}")


def test_file_endings_are_kept(main_checkout):
    file = main_checkout / KERNEL
    file.write_bytes(file.read_bytes() + b"// \xe2\x80\x94\r\n")
    commit(main_checkout)
    stage_upstream.stage(main_checkout)
    command = ["git", "-C", str(main_checkout), "show", f"{stage_upstream.BRANCH}:{KERNEL}"]
    staged = subprocess.run(command, capture_output=True, check=True, timeout=300).stdout
    assert staged.endswith(b"// \xe2\x80\x94\r\n")


def test_modes_are_kept(main_checkout):
    (main_checkout / KERNEL).chmod(0o755)
    commit(main_checkout)
    stage_upstream.stage(main_checkout)
    entry = git(main_checkout, "ls-tree", stage_upstream.BRANCH, "--", KERNEL)
    assert entry.startswith("100755 ")


def test_not_a_checkout(tmp_path):
    with pytest.raises(StagingError, match="git rev-parse"):
        stage_upstream.stage(tmp_path)


# --- what does not fit -----------------------------------------------------------------------


def test_base_is_recognised(checkout, base):
    assert f"base {base}" in stage_upstream.stage(checkout, dry_run=True)[0]


def test_unknown_base(main_checkout):
    (main_checkout / "aten/src/ATen/native/group_norm.cpp").write_text("// rewritten\n")
    commit(main_checkout)
    first, *missed = refused(main_checkout).splitlines()
    assert first == "the checkout is none of the known bases"
    assert [line.split(" does not ")[0] for line in missed] == [
        f"  {base}: aten/src/ATen/native/group_norm.cpp" for base in BASES
    ]


EDITS = [
    pytest.param(base, edit, id=f"{base}-{Path(edit.file).name}-{number}")
    for base in BASES
    for number, edit in enumerate(e for c in upstream.commits(CHANGE, base) for e in c.edits)
]


@pytest.mark.parametrize("base, edit", EDITS)
def test_missing_and_double_anchors(base, edit):
    tree = upstream.skeleton(CHANGE, base)
    text = tree[edit.file]
    changes = [(text + edit.anchor, "is there 2 times")]
    if edit.anchor in text:  # and not what an earlier edit leaves
        changes.append((text.replace(edit.anchor, ""), "is not there"))
    for changed, found in changes:
        with pytest.raises(StagingError) as caught:
            upstream.render(CHANGE, base, (tree | {edit.file: changed}).get)
        first, why = str(caught.value).split("\n", 1)
        assert first == f"{base}: {edit.file}: the anchor {found}: {edit.anchor!r}"
        assert why == f"  edit: {edit.why}"


def test_missing_end_of_an_edit(monkeypatch):
    additions = [a for c in CHANGE.commits for a in c.additions]
    source, edit = next((a.source, e) for a in additions for e in a.edits if e.until)
    read = upstream._read
    monkeypatch.setattr(
        upstream,
        "_read",
        lambda name: read(name).replace(edit.until, "") if name == source else read(name),
    )
    with pytest.raises(StagingError, match=f"{source}: nothing after the anchor"):
        upstream.render(CHANGE, "main", upstream.skeleton(CHANGE, "main").get)


def test_staging_stops_at_a_missing_anchor(main_checkout):
    (main_checkout / "test/test_nn.py").write_text("# rewritten\n")
    commit(main_checkout)
    assert "main: test/test_nn.py: the anchor is not there" in refused(main_checkout)


def test_missing_file(main_checkout):
    git(main_checkout, "rm", "--quiet", "test/test_nn.py")
    commit(main_checkout)
    assert "main: test/test_nn.py: there is no such file" in refused(main_checkout)


def test_other_schema(main_checkout):
    file = main_checkout / verify.NATIVE_FUNCTIONS
    text = file.read_text()
    schema = "native_group_norm_backward(Tensor grad_out, Tensor input"
    assert schema in text
    file.write_text(text.replace(schema, schema.replace("Tensor input", "Tensor? input")))
    commit(main_checkout)
    assert "the checkout has another schema" in refused(main_checkout)


def test_definitions_that_do_not_parse(main_checkout):
    file = main_checkout / verify.NATIVE_FUNCTIONS
    file.write_text(file.read_text() + "- func: nonsense\n")
    commit(main_checkout)
    error = refused(main_checkout)
    assert "cannot parse" in error and "install a torch that is as new" in error


# --- rendering and verifying -----------------------------------------------------------------


def rendered(base: str, change=CHANGE) -> dict[str, str]:
    tree = upstream.skeleton(change, base)
    commits = upstream.render(change, base, tree.get)
    return {path: text for commit in commits for path, text in commit.files.items()}


NOT_SERVED = "  if (!is_served()) {\n    return;\n  }\n"


def test_kernels_are_those_of_native():
    """No second copy: every kernel and launcher is rendered, but for those with activations or a
    wider Y, and only what edits put there is new."""
    staged = rendered("main")
    of_TY = {old: new for old, new in CHANGE.rewrite.items() if "TY" in old}
    additions = {a.source: a for commit in CHANGE.commits for a in commit.additions}
    for folder in ("kernels", "launch"):
        for source in (ROOT / "native" / folder).iterdir():
            name = str(source.relative_to(ROOT))
            if source.name == "activation.cuh" or re.search("_fused_|_wide_", source.name):
                assert name not in additions
                continue
            text = source.read_text()
            for old, new in of_TY.items():
                text = re.sub(old, new, text, flags=re.MULTILINE)
            ours = text.splitlines()
            theirs = staged[additions[name].path].replace(NOT_SERVED, "").splitlines()
            edited = "".join(edit.text for edit in additions[name].edits).splitlines()
            assert len(theirs) <= len(ours) + len(edited) + 2  # the guard of ROCm
            added = {line for line in theirs if line not in ours and line not in edited}
            assert len(added) <= 20, name  # includes, namespace, what has no kFused


def test_kernels_take_no_room_for_devices_that_do_not_run_them():
    kernel = re.compile(r"^__global__ void (?!occupy).*?\) \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
    count = 0
    for path, text in rendered("main").items():
        bodies = kernel.findall(text)
        assert all(body.startswith(NOT_SERVED) for body in bodies), path
        assert text.count(NOT_SERVED) == len(bodies), path
        count += len(bodies)
    assert count == 11


def test_no_activations_and_no_mixed_types():
    """PyTorch has no fused ones, and Y of X's type: nothing of the others is left."""
    for path, text in rendered("main").items():
        if path.endswith(verify.CPP):
            assert not re.search(r"activat|fused|differentiat|dZ", text, re.IGNORECASE), path
            assert not re.search(r"\bTY\b|wide_output|output_dtype", text), path
            assert not re.search(r"is_float|param_dtype", text), path


@pytest.mark.parametrize("pattern", CHANGE.rewrite)
def test_every_rewriting_has_an_effect(pattern):
    others = {old: new for old, new in CHANGE.rewrite.items() if old != pattern}
    try:
        assert rendered("main", dataclasses.replace(CHANGE, rewrite=others)) != rendered("main")
    except StagingError:
        pass  # something of this repository is left


# Prints the plans of the problems that it reads, one a line:
# dtype, backward, N, C, HxW, G, alignment.
PLANS = """
#include PLAN
#include <iostream>
namespace norm = NAMESPACE;
int main() {
  norm::Problem p;
  norm::Device d;
  d.sm_count = 114; // no plan of native/plan/measured_cuda.h
  d.compute_capability = 90;
  d.shared_memory_per_block = 232448;
  d.l2_bytes = 52428800;
  d.clusters = {0, 114, 57, 34, 26, 19, 14, 13, 13, 7, 6, 6, 6, 6, 6, 6, 6};
  int dtype = 0;
  int backward = 0;
  while (std::cin >> dtype >> backward >> p.N >> p.C >> p.HxW >> p.G >> p.alignment) {
    p.dtype = static_cast<norm::DType>(dtype);
    SET_PARAMETERS
    p.direction = static_cast<norm::Direction>(backward);
    const norm::Plan plan = norm::make_plan(p, d);
    for (const int64_t field :
         {int64_t(plan.scheme), int64_t(plan.vector), int64_t(plan.columns), int64_t(plan.rows),
          int64_t(plan.column_tiles), int64_t(plan.splits), plan.pixels_per_split,
          int64_t(plan.threads), int64_t(plan.cluster), plan.shared_bytes, plan.samples_per_wave,
          plan.pixels_kept, plan.pixels_cached, plan.workspace_bytes}) {
      std::cout << field << ' ';
    }
    std::cout << std::endl;
  }
}
"""


def plans(
    folder: Path,
    header: str,
    namespace: str,
    include: Path,
    sources: list[Path],
    set_parameters: str = "",
) -> str:
    """What a planner says to every case of the tables, in each dtype and direction."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder.mkdir()
    (folder / "plans.cpp").write_text(PLANS)
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    command += [f"-DPLAN=<{header}>", f"-DNAMESPACE={namespace}", str(folder / "plans.cpp")]
    command.append(f"-DSET_PARAMETERS={set_parameters}")
    too_wide = Case("too wide", (1, 1 << 30, 1, 1), 2)
    command += [*map(str, sources), "-o", str(folder / "plans")]
    subprocess.run(command, check=True, timeout=900)
    questions = [
        f"{dtype} {backward} {case.N} {case.C} {case.HxW} {case.G} {alignment}"
        for case in (*KERNEL_CASES, *MODEL_CASES, *EDGE_CASES, too_wide)
        for dtype in range(4)
        for backward in (0, 1)
        for alignment in (16, 8)
    ]
    done = subprocess.run(
        [str(folder / "plans")],
        input="\n".join(questions),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert len(done.stdout.splitlines()) == len(questions)
    return done.stdout


def test_the_planner_decides_as_ours_does(tmp_path):
    """What is left out of it, pins, measured plans and the CPU, changes no other plan."""
    tree = tmp_path / "tree"
    for path, text in rendered("main").items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    source = tree / "aten" / "src"
    native = sorted((ROOT / "native" / "plan").glob("*.cpp"))
    names = ("estimates", "plan", "policy")
    staged = [source / f"ATen/native/cuda/group_norm_{name}.cpp" for name in names]
    header = "ATen/native/cuda/group_norm/plan/plan.h"
    ours = plans(
        tmp_path / "ours",
        "native/plan/plan.h",
        "gn_override",
        ROOT,
        native,
        set_parameters="p.param_dtype = p.dtype;",
    )
    theirs = plans(tmp_path / "theirs", header, "at::native::group_norm_nhwc", source, staged)
    assert ours == theirs
    schemes = {line.split()[0] for line in ours.splitlines()}
    assert schemes == {"0", "1", "2", "3", "4"}


def test_compile_units_are_where_pytorch_looks_for_them():
    """Its build globs native/cuda/*.cu and *.cpp, without the folders below."""
    for path in rendered("main"):
        if path.endswith((".cu", ".cpp")):
            assert Path(path).parent == Path("aten/src/ATen/native/cuda")
        if path.endswith((".cu", ".cpp")) and path != KERNEL:
            assert rendered("main")[path].startswith("#ifndef USE_ROCM\n")


def test_nothing_of_this_repository_is_left():
    with pytest.raises(StagingError, match="still says 'gn_override' in line"):
        rendered("main", dataclasses.replace(CHANGE, rewrite={}))


def test_an_include_that_is_not_part_of_the_change():
    first, *others = CHANGE.commits
    additions = tuple(a for a in first.additions if a.source != "native/plan/plan.h")
    change = dataclasses.replace(
        CHANGE, commits=(dataclasses.replace(first, additions=additions), *others)
    )
    with pytest.raises(StagingError, match=r"includes native/plan/plan\.h, which is not part"):
        rendered("main", change)


# --- errors in the YAML file -----------------------------------------------------------------

SMALL = """\
conditions: {}
operators: []
upstream:
  guard: USE_ROCM
  rewrite: {gn_override: norm}
  bases:
    main: [{file: a.cpp, contains: here}]
  commits:
  - title: one
    body: of them
    add: [{path: b.h, from: native/plan/plan.h}]
    edit: [{file: a.cpp, anchor: here, text: there, why: because}]
"""


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("contains: here", "has: here", "upstream, base main, sign 1: unknown field 'has'"),
        (", contains: here", "", "upstream, base main, sign 1: needs either 'contains' or"),
        ("body: of them", "bases: ['3.0']", "upstream, commit 1: field 'body' is missing"),
        ("    add:", "    bases: ['3.0']\n    add:", "upstream, commit 1: unknown base '3.0'"),
        ("text: there, ", "", "upstream, commit 1, edit 1: needs either 'text' or 'from'"),
        ("anchor: here", "anchor: ''", "upstream, commit 1, edit 1: the anchor is empty"),
        (", why: because", "", "upstream, commit 1, edit 1: field 'why' is missing"),
        ("file: a.cpp, anchor", "anchor", "upstream, commit 1, edit 1: field 'file' is missing"),
        ("text: there", "until: b, text: there", "commit 1, edit 1: unknown field 'until'"),
    ],
)
def test_errors_of_the_yaml_file(tmp_path, old, new, error):
    path = tmp_path / "ops.yaml"
    path.write_text(SMALL)
    model.load(path)
    assert old in SMALL
    path.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(model.CodegenError) as caught:
        model.load(path)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("plan.h}", "plam.h}", "there is no file native/plan/plam.h"),
        (
            "text: there",
            "from: README.md, after: '# gn_override', before: nowhere",
            "README.md: 'nowhere' is not there exactly once",
        ),
    ],
)
def test_sources_that_are_not_there(tmp_path, old, new, error):
    path = tmp_path / "ops.yaml"
    assert old in SMALL
    path.write_text(SMALL.replace(old, new, 1).replace("native/plan/plan.h", "README.md"))
    with pytest.raises(StagingError) as caught:
        upstream.render(model.load(path).upstream, "main", {"a.cpp": "here"}.get)
    assert error in str(caught.value)


# --- the command and the text ----------------------------------------------------------------


def test_a_repository_that_the_environment_names(tmp_path, monkeypatch):
    """git gives its hooks and the commands of a rebase GIT_DIR: nothing happens to that one."""
    folder = tmp_path / "ours"
    stage_upstream.make_up_checkout(folder, "main")
    before = state(folder)
    monkeypatch.setenv("GIT_DIR", str(folder / ".git"))
    stage_upstream.make_up_checkout(tmp_path / "other", "main")
    stage_upstream.stage(tmp_path / "other")
    monkeypatch.delenv("GIT_DIR")
    assert state(folder) == before


def test_command(main_checkout, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        status = stage_upstream.main(list(map(str, arguments)))
        return status, *capsys.readouterr()

    status, out, _ = run("--pytorch", main_checkout, "--branch", "norm")
    assert status == 0 and "branch norm is ready" in out
    status, out, _ = run("--pytorch", main_checkout, "--branch", "norm", "--check")
    assert status == 0 and "branch norm is there already" in out
    status, _, err = run("--pytorch", main_checkout, "--base", "2.14")
    assert status == 1 and "2.14: aten/src/ATen/native/group_norm.cpp" in err
    alone = ("--compile", "--branch=norm", "--allow-dirty", "--base=main")
    for arguments in (
        ["--pytorch", main_checkout, "--base", "1.0"],
        ["--pytorch", main_checkout, "--check", "--dry-run"],
        [],
        *(["--check", option] for option in alone),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(*arguments)


def test_command_checks_by_itself(tmp_path):
    done = run_python(ROOT / "tools" / "stage_upstream.py", "--check", cwd=tmp_path)
    assert done.stderr == ""
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"base {b}" for b in BASES]


def test_text_of_the_pull_request(base):
    text = stage_upstream.pull_request(base)
    results = stage_upstream.render_readme.RESULTS
    content = json.loads((results / f"{stage_upstream.KERNELS}.json").read_text())
    rows, before = content["rows"], stage_upstream.BEFORE[base]
    table = [line for line in text.splitlines() if line.startswith("| ") and "float" in line]
    for line, row in zip(table, rows, strict=True):
        assert line.startswith(f"| {'x'.join(map(str, row['shape']))} | {row['dtype']} |")
        ratio = row["fwd_bwd"][before] / row["fwd_bwd"]["gn_override"]
        assert line.endswith(f" {ratio:.2f}x |")
    assert "{{" not in text and "<!--" not in text
    tree = upstream.skeleton(CHANGE, base)
    new = sum(len(t.splitlines()) for path, t in rendered(base).items() if path not in tree)
    (lines, files) = map(int, re.findall(r"adds\*\* (\d+) lines, in (\d+) new files", text)[0])
    assert 0 < lines - new < 500 and files == len(rendered(base).keys() - tree.keys())
    assert "which this\nchange leaves out. " in text
    assert ("#111824" in text) == (base == "2.14")
    assert (content["pytorch"]["git blob"][:12] in text) == (base == "main")


def test_the_text_is_of_the_commits_that_were_measured(tmp_path, monkeypatch):
    """Of their table of plans, and of gains only where both results are of the same kernels."""
    monkeypatch.setattr(stage_upstream.render_readme, "ROOT", tmp_path)
    table = tmp_path / stage_upstream.MEASURED_PLANS
    table.parent.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")

    def committed(text: str, page: str) -> str:
        table.write_text(text)
        (tmp_path / "README.md").write_text(page)
        git(tmp_path, "add", "--all")
        someone = ["-c", "user.name=a", "-c", "user.email=a@b"]
        git(tmp_path, *someone, "commit", "--quiet", "--message", "a")
        return git(tmp_path, "rev-parse", "HEAD").strip()[:12]

    plan = "    {k%s, kIdentity, 2, 8, 15, 4, {kResident, 5, %d, 128}, %.2f},\n"
    first = committed(plan % ("Forward", 8, 0.8) + plan % ("Backward", 16, 0.5), "a")
    same = committed(table.read_text(), "b")
    last = committed(plan % ("Backward", 4, 0.5), "b")

    def results(commit: str, fwd: float) -> dict[str, object]:
        head = dict.fromkeys(("gpu", "driver", "cuda", "torch", "date", "command"), "x")
        times = {"fwd": {"gn_override": fwd}, "fwd_bwd": {"gn_override": 8.0}}
        row = {"name": "one", "shape": [2, 8, 3, 5], "groups": 4, "dtype": "bfloat16"} | times
        return head | {"commit": commit, "rows": [row]}

    held = stage_upstream.measured_plans(results(first, 6.0))
    assert "holds forward 2x8x3x5; there" in held and "up to 1.25 times" in held
    held = stage_upstream.measured_plans(results(last, 6.0))
    assert "holds backward 2x8x3x5; there" in held and "up to 2.00 times" in held
    other = results(first, 6.0)
    other["rows"][0]["dtype"] = "float32"
    assert stage_upstream.measured_plans(other) == "It holds none of these rows."
    for lost in (f"{last}-dirty", "unknown"):
        held = stage_upstream.measured_plans(results(lost, 6.0))
        assert held.startswith("Which of these rows") and stage_upstream.MEASURED_PLANS in held

    for commit in (first, same):
        gains = stage_upstream.gains(results(first, 6.0), results(commit, 4.0))
        assert "a factor: forward 1.50 to 1.50 in 1 of 1 rows (x, " in gains
        assert f"commit {commit}" in gains
    for commit in (last, "unknown"):
        assert stage_upstream.gains(results(first, 6.0), results(commit, 4.0)) == ""
    assert stage_upstream.gains(results("unknown", 6.0), results("unknown", 4.0))
