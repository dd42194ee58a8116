"""What is built and packed: a build that fails says what it lacks and leaves nothing that would fail later."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
]
FOLDERS = ["benchmarks", "docs", "examples", "schedules", "tests", "zfunc"]
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc", ".*")
COMPILER = os.environ.get("CC", "gcc")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, as they come out of a clone."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*FILES, "setup.py"):
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=BUILT)
    return tree


def setup(tree: Path, *command: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "setup.py", "--quiet", *map(str, command)]
    return subprocess.run(run, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)


def failing(tree: Path, out: Path, **environment: str) -> str:
    """What a build of the kernel says that fails. It leaves nothing that would fail at first use."""
    done = setup(tree, "build_ext", "--build-lib", out, "--build-temp", out, **environment)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert not list(out.rglob("*.so"))
    return done.stderr


def wrapped(folder: Path, line: str) -> str:
    """A compiler: a shell script of one line."""
    script = folder / "cc"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def without(pattern: str, more: str = "") -> str:
    """The real compiler, called without the arguments of a pattern."""
    keep = f'for a; do shift; case "$a" in {pattern}) ;; *) set -- "$@" "$a" ;; esac; done'
    return f'{keep}; exec {COMPILER} {more} "$@"'


def without_openmp_header(folder: Path) -> str:
    """The real compiler, with all its headers but omp.h."""
    own = Path(
        subprocess.check_output([*COMPILER.split(), "-print-file-name=include"], text=True).strip()
    ).resolve()
    (folder / "own").mkdir()
    for header in own.iterdir():
        if header.name != "omp.h":
            (folder / "own" / header.name).symlink_to(header)
    ask = [*COMPILER.split(), "-E", "-v", "-xc", "/dev/null"]
    output = subprocess.run(ask, capture_output=True, text=True).stderr
    searched = re.search(r"<\.\.\.> [^\n]*\n(.*)End of search", output, re.DOTALL)
    folders = [Path(line) for line in searched[1].split()]
    system = [folder / "own", *(f for f in folders if f.resolve() != own)]
    return f'exec {COMPILER} -nostdinc {" ".join(f"-isystem {f}" for f in system)} "$@"'


# ---- a compile that fails --------------------------------------------------------------------------

LACKING = {
    "fails": ("gcc 9 or newer", "false does not compile", lambda _: "/bin/false"),
    "absent": ("gcc 9 or newer", "/nonexistent/cc is not there", lambda _: "/nonexistent/cc"),
    "Python.h": (
        "Python.h, the headers of this Python",
        "#include <Python.h>",
        lambda folder: wrapped(folder, without("-I/*")),
    ),
    "omp.h": (
        "omp.h, the header of OpenMP",
        "#include <omp.h>",
        lambda folder: wrapped(folder, without_openmp_header(folder)),
    ),
    "another OpenMP": (
        "a compiler for GNU's OpenMP runtime",
        "does not call GOMP_parallel",
        lambda folder: wrapped(folder, without("-fopenmp|-O3", "-O0")),
    ),
}


@pytest.mark.parametrize(
    "lacks",  # a compiler that is absent is the next test's, by its name
    [pytest.param(x, marks=[pytest.mark.slow] * (x in ("absent", "another OpenMP"))) for x in LACKING],
)
def test_a_failing_build_says_what_is_missing(tree: Path, tmp_path: Path, lacks: str) -> None:
    need, evidence, compiler = LACKING[lacks]
    errors = failing(tree, tmp_path, CC=compiler(tmp_path))
    message = errors[errors.index("zfunc: its host kernel was not built") :]
    assert f"It needs {need}" in message
    assert evidence in message
    assert "apt install" in message


def test_no_compiler_on_the_path(tree: Path, tmp_path: Path) -> None:
    errors = failing(tree, tmp_path, CC="gcc", PATH=str(tmp_path))
    assert "It needs gcc 9 or newer" in errors
    assert "(gcc is not there)" in errors


def test_a_failure_of_another_kind_points_at_the_compilers_words(tree: Path, tmp_path: Path) -> None:
    line = f'case "$*" in *syntax*) exec {COMPILER} "$@" ;; esac; echo words >&2; exit 1'
    errors = failing(tree, tmp_path, CC=wrapped(tmp_path, line))
    assert re.search(r"words.*It needs Linux, gcc 9 or newer.*first error above", errors, re.DOTALL)


def test_without_a_kernel_there_is_a_wheel_for_any_machine(tree: Path, tmp_path: Path) -> None:
    done = setup(tree, "bdist_wheel", "--dist-dir", tmp_path, ZFUNC_KERNEL="0", CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert [x.name.split("-")[2:] for x in tmp_path.iterdir()] == [["py3", "none", "any.whl"]]


@pytest.mark.parametrize("version", ["none", "3.0.12"])
def test_without_a_cython_that_is_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    if version == "none":
        monkeypatch.setitem(sys.modules, "Cython.Build", None)
    else:
        monkeypatch.setattr("Cython.__version__", version)
    with pytest.raises(SystemExit, match=rf"Cython 3\.1 or newer, got {version}: pip install"):
        runpy.run_path(str(ROOT / "setup.py"))


# ---- a compile that does not -----------------------------------------------------------------------


IMPORTED = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import zfunc, zfunc.schedules
print(zfunc.__file__, zfunc.schedules.__file__)
"""


@pytest.mark.slow
def test_an_editable_build_is_the_one_imported(tree: Path, tmp_path: Path) -> None:
    stale = tree / "zfunc" / f"_cpu_adam{sysconfig.get_config_var('EXT_SUFFIX')}"
    stale.write_bytes(b"an older build, which Python would import first")
    compiler = wrapped(tmp_path, without("-O3", "-O0"))
    done = setup(tree, "editable_wheel", "--dist-dir", tmp_path, CC=compiler)
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "zfunc").glob("_cpu_adam*.so")
    linked = subprocess.check_output(["readelf", "--dynamic", built], text=True)
    built.unlink()
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert built.name == (stale.name if free_threaded else "_cpu_adam.abi3.so")
    assert re.findall(r"NEEDED.*\[lib(?!c\.|pthread\.)", linked) == []  # OpenMP is torch's
    assert "RUNPATH" not in linked
    assert "RPATH" not in linked

    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    (tmp_path / "zfunc").mkdir()  # as the folder that contains a clone has one
    needed = Path(attrs.__file__).parents[1]
    command = [sys.executable, "-S", "-c", IMPORTED, str(tmp_path / "site"), str(needed)]
    imported = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert imported.split() == [str(tree / "zfunc" / "__init__.py"), str(tree / "schedules" / "__init__.py")]


@pytest.mark.slow
def test_a_cross_compiler_builds_the_wheel_for_aarch64(tree: Path, tmp_path: Path) -> None:
    """As `make wheel-aarch64` does. Another architecture's OpenMP is torch's there, too."""
    if not shutil.which(cross := "aarch64-linux-gnu-gcc"):
        pytest.skip(f"{cross} is not installed: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    environment = {"CC": f"{cross} -O0", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    done = setup(tree, "bdist_wheel", "--dist-dir", tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*-linux_aarch64.whl")
    shutil.unpack_archive(wheel, tmp_path, format="zip")
    read = ["readelf", "--file-header", "--dynamic", tmp_path / "zfunc" / "_cpu_adam.abi3.so"]
    found = subprocess.check_output(read, text=True)
    assert "AArch64" in found
    assert re.findall(r"NEEDED.*\[(.*)\]", found) == ["libc.so.6"]


# ---- what is packed --------------------------------------------------------------------------------


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_is_the_source_tree(tree: Path, tmp_path: Path) -> None:
    sources = {f"{name}/{path}" for name in FOLDERS for path in listing(tree / name)}
    expected = {*FILES, "setup.py"} | {path for path in sources if "__pycache__" not in path}
    (tree / "zfunc" / "_cpu_adam.abi3.so").touch()
    (tree / "tests" / "test_adam.pyc").touch()
    try:
        done = setup(tree, "sdist", "--dist-dir", tmp_path)
    finally:
        (tree / "zfunc" / "_cpu_adam.abi3.so").unlink()
        (tree / "tests" / "test_adam.pyc").unlink()
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("zfunc_offload-*.tar.gz")
    # Python warns without a filter, and knows none before 3.11.4.
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, **safe)
    packed = listing(tmp_path / archive.name.removesuffix(".tar.gz"))
    metadata = {path for path in packed if path.startswith("zfunc_offload.egg-info/")} | {
        "PKG-INFO",
        "setup.cfg",
    }
    assert packed - metadata == expected


def test_the_wheel_has_the_package_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    done = setup(tree, "build_py", "--build-lib", tmp_path)
    assert done.returncode == 0, done.stderr
    package, schedules = ROOT / "zfunc", (ROOT / "schedules").glob("*.py")
    own = [*package.rglob("*.py"), *package.rglob("*.toml"), *(package / "viz" / "web").iterdir()]
    own += (package / "optim" / "csrc").glob("*.h")  # with which rules of one's own are compiled
    expected = {str(path.relative_to(ROOT)) for path in (*own, package / "py.typed")}
    assert listing(tmp_path) == expected | {f"zfunc/{path.relative_to(ROOT)}" for path in schedules}


def test_the_wheel_serves_every_python_the_package_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = re.search(r"^OLDEST_PYTHON = \((\d+), (\d+)\)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert project["requires-python"] == ">={}.{}".format(*oldest.groups())


def test_training_waits_for_no_tools_of_tests_and_linters(tmp_path: Path) -> None:
    def installed(target: str) -> list[str]:
        command = ["make", "--dry-run", f"VENV={tmp_path}", target]
        lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
        # A make within make repeats what a dry run does not do.
        return [*dict.fromkeys(x.split("constraints.txt ")[1] for x in lines if "pip install" in x)]

    alone = installed("train")
    assert [x.split()[0] for x in alone] == ["torch", "--no-build-isolation"]
    assert not any("[" in x for x in alone)
    assert installed("test") == [*alone, '"zfunc-offload[test,lint]"']


def test_nothing_asks_for_the_other_zfunc_of_pypi() -> None:
    """An extra is installed from a clone, by `.[hf]`: the name zfunc is another project's there."""
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")] + [*ROOT.iterdir()]
    asked = re.compile(r"pip install (?:-\S+ )*['\"]?zfunc(?![-_/.\w])|\bzfunc\[[a-z]+\]")
    texts = {p: p.read_text() for p in paths if p.suffix in {".md", ".py", ".toml"} or p.name == "Makefile"}
    assert {path: found for path, text in texts.items() if (found := asked.findall(text))} == {}
