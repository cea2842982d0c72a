//! The server over HTTP, as clients meet it: what good requests get, on every route.

use std::time::Duration;

use crate::server::{Answer, MODEL, Subject, chat_body};
use forkpoint::config::Bytes;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_and_its_stream_say_the_same() {
    let server = Subject::start().await;
    let whole = server.chat(MODEL, "Hello").await.ok();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!(MODEL)));
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(whole["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 8);
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(
        number(&usage["total_tokens"]),
        number(&usage["prompt_tokens"]) + number(&usage["completion_tokens"])
    );
    let ours = &usage["x_forkpoint"];
    assert_eq!(number(&ours["reused"]) + number(&ours["computed"]), number(&usage["prompt_tokens"]));

    let mut body = chat_body(MODEL, "Hello");
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let stream = server.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(stream.streamed_text(), whole["choices"][0]["message"]["content"]);
    let events = stream.events();
    let (last, parts) = events.split_last().unwrap();
    assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(parts.iter().all(|part| part["id"] == last["id"] && part["usage"].is_null()));
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["prompt_tokens"], usage["prompt_tokens"]);
    // Warm by now: all but what does not fill a page of 16 is found.
    assert!(
        number(&last["usage"]["prompt_tokens_details"]["cached_tokens"]) + 16
            >= number(&usage["prompt_tokens"]) - 1
    );

    body["stream_options"] = Value::Null;
    let plain = server.ask("/v1/chat/completions", body).await;
    assert!(plain.events().iter().all(|event| event.get("usage").is_none()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_come_in_either_form() {
    let server = Subject::start().await;
    let mut body = chat_body(MODEL, "Hello");
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(3);
    let whole = server.ask("/v1/chat/completions", body.clone()).await.ok();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(tokens.len(), 8);
    for token in &tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]), "greedy");
        assert!(token["logprob"].as_f64().unwrap() < 0.0);
    }
    body["stream"] = json!(true);
    let events = server.ask("/v1/chat/completions", body).await.events();
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, tokens);

    let body = json!({"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0, "logprobs": 2});
    let told = &server.ask("/v1/completions", body).await.ok()["choices"][0]["logprobs"];
    for array in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(told[array].as_array().unwrap().len(), 4, "{array}");
    }
    assert_eq!(told["text_offset"][0], 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_continue_a_text() {
    let server = Subject::start().await;
    let mut body = json!({"model": MODEL, "prompt": "Once upon", "temperature": 0});
    let whole = server.ask("/v1/completions", body.clone()).await.ok();
    assert_eq!(
        (&whole["object"], &whole["usage"]["completion_tokens"]),
        (&json!("text_completion"), &json!(16))
    );
    body["stream"] = json!(true);
    let events = server.ask("/v1/completions", body).await.events();
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn systemone_answers_warm_as_cold_and_counts_alike() {
    let server = Subject::start().await;
    let body = json!({
        "model": "jev-latest",
        "state": "The invoice for March was charged twice. ".repeat(4),
        "questions": {
            "is it": {"type": "noul", "instructions": "Does the customer ask for a refund?"},
            "팀": {"type": "choice", "criteria": {"billing": "invoices", "sales": null}},
            "s": {"type": "score", "criteria": ["low", "mid", "high"]},
        },
        "seed": 7,
    });
    let cold = server.ask("/v1/systemone", body.clone()).await;
    assert!(!cold.header("x-typesafe-request-id").is_empty());
    let (cold, warm) = (cold.ok(), server.ask("/v1/systemone", body).await.ok());
    assert_eq!(cold["answers"], warm["answers"]);
    assert_eq!(cold["usage"]["input_tokens"], warm["usage"]["input_tokens"]);
    let cached = |body: &Value| body["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&warm) > cached(&cold));
    assert_eq!(warm["model"], MODEL);
    let score = &warm["answers"]["s"];
    let expected = 0.0
        + score["probabilities"]["1"].as_f64().unwrap()
        + 2.0 * score["probabilities"]["2"].as_f64().unwrap();
    assert_eq!(score["score"].as_f64().unwrap(), expected);
    let sum: f64 = warm["answers"]["팀"]["probabilities"]
        .as_object()
        .unwrap()
        .values()
        .map(|p| p.as_f64().unwrap())
        .sum();
    assert!((sum - 1.0).abs() < 1e-9, "{sum}");

    let short = json!({"prompt": "x", "schema": {"type": "choice", "options": ["a", "b"]}});
    assert_eq!(server.ask("/v1/systemone", short).await.ok()["answers"]["answer"]["type"], "choice");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_answer_as_systemone_does() {
    let server = Subject::start().await;
    let decisions = json!({
        "input": "It rains.",
        "questions": [{"type": "predicate", "instructions": "Is it wet?"}],
    });
    let systemone =
        json!({"state": "It rains.", "questions": {"q": {"type": "noul", "instructions": "Is it wet?"}}});
    let (decisions, systemone) = (
        server.ask("/v1/decisions", decisions).await.ok(),
        server.ask("/v1/systemone", systemone).await.ok(),
    );
    assert_eq!(decisions["answers"][0]["probability"], systemone["answers"]["q"]["noul"]);
    assert_eq!(decisions["usage"]["total_tokens"], systemone["usage"]["input_tokens"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_catalog_tells_what_is_served() {
    let server = Subject::configured(|config| config.model.aliases = vec!["small".into()]).await;
    let models = server.get("/v1/models").await.ok();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(models["models"][0]["name"], MODEL);
    assert_eq!(models["models"][0]["release_date"].as_str().unwrap().len(), 10);
    assert_eq!(server.get("/v1/models/small").await.ok()["id"], MODEL);
    assert_eq!(server.chat("small", "x").await.ok()["model"], MODEL);
    assert_eq!(server.get("/v1/policies").await.ok()["data"], json!([]));
    let health = server.get("/health").await.ok();
    assert_eq!((&health["status"], &health["model"]), (&json!("ok"), &json!(MODEL)));
    assert!(server.metric("forkpoint_http_requests_total", "route=\"/health\"").await >= 1.0);
    assert!(server.metric("forkpoint_engine_generated_tokens_total", "").await >= 1.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids_are_echoed() {
    let server = Subject::start().await;
    let answer = Answer::of(
        server
            .post("/v1/chat/completions", &chat_body(MODEL, "x"))
            .header("x-request-id", "mine-7")
            .send()
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(answer.header("x-request-id"), "mine-7");
    assert_eq!(answer.ok()["id"], "chatcmpl-mine-7");
    assert_eq!(server.get("/nowhere").await.header("x-request-id").len(), 32);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_gives_its_pages_back() {
    let server = Subject::start().await;
    let mut body = chat_body(MODEL, "Tell me everything.");
    body["max_tokens"] = json!(100_000);
    body["stream"] = json!(true);
    for path_is_streamed in [true, false] {
        body["stream"] = json!(path_is_streamed);
        let request = server.post("/v1/chat/completions", &body).send();
        if path_is_streamed {
            let mut events = request.await.unwrap().bytes_stream();
            assert!(events.next().await.unwrap().is_ok());
        } else {
            // The answer takes longer than the client's patience.
            assert!(tokio::time::timeout(Duration::from_millis(20), request).await.is_err());
        }
        server.until_nothing_is_held().await;
    }
    assert_eq!(server.metric("forkpoint_http_disconnected_total", "").await, 2.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_its_time_and_no_more() {
    let server = Subject::configured(|config| config.server.request_timeout_ms = 60).await;
    let mut body = chat_body(MODEL, "Tell me everything.");
    body["max_tokens"] = json!(100_000);
    let late = server.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(late.error().0, 504);
    assert_eq!(late.error().1, "request_timeout");
    body["stream"] = json!(true);
    let late = server.ask("/v1/chat/completions", body).await.events();
    assert_eq!(late.last().unwrap()["error"]["code"], "request_timeout");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_asked_for_in_each_dialect() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "sk-one\n").unwrap();
    let server = Subject::configured(|config| config.server.api_keys_file = Some(file)).await;
    let with = |path: &str, key: &str| {
        let body = json!({"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}},
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
        server.post(path, &body).header("authorization", format!("Bearer {key}")).send()
    };
    for path in ["/v1/chat/completions", "/v1/systemone"] {
        assert_eq!(with(path, "sk-one").await.unwrap().status(), 200);
        let wrong = Answer::of(with(path, "sk-two").await.unwrap()).await;
        assert_eq!(wrong.error().0, 401);
        assert_eq!(wrong.error().1, "invalid_api_key");
        assert_eq!(wrong.header("www-authenticate"), "Bearer");
        if path == "/v1/systemone" {
            assert_eq!(wrong.json()["detail"]["error_type"], "authentication_error");
        }
    }
    assert_eq!(server.get("/v1/models").await.status, 401);
    assert_eq!(server.get("/health").await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_at_once_are_told_when_to_come_back() {
    let server = Subject::configured(|config| config.server.max_in_flight = 1).await;
    let mut body = chat_body(MODEL, "Tell me everything.");
    body["max_tokens"] = json!(100_000);
    body["stream"] = json!(true);
    let mut first = server.post("/v1/chat/completions", &body).send().await.unwrap().bytes_stream();
    assert!(first.next().await.unwrap().is_ok());
    for path in ["/v1/chat/completions", "/v1/systemone"] {
        let busy = server.ask(path, json!({})).await;
        assert_eq!(busy.error().0, 429, "{path}");
        assert_eq!((busy.header("retry-after"), busy.header("retry-after-ms")), ("1", "1000"));
    }
    // Reading what is served is always possible.
    assert_eq!(server.get("/v1/models").await.status, 200);
    drop(first);
    server.until_nothing_is_held().await;
    assert_eq!(server.chat(MODEL, "x").await.status, 200);
    server.stop().await;
}

/// A Zstandard frame (RFC 8878) of raw blocks, which needs no compressor.
fn zstd_stored(bytes: &[u8]) -> Vec<u8> {
    zstd_frame(bytes.chunks(1000).map(|chunk| (0, chunk.len(), chunk.to_vec())).collect())
}

/// A frame of blocks, each 128 KiB of one byte.
fn zstd_bomb(blocks: usize) -> Vec<u8> {
    zstd_frame(vec![(1, 128 << 10, vec![b' ']); blocks])
}

/// Blocks are a type (0 raw, 1 repeated), a size and their content.
fn zstd_frame(blocks: Vec<(u32, usize, Vec<u8>)>) -> Vec<u8> {
    // The magic number, no size and no checksum, a window of 128 KiB.
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0x00, 0x38];
    let count = blocks.len();
    for (index, (kind, size, content)) in blocks.into_iter().enumerate() {
        let last = u32::from(index + 1 == count);
        frame.extend_from_slice(&((size as u32) << 3 | kind << 1 | last).to_le_bytes()[..3]);
        frame.extend_from_slice(&content);
    }
    frame
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_may_be_compressed_and_are_bounded_after_it() {
    let server = Subject::configured(|config| config.server.max_body_bytes = Bytes(1 << 20)).await;
    let body = json!({"state": "x".repeat(3000), "questions": {"q": {"type": "noul", "instructions": "?"}}});
    let send = |encoding: &str, bytes: Vec<u8>| {
        server.raw("/v1/systemone", bytes).header("content-encoding", encoding).send()
    };
    assert_eq!(send("zstd", zstd_stored(body.to_string().as_bytes())).await.unwrap().status(), 200);
    let cases = [
        ("identity", vec![b' '; 16 << 20], 413, "larger than 1048576 bytes"),
        ("zstd", zstd_bomb(8_000), 413, "larger than 1048576 bytes"),
        ("zstd", b"not zstd at all".to_vec(), 422, "could not be read or decompressed"),
        ("zstd", zstd_stored(b"{"), 422, "not valid JSON"),
        ("compress", b"{}".to_vec(), 415, "\"compress\" is not supported"),
    ];
    for (encoding, bytes, status, message) in cases {
        let answer = Answer::of(send(encoding, bytes).await.unwrap()).await;
        assert_eq!(answer.error().0, status, "{message}: {}", answer.text);
        assert!(answer.error().2.contains(message), "{}", answer.text);
    }
    server.stop().await;
}

/// Writes a request and returns its answer's head, in lower case, without its body.
async fn head_of(stream: &mut BufReader<TcpStream>, request: &[u8]) -> String {
    stream.get_mut().write_all(request).await.unwrap();
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(stream.read_line(&mut head).await.unwrap(), 0, "closed after {head:?}");
    }
    head.make_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).unwrap().lines().next().unwrap().parse().unwrap();
    stream.read_exact(&mut vec![0; length]).await.unwrap();
    head
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_goes_on_behind_a_body_that_was_not_wanted_or_says_that_it_does_not() {
    let server = Subject::configured(|config| config.server.max_body_bytes = Bytes(1000)).await;
    let connect = async || BufReader::new(TcpStream::connect(server.addr()).await.unwrap());
    let post = |headers: &str, body: &[u8]| {
        let head = format!("POST /v1/systemone HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
        [head.as_bytes(), body].concat()
    };
    let sized = |length: usize| format!("content-length: {length}\r\n");
    let chunk = |length: usize| format!("{length:x}\r\n{}\r\n", " ".repeat(length));
    let chunked = "transfer-encoding: chunked\r\n";
    let goes_on = [
        post(&sized(10 << 10), &[b' '; 10 << 10]),
        post(chunked, format!("{}{}0\r\n\r\n", chunk(1001), chunk(10 << 10)).as_bytes()),
    ];
    let mut stream = connect().await;
    for request in goes_on {
        let head = head_of(&mut stream, &request).await;
        assert!(head.starts_with("http/1.1 413") && !head.contains("connection:"), "{head}");
        let next = head_of(&mut stream, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(next.starts_with("http/1.1 200"), "{next}");
    }
    let closes = [
        // Too much, announced or found.
        (413, post(&sized(16 << 20), &[b' '; 16 << 20])),
        (413, post(chunked, chunk(16 << 20).as_bytes())),
        // Nothing comes, or nothing for long.
        (413, post(&format!("{}expect: 100-continue\r\n", sized(1001)), b"")),
        (413, post(&sized(1001), b"{")),
        // It cannot be told where it ends.
        (422, post(chunked, b"no length\r\n{}\r\n")),
    ];
    for (status, request) in closes {
        let mut stream = connect().await;
        let head = head_of(&mut stream, &request).await;
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{head}");
        assert!(head.contains("connection: close"), "{head}");
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_requests_in_flight_finish() {
    let server = Subject::start().await;
    let mut body = chat_body(MODEL, "Hello");
    body["max_tokens"] = json!(400);
    body["stream"] = json!(true);
    let response = server.post("/v1/chat/completions", &body).send().await.unwrap();
    let reading = tokio::spawn(Answer::of(response));
    server.drain().await;
    let events = reading.await.unwrap().events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_ever() {
    let server = Subject::configured(|config| config.server.drain_timeout_ms = 50).await;
    let mut body = chat_body(MODEL, "Hello");
    body["max_tokens"] = json!(100_000);
    body["stream"] = json!(true);
    let response = server.post("/v1/chat/completions", &body).send().await.unwrap();
    server.drain().await;
    let cut = response.bytes().await;
    assert!(cut.is_err(), "a stream that was cut must not look whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap();
    let error = forkpoint::serve::bind(addr).await.unwrap_err().to_string();
    assert!(error.contains(&addr.to_string()) && error.contains("--port"), "{error}");
}
