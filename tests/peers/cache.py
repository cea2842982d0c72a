"""Where the peers lie on this machine, and what their scripts share: saying, running, checking."""

import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("FORKPOINT_PEERS") or "~/.cache/forkpoint/peers").expanduser().resolve()
TOOLS = CACHE / "tools"

# What builds and installs the peers: a virtual environment of its own, so that the machine needs Python and gcc only.
TOOL_PINS = ["cmake==4.4.5", "ninja==1.13.2", "uv==0.13.9"]


class PeerError(Exception):
    """A step that failed: what was tried, what was expected, and what came."""


def say(text: str) -> None:
    """One line for people, at once, also into a pipe."""
    print(text, flush=True)


def call(command: list, *, capture: bool = False) -> str:
    """Runs a command that must succeed; prints it first. With `capture`, returns its standard output."""
    words = [str(word) for word in command]
    say("$ " + shlex.join(words))
    stdout = subprocess.PIPE if capture else None
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stdout, text=True)
    except OSError as error:
        raise PeerError(f"cannot run {words[0]}: {error}") from error
    if done.returncode != 0:
        raise PeerError(f"exit status 0 expected, {done.returncode} came from: {shlex.join(words)}")
    return done.stdout or ""


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Refuses a file that is not the one that was pinned."""
    came = sha256(path)
    if came != expected:
        raise PeerError(f"{path}: SHA-256 {expected} expected, {came} came")


def is_made(folder: Path, recipe: dict) -> bool:
    """Whether `folder` was finished by this very recipe."""
    stamp = folder / "made.json"
    return stamp.is_file() and json.loads(stamp.read_text()) == recipe


def mark_made(folder: Path, recipe: dict) -> None:
    """Says that `folder` is whole: the last thing that a recipe does."""
    (folder / "made.json").write_text(json.dumps(recipe, indent=1) + "\n")


def processor_flags() -> list[str]:
    """What this processor can do, as the kernel lists it: a native build is good for these alone."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return sorted(value.split())
    raise PeerError("/proc/cpuinfo names no flags: the peers are built for x86-64 Linux")


def tool(name: str) -> Path:
    """A program of the tools' environment, which is made on first use."""
    recipe = {"pins": TOOL_PINS, "python": sys.version.split()[0]}
    if not is_made(TOOLS, recipe):
        say(f"tools: {', '.join(TOOL_PINS)} into {TOOLS}")
        call([sys.executable, "-m", "venv", "--clear", TOOLS])
        call([TOOLS / "bin/pip", "install", "--quiet", *TOOL_PINS])
        mark_made(TOOLS, recipe)
    return TOOLS / "bin" / name


def forkpoint() -> Path:
    """The server's binary: $FORKPOINT, or that of this checkout."""
    binary = Path(os.environ.get("FORKPOINT") or ROOT / "target/release/forkpoint")
    if not binary.is_file():
        raise PeerError(f"{binary} is not there: build it with `cargo build --release`, or name one in FORKPOINT")
    return binary.resolve()


@functools.cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, the very file that Forkpoint serves; fetched on first use."""
    return Path(call([forkpoint(), "pull", "smollm2-135m"], capture=True).strip())
