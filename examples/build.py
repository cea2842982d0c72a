#!/usr/bin/env python3
"""Builds policies from source to components, and proves that the committed ones match their sources.

    examples/build.py shell-gate auto     build these and put them where they are served from, with their record
    examples/build.py --all --out DIR     build every one to DIR and touch nothing else
    examples/build.py --check             fail when a source changed without a rebuild, or a component was replaced
    examples/build.py --list              name them

Each is built by `forkpoint policy build`, where the recipes are: $FORKPOINT, or target/release/forkpoint. Compilers
come from the machine or are fetched once into a cache (toolchains.py).

A record is a table of SOURCES.toml beside the component:

    language  "rust", "c", "cpp", "javascript", "typescript", "python", "go", "assemblyscript", "zig" or "wat"
    source    the folder, from the root of the repository
    sources   SHA-256, in hex, of the lines "PATH\\0SHA256\\n" of every source file, sorted by path as bytes; paths are
              from the root of the repository, SHA256 is that of the file, in hex; of the contract, that of its lines
              but for comments, blank lines and blanks around them: words about it change no component. Source files are
              those that SHARED names for the language and all in the folder except *.md and what tools leave there (LEFT)
    component SHA-256 of the component, in hex
    wasi      optional: "adapter" where the component is to ask the host for WASI

A manifest, NAME.toml in the folder above the source, is copied to beside the component.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

sys.dont_write_bytecode = True
import toolchains  # noqa: E402  (its bytecode would lie in the tree)

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIT = ROOT / "wit"

# Where components are served from or tested in, each folder with its SOURCES.toml.
RECORDED = ["plugins", "tests/fixtures", "tests/hostile"]

# What a component depends on besides its folder.
SHARED = {
    "rust": ["wit/rust/Cargo.toml", "wit/rust/src/*.rs", "wit/rust/macros/Cargo.toml", "wit/rust/macros/src/*.rs"],
    "c": ["wit/c/*.[ch]"],
    "cpp": ["wit/cpp/*.hpp"],
    "javascript": ["wit/js/*.js"],
    "typescript": ["wit/js/*.js", "wit/js/*.d.ts"],
    "python": ["wit/python/*.py"],
    "go": ["wit/go/go.mod", "wit/go/**/*.go"],
    "assemblyscript": ["wit/assemblyscript/*.ts"],
    "zig": ["wit/zig/*.zig"],
    "wat": ["wit/wat/*.wat"],
}

# Folders that are named otherwise than their language.
NAMED = {"js": "javascript", "ts": "typescript"}

# What tools leave in a policy's folder.
LEFT = {"target", "node_modules", ".venv", "__pycache__"}


class Guest:
    """A component to be built: `name` is its file's, `folder` where it lies, `record` what SOURCES.toml says."""

    def __init__(self, folder: pathlib.Path, name: str, record: dict):
        self.folder, self.name, self.record = folder, name, record
        self.source, self.language = ROOT / record["source"], record["language"]

    @property
    def path(self) -> pathlib.Path:
        return (self.folder or pathlib.Path()) / f"{self.name}.wasm"

    @property
    def manifest(self) -> pathlib.Path:
        """What the policy asks for, where it says so: served from beside the component."""
        return self.source.parent / f"{self.name}.toml"

    def sources(self) -> str:
        """The hash that the record's `sources` holds."""
        found = {path for pattern in ["wit/policy.wit", *SHARED[self.language]] for path in ROOT.glob(pattern)}
        found |= {path for path in self.source.rglob("*") if path.is_file() and path.suffix != ".md"
                  and not LEFT & set(path.relative_to(self.source).parts)}
        if self.language == "rust":
            found |= {self.workspace() / "Cargo.toml", self.workspace() / "Cargo.lock"}
        lines = ((path.relative_to(ROOT).as_posix().encode(), digest(path).encode()) for path in found)
        return hashlib.sha256(b"".join(name + b"\0" + digest + b"\n" for name, digest in sorted(lines))).hexdigest()

    def workspace(self) -> pathlib.Path:
        """The nearest folder above a Rust guest that holds its lock file."""
        return next(folder for folder in self.source.parents if (folder / "Cargo.lock").exists())

    def build(self, out: pathlib.Path) -> None:
        environment = os.environ | toolchains.environment(self.language)
        command = [forkpoint(), "policy", "build", self.source, "--wit", WIT, "--out", out]
        if "wasi" in self.record:
            command.append("--wasi")
        if self.language == "rust":
            environment.setdefault("CARGO_TARGET_DIR", str(self.workspace() / "target"))
            command += ["--", "--locked"]
        elif self.language in ("c", "cpp"):
            command += ["--", "-Werror"]
        run(command, env=environment)


def forkpoint() -> pathlib.Path:
    binary = pathlib.Path(os.environ.get("FORKPOINT") or ROOT / "target/release/forkpoint")
    if not binary.exists():
        raise SystemExit(f"{binary} is not there: run `cargo build --release`, or set FORKPOINT")
    return binary


def run(command: list, **how) -> None:
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    subprocess.run(words, check=True, stdout=sys.stderr, **how)


def digest(path: pathlib.Path) -> str:
    """What the record has of a source file."""
    if path != WIT / "policy.wit":
        return sha256(path)
    lines = (line.strip() for line in path.read_bytes().splitlines())
    return hashlib.sha256(b"".join(line + b"\n" for line in lines if line and not line.startswith(b"//"))).hexdigest()


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def guests() -> list[Guest]:
    """Every component of the tree: those on record, then the examples that no record ships."""
    found = []
    for folder in RECORDED:
        records = ROOT / folder / "SOURCES.toml"
        tables = tomllib.loads(records.read_text()) if records.exists() else {}
        found += [Guest(ROOT / folder, name, record) for name, record in tables.items()]
    shipped = {guest.source for guest in found}
    for source in sorted((ROOT / "examples").glob("*/*/")):
        language = NAMED.get(source.name, source.name)
        if language in SHARED and source not in shipped:
            record = {"language": language, "source": source.relative_to(ROOT).as_posix()}
            found.append(Guest(None, f"{source.parent.name}-{source.name}", record))
    return found


def record(built: list[Guest]) -> None:
    """Writes the hashes of what was just built into the SOURCES.toml of its folder."""
    for folder in {guest.folder for guest in built}:
        path = folder / "SOURCES.toml"
        tables = tomllib.loads(path.read_text())
        for guest in built:
            if guest.folder == folder:
                tables[guest.name] |= {"sources": guest.sources(), "component": sha256(guest.path)}
        comment = "".join(line + "\n" for line in path.read_text().splitlines() if line.startswith("#"))
        body = "\n".join(f"[{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in table.items())
                         for name, table in tables.items())
        path.write_text(comment + ("\n" if comment else "") + body)


def same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether the files hold the same; a source without a manifest says nothing of the other."""
    return not one.exists() or (other.exists() and one.read_bytes() == other.read_bytes())


def check(all_guests: list[Guest]) -> int:
    faults = 0
    for guest in (guest for guest in all_guests if guest.folder):
        name = guest.path.relative_to(ROOT)
        if not guest.path.exists():
            fault = "is not there"
        elif sha256(guest.path) != guest.record.get("component"):
            fault = "is not what SOURCES.toml records"
        elif guest.sources() != guest.record.get("sources"):
            fault = f"was built from other sources: run examples/build.py {guest.name}"
        elif not same(guest.manifest, guest.path.with_suffix(".toml")):
            fault = f"has another manifest than its source: run examples/build.py {guest.name}"
        else:
            continue
        faults += 1
        print(f"{name} {fault}", file=sys.stderr)
    for folder in RECORDED:
        recorded = {guest.name for guest in all_guests if guest.folder == ROOT / folder}
        for path in sorted((ROOT / folder).glob("*.wasm")):
            # Files that are broken on purpose have no source.
            if path.stem not in recorded and folder != "tests/hostile":
                faults += 1
                print(f"{path.relative_to(ROOT)} has no record", file=sys.stderr)
    return faults


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help="what to build")
    arguments.add_argument("--all", action="store_true", help="build every one")
    arguments.add_argument("--out", type=pathlib.Path, help="put components here and write no record")
    arguments.add_argument("--check", action="store_true", help="compare hashes, build nothing")
    arguments.add_argument("--list", action="store_true", help="name what can be built")
    options = arguments.parse_args()
    known = guests()
    if options.list:
        for guest in known:
            print(f"{guest.name:26} {guest.language:15} {guest.source.relative_to(ROOT)}")
        return 0
    if options.check:
        return 1 if check(known) else 0
    unknown = set(options.names) - {guest.name for guest in known}
    if unknown or not (options.names or options.all):
        arguments.error(f"no guest named {', '.join(sorted(unknown))}" if unknown else "name guests, or say --all")
    chosen = [guest for guest in known if options.all or guest.name in options.names]
    if not options.out:
        # What no record ships has no place in the tree.
        unplaced = [guest.name for guest in chosen if not guest.folder]
        if options.names and unplaced:
            arguments.error(f"{', '.join(unplaced)}: served from nowhere, say --out DIR")
        chosen = [guest for guest in chosen if guest.folder]
    else:
        options.out.mkdir(parents=True, exist_ok=True)

    def build(some: list[Guest]) -> None:
        for guest in some:
            path = options.out.resolve() / guest.path.name if options.out else guest.path
            guest.build(path)
            if guest.manifest.exists():
                shutil.copyfile(guest.manifest, path.with_suffix(".toml"))

    # Those in Rust wait for each other at cargo's lock; the others may be built meanwhile.
    rust = [guest for guest in chosen if guest.language == "rust"]
    others = [guest for guest in chosen if guest.language != "rust"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for built in [pool.submit(build, rust), pool.submit(build, others)]:
            built.result()
    if not options.out:
        record(chosen)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except toolchains.Missing as missing:
        sys.exit(f"build.py: {missing}")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"build.py: {failed.cmd[0]} failed with {failed.returncode}")
