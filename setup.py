"""Builds gn_override/_C.abi3.so against the torch of the running environment.

    pip install torch "setuptools>=77" ninja pyyaml
    pip install --no-build-isolation .

What the environment may say:
    CUDA_HOME             the CUDA toolkit; else the nvcc on PATH, else /usr/local/cuda
    GN_OVERRIDE_CUDA=0    build the CPU backend only
    TORCH_CUDA_ARCH_LIST  "8.0;9.0+PTX"; else the visible GPUs, else a default list
    MAX_JOBS              compilers at a time; else ninja's default
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import setuptools

ROOT = Path(__file__).resolve().parent

SOURCES = [
    "native/plan/estimates_cuda.cpp",
    "native/plan/plan.cpp",
    "native/plan/policy_cpu.cpp",
    "native/plan/policy_cuda.cpp",
    "native/cpu/cpu.cpp",
    "native/cpu/kernels_baseline.cpp",
    "native/binding/activation.cpp",
    "native/binding/autocast.cpp",
    "native/binding/autograd.cpp",
    "native/binding/classify.cpp",
    "native/binding/composite.cpp",
    "native/binding/control.cpp",
    "native/binding/cpu.cpp",
    "native/binding/generated/register.cpp",
    "native/binding/output_allocator.cpp",
    "native/binding/plan_cache.cpp",
    "native/binding/state.cpp",
]

# Planner and CPU kernels know nothing of torch: no path to its headers, and the
# same objects with any of its versions.
WITHOUT_TORCH = ("native/plan/", "native/cpu/")

# x86-64 only. The baseline has these kernels too: the widest that the machine
# runs is chosen at run time. The order is the order of linking: an inline
# function that several objects hold is taken from the first of them, so that
# AVX-512 code cannot get into a function that every machine calls.
INSTRUCTION_SETS = {
    "native/cpu/kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "native/cpu/kernels_avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mfma",
        "-mf16c",
    ],
}

CUDA_SOURCES = [
    "native/binding/avg_pool.cpp",
    "native/binding/cuda.cpp",
    "native/launch/launch.cu",
    "native/launch/registers_bfloat16.cu",
    "native/launch/registers_fused_bfloat16.cu",
    "native/launch/registers_fused_half.cu",
    "native/launch/registers_half.cu",
    "native/launch/resident_bfloat16.cu",
    "native/launch/resident_double.cu",
    "native/launch/resident_float.cu",
    "native/launch/resident_fused_bfloat16.cu",
    "native/launch/resident_fused_double.cu",
    "native/launch/resident_fused_float.cu",
    "native/launch/resident_fused_half.cu",
    "native/launch/resident_fused_wide_bfloat16.cu",
    "native/launch/resident_fused_wide_half.cu",
    "native/launch/resident_half.cu",
    "native/launch/resident_wide_bfloat16.cu",
    "native/launch/resident_wide_half.cu",
    "native/launch/two_pass_bfloat16.cu",
    "native/launch/two_pass_double.cu",
    "native/launch/two_pass_float.cu",
    "native/launch/two_pass_fused_bfloat16.cu",
    "native/launch/two_pass_fused_double.cu",
    "native/launch/two_pass_fused_float.cu",
    "native/launch/two_pass_fused_half.cu",
    "native/launch/two_pass_fused_wide_bfloat16.cu",
    "native/launch/two_pass_fused_wide_half.cu",
    "native/launch/two_pass_half.cu",
    "native/launch/two_pass_wide_bfloat16.cu",
    "native/launch/two_pass_wide_half.cu",
]

LEAST_CAPABILITY = (8, 0)  # that the kernels are for: see native/plan/plan.h
# Later GPUs compile the PTX of 9.0 on first use.
DEFAULT_ARCHS = ["8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0"]

# The names that TORCH_CUDA_ARCH_LIST may use, as torch reads them.
NAMED_ARCHS = {
    "Ampere+Tegra": "8.7",  # ahead of the name that it begins with
    "Blackwell+Tegra": "11.0",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}

# Where a toolkit is looked for when neither CUDA_HOME nor PATH leads to one.
DEFAULT_HOME = Path("/usr/local/cuda")

INSTALL = "pip install --no-build-isolation ."


class BuildError(Exception):
    """The build cannot go on; the text is one line and says what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can compile and link."""

    home: Path
    version: tuple[int, int]
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]
    archs: tuple[str, ...]  # what its nvcc compiles for: "8.0", "9.0", ...


@dataclass
class Config:
    """What is built."""

    backends: list[str]
    notes: list[str]
    sources: list[str]
    archs: list[str] = field(default_factory=list)
    toolkit: Toolkit | None = None


def run(*command: str | Path) -> str:
    """The standard output and error of a command; empty if it does not run."""
    try:
        result = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def toolkit_directories(home: Path, name: str, holds: str) -> tuple[Path, ...]:
    """The directories of a toolkit called `name` (include, lib) that have the file `holds`.

    A toolkit from a system installer has them at the top, one from conda in targets/.
    """
    names = [name, f"{name}64"] if name == "lib" else [name]
    found = [home / n for n in names]
    found += sorted((home / "targets").glob(f"*/{name}"))
    unique = {d.resolve(): d for d in reversed(found) if (d / holds).exists()}
    return tuple(reversed(unique.values()))


def home_behind(nvcc: Path) -> Path | None:
    """The toolkit that an nvcc really belongs to, asked of nvcc itself.

    An nvcc on PATH is often a script that starts another one, so that its own place says nothing.
    """
    with tempfile.TemporaryDirectory() as directory:
        empty = Path(directory, "empty.cu")
        empty.touch()
        report = run(nvcc, "--dryrun", "-c", empty, "-o", Path(directory, "empty.o"))
    top = re.search(r"^#\$ TOP=(.+)$", report, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else None


def find_toolkit(environ: Mapping[str, str]) -> Toolkit | str:
    """The CUDA toolkit to use, or one clause that says why there is none.

    Raises BuildError where CUDA_HOME names something that is not a toolkit.
    """
    said = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    homes: list[Path] = []
    if said:
        homes.append(Path(said))
    else:
        if on_path:
            homes.append(Path(on_path).resolve().parent.parent)
            behind = home_behind(Path(on_path))
            homes += [behind] if behind else []
        homes.append(DEFAULT_HOME)
    for home in homes:
        nvcc = home / "bin" / "nvcc"
        includes = toolkit_directories(home, "include", "cuda_runtime.h")
        libraries = toolkit_directories(home, "lib", "libcudart.so")
        release = re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version"))
        if release and includes and libraries:
            archs = re.findall(r"compute_(\d+)(\d)$", run(nvcc, "--list-gpu-arch"), re.MULTILINE)
            return Toolkit(
                home=home,
                version=(int(release.group(1)), int(release.group(2))),
                includes=includes,
                libraries=libraries,
                archs=tuple(f"{major}.{minor}" for major, minor in archs),
            )
    if said:
        raise BuildError(
            f"CUDA_HOME is {said}, which lacks bin/nvcc, include/cuda_runtime.h or libcudart.so: "
            "set it to a CUDA toolkit, or GN_OVERRIDE_CUDA=0 to build the CPU backend only"
        )
    if on_path:
        return (
            f"{on_path} has no CUDA toolkit behind it (no cuda_runtime.h or libcudart.so): "
            "set CUDA_HOME to one to build the CUDA backend too"
        )
    return "there is no nvcc: put one on PATH or set CUDA_HOME to build the CUDA backend too"


def select_archs(
    asked: str | None, visible: Iterable[tuple[int, int]], known: Sequence[str]
) -> tuple[list[str], str]:
    """The architectures to compile for and where the choice comes from.

    Args:
        asked: the value of TORCH_CUDA_ARCH_LIST; None, "" and "native" leave the choice to us.
        visible: compute capabilities of the GPUs of this machine; may be empty.
        known: what nvcc compiles for, as "9.0", in ascending order.

    Raises BuildError for an architecture that nvcc does not know.
    """

    def is_known(arch: str) -> bool:
        return re.sub(r"[af]?(\+PTX)?$", "", arch) in known

    if asked and asked != "native":
        for name, value in NAMED_ARCHS.items():
            asked = asked.replace(name, value)
        archs = list(dict.fromkeys(re.split(r"[;,\s]+", asked.strip("; ,"))))
        for arch in archs:
            if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) or not is_known(arch):
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST asks for {arch!r}, but nvcc compiles for "
                    f"{', '.join(known)} (with +PTX after any)"
                )
        return archs, "TORCH_CUDA_ARCH_LIST"
    archs = []
    for major, minor in sorted(set(visible)):
        if (major, minor) < LEAST_CAPABILITY:
            continue
        arch = f"{major}.{minor}"
        if not is_known(arch):  # newer than nvcc: the GPU compiles the newest PTX
            older = [k for k in known if tuple(map(int, k.split("."))) <= (major, minor)]
            if not older:
                continue
            arch = f"{older[-1]}+PTX"
        archs.append(arch)
    if archs:
        return list(dict.fromkeys(archs)), "the GPUs of this machine"
    default = [arch for arch in DEFAULT_ARCHS if is_known(arch)]
    return default, "no GPU of compute capability 8.0 or later is visible, so the default list"


def gencode(archs: Iterable[str]) -> list[str]:
    """nvcc's flags for a list of architectures."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def wanted_toolkit(torch: Any, environ: Mapping[str, str]) -> Toolkit | str:
    """The toolkit for the CUDA backend, or why there is to be none. Raises BuildError."""
    if environ.get("GN_OVERRIDE_CUDA") == "0":
        return "GN_OVERRIDE_CUDA=0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    return find_toolkit(environ)


def configure(torch: Any, environ: Mapping[str, str]) -> Config:
    """Decides what to build from the torch module and the environment. Raises BuildError."""
    cpu = list(SOURCES)
    if platform.machine().lower() in ("x86_64", "amd64"):
        cpu += INSTRUCTION_SETS
    toolkit = wanted_toolkit(torch, environ)
    if isinstance(toolkit, str):
        config = Config(["cpu"], [f"building the CPU backend only: {toolkit}"], cpu)
    else:
        wanted = tuple(map(int, torch.version.cuda.split(".")))
        if toolkit.version[0] != wanted[0]:
            raise BuildError(
                f"torch {torch.__version__} is built with CUDA {torch.version.cuda}, but the "
                f"toolkit in {toolkit.home} is CUDA {toolkit.version[0]}.{toolkit.version[1]}: set "
                f"CUDA_HOME to a CUDA {wanted[0]} toolkit, or GN_OVERRIDE_CUDA=0 to build the CPU "
                "backend only"
            )
        visible = [
            torch.cuda.get_device_capability(i)
            for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ]
        archs, origin = select_archs(environ.get("TORCH_CUDA_ARCH_LIST"), visible, toolkit.archs)
        note = (
            f"building the CPU and CUDA backends with {toolkit.home} for {' '.join(archs)} "
            f"({origin}{'; TORCH_CUDA_ARCH_LIST overrides it' if 'GPU' in origin else ''})"
        )
        config = Config(["cpu", "cuda"], [note], cpu + CUDA_SOURCES, archs, toolkit)
    missing = [source for source in config.sources if not (ROOT / source).exists()]
    if missing:
        raise BuildError(f"source files are missing from {ROOT}: {', '.join(missing)}")
    return config


def evaluate_conditions() -> dict[str, bool]:
    """The conditions of codegen/group_norm.yaml on the installed torch."""
    sys.path.insert(0, str(ROOT))
    try:
        from codegen import conditions, model
    except ModuleNotFoundError as error:
        raise BuildError(
            f"the build needs {error.name}: run `pip install pyyaml ninja`, then `{INSTALL}`"
        ) from None
    finally:
        sys.path.remove(str(ROOT))
    try:
        return conditions.evaluate()
    except model.CodegenError as error:
        raise BuildError(str(error)) from None


def build_info(torch: Any, config: Config, conditions: Mapping[str, bool]) -> dict[str, Any]:
    """The record that gn_override/_library.py compares with the running torch."""
    return {
        "version": project_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda if config.toolkit else None,
        "cuda_archs": config.archs,
        "backends": config.backends,
        "conditions": dict(conditions),
    }


def in_pyproject(pattern: str) -> tuple[str, ...]:
    """The groups of a regular expression that matches a line of pyproject.toml."""
    match = re.search(f"^{pattern}$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None, pattern
    return match.groups()


def project_version() -> str:
    return in_pyproject(r'version = "(.+)"')[0]


def check_torch_version(version: str) -> None:
    """Raises BuildError for a torch that pip is about to replace by a supported one."""
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    bounds = in_pyproject(r'dependencies = \["torch>=([\d.]+),<([\d.]+)"\]')
    first, end = (tuple(map(int, bound.split("."))) for bound in bounds)
    if not first <= release < end:
        raise BuildError(
            f"torch {version} is installed and not supported: run `pip install "
            f"'torch>={bounds[0]},<{bounds[1]}' ninja pyyaml`, then `{INSTALL}`"
        )


def extension(
    torch: Any, include: Sequence[str], config: Config, conditions: Mapping[str, bool]
) -> setuptools.Extension:
    """The extension module: a plain shared library, which never calls Python."""
    defines = [f"-DGN_OVERRIDE_{name}={int(value)}" for name, value in conditions.items()]
    # The torch version is on the command line so that objects of another torch
    # are compiled again: ninja does not look at system headers.
    defines += [
        f'-DGN_OVERRIDE_TORCH_VERSION="{torch.__version__}"',
    ]
    toolkit_includes: list[str] = []
    library_dirs = [str(Path(torch.__file__).parent / "lib")]
    libraries = ["c10", "torch_cpu"]
    if config.toolkit:
        defines.append("-DGN_OVERRIDE_WITH_CUDA=1")
        toolkit_includes = [str(d) for d in config.toolkit.includes if str(d) != "/usr/include"]
        library_dirs += [str(d) for d in config.toolkit.libraries]
        libraries += ["c10_cuda", "torch_cuda", "cudart"]
    system = [flag for d in (*include, *toolkit_includes) for flag in ("-isystem", d)]
    common = ["-DNDEBUG", f"-I{ROOT}", "-std=c++20", "-O3"]
    return setuptools.Extension(
        "gn_override._C",
        config.sources,
        py_limited_api=True,
        language="c++",
        extra_compile_args={
            # at::parallel_for is inline: without -fopenmp it runs on one thread.
            "cxx": [
                *common,
                "-g0",
                "-fopenmp",
                "-fvisibility=hidden",
                f"-ffile-prefix-map={ROOT}/=",  # where it is built is nobody's concern
                "-Wall",
                "-Wextra",
            ],
            "torch": [*defines, *system],  # for what is not in WITHOUT_TORCH
            # CUDA kernels and launchers know nothing of torch either.
            "nvcc": [
                *common,
                *gencode(config.archs),
                "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra",
            ],
        },
        library_dirs=library_dirs,
        libraries=libraries,
        # The library is loaded into a process that has torch's libraries
        # already (its OpenMP among them, by the same name), so no rpath. A
        # symbol that nobody has is an error here.
        extra_link_args=["-fopenmp", "-Wl,--no-undefined", "-Wl,--as-needed"],
    )


def build_command(cpp_extension: Any, config: Config, info: dict[str, Any]) -> type:
    """build_ext that knows flags of single files and writes the build's record."""

    class Build(cpp_extension.BuildExtension):  # type: ignore[misc]
        def build_extension(self, ext: setuptools.Extension) -> None:
            for note in config.notes:
                print(f"gn_override: {note}", file=sys.stderr, flush=True)
            record = Path(self.get_ext_fullpath(ext.name)).with_name("_build_info.json")
            record.unlink(missing_ok=True)  # no record beside half a library
            self.compiler.compile = by_flags(self.compiler.compile)
            try:
                super().build_extension(ext)
            except RuntimeError as error:  # ninja has printed the compiler's words
                sys.exit(f"gn_override: {error}")
            record.write_text(json.dumps(info, indent=2) + "\n")

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            built = Path(self.build_lib, "gn_override", "_build_info.json")
            self.copy_file(str(built), str(ROOT / "gn_override" / built.name))

    return Build


def by_flags(compile_all: Any) -> Any:
    """A compile method that gives each source the flags that it needs, and no others.

    Sources with the same flags are a ninja run of their own, beside the others or after them where
    MAX_JOBS limits the number of compilers.
    """

    def compile(sources: list[str], output_dir: str, extra_postargs: Any, **kw: Any) -> list[str]:
        def run(folder: str, chosen: list[str], flags: list[str]) -> list[str]:
            postargs = {**extra_postargs, "cxx": extra_postargs["cxx"] + flags}
            folder = str(Path(output_dir, folder))
            return compile_all(chosen, output_dir=folder, extra_postargs=postargs, **kw)

        alone = [s for s in sources if s.startswith(WITHOUT_TORCH) and s not in INSTRUCTION_SETS]
        others = [s for s in sources if not s.startswith(WITHOUT_TORCH)]
        runs = [("", others, extra_postargs["torch"]), ("without_torch", alone, [])]
        for source, flags in INSTRUCTION_SETS.items():
            runs += [(Path(source).stem, [source], flags)] if source in sources else []
        workers = 1 if os.environ.get("MAX_JOBS") else len(runs)
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(run, *arguments) for arguments in runs]
            return [obj for job in jobs for obj in job.result()]

    return compile


BUILD_COMMANDS = {
    "bdist",
    "bdist_wheel",
    "build",
    "build_ext",
    "develop",
    "dist_info",
    "editable_wheel",
    "install",
}


def require_ninja() -> None:
    """Puts ninja on PATH: `venv/bin/pip` may run without the rest of venv/bin."""
    if shutil.which("ninja"):
        return
    try:
        import ninja
    except ModuleNotFoundError:
        raise BuildError(
            f"the build needs ninja: run `pip install ninja pyyaml`, then `{INSTALL}`"
        ) from None
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])


def build_arguments() -> dict[str, Any]:
    """What setup() needs to build the extension. Raises BuildError."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise BuildError(
            f"setuptools {setuptools.__version__} is too old: run "
            f"`pip install 'setuptools>=77'`, then `{INSTALL}`"
        )
    try:
        import torch
    except ModuleNotFoundError:
        raise BuildError(
            "torch is not installed where the build runs: run "
            "`pip install torch 'setuptools>=77' ninja pyyaml`, "
            f"then `{INSTALL}` (an isolated build cannot see the torch that you have)"
        ) from None
    check_torch_version(torch.__version__)
    require_ninja()
    config = configure(torch, os.environ)
    if config.toolkit:  # torch.utils.cpp_extension reads it when it is imported
        os.environ["CUDA_HOME"] = str(config.toolkit.home)
    from torch.utils import cpp_extension

    conditions = evaluate_conditions()
    return {
        "ext_modules": [extension(torch, cpp_extension.include_paths(), config, conditions)],
        "cmdclass": {
            "build_ext": build_command(cpp_extension, config, build_info(torch, config, conditions))
        },
    }


def main() -> None:
    arguments: dict[str, Any] = {}
    if BUILD_COMMANDS & set(sys.argv[1:]):  # an sdist needs no torch
        try:
            arguments = build_arguments()
        except BuildError as error:
            sys.exit(f"gn_override: {error}")
    setuptools.setup(options={"bdist_wheel": {"py_limited_api": "cp310"}}, **arguments)


if __name__ == "__main__":
    main()
