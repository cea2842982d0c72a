"""An operator's hour in small: faults that are all accounted for, an end by force, a disk that is full, a plugins folder
that goes. FORKPOINT_HOUR=10 makes it ten times as long."""

import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from server import ROOT, TINY, Server, binary

HOUR = int(os.environ.get("FORKPOINT_HOUR", "1"))
SCRIPTED = ROOT / "tests/fixtures/scripted.wasm"
ADMIN = {"ADMIN": "root"}


def plugins(folder: Path) -> Path:
    there = folder / "plugins"
    there.mkdir(exist_ok=True)
    shutil.copy(SCRIPTED, there / "p.wasm")
    return there


def call(server, script: str, name: str = "p", request_id: str | None = None) -> tuple[int, str, str]:
    """Status, reason and text of one request."""
    body = {"model": name, "messages": [{"role": "user", "content": script}], "max_tokens": 1, "temperature": 0}
    headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = json.load(response)["choices"][0]["message"]["content"]
            return response.status, response.headers["x-forkpoint-reason"], text
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("x-forkpoint-reason", ""), ""


def upload(server, name: str, component: bytes) -> int:
    request = urllib.request.Request(f"{server.url}/v1/policies/{name}", component, method="PUT")
    request.add_header("authorization", "Bearer root")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def records(folder: Path) -> list[dict]:
    files = sorted(folder.glob("journal-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_answer_of_a_policy_that_traps_is_accounted_for(tmp_path):
    state = tmp_path / "state"
    server = Server(tmp_path, plugins=plugins(tmp_path), model=TINY, env={"FORKPOINT_STATE": str(state)})
    count = 1000 * HOUR

    def one(n: int):
        return call(server, "trap" if n % 10 == 0 else "because:fine\nreply:ok", request_id=f"r{n}")[:2]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(count)))
    server.wait_until_nothing_is_held()
    server.stop()
    assert Counter(answers) == {(200, "fine"): count - count // 10, (200, "policy-trap"): count // 10}
    kept = {record["id"]: record for record in records(state / "journal")}
    assert len(kept) == count
    for n, (status, reason) in enumerate(answers):
        record = kept[f"r{n}"]
        assert (record["outcome"]["status"], record["reason"]) == (status, reason)


def test_an_end_by_force_loses_no_counter_and_no_version(tmp_path):
    state = {"FORKPOINT_STATE": str(tmp_path / "state")} | ADMIN
    config = '[server]\nadmin_keys_env = "ADMIN"\n'
    server = Server(tmp_path, plugins=plugins(tmp_path), model=TINY, env=state, config=config)
    assert upload(server, "q", (ROOT / "tests/fixtures/reply-v1.wasm").read_bytes()) == 200
    counted, wrong, done = [], [], threading.Event()

    def count():
        while not done.is_set():
            try:
                status, _, text = call(server, "add:n\necho")
            except (urllib.error.URLError, ConnectionError, OSError):
                return
            if status != 200 or not text.startswith("add "):
                wrong.append((status, text))
                return
            counted.append(int(text.removeprefix("add ")))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(counted) < 200 * HOUR and not wrong:
        done.wait(0.01)
    assert upload(server, "q", (ROOT / "tests/fixtures/reply-v2.wasm").read_bytes()) == 200
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server.log.close()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong

    server = Server(tmp_path, plugins=tmp_path / "plugins", model=TINY, env=state, config=config)
    next_one = int(call(server, "add:n\necho")[2].removeprefix("add "))
    # Four requests may have been counted without an answer.
    assert max(counted) < next_one <= max(counted) + 5
    assert call(server, "hello", "q")[2] == "v2"
    assert all(record["v"] == 1 for record in records(tmp_path / "state/journal")), "no half line"
    server.stop()


def with_section(component: bytes, name: bytes, content: bytes) -> bytes:
    """A component with one more custom section: 0, its length in LEB128, its name with a length, its content."""
    body = bytes([len(name)]) + name + content
    rest, length = len(body), b""
    while rest >= 0x80:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return component + b"\0" + length + bytes([rest]) + body


def test_a_policy_and_the_examples_of_its_probes_are_uploaded_as_one_thing(tmp_path):
    config = '[server]\nadmin_keys_env = "ADMIN"\n'
    server = Server(tmp_path, model=TINY, env=ADMIN, config=config)
    texts = [("drop the table ", "true"), ("sing me a song ", "false")]
    rows = [f'{{ text = "{text * 2}{i}", label = {label} }},\n' for i in range(12) for text, label in texts]
    manifest = f"[probes.drops]\nexamples = [\n{''.join(rows)}]\n"
    good, bad = manifest.encode(), manifest.replace("true", '"maybe"', 1).encode()
    component = SCRIPTED.read_bytes()

    def probe() -> dict:
        return server.get("/v1/policies/q")["probes"]["drops"]

    def answered() -> str:
        deadline = time.monotonic() + 60
        while (status := probe())["state"] != "ready" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (status["state"], status["labels"]) == ("ready", {"yes": 12, "no": 12}), status
        return call(server, "ask:probe:Does it drop?|drops\ndecide\necho", "q")[2]

    section = b"forkpoint:manifest"
    assert upload(server, "q", with_section(component, section, bad)) == 422
    assert upload(server, "q", with_section(component, section, good)) == 200
    assert answered().endswith("by probe")
    # The same beside the component, which the file wins over: nothing is fitted anew.
    assert upload(server, "q/manifest", bad) == 422
    assert upload(server, "q/manifest", good) == 200
    assert probe()["state"] == "ready"
    assert answered().endswith("by probe")
    server.stop()


def test_a_full_disk_is_survived_and_counted(tmp_path):
    journal = tmp_path / "journal"
    config = f'[journal]\ndir = "{journal}"\n'
    # What is compiled is in the cache before the disk is full.
    server = Server(tmp_path, plugins=plugins(tmp_path), model=TINY, config=config)
    assert call(server, "reply:hello")[0] == 200
    server.stop()
    (kept,) = journal.glob("*.jsonl")
    line, most = kept.read_bytes(), 16 << 20
    # Room for a dozen records more.
    kept.write_bytes(line * (most // len(line) - 12))

    def full():
        # Writing beyond this fails, as on a full disk, and does not end the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    server = Server(tmp_path, plugins=tmp_path / "plugins", model=TINY, config=config, before=full)
    for _ in range(40):
        assert call(server, "reply:" + "x" * 10)[0] == 200
    server.wait_until_nothing_is_held()
    lost = server.metric("forkpoint_journal_lost_total")
    assert lost > 20 and lost + server.metric("forkpoint_journal_written_total") == 40
    server.stop()
    assert all(record["v"] == 1 for record in records(journal)), "no half line"


def test_a_store_works_again_once_the_disk_has_room(tmp_path):
    def deaf():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    state = {"FORKPOINT_STATE": str(tmp_path / "state")}
    server = Server(tmp_path, plugins=plugins(tmp_path), model=TINY, env=state, before=deaf)
    assert call(server, "add:n\necho")[2] == "add 1"
    none = (1, resource.RLIM_INFINITY)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, none)
    for _ in range(3):
        status, _, text = call(server, "add:n\nget:n\necho")
        assert status == 200 and "not stored" in text and 'get Some("1")' in text, text
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert call(server, "add:n\necho")[2] == "add 2"
    server.stop()
    server = Server(tmp_path, plugins=tmp_path / "plugins", model=TINY, env=state)
    assert call(server, "add:n\necho")[2] == "add 3"
    server.stop()


def test_only_what_is_signed_is_served_where_it_must_be(tmp_path):
    there, key = plugins(tmp_path), tmp_path / "alice.pem"
    shutil.copy(there / "p.wasm", there / "unsigned.wasm")
    line = subprocess.run([binary(), "policy", "keygen", key], check=True, capture_output=True, text=True).stdout

    def sign():
        subprocess.run([binary(), "policy", "sign", there / "p.wasm", "--key", key], check=True, capture_output=True)

    (there / "p.toml").write_text("[config]\ndeny-at = 0.8\n")
    sign()
    config = f"[plugins]\nrequire_signature = true\n[plugins.signers]\n{line}"
    server = Server(tmp_path, plugins=there, model=TINY, config=config)
    assert server.get("/v1/policies/p")["signed_by"] == "alice"
    assert server.get("/v1/policies/unsigned")["last_error"]["code"] == "signature"
    assert call(server, "config:deny-at\necho")[2] == 'config Some("0.8")'

    def until(condition):
        for _ in range(200):
            if condition(server.get("/v1/policies/p")):
                return
            threading.Event().wait(0.05)
        raise AssertionError(server.get("/v1/policies/p"))

    # A threshold under the old signature counts for nothing; under a new one it holds.
    (there / "p.toml").write_text((there / "p.toml").read_text().replace("0.8", "0.1"))
    until(lambda status: (status["last_error"] or {}).get("code") == "signature")
    assert call(server, "config:deny-at\necho")[2] == 'config Some("0.8")'
    sign()
    until(lambda status: status["last_error"] is None)
    assert call(server, "config:deny-at\necho")[2] == 'config Some("0.1")'
    server.stop()


def test_a_route_to_a_policy_that_is_not_there_ends_the_start(tmp_path):
    there = plugins(tmp_path)
    (there / "broken.wasm").write_bytes(b"no component")
    (tmp_path / "forkpoint.toml").write_text('[routes]\nguarded = ["p", "shell-gaet"]\n')
    command = [binary(), "serve", "--port", "0", "--plugins", there, "--model", TINY, "--state", "memory"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "routes.guarded: there is no shell-gaet.wasm in" in done.stderr and "there are broken, p;" in done.stderr

    # One that is there and broken is no reason not to start, nor is one that may come later.
    routes = '[plugins]\nallow_missing = true\n[routes]\nguarded = ["p", "late"]\n'
    server = Server(tmp_path, plugins=there, model=TINY, config=routes)
    assert "late NOT THERE" in server.log_text()
    assert call(server, "next", "guarded")[:2] == (200, "policy-unavailable")
    server.stop()
    server = Server(tmp_path, plugins=there, model=TINY, config='[routes]\nguarded = ["broken", "p"]\n')
    assert call(server, "because:x\nreply:y", "guarded")[1] == "policy-unavailable"
    server.stop()


def test_a_plugins_folder_that_goes_takes_nothing_away(tmp_path):
    config = '[server]\nadmin_keys_env = "ADMIN"\n'
    there = plugins(tmp_path)
    server = Server(tmp_path, plugins=there, model=TINY, config=config, env=ADMIN)
    shutil.rmtree(there)
    # Nothing can be written where a file has taken the folder's place.
    there.write_text("")
    threading.Event().wait(3)
    assert call(server, "reply:still here")[2] == "still here"
    assert upload(server, "q", SCRIPTED.read_bytes()) == 500
    there.unlink()
    there.mkdir()
    assert upload(server, "q", SCRIPTED.read_bytes()) == 200
    assert call(server, "reply:new", "q")[2] == "new"
    server.stop()
