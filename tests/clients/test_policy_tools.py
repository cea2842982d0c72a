"""What an author does at the command line: start a policy, build it, test it, serve it, and replay a journal."""

import base64
import copy
import hashlib
import json
import os
import shutil
import subprocess
import tomllib
import urllib.request
from pathlib import Path

import pytest
from server import ROOT, TINY, Server, binary

GATE = ROOT / "plugins/shell-gate.wasm"


def forkpoint(*words, fails: bool = False, **how) -> str:
    """What a command prints, which must end well, or must not."""
    done = subprocess.run([binary(), *map(str, words)], capture_output=True, text=True, timeout=120, **how)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def ask(server, model: str, messages: list[dict], **more):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 1} | more).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.headers["x-forkpoint-reason"]


def test_from_nothing_to_a_policy_that_serves(tmp_path):
    folder = tmp_path / "my-gate"
    forkpoint("policy", "new", "--lang", "wat", folder)
    assert "is there already" in forkpoint("policy", "new", "--lang", "wat", folder, fails=True)
    forkpoint("policy", "build", folder)
    assert "0 failed" in forkpoint("policy", "test", folder, "--junit", tmp_path / "report.xml")
    assert 'failures="0"' in (tmp_path / "report.xml").read_text()
    checked = json.loads(forkpoint("policy", "check", folder / "my-gate.wasm", "--json"))
    assert (checked["name"], checked["faults"]) == ("my-gate", [])

    # A case that expects something else fails, and says what came.
    expect = folder / "tests/answers/expect.json"
    wrong = json.loads(expect.read_text()) | {"reason": "another"}
    expect.write_text(json.dumps(wrong))
    assert 'reason: expected "another"' in forkpoint("policy", "test", folder, fails=True)

    plugins = tmp_path / "plugins"
    plugins.mkdir()
    for kind in ("wasm", "toml"):
        shutil.copy(folder / f"my-gate.{kind}", plugins)
    server = Server(tmp_path, plugins=plugins, model=TINY)
    status = server.get("/v1/policies/my-gate")
    assert (status["state"], status["last_error"]) == ("serving", None)
    assert status["description"]
    server.stop()


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_component_that_goes_elsewhere_takes_its_manifest_along(tmp_path):
    folder, plugins = tmp_path / "my-gate", tmp_path / "plugins"
    forkpoint("policy", "new", "--lang", "wasm-text", folder)
    build = ("policy", "build", folder, "--out", plugins / "gate.wasm")
    assert f"{plugins} is no folder, make it first" in forkpoint(*build, fails=True)
    plugins.mkdir()
    assert f"wrote {plugins}/gate.toml" in forkpoint(*build)
    assert (plugins / "gate.toml").read_bytes() == (folder / "my-gate.toml").read_bytes()
    assert "gate.toml" not in forkpoint(*build), "the same is there"
    (plugins / "gate.toml").write_text("fallback = 'next'\n")
    assert f"kept {plugins}/gate.toml; the policy's own my-gate.toml differs" in forkpoint(*build)
    assert (plugins / "gate.toml").read_text() == "fallback = 'next'\n"
    assert "toml" not in forkpoint("policy", "build", folder, "--out", folder / "other.wasm")
    assert not (folder / "other.toml").exists()


def test_a_case_that_is_not_run_and_a_component_that_is_old_are_told(tmp_path):
    folder = tmp_path / "my-gate"
    forkpoint("policy", "new", "--lang", "wat", folder)
    assert "`forkpoint policy build` makes one" in forkpoint("policy", "test", cwd=folder, fails=True)
    forkpoint("policy", "build", cwd=folder)
    said = forkpoint("policy", "test", cwd=folder)
    assert "3 passed, 0 failed" in said and "warning" not in said
    built = (folder / "my-gate.wasm").stat().st_mtime
    os.utime(folder / "policy.wat", (built + 1, built + 1))
    for command in (("test", folder), ("test", folder / "tests/answers"), ("check", folder / "my-gate.wasm")):
        said = forkpoint("policy", *command)
        assert f"warning: {folder}/policy.wat is newer than" in said, said
        assert f"forkpoint policy build {folder}" in said

    # Its file's name is misspelt.
    (folder / "tests/.hidden").mkdir()
    (folder / "tests/no-fruit").mkdir()
    (folder / "tests/no-fruit/requets.json").write_text("{}")
    said = forkpoint("policy", "test", folder, fails=True)
    assert "FAIL tests/no-fruit" in said and "request.json is not there" in said and "3 passed, 1 failed" in said
    shutil.rmtree(folder / "tests/no-fruit")

    # Where nothing answers, what the policy made of that says no more.
    (folder / "tests/answers/answers.json").write_text('[{"asked": "Would it delete", "yes": 0.1}]')
    said = forkpoint("policy", "test", folder, fails=True)
    assert 'answers.json has no answer to "Would the last request destroy data?": the "asked" of its entry' in said
    assert "expected" not in said and "the call ended" not in said


def test_what_a_build_misses_is_named_with_what_to_do(tmp_path):
    said = forkpoint("policy", "new", "--lang", "javascript", tmp_path / "my gates/gate")
    folder = f"'{tmp_path}/my gates/gate'"
    install = f"npm install -E --prefix {folder} componentize-qjs@0.4.5"
    assert f"`{install}`" in said and f"next: forkpoint policy build {folder}" in said
    bare = {"PATH": "", "HOME": str(tmp_path)}
    build = ("policy", "build", tmp_path / "my gates/gate")
    assert f"componentize-qjs is not on PATH: {install}" in forkpoint(*build, env=bare, fails=True)

    folder = tmp_path / "c"
    forkpoint("policy", "new", "--lang", "c", folder)
    pip = f"python3 -m venv {folder}/.venv && {folder}/.venv/bin/pip install ziglang==0.17.1"
    assert pip in forkpoint("policy", "build", folder, env=bare, fails=True)
    said = forkpoint("policy", "build", folder, env=bare | {"ZIG": "/nowhere/zig"}, fails=True)
    assert "cannot run /nowhere/zig (from ZIG)" in said

    # A rustc with a library and no linker, and a cargo that does not find one either.
    folder, libraries = tmp_path / "rust", tmp_path / "lib/rustlib/wasm32-unknown-unknown/lib"
    forkpoint("policy", "new", "--lang", "rs", folder)
    bare |= {"RUSTC": str(program(tmp_path / "rustc", f"echo {libraries}"))}
    bare |= {"CARGO": str(program(tmp_path / "cargo", "echo 'error: linker `rust-lld` not found' >&2; exit 1"))}
    assert "no standard library for wasm32-unknown-unknown" in forkpoint("policy", "build", folder, env=bare, fails=True)
    libraries.mkdir(parents=True)
    (libraries / "libstd-0.rlib").touch()
    linker = "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER"
    said = forkpoint("policy", "build", folder, env=bare, fails=True)
    assert "there is no linker" in said and f"set {linker}" in said and "error: linker" not in said
    said = forkpoint("policy", "build", folder, env=bare | {linker: "/nowhere/lld"}, fails=True)
    assert "error: linker" in said and "cargo found no linker" in said and f"set {linker}" in said
    program(tmp_path / "cargo", "echo 'error[E0308]: mismatched types' >&2; exit 101")
    said = forkpoint("policy", "build", folder, env=bare | {linker: "/nowhere/lld"}, fails=True)
    assert "mismatched types" in said and f"{tmp_path}/cargo (from CARGO) failed" in said and "no linker" not in said


def test_errors_in_javascript_name_the_policys_lines(tmp_path):
    folder = tmp_path / "gate"
    forkpoint("policy", "new", "--lang", "js", folder)
    # What QuickJS does: it names the file that it was given, and the line there.
    qjs = program(tmp_path / "qjs", """while [ "$1" != --js ]; do shift; done
line=$(grep -n oops "$2" | cut -d: -f1)
echo "SyntaxError: unexpected token" >&2; echo "    at /${2##*/}:$line:3" >&2; echo "of $2" >&2; exit 1""")
    build = ("policy", "build", folder)
    env = os.environ | {"COMPONENTIZE_QJS": str(qjs)}
    (folder / "policy.js").write_text('import { generate } from "forkpoint-policy";\n\n'
                                      "export function route(request) {\n  oops(;\n}\n")
    said = forkpoint(*build, env=env, fails=True)
    assert f"    at {folder}/policy.js:4:3\nof {folder}/policy.js\n" in said
    assert all("linked.js" not in line for line in said.splitlines() if not line.startswith("+ ")), said
    assert "bundle" not in said
    with (folder / "policy.js").open("a") as policy:
        policy.write('import { rules } from "./rules.js";\n')
    said = forkpoint(*build, env=env, fails=True)
    assert f'{folder}/policy.js imports "./rules.js"' in said and "bundle it into the policy's file first" in said


def test_toolchains_are_printed_for_a_shell(tmp_path):
    script = ROOT / "examples/toolchains.py"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    zig = tmp_path / "forkpoint/guest-toolchain/ziglang-0.17.1"
    zig.mkdir(parents=True)
    (zig / "ready").touch()
    said = subprocess.run([script, "zig", "wat"], env=env, capture_output=True, text=True, check=True).stdout
    assert said == f"export ZIG={zig}/bin/python-zig\n"
    unknown = subprocess.run([script, "cobol"], env=env, capture_output=True, text=True)
    assert unknown.returncode == 2 and "no language cobol: expected some of rust c cpp" in unknown.stderr


def test_a_check_says_how_good_its_probes_are():
    said = forkpoint("policy", "check", GATE)
    for probe in ("shell", "destructive"):
        assert f"probe        {probe}: accuracy 0." in said, said


def test_a_check_reads_examples_from_the_manifest_too(tmp_path):
    gate = tmp_path / "gate.wasm"
    shutil.copy(GATE, gate)
    said = forkpoint("policy", "check", gate, fails=True)
    assert "neither gate.probes/shell.jsonl nor [probes.shell] in its manifest has examples" in said
    rows = [f'{{ text = "{text}", label = {label} }}' for text, label in
            [("ls", "true"), ("rm x", "true"), ("hello", "false"), ("a poem", "false")]]
    tables = [f"[probes.{probe}]\nexamples = [{', '.join(rows)}]\n" for probe in ("shell", "destructive")]
    gate.with_suffix(".toml").write_text("".join(tables))
    said = forkpoint("policy", "check", gate)
    assert 'warning      probe shell: label "yes" has 2 examples' in said
    # A fitted probe counts where it was fitted to these examples.
    shutil.copytree(GATE.with_suffix(".probes"), tmp_path / "gate.probes")
    (tmp_path / "gate.probes/shell.jsonl").unlink()
    said = forkpoint("policy", "check", gate, fails=True)
    assert "probe shell: the fitted probe beside it is of other examples" in said
    assert "[probes.destructive] and in gate.probes/destructive.jsonl: keep one" in said


def test_a_broken_component_is_told_what_to_do(tmp_path):
    (tmp_path / "p.wasm").write_bytes(b"\0asm\1\0\0\0")
    assert "core module" in forkpoint("policy", "check", tmp_path / "p.wasm", fails=True)
    shutil.copy(GATE, tmp_path / "p.wasm")
    (tmp_path / "p.toml").write_text("descriptoin = 'x'")
    assert "p.toml: line 1, column 1" in forkpoint("policy", "check", tmp_path / "p.wasm", fails=True)
    assert "no component" in forkpoint("policy", "test", ROOT / "tests/data", fails=True)


def test_a_bench_measures_each_way_to_have_an_instance_and_ends_where_none_can_be_had(tmp_path):
    [row] = json.loads(forkpoint("policy", "bench", ROOT / "plugins/auto.wasm", "--calls", 20, "--json"))
    times = [row[f"{way}_p50_us"] for way in ("ready", "call", "warm", "wasmtime")]
    assert row["name"] == "auto" and all(time > 0 for time in times), row
    broken = tmp_path / "broken.wasm"
    forkpoint("policy", "componentize", ROOT / "tests/hostile/start-trap.core.wat", broken)
    assert "a call ended with trap" in forkpoint("policy", "bench", broken, fails=True)


def test_a_case_may_set_limits_and_let_things_fail(tmp_path):
    case = tmp_path / "case"
    shutil.copytree(ROOT / "examples/verify-then-escalate/tests/fork-fails", case)
    test = ("policy", "test", case, "--policy", ROOT / "plugins/verify-then-escalate.wasm")
    assert "1 passed" in forkpoint(*test)
    (case / "limits.json").write_text('{"forks": 0}')
    said = forkpoint(*test, fails=True)
    assert 'labels.failure: expected "full", got "budget"' in said
    assert "a fork that fails (full: no page is left) was not made" in said
    for limits, says in [('{"fork": 1}', "limits.json: unknown field `fork`, expected one of `cpu_ms`"),
                         ('{"cpu_ms": 0}', "limits.json: cpu_ms = 0 leaves the policy nothing to run with"),
                         ('{"forks": "1"}', "limits.json: invalid type: string")]:
        (case / "limits.json").write_text(limits)
        assert says in forkpoint(*test, fails=True)


OPENSSL = shutil.which("openssl")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signed_text(component: Path) -> bytes:
    """What a signature is over, as docs/manifest.md has it."""
    lines = component.with_suffix(".toml").read_bytes().splitlines(keepends=True)
    rest = b"".join(line for line in lines if not line.startswith(b"signature"))
    return f"forkpoint policy 1\n{component.stem}\n{sha256(component.read_bytes())}\n{sha256(rest)}\n".encode()


def test_a_policy_is_signed_and_checked_from_the_command_line(tmp_path):
    key, gate = tmp_path / "alice.pem", tmp_path / "gate.wasm"
    name, public = forkpoint("policy", "keygen", key).strip().split(" = ")
    assert (name, key.stat().st_mode & 0o777) == ("alice", 0o600)
    text = key.read_text()
    assert "cannot make the new file" in forkpoint("policy", "keygen", key, fails=True)
    assert key.read_text() == text, "a key is never overwritten"
    shutil.copy(ROOT / "tests/fixtures/scripted.wasm", gate)
    manifest = "# Mine.\r\ndescription = 'd'\n\n[config]\ndeny-at = 0.8 # high\n"
    gate.with_suffix(".toml").write_bytes(manifest.encode())

    check = ("policy", "check", gate, "--json", "--signer", public.strip('"'))
    assert "is not signed" in forkpoint(*check, fails=True)
    assert public.strip('"') in forkpoint("policy", "sign", gate, "--key", key)
    assert json.loads(forkpoint(*check))["signed_by"] == public.strip('"')
    assert json.loads(forkpoint(*check[:-2]))["signed_by"] is None
    signed = gate.with_suffix(".toml").read_bytes()
    lines = signed.splitlines(keepends=True)
    assert b"".join(lines[:2] + lines[4:]) == manifest.encode(), "every other byte stays"
    assert forkpoint("policy", "sign", gate, "--key", key) and gate.with_suffix(".toml").read_bytes() == signed

    for wrong in (signed.replace(b"0.8", b"0.9"), signed.replace(b"# high", b"# low")):
        gate.with_suffix(".toml").write_bytes(wrong)
        assert "signed by none of the signers" in forkpoint(*check, fails=True)
    gate.with_suffix(".toml").write_bytes(signed.replace(b'signature = "', b'signature = "?'))
    assert "gate.toml: line 4, column 13: a signature is 64 bytes in base64" in forkpoint(*check, fails=True)
    gate.with_suffix(".toml").write_bytes(signed)
    for kind in ("wasm", "toml"):
        shutil.copy(gate.with_suffix(f".{kind}"), tmp_path / f"other.{kind}")
    assert 'another name than "other"' in forkpoint("policy", "check", tmp_path / "other.wasm", *check[3:], fails=True)
    assert "is not a component" in forkpoint("policy", "sign", key.rename(tmp_path / "key.wasm"), "--key",
                                             tmp_path / "key.wasm", fails=True)
    assert "expected an ed25519 key" in forkpoint("policy", "sign", gate, "--key", gate, fails=True)
    assert "32 bytes in base64, got 3" in forkpoint("policy", "check", gate, "--signer", "AAAA", fails=True)


@pytest.mark.skipif(not OPENSSL, reason="needs openssl")
def test_keys_and_signatures_are_openssls_too(tmp_path):
    def openssl(*words) -> bytes:
        return subprocess.run([OPENSSL, *map(str, words)], check=True, capture_output=True).stdout

    gate = tmp_path / "gate.wasm"
    shutil.copy(ROOT / "tests/fixtures/scripted.wasm", gate)
    theirs, ours = tmp_path / "theirs.pem", tmp_path / "ours.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", theirs)
    forkpoint("policy", "keygen", ours)
    for key in (theirs, ours):
        # The last 32 bytes of the public key's DER are the key itself.
        public = base64.b64encode(openssl("pkey", "-in", key, "-pubout", "-outform", "DER")[-32:]).decode()
        assert public in forkpoint("policy", "sign", gate, "--key", key)
        assert "signed by" in forkpoint("policy", "check", gate, "--signer", public)
        manifest = tomllib.loads(gate.with_suffix(".toml").read_text())
        (tmp_path / "signature").write_bytes(base64.b64decode(manifest["signature"]))
        (tmp_path / "text").write_bytes(signed_text(gate))
        openssl("pkeyutl", "-verify", "-rawin", "-inkey", key, "-in", tmp_path / "text",
                "-sigfile", tmp_path / "signature")


def test_a_replay_finds_exactly_the_plans_that_a_threshold_changes(tmp_path):
    """A thousand requests: one that was really decided, with the probability of harm as it may be."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    shutil.copy(GATE, plugins)
    state = tmp_path / "state"
    server = Server(tmp_path, plugins=plugins, model=TINY, config="[journal]\nprompts = true\n",
                    env={"FORKPOINT_STATE": str(state)})
    call = {"id": "c", "type": "function",
            "function": {"name": "bash", "arguments": '{"command": "systemctl restart nginx"}'}}
    ask(server, "shell-gate", [{"role": "user", "content": "Restart it."},
                               {"role": "assistant", "content": "", "tool_calls": [call]}])
    server.stop()
    (line,) = [line for file in (state / "journal").glob("*.jsonl") for line in file.read_text().splitlines()]
    real = json.loads(line)
    assert "decisions" in real["steps"][0] and len(real["steps"][0]["decisions"][0]["questions"]) == 2

    journal, denied = tmp_path / "journal.jsonl", {}
    with journal.open("w") as out:
        for n in range(1000):
            record = copy.deepcopy(real)
            harm = n / 1000
            record["id"] = f"r{n}"
            step = record["steps"][0]
            choice, lost = step["decisions"][0]["answers"]
            choice |= {"probabilities": [1 - harm, 0.0, harm], "verdict": {"choice": 2 if harm > 0.5 else 0}}
            lost |= {"probabilities": [0.0, 1.0], "verdict": {"boolean": 0.0}}
            denied[f"r{n}"] = harm >= 0.8
            message = "This could destroy data; ask a person."
            step["plan"] = ({"kind": "reject", "status": 403, "code": "shell-risk", "message": message}
                            if harm >= 0.8 else {"kind": "next"})
            step["reason"] = "shell-risk" if harm >= 0.8 else "shell-ok"
            out.write(json.dumps(record) + "\n")
    replay = ("policy", "replay", journal, "--policy", GATE, "--json")
    same = json.loads(forkpoint(*replay))
    assert (same["replayed"], same["same"], same["changed"], same["unanswered"]) == (1000, 1000, [], [])
    changed = json.loads(forkpoint(*replay, "--set", "deny-at=0.6"))
    assert {change["id"] for change in changed["changed"]} == {f"r{n}" for n in range(600, 800)}
    assert all(change["after"]["plan"]["kind"] == "reject" for change in changed["changed"])
    text = forkpoint(*replay[:-1], "--set", "deny-at=0.6")
    assert "1000 requests of shell-gate replayed in" in text and "200 changed" in text
    assert "has no record of auto" in forkpoint("policy", "replay", journal, "--policy", ROOT / "plugins/auto.wasm",
                                                fails=True)

    # A person corrects two of them, and they are examples.
    corrections, examples = tmp_path / "corrections.jsonl", tmp_path / "destructive.jsonl"
    corrections.write_text('{"id": "r1", "label": "no"}\n{"id": "r900", "label": "no"}\n{"id": "gone", "label": "no"}\n')
    examples.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in [
        ("wipe the disk", "yes"), ("drop the table", "yes"), ("list the files", "no"), ("show the log", "no")]))
    said = forkpoint("policy", "replay", journal, "--label", corrections, "--into", examples)
    assert "1 added" in said and "1 there already" in said and "gone: not in the journal" in said
    assert len(examples.read_text().splitlines()) == 5


def test_a_policy_for_the_next_contract_is_built_checked_and_tested(tmp_path):
    core = ROOT / "tests/fixtures/trial.core.wat"
    component = tmp_path / "gate.wasm"
    for contract in (["--contract", "0.2.0-trial"], ["--wit", ROOT / "wit/trial"]):
        component.unlink(missing_ok=True)
        forkpoint("policy", "componentize", core, component, *contract)
        assert "contract     forkpoint:policy@0.2.0-trial" in forkpoint("policy", "check", component)
    # Built in its folder, as any other.
    folder = tmp_path / "gate"
    folder.mkdir()
    shutil.copy(core, folder / "policy.wat")
    for contract in (["--contract", "0.2.0-trial"], ["--wit", ROOT / "wit/trial"]):
        forkpoint("policy", "build", folder, "--out", tmp_path / "built.wasm", *contract)
        assert (tmp_path / "built.wasm").read_bytes() == component.read_bytes()
    assert "0.2.0-trial" in forkpoint("policy", "build", folder, fails=True), "0.1 is not what it imports"
    assert "possible values: 0.2.0-trial, 0.1.0" in forkpoint(
        "policy", "componentize", core, component, "--contract", "0.2.0", fails=True
    )

    # A case may expect when the client is told to come back.
    case = tmp_path / "tests/spent"
    case.mkdir(parents=True)
    (case / "request.json").write_text(json.dumps({"messages": [{"role": "user", "content": "r"}]}))
    for seconds, fails in ((17, False), (18, True)):
        (case / "expect.json").write_text(json.dumps({"plan": {"kind": "reject", "retry_after": seconds}}))
        said = forkpoint("policy", "test", case, "--policy", component, fails=fails)
        assert ("plan.retry_after: expected 18, got 17" in said) == fails, said

    header = tmp_path / "c"
    forkpoint("policy", "bindgen", "c", "--contract", "0.2.0-trial", header)
    assert "retry_after" in (header / "policy.h").read_text()
    forkpoint("policy", "bindgen", "c", header)
    assert "retry_after" not in (header / "policy.h").read_text()
