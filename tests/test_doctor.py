"""python -m gn_override doctor: every fault is found, named, and comes with what mends it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from processes import run_python

import gn_override
from gn_override import _doctor, _library, _report
from gn_override.__main__ import main

PACKAGE = Path(_library.__file__).parent
INFO = {"torch": "2.14.1", "torch_cuda": "13.0", "cuda_archs": ["9.0"], "backends": ["cpu", "cuda"]}
CPU_INFO = INFO | {"torch_cuda": None, "cuda_archs": [], "backends": ["cpu"]}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A torch with CUDA 13.0 on a machine with one H200 and no nvcc; tests change it."""
    fake = SimpleNamespace(driver=["GPU 0: NVIDIA H200"], capability=(9, 0), visible=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: fake.visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: fake.capability)
    monkeypatch.setattr(_doctor, "_gpus_of_driver", lambda: fake.driver)
    monkeypatch.setattr(_doctor, "_TOOLKIT", tmp_path / "no such toolkit")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH", "GN_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    return fake


def only(checks):
    (check,) = checks
    assert check.ok is (check.mend == "")
    return check


# Installed, as it is.


def test_a_sound_installation(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert torch.__version__ in lines[0] and str(PACKAGE) in lines[0]
    assert any("cpu call" in line for line in lines)


def test_json(capsys, monkeypatch):
    monkeypatch.setenv("GN_OVERRIDE", "0")
    assert main(["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "ok", "found", "mend"} for check in checks)
    (wrong,) = [check for check in checks if not check["ok"]]
    assert wrong["name"] == "switch" and wrong["mend"] == "unset GN_OVERRIDE"


@pytest.mark.parametrize(("value", "ok"), [("1", True), ("", True), ("off", False)])
def test_the_switch_of_the_environment(value, ok, monkeypatch):
    monkeypatch.setenv("GN_OVERRIDE", value)
    check = _doctor._switch()
    assert check.ok is ok and (ok or "GN_OVERRIDE=off" in check.found)


# An extension that cannot be loaded: then the import itself fails, and doctor still speaks.


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, which a test may damage."""
    target = tmp_path / "gn_override"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def damage(package: Path, how: str) -> None:
    if how == "library is missing":
        (package / "_C.abi3.so").unlink()
    elif how == "library is garbage":
        (package / "_C.abi3.so").write_bytes(b"not a library" * 1000)
    elif how == "record is garbage":
        (package / "_build_info.json").write_text("{}")
    else:
        record = package / "_build_info.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"torch": "2.10.0"}))


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("library is missing", "has no extension in"),
        ("library is garbage", "invalid ELF header"),  # the linker's words
        ("record is garbage", "is not the record of a build"),
        ("another torch", f"this is torch {torch.__version__}"),
    ],
)
def test_an_extension_that_does_not_load(how, found, installed):
    damage(installed, how)
    result = run_python("-m", "gn_override", "doctor", "--json", cwd=installed.parent, status=1)
    assert result.stderr == ""
    (check,) = json.loads(result.stdout)
    assert check["name"] == "extension" and found in check["found"]
    assert "pip install --no-build-isolation" in check["mend"]
    assert "pip install" not in check["found"]


def test_other_commands_raise_where_doctor_speaks(installed):
    damage(installed, "another torch")
    result = run_python("-m", "gn_override", "doctor", "--help", cwd=installed.parent)
    assert "how to mend it" in result.stdout
    other = run_python("-m", "gn_override", "report", cwd=installed.parent, status=1)
    assert "ImportError" in other.stderr and not other.stdout


@pytest.mark.parametrize(
    "spelling",
    [("-m", "gn_override", "--json"), ("-mgn_override",), ("-Bm", "gn_override")],
    ids=" ".join,
)
def test_spellings_of_the_command(spelling, installed):
    damage(installed, "another torch")
    result = run_python(*spelling, "doctor", cwd=installed.parent, status=1)
    assert result.stderr == ""
    assert f"this is torch {torch.__version__}" in result.stdout


def test_a_path_that_stdout_cannot_encode(installed):
    elsewhere = installed.parent / "Verzeichnis-\u00e9" / "gn_override"
    shutil.copytree(installed, elsewhere)
    command = ("-m", "gn_override", "doctor")
    result = run_python(*command, cwd=elsewhere.parent, PYTHONIOENCODING="ascii")
    assert "\\xe9" in result.stdout


# The CUDA backend.


def test_cuda_backend(machine):
    assert "9.0" in only([_doctor._cuda(INFO)]).found


def test_no_nvcc_at_all(machine):
    check = only([_doctor._cuda(CPU_INFO)])
    assert not check.ok and "no nvcc" in check.found
    assert "CUDA 13" in check.mend and "pip install" in check.mend


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", "default"])
def test_nvcc_came_later(where, machine, monkeypatch, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    if where == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    elif where == "PATH":
        monkeypatch.setenv("PATH", str(nvcc.parent))
    else:
        monkeypatch.setattr(_doctor, "_TOOLKIT", tmp_path / "cuda")
    check = only([_doctor._cuda(CPU_INFO)])
    assert not check.ok and str(nvcc) in check.found and "pip install" in check.mend


def test_a_torch_without_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    machine.visible = False
    check = only([_doctor._cuda(CPU_INFO)])
    assert not check.ok and "nvidia-smi" in check.found and "torch with CUDA" in check.mend
    assert not list(_doctor._gpus(CPU_INFO))


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_machine_without_a_gpu_needs_no_backend(cuda, machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    machine.visible, machine.driver = False, []
    assert "no GPU here" in only([_doctor._cuda(CPU_INFO)]).found


def test_gpus_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _doctor._gpus_of_driver() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\necho 'No devices'\n")
    program.chmod(0o755)
    assert _doctor._gpus_of_driver() == ["GPU 0: NVIDIA H200"]


# GPUs.


def test_a_gpu_of_the_build(machine):
    assert only(_doctor._gpus(INFO)).ok


def test_a_gpu_that_the_build_has_no_code_for(machine):
    machine.capability = (10, 0)
    check = only(_doctor._gpus(INFO))
    assert not check.ok and "10.0" in check.found and "the build is for 9.0" in check.found
    assert check.mend.startswith("export TORCH_CUDA_ARCH_LIST='9.0;10.0', then ")


def test_a_gpu_that_is_too_old(machine):
    machine.capability = (7, 5)
    check = only(_doctor._gpus(INFO | {"cuda_archs": ["7.5"]}))
    assert check.ok and "PyTorch's own kernels" in check.found


def test_a_gpu_without_a_backend(machine):
    assert "no CUDA backend" in only(_doctor._gpus(CPU_INFO)).found


def test_a_gpu_that_torch_does_not_see(machine):
    machine.visible = False
    check = only(_doctor._gpus(INFO))
    assert not check.ok and "torch sees none" in check.found
    machine.driver = []
    assert only(_doctor._gpus(INFO)).ok


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["9.0"], True),
        ((8, 6), ["8.0"], True),
        ((8, 0), ["8.6"], False),
        ((9, 0), ["8.0"], False),
        ((9, 0), ["8.0+PTX"], True),
        ((8, 0), ["9.0+PTX"], False),
        ((9, 0), ["9.0a"], True),
        ((10, 3), ["10.0a"], False),
        ((10, 3), ["10.0f"], True),
        ((10, 3), ["10.0a+PTX"], False),
        ((12, 0), ["10.0f+PTX"], False),
        ((12, 0), ["8.0", "9.0", "10.0+PTX"], True),
        ((9, 0), [], False),
    ],
)
def test_where_code_runs(capability, architectures, runs):
    assert _doctor.runs_on(capability, architectures) is runs


# The dispatcher.


def test_another_package_on_top(tmp_path, installed):
    package = tmp_path / "site-packages" / "elsewhere"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import torch\n"
        "print('a banner')\n"
        "lib = torch.library.Library('aten', 'IMPL')\n"
        "lib.impl('native_group_norm', lambda *a: None, 'CPU')\n"
    )
    result = run_python(
        *("-W", "ignore", "-m", "gn_override", "doctor", "--json", "--import", "elsewhere"),
        cwd=tmp_path,
        status=1,
        PYTHONPATH=str(package.parent),
    )
    assert "a banner" in result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    wrong = checks["dispatcher"]
    assert not wrong["ok"] and "elsewhere has taken native_group_norm on CPU" in wrong["found"]
    assert wrong["mend"] == "import gn_override after elsewhere"
    assert not checks["cpu call"]["ok"]


def test_a_module_that_cannot_be_imported():
    first, second = _doctor._dispatcher(["no_such_module"])
    assert not first.ok and "no_such_module" in first.found and first.mend
    assert second.ok


def test_a_script_that_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "a_script.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = _doctor._dispatcher(["a_script"])
    assert not first.ok and first.found == "import a_script: SystemExit: 3"
    assert second.ok


OURS = "x/native/binding/generated/register.cpp:37"


def test_owners_are_those_of_the_report(monkeypatch):
    """What came after us shall come before; where nothing of ours is, the order is no matter."""
    owners = [
        _report.Owner("native_group_norm", "CUDA", "flag_gems", "flag_gems/x.py:1", (OURS,)),
        _report.Owner("group_norm", "CompositeImplicitAutograd", "other", "other/x.py:1", (OURS,)),
        _report.Owner("group_norm", "CPU", "other", "other/x.py:1", ()),
        _report.Owner("group_norm", "CUDA", "flag_gems", "flag_gems/x.py:1", ()),
    ]
    monkeypatch.setattr(_report, "report", lambda: SimpleNamespace(owners=owners))
    checks = list(_doctor._dispatcher(()))
    assert not any(check.ok for check in checks)
    assert [check.mend for check in checks] == [
        "import gn_override after flag_gems",
        "import gn_override after other",
        "import gn_override after other",
        "do without flag_gems, or keep it from registering group_norm",
    ]


@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "AutocastCPU"])
def test_another_package_beside_ours(key, tmp_path):
    """At a key where this package has nothing, so that the order of imports is no matter."""
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "lib = torch.library.Library('aten', 'IMPL')\n"
        f"lib.impl('group_norm', lambda x, *a: x + 1, {key!r})\n"
    )
    code = (
        "import sys, elsewhere, gn_override.__main__\n"
        "sys.exit(gn_override.__main__.main(['doctor', '--json']))\n"
    )
    result = run_python("-W", "ignore", "-c", code, cwd=tmp_path, status=1)
    wrong = [check for check in json.loads(result.stdout) if check["name"] == "dispatcher"]
    assert wrong and not any(check["ok"] for check in wrong)
    assert any(f"elsewhere has taken group_norm on {key}: " in check["found"] for check in wrong)
    assert {check["mend"] for check in wrong} == {
        "do without elsewhere, or keep it from registering group_norm"
    }


# A call.


def test_a_call_that_raises(monkeypatch):
    def no_image(*arguments):
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(F, "group_norm", no_image)
    check = only([_doctor._call("cpu")])
    found = "raises RuntimeError: CUDA error: no kernel image is available"
    assert not check.ok and check.found == found


def test_a_call_that_raises_what_another_package_raises(monkeypatch):
    def refuse(*arguments):
        raise KeyError("block size")

    monkeypatch.setattr(F, "group_norm", refuse)
    assert only([_doctor._call("cpu")]).found == "raises KeyError: 'block size'"


def test_a_call_that_runs_elsewhere(monkeypatch):
    monkeypatch.setattr(gn_override, "enabled", gn_override.disabled)
    check = only([_doctor._call("cpu")])
    assert not check.ok and "not on this package's kernel" in check.found


def test_a_wrong_result(monkeypatch):
    stock = F.group_norm

    def wrong(x, groups):
        return stock(x, groups) * (1.01 if gn_override.is_enabled() else 1.0)

    monkeypatch.setattr(F, "group_norm", wrong)
    check = only([_doctor._call("cpu")])
    assert not check.ok and "not PyTorch's" in check.found


@pytest.mark.cuda
def test_a_call_on_a_gpu():
    assert only([_doctor._call("cuda")]).ok
