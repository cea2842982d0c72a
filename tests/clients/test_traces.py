"""OpenTelemetry spans, as a collector gets them."""

import http.client
import itertools
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from collector import Collector, Upstream
from server import ROOT, TINY, Server, free_port

SCRIPTED = ROOT / "tests/fixtures/scripted.wasm"
CHAT = "POST /v1/chat/completions"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3
ERROR = 2

CONFIG = """
[traces]
endpoint = "{collector}"
{more}

[journal]
dir = "{journal}"

[routes]
watched = ["watch", "p"]

[policies.watch]
shadow = true

[upstreams.far]
url = "{upstream}/v1"
model = "large"
"""

ids = (f"r{number}" for number in itertools.count())


def start(folder: Path, collector: str, upstream: str = "http://127.0.0.1:9", more: str = "", **options) -> Server:
    there = folder / "plugins"
    there.mkdir()
    for name in ("p", "watch"):
        shutil.copy(SCRIPTED, there / f"{name}.wasm")
    config = CONFIG.format(collector=collector, upstream=upstream, more=more, journal=folder / "journal")
    return Server(folder, config=config, plugins=there, model=TINY, **options)


class Traced:
    """A server, its collector and its upstream."""

    def __init__(self, folder: Path):
        self.collector, self.upstream = Collector(), Upstream()
        self.server = start(folder, self.collector.url, self.upstream.url)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    traced = Traced(tmp_path_factory.mktemp("traced"))
    yield traced
    traced.server.stop()
    traced.collector.close()
    traced.upstream.close()


def post(server, path: str, body: dict, headers: dict | None = None) -> tuple[str, int, dict]:
    """The request's id, the status and the answer."""
    request_id = next(ids)
    headers = {"content-type": "application/json", "x-request-id": request_id} | (headers or {})
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return request_id, response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return request_id, error.code, json.load(error)


def chat(server, text: str, model: str = "p", headers: dict | None = None, **options) -> tuple[str, int, dict]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    return post(server, "/v1/chat/completions", body | options, headers)


def below(spans, parent) -> list[str]:
    return [span.name for span in spans if span.parent == parent.id]


def one(spans, name: str):
    (found,) = [span for span in spans if span.name == name]
    return found


def parent(flags: str = "01") -> dict:
    return {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}


# What a request becomes


def test_a_policy_that_asks_and_generates_is_a_tree(traced):
    script = "decide:boolean:Is an aardvark meant?\nbecause:asked\ngenerate"
    request_id, status, reply = chat(traced.server, script)
    assert status == 200
    spans = traced.collector.of_request(request_id)
    root = spans[0]
    assert (root.name, root.kind, root.parent) == (CHAT, SERVER, "")
    assert sorted(below(spans, root)) == ["generate", "open session", "policy p"]
    policy, decide = one(spans, "policy p"), one(spans, "decide")
    assert below(spans, policy) == ["decide"] and len(spans) == 5
    for span in spans:
        assert root.start <= span.start <= span.end <= root.end, f"{span} is not within {root}"
    assert policy.start <= decide.start < decide.end <= policy.end
    opened = one(spans, "open session")
    assert policy.start <= opened.start and opened.end <= decide.start + 5_000_000, "the question is what opens it"
    assert policy.end <= one(spans, "generate").start + 5_000_000

    usage = reply["usage"]
    read = {"gen_ai.usage.input_tokens": usage["prompt_tokens"]}
    written = {"gen_ai.usage.output_tokens": usage["completion_tokens"]}
    assert root.said.items() >= (read | written).items()
    assert root.said["http.request.method"] == "POST" and root.said["http.response.status_code"] == 200
    assert root.said["http.route"] == root.said["url.path"] == "/v1/chat/completions"
    assert (root.said["gen_ai.request.model"], root.said["gen_ai.response.model"]) == ("p", reply["model"])
    assert (root.said["forkpoint.policy.name"], root.said["forkpoint.reason"]) == ("p", "asked")
    assert one(spans, "generate").said.items() >= (read | written).items()
    assert one(spans, "generate").said["gen_ai.response.finish_reasons"] == [reply["choices"][0]["finish_reason"]]
    tokens, reused, computed = (opened.said[f"forkpoint.session.{what}"] for what in ("tokens", "reused", "computed"))
    assert tokens == reused + computed > 0
    assert policy.said["forkpoint.plan"] == "generate" and len(policy.said["forkpoint.policy.version"]) == 12
    assert policy.said["forkpoint.policy.questions"] == 1 and policy.said["forkpoint.policy.host_us"] > 0
    assert (decide.said["forkpoint.decide.questions"], decide.said["forkpoint.decide.rungs"]) == (1, ["labels"])
    assert {span.status for span in spans} == {0}
    assert root.resource["service.name"] == "forkpoint" and root.resource["service.version"]

    words = ["aardvark", reply["choices"][0]["message"]["content"] or "aardvark"]
    assert not [span for span in spans for word in words if word in span.raw], "a span repeats the conversation"

    records = (traced.server.folder / "journal").glob("*.jsonl")
    records = [json.loads(line) for file in records for line in file.read_text().splitlines()]
    (record,) = [record for record in records if record["id"] == request_id]
    assert record["trace_id"] == root.trace
    (line,) = [line for line in traced.server.log_text().splitlines() if f'id="{request_id}"' in line]
    assert f'trace_id="{root.trace}"' in line


def test_a_stream_is_generated_until_its_last_token(traced):
    body = {"model": "qwen3-tiny", "stream": True, "max_tokens": 8, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "hello"}]
    request_id = next(ids)
    headers = {"content-type": "application/json", "x-request-id": request_id}
    request = urllib.request.Request(traced.server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    spans = traced.collector.of_request(request_id)
    assert sorted(below(spans, spans[0])) == ["generate", "open session"]
    assert one(spans, "generate").said["gen_ai.usage.output_tokens"] == 8


def test_a_stream_that_the_client_leaves_says_so(traced):
    body = {"model": "p", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "generate"}]
    request_id = next(ids)
    connection = http.client.HTTPConnection("127.0.0.1", traced.server.port, timeout=60)
    headers = {"content-type": "application/json", "x-request-id": request_id}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200 and response.read(64)
    response.close()
    connection.close()
    spans = traced.collector.of_request(request_id)
    root, generate = spans[0], one(spans, "generate")
    assert sorted(below(spans, root)) == ["generate", "open session", "policy p"]
    assert root.said["forkpoint.client_left"] and generate.said["forkpoint.client_left"]
    assert root.said["http.response.status_code"] == 200 and root.status == 0
    assert "gen_ai.usage.output_tokens" not in generate.said, "how much was written is not known"


def test_a_fault_is_an_error_of_the_policy_and_not_of_the_server(traced):
    request_id, status, _ = chat(traced.server, "trap")
    assert status == 200
    spans = traced.collector.of_request(request_id)
    policy = one(spans, "policy p")
    assert (policy.status, policy.said["error.type"]) == (ERROR, "trap")
    assert policy.said["forkpoint.reason"] == spans[0].said["forkpoint.reason"] == "policy-trap"
    assert "forkpoint.plan" not in policy.said and spans[0].status == 0
    request_id, status, _ = chat(traced.server, "error:an aardvark")
    spans = traced.collector.of_request(request_id)
    assert one(spans, "policy p").said["error.type"] == "error"
    assert "aardvark" not in "".join(span.raw for span in spans), "what a policy says may quote the conversation"


def test_a_refusal_is_no_error_of_the_server(traced):
    request_id, status, _ = chat(traced.server, "reject:451:law:an aardvark")
    spans = traced.collector.of_request(request_id)
    assert below(spans, spans[0]) == ["policy p"], "nothing needed the session"
    assert (status, spans[0].said["http.response.status_code"], spans[0].status) == (451, 451, 0)
    assert spans[0].said["error.type"] == "law" and "aardvark" not in "".join(span.raw for span in spans)


def test_a_session_that_cannot_be_opened_is_an_error_of_its_own_span(traced):
    too_long = "word " * 9000
    for ends, named, wanted in (("generate", None, 400), ("forward:far", "forward far", 200)):
        messages = [{"role": "system", "content": too_long}, {"role": "user", "content": f"decide:boolean:?\n{ends}"}]
        request_id, status, _ = chat(traced.server, "", messages=messages)
        assert status == wanted
        spans = traced.collector.of_request(request_id)
        assert sorted(below(spans, spans[0])) == sorted(filter(None, [named, "open session", "policy p"]))
        opened = one(spans, "open session")
        assert (opened.status, opened.said["error.type"]) == (ERROR, "context_length_exceeded")
        assert "forkpoint.session.tokens" not in opened.said
        assert one(spans, "decide").said["error.type"] == "full"
        assert spans[0].status == 0 and one(spans, "policy p").status == 0


def test_a_policy_in_shadow_is_marked(traced):
    request_id, _, _ = chat(traced.server, "decide:boolean:Really?\nreply:yes", "watched")
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        spans = traced.collector.of_request(request_id)
        if any(span.name == "policy watch" for span in spans):
            break
        time.sleep(0.05)
    shadow, open_one = one(spans, "policy watch"), one(spans, "policy p")
    assert shadow.parent == spans[0].id and shadow.said["forkpoint.policy.shadow"] is True
    assert "forkpoint.policy.shadow" not in open_one.said
    assert below(spans, shadow) == ["decide"] and shadow.start >= open_one.end


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_questions_of_a_client(traced, path):
    if path == "/v1/decisions":
        question = {"type": "predicate", "instructions": "Is an aardvark meant?"}
        body = {"model": "qwen3-tiny", "input": "An aardvark.", "questions": [question]}
    else:
        question = {"type": "noul", "instructions": "Is an aardvark meant?"}
        body = {"state": "An aardvark.", "questions": {"q": question}}
    request_id, status, answer = post(traced.server, path, body)
    assert status == 200, answer
    spans = traced.collector.of_request(request_id)
    assert spans[0].name == f"POST {path}" and sorted(below(spans, spans[0])) == ["decide", "open session"]
    assert one(spans, "decide").said["forkpoint.decide.rungs"] == ["labels"]
    assert spans[0].said["gen_ai.usage.input_tokens"] > 0
    assert "aardvark" not in "".join(span.raw for span in spans)


def test_a_mistake_of_the_client_and_what_is_asked_every_few_seconds(traced):
    before = len(traced.collector.spans)
    for path in ("/health", "/metrics"):
        traced.server.get(path)
    request_id, status, _ = post(traced.server, "/v1/chat/completions", {"messages": 3})
    spans = traced.collector.of_request(request_id)
    assert (status, spans[0].status, spans[0].said["error.type"]) == (400, 0, "invalid_value")
    assert len(spans) == 1
    routes = {span.said.get("http.route") for span in traced.collector.spans[before:]}
    assert not routes & {"/health", "/metrics"}


# From the client, to the upstream


def test_a_forward_carries_the_trace_to_the_upstream(traced):
    headers = parent() | {"tracestate": "a=1,b=2"}
    request_id, status, _ = chat(traced.server, "forward:far", headers=headers)
    assert status == 200
    spans = traced.collector.of_request(request_id)
    root, forward = spans[0], one(spans, "forward far")
    assert (root.trace, root.parent, root.state) == (TRACE, CALLER, "a=1,b=2")
    assert (forward.kind, forward.parent) == (CLIENT, root.id)
    sent = traced.upstream.headers[-1]
    assert sent["traceparent"] == f"00-{TRACE}-{forward.id}-01" and sent["tracestate"] == "a=1,b=2"
    assert sent["x-request-id"] == request_id
    address, port = forward.said["server.address"], forward.said["server.port"]
    assert traced.upstream.url == f"http://{address}:{port}"
    assert (forward.said["http.response.status_code"], forward.said["gen_ai.request.model"]) == (200, "large")
    assert "forkpoint.client_left" not in root.said, "the client has read it all"


def test_who_does_not_sample_makes_no_span_and_says_so(traced):
    before = len(traced.collector.spans)
    request_id, status, _ = chat(traced.server, "forward:far", headers=parent("00"))
    assert status == 200
    version, trace, _, flags = traced.upstream.headers[-1]["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "00")
    traced.collector.of_request(chat(traced.server, "reply:x")[0])
    seen = [span.said.get("forkpoint.request.id") for span in traced.collector.spans[before:]]
    assert request_id not in seen
    (line,) = [line for line in traced.server.log_text().splitlines() if f'id="{request_id}"' in line]
    assert "trace_id" not in line


@pytest.mark.parametrize("broken", ["", "00-1-2-01", f"00-{TRACE.upper()}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01"])
def test_a_parent_that_is_none_is_passed_over(traced, broken):
    request_id, _, _ = chat(traced.server, "reply:x", headers={"traceparent": broken, "tracestate": "a=1"})
    root = traced.collector.of_request(request_id)[0]
    assert root.trace != TRACE and (root.parent, root.state) == ("", "")


def test_only_those_that_are_asked_for_where_the_share_is_nothing(tmp_path):
    with Collector() as collector:
        server = start(tmp_path, collector.url, more="sample = 0\nservice_name = 'edge'")
        for _ in range(5):
            assert chat(server, "reply:x")[1] == 200
        request_id, _, _ = chat(server, "reply:x", headers=parent())
        assert collector.of_request(request_id)[0].resource["service.name"] == "edge"
        server.stop()
        assert {span.trace for span in collector.spans} == {TRACE}


def test_without_a_collector_the_clients_headers_go_on_as_they_came(tmp_path):
    with Upstream() as upstream:
        (tmp_path / "plugins").mkdir()
        shutil.copy(SCRIPTED, tmp_path / "plugins/p.wasm")
        config = f'[upstreams.far]\nurl = "{upstream.url}/v1"\nmodel = "large"\n'
        server = Server(tmp_path, config=config, plugins=tmp_path / "plugins", model=TINY)
        sent = {"traceparent": f"01-{TRACE}-{CALLER}-03-more", "tracestate": "a=1, b = 2"}
        assert chat(server, "forward:far", headers=sent)[1] == 200
        assert upstream.headers[-1].items() >= sent.items()
        assert chat(server, "forward:far")[1] == 200
        assert "traceparent" not in upstream.headers[-1]
        assert "forkpoint_traces" not in server.get("/metrics") and "trace_id" not in server.log_text()
        server.stop()


# The collector


def wait_for_lost(server, at_least: int) -> None:
    deadline = time.monotonic() + 20
    while server.metric("forkpoint_traces_lost_total") < at_least and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("forkpoint_traces_lost_total") >= at_least


def stop_within(server, seconds: float) -> None:
    begun = time.monotonic()
    server.stop()
    assert time.monotonic() - begun < seconds


def warnings(server) -> int:
    return sum("spans are lost" in line for line in server.log_text().splitlines())


def test_a_collector_that_is_down_or_refuses_costs_its_spans_and_nothing_else(tmp_path):
    with Collector(status=500) as refusing:
        for name, url in (("down", f"http://127.0.0.1:{free_port()}"), ("refusing", refusing.url)):
            folder = tmp_path / name
            folder.mkdir()
            server = start(folder, url)
            # Two batches at least: the second begins once the first is lost.
            for lost in (2, 4):
                assert chat(server, "reply:x")[1] == 200
                wait_for_lost(server, lost)
            assert server.metric("forkpoint_traces_sent_total") == 0
            assert warnings(server) == 1, "one line, not one a batch"
            assert chat(server, "reply:x")[1] == 200
            stop_within(server, 8)


def test_a_collector_that_does_not_answer_delays_neither_requests_nor_the_stop(tmp_path):
    late = threading.Event()
    with Collector(late=late) as collector:
        server = start(tmp_path, collector.url)
        for _ in range(3):
            begun = time.monotonic()
            assert chat(server, "reply:x")[1] == 200
            assert time.monotonic() - begun < 2
            time.sleep(1)
        assert collector.headers, "the collector was called and is still thinking"
        stop_within(server, 8)
        assert "before the collector took them" in server.log_text()
        late.set()


def test_what_waits_is_sent_at_the_stop(tmp_path):
    with Collector() as collector:
        server = start(tmp_path, collector.url)
        begun = time.monotonic()
        request_id, _, _ = chat(server, "reply:x")
        server.process.terminate()
        assert server.process.wait(30) == 0
        server.log.close()
        assert collector.of_request(request_id, 0.1) and time.monotonic() - begun < 8


def test_the_environment_counts_where_the_file_says_nothing(tmp_path):
    with Collector() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=a%20b",
            "OTEL_SERVICE_NAME": "from-outside",
        }
        server = Server(tmp_path, model=TINY, env=env)
        request_id, _, _ = chat(server, "hello", "qwen3-tiny")
        assert collector.of_request(request_id)[0].resource["service.name"] == "from-outside"
        assert collector.headers[-1]["x-team"] == "a b"
        server.stop()


@pytest.mark.parametrize(
    ("config", "env", "told"),
    [
        ("endpoint = 'collector:4318'", {}, "traces.endpoint: must start with http"),
        ("sample = 2", {}, "a share is from 0 to 1, got 2"),
        ("smaple = 0.5", {}, "unknown field `smaple`"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "nowhere"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: "),
    ],
)
def test_what_cannot_be_used_is_told_at_the_start(tmp_path, config, env, told):
    with pytest.raises(AssertionError, match=r"the server ended with 1") as ended:
        Server(tmp_path, config=f"[traces]\n{config}\n", model=TINY, env=env)
    assert told in str(ended.value)
