//! What a client may get wrong, and what it is told. Each case: the route, the body, the status, the code, a part of
//! the message. No case may be a server error, and the server answers as before afterwards.

use crate::server::{Answer, MODEL, Subject, chat_body};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const ONE: &str = "/v1/systemone";
const DECISIONS: &str = "/v1/decisions";

/// Bodies that are not what their route reads.
fn broken_bodies() -> Vec<(&'static [u8], &'static str)> {
    vec![
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"{\"model\": \"\xff\"}", "not UTF-8"),
        (b"[]", "must be a JSON object, got an array"),
        (b"7", "must be a JSON object, got a number"),
        (b"{\"a\": NaN}", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_bodies_are_told_apart() {
    let server = Subject::start().await;
    for path in [CHAT, TEXT, ONE, DECISIONS] {
        for (body, message) in broken_bodies() {
            let answer = Answer::of(server.raw(path, body).send().await.unwrap()).await;
            let (status, _, told) = answer.error();
            assert_eq!(status, if path == ONE { 422 } else { 400 }, "{path} {message}");
            assert!(told.contains(message), "{path}: {told}");
            assert_eq!(answer.header("content-type"), "application/json");
        }
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let answer = Answer::of(server.raw(path, deep).send().await.unwrap()).await;
        assert!(answer.error().2.contains("recursion limit"), "{}", answer.text);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_are_named() {
    let server = Subject::start().await;
    let chat = |field: &str, value: Value| {
        let mut body = chat_body(MODEL, "x");
        body[field] = value;
        body
    };
    let one = |question: Value| json!({"state": "s", "questions": {"q": question}});
    let long = "word ".repeat(20_000);
    let options: serde_json::Map<String, Value> = (0..27).map(|i| (format!("o{i}"), Value::Null)).collect();
    let cases = [
        (CHAT, json!({}), 400, "invalid_value", "messages: this field is required"),
        (CHAT, chat("messages", json!([])), 400, "invalid_value", "messages: at least one message"),
        (CHAT, chat("messages", json!([{"role": "user"}])), 400, "invalid_value", "messages[0].content"),
        (
            CHAT,
            chat("messages", json!([{"role": "user", "content": [{"type": "image_url"}]}])),
            400,
            "unsupported",
            "images",
        ),
        (
            CHAT,
            chat("model", json!("gpt-9")),
            404,
            "model_not_found",
            "no model \"gpt-9\" is served; there are qwen3-tiny",
        ),
        (CHAT, chat("model", json!(["x"])), 400, "invalid_value", "model: invalid type"),
        (
            CHAT,
            chat("temperature", json!("hot")),
            400,
            "invalid_value",
            "temperature: invalid type: string \"hot\"",
        ),
        (CHAT, chat("temperature", json!(-1)), 400, "invalid_value", "temperature must be from 0"),
        (CHAT, chat("max_tokens", json!(0)), 400, "invalid_value", "max_tokens: must be at least 1"),
        (CHAT, chat("max_tokens", json!(1.5)), 400, "invalid_value", "max_tokens: invalid type"),
        (CHAT, chat("n", json!(2)), 400, "unsupported", "n: only 1 reply"),
        (
            CHAT,
            chat("response_format", json!({"type": "json_object"})),
            400,
            "unsupported",
            "response_format: only",
        ),
        (
            CHAT,
            chat("tools", json!([{"type": "function", "function": {}}])),
            400,
            "invalid_value",
            "tools[0].function.name",
        ),
        (CHAT, chat("tool_choice", json!("required")), 400, "unsupported", "tool_choice"),
        (CHAT, chat_body(MODEL, &long), 400, "context_length_exceeded", "the context window holds"),
        (TEXT, json!({"model": MODEL}), 400, "invalid_value", "prompt: this field is required"),
        (TEXT, json!({"model": MODEL, "prompt": [1, 2]}), 400, "unsupported", "prompt: token ids"),
        (
            TEXT,
            json!({"model": MODEL, "prompt": long}),
            400,
            "context_length_exceeded",
            "the context window holds",
        ),
        (TEXT, json!({"model": "gpt-9", "prompt": "x"}), 404, "model_not_found", "no model \"gpt-9\""),
        (ONE, json!({"questions": {}}), 422, "invalid_value", "state: this field is required"),
        (ONE, json!({"state": "s"}), 422, "invalid_value", "questions: this field is required"),
        (ONE, json!({"state": "s", "questions": {}}), 422, "invalid_value", "at least one question"),
        (ONE, one(json!({"type": "boolean"})), 422, "invalid_value", "questions.q.type: must be \"noul\""),
        (ONE, one(json!({"type": "choice", "criteria": options})), 422, "unsupported", "at most 26 options"),
        (
            ONE,
            one(json!({"type": "score", "criteria": {"0": "a"}})),
            422,
            "invalid_value",
            "must be an array of levels",
        ),
        (
            ONE,
            json!({"state": long, "questions": {"q": {"type": "noul", "instructions": "?"}}}),
            413,
            "context_length_exceeded",
            "the context window holds",
        ),
        (
            ONE,
            json!({"model": "jev-99", "state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}),
            400,
            "model_not_found",
            "no model \"jev-99\"",
        ),
        (DECISIONS, json!({"input": "x", "questions": []}), 400, "invalid_value", "questions: from 1 to 400"),
        (
            DECISIONS,
            json!({"input": "x", "questions": [{"type": "noul", "instructions": "?"}]}),
            400,
            "invalid_value",
            "questions[0].type",
        ),
    ];
    for (path, body, status, code, message) in cases {
        let answer = server.ask(path, body.clone()).await;
        let (got_status, got_code, told) = answer.error();
        let shown: String = body.to_string().chars().take(200).collect();
        assert_eq!((got_status, got_code.as_str()), (status, code), "{path} {shown}\n{told}");
        assert!(told.contains(message), "{path} {shown}\n{told}");
        if path == ONE && status == 422 {
            assert_eq!(answer.json()["detail"][0]["loc"][0], "body");
        } else if path == ONE {
            assert!(answer.json()["detail"]["error_type"].is_string());
        }
    }
    assert_eq!(server.chat(MODEL, "x").await.status, 200, "still there");
    assert_eq!(server.metric("forkpoint_http_requests_total", "status=\"5").await, 0.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_that_do_not_exist_name_those_that_do() {
    let server = Subject::start().await;
    let nowhere = server.get("/v2/nothing").await;
    assert_eq!(nowhere.error().0, 404);
    assert!(nowhere.error().2.contains("POST /v1/chat/completions"), "{}", nowhere.text);
    let method = server.get(CHAT).await;
    assert_eq!(method.error().0, 405);
    assert!(method.error().2.contains("takes POST, got GET"), "{}", method.text);
    assert_eq!(method.header("allow"), "POST");
    let detail = server.get(ONE).await.json();
    assert!(detail["detail"]["message"].as_str().unwrap().contains("takes POST"), "{detail}");
    for (path, message) in
        [("/v1/policies/none", "no policy \"none\""), ("/v1/models/gpt/9", "no model \"gpt/9\"")]
    {
        let answer = server.get(path).await;
        assert_eq!(answer.error().0, 404);
        assert!(answer.error().2.contains(message), "{}", answer.text);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn media_types_that_are_not_read_say_so() {
    let server = Subject::start().await;
    let send = |media: &'static str| {
        server.client.post(server.url(ONE)).header("content-type", media).body("{}").send()
    };
    let cases = [
        ("multipart/form-data; boundary=x", 415, "images are not supported"),
        ("application/x-www-form-urlencoded", 415, "send application/json"),
        ("text/plain", 415, "send application/json"),
        ("application/json; charset=utf-8", 422, "state: this field is required"),
    ];
    for (media, status, message) in cases {
        let answer = Answer::of(send(media).await.unwrap()).await;
        assert_eq!(answer.error().0, status, "{media}: {}", answer.text);
        assert!(answer.error().2.contains(message), "{media}: {}", answer.text);
    }
    server.stop().await;
}
