"""A collector of traces and an upstream, as far as tests need them."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span:
    """A span as it arrived."""

    def __init__(self, span, resource: dict):
        self.name, self.kind, self.status = span.name, span.kind, span.status.code
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.state = span.trace_state
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.said = {pair.key: value(pair.value) for pair in span.attributes}
        self.resource = resource
        self.raw = str(span)

    def __repr__(self):
        return f"{self.name} {self.said}"


def value(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in any_value.array_value.values]
    return getattr(any_value, kind)


class Loopback:
    """An HTTP server in a thread; `answer` takes a request's path, headers and body and says status, type and body."""

    def __init__(self, port: int = 0):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, media, answer = outer.answer(self.path, self.headers, body)
                self.send_response(status)
                self.send_header("content-type", media)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Collector(Loopback):
    """Takes OTLP over HTTP, or answers with another status, or late."""

    def __init__(self, status: int = 200, late: threading.Event | None = None):
        self.spans: list[Span] = []
        self.headers = []
        self.status, self.late = status, late
        super().__init__()

    def answer(self, path, headers, body):
        self.headers.append(dict(headers))
        if self.late:
            self.late.wait(60)
        assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf"), (path, headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {pair.key: value(pair.value) for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Span(span, about) for span in scope.spans]
        return self.status, "application/x-protobuf", ExportTraceServiceResponse().SerializeToString()

    def of_request(self, request_id: str, seconds: float = 15) -> list[Span]:
        """All spans of a request's trace, its own first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [span for span in self.spans if span.said.get("forkpoint.request.id") == request_id]
            if found:
                (root,) = found
                return [root, *(span for span in list(self.spans) if span.trace == root.trace and span is not root)]
            time.sleep(0.05)
        raise AssertionError(f"no span of the request {request_id} after {seconds} s: {self.spans}")


class Upstream(Loopback):
    """Answers every chat, and remembers the headers that it was sent."""

    def __init__(self):
        self.headers = []
        super().__init__()

    def answer(self, path, headers, body):
        self.headers.append({name.lower(): text for name, text in headers.items()})
        message = {"role": "assistant", "content": "far away"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}
        return 200, "application/json", json.dumps(reply).encode()
