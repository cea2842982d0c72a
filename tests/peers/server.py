"""A peer's server: started on a free loopback port, waited for, watched while idle, and stopped whatever happens."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from cache import PeerError, say

STOP_SECONDS = 30
# How long a server is watched after an answer, and in what steps.
WATCH_SECONDS = 3.0
STEP_SECONDS = 0.25
# Above this share of one core, it would slow whoever is measured beside it.
BUSY_SHARE = 0.1


class Server:
    """A context manager: inside it the server answers. `{port}` in the command becomes the port."""

    def __init__(self, name: str, command: list, *, log: Path, probe: tuple[str, dict], start_seconds: int, env=None):
        self.name, self.log, self.probe, self.start_seconds = name, log, probe, start_seconds
        self.command = [str(word) for word in command]
        self.url = ""
        self.env = env or {}
        self.process = None

    def __enter__(self):
        # Not before now: of two servers, the first must listen before the second looks for a port.
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [word.replace("{port}", str(port)) for word in self.command]
        say(f"{self.name}: {shlex.join([f'{k}={v}' for k, v in self.env.items()] + self.command)}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                # A session of its own: Ctrl-C reaches it through stop() alone, and its children can be ended with it.
                self.process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise PeerError(f"{self.name} does not start: {error}") from error
        try:
            self._wait_until_healthy()
            self._ask()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def _wait_until_healthy(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < self.start_seconds:
            if self.process.poll() is not None:
                raise PeerError(f"{self.name} ended with {self.process.returncode} before it served:\n{self._tail()}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    say(f"{self.name}: serves {self.url} after {time.monotonic() - began:.0f} s")
                    return
            except OSError:
                time.sleep(0.2)
        raise PeerError(f"{self.name} did not serve within {self.start_seconds} s:\n{self._tail()}")

    def _ask(self) -> None:
        """One request that must be answered, so that what starts lazily has started."""
        path, body = self.probe
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.start_seconds) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            raise PeerError(f"{self.name}: 200 expected, {error.code} came: {error.read().decode()}") from error

    def idle(self) -> dict:
        """How it behaves when nobody asks it: for how long it stays busy after an answer, and what it uses then.

        `settles_s` is in seconds, to a quarter of one; `share` is of one core, from then on.
        """
        self._ask()
        shares = []
        while len(shares) * STEP_SECONDS < WATCH_SECONDS:
            before, began = cpu_seconds(self.process.pid), time.monotonic()
            time.sleep(STEP_SECONDS)
            shares.append((cpu_seconds(self.process.pid) - before) / (time.monotonic() - began))
        settled = max((step + 1 for step, share in enumerate(shares) if share > BUSY_SHARE), default=0)
        rest = shares[settled:] or shares[-1:]
        idle = {"settles_s": settled * STEP_SECONDS, "share": round(sum(rest) / len(rest), 4)}
        if settled == len(shares):
            say(f"{self.name}: still uses {idle['share']:.0%} of a core {WATCH_SECONDS:.0f} s after an answer")
        else:
            say(f"{self.name}: idle {idle['settles_s']} s after an answer, then uses {idle['share']:.1%} of a core")
        return idle

    def stop(self) -> None:
        """Asks it to end, then ends it and every child that it left."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{self.name}: still there after {STOP_SECONDS} s, so it is killed")
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
            self.process = None

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(root: int) -> float:
    """Processor time that a process and its living descendants have used."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        # After the name: state, parent, …; fields 14 and 15 of proc(5) are time in user and kernel mode.
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    total = 0
    for pid in ticks:
        ancestor = pid
        while ancestor not in (root, 0) and ancestor in parents:
            ancestor = parents[ancestor]
        total += ticks[pid] if ancestor == root else 0
    return total / os.sysconf("SC_CLK_TCK")
