//! What becomes of a policy's plan: replies, refusals, generations and upstreams, as the client sees them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::server::{Answer, MODEL, Subject, chat_body, repository};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use forkpoint::config::{ToolConfig, UpstreamConfig};
use forkpoint::guest_tools::{Wit, componentize};
use futures::{StreamExt, stream};
use serde_json::{Value, json};

/// The policy for the trial of contract 0.2; its source says what it does.
const TRIAL: &str = "tests/fixtures/trial.core.wat";

/// The policy that does what the last user turn says; tests/fixtures/README.md lists its commands.
pub(crate) const SCRIPTED: &str = "tests/fixtures/scripted.wasm";
const CHAT: &str = "/v1/chat/completions";

/// A model server elsewhere, which acts by the model's name and remembers what it was sent.
#[derive(Clone, Default)]
pub(crate) struct Elsewhere {
    pub(crate) seen: Arc<Mutex<Vec<(HeaderMap, Value)>>>,
}

/// A stream with odd spacing, which must arrive as it is.
const STREAM: &str = "data: {\"a\":  1}\n\n: a comment\n\ndata: [DONE]\n\n";

impl Elsewhere {
    pub(crate) async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let this = self.clone();
        let answer = move |headers: HeaderMap, body: Bytes| async move { this.answer(headers, &body).await };
        let router = Router::new().route("/v1/chat/completions", post(answer));
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    async fn answer(&self, headers: HeaderMap, body: &[u8]) -> Response {
        let body: Value = serde_json::from_slice(body).unwrap();
        let model = body["model"].as_str().unwrap().to_owned();
        self.seen.lock().unwrap().push((headers, body));
        let pieces =
            |pieces: Vec<Result<&'static str, std::io::Error>>| Body::from_stream(stream::iter(pieces));
        match model.as_str() {
            "whole" => (
                [
                    ("x-up", "kept"),
                    ("connection", "x-hop"),
                    ("x-hop", "dropped"),
                    ("keep-alive", "timeout=1"),
                ],
                "{ \"odd\":   \"spacing\" }",
            )
                .into_response(),
            "stream" => {
                let halves = STREAM.split_at(13);
                ([(header::CONTENT_TYPE, "text/event-stream")], pieces(vec![Ok(halves.0), Ok(halves.1)]))
                    .into_response()
            }
            "cut" => {
                let breaks = async {
                    // Long enough for what goes before it to arrive.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    Err(std::io::Error::other("cut"))
                };
                let body = stream::once(async { Ok("data: {}\n\n") }).chain(stream::once(breaks));
                ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
            }
            "busy" => {
                (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "7")], "{\"error\": {}}").into_response()
            }
            "unauthorized" => StatusCode::UNAUTHORIZED.into_response(),
            "redirect" => (StatusCode::TEMPORARY_REDIRECT, [("location", "/elsewhere")]).into_response(),
            "slow" => {
                tokio::time::sleep(Duration::from_secs(5)).await;
                StatusCode::OK.into_response()
            }
            other => panic!("no such model: {other}"),
        }
    }
}

pub(crate) fn upstream(url: &str) -> UpstreamConfig {
    UpstreamConfig {
        url: url.into(),
        model: "whole".into(),
        api_key_env: None,
        timeout_ms: 300,
        headers: BTreeMap::from([("x-team".into(), "us".into())]),
    }
}

async fn start(url: &str) -> Subject {
    Subject::with_policies(&[SCRIPTED], |config| {
        config.routes.insert("chain".into(), vec!["missing".into(), "scripted".into()]);
        config.plugins.allow_missing = true;
        config.policies.insert("missing".into(), toml::from_str("fallback = 'next'").unwrap());
        config.upstreams.insert("up".into(), upstream(url));
        // Nobody listens on the discard port.
        config.upstreams.insert("dead".into(), upstream("http://127.0.0.1:9/v1"));
        config.tools.insert(
            "clock".into(),
            ToolConfig { description: Some("Tells the time".into()), parameters: None },
        );
    })
    .await
}

async fn script(server: &Subject, lines: &str, stream: bool) -> Answer {
    let mut body = chat_body("scripted", lines);
    body["stream"] = json!(stream);
    let request = server.post(CHAT, &body).header("authorization", "Bearer the-clients-own");
    Answer::of(request.send().await.unwrap()).await
}

fn told(answer: &Answer) -> (&str, &str, &str) {
    let version = answer.header("x-forkpoint-version");
    assert_eq!(version.len(), 12, "{version}");
    (
        answer.header("x-forkpoint-policy"),
        answer.header("x-forkpoint-route"),
        answer.header("x-forkpoint-reason"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn every_plan_says_who_decided_and_why() {
    let server = start("http://127.0.0.1:9/v1").await;
    for stream in [false, true] {
        let reply = script(&server, "because:greeting\nreply:Grüße 👋", stream).await;
        assert_eq!(told(&reply), ("scripted", "reply", "greeting"));
        let text = if stream {
            reply.streamed_text()
        } else {
            reply.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(text, "Grüße 👋");

        let refusal = script(&server, "because:risky\nreject:403:shell-risk:Ask a person.", stream).await;
        assert_eq!(told(&refusal), ("scripted", "reject", "risky"));
        assert_eq!(refusal.error(), (403, "shell-risk".into(), "Ask a person.".into()));

        let generated = script(&server, "ask:boolean:Is it?\ndecide\nbecause:asked\ngenerate", stream).await;
        assert_eq!(told(&generated), ("scripted", MODEL, "asked"));
        assert_eq!(generated.status, 200);

        let dead = script(&server, "forward:dead", stream).await;
        assert_eq!(told(&dead).1, "dead");
        assert_eq!((dead.error().0, dead.error().1.as_str()), (502, "upstream_unreachable"));

        let failed = script(&server, "trap", stream).await;
        assert_eq!(told(&failed), ("scripted", MODEL, "policy-trap"));
        assert_eq!(failed.status, 200);
    }
    assert_eq!(server.metric("forkpoint_policy_plans_total", "plan=\"reject\"").await, 2.0);
    assert_eq!(server.metric("forkpoint_policy_faults_total", "fault=\"trap\"").await, 2.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_never_loaded_is_told_from_a_name_that_nobody_knows() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.wasm");
    std::fs::write(&broken, "garbage").unwrap();
    let server = Subject::with_policies(&[SCRIPTED, broken.to_str().unwrap()], |config| {
        config.routes.insert("gated".into(), vec!["broken".into()]);
        config.policies.insert("broken".into(), toml::from_str("fallback = 'reject'").unwrap());
    })
    .await;
    let message = |name: &str, why: &str| format!("no model \"{name}\" is served{why}");
    let (status, code, said) = server.chat("broken", "hello").await.error();
    assert_eq!((status, code.as_str()), (404, "model_not_found"));
    let why = ": the policy of that name failed to load, and GET /v1/policies/broken says why";
    assert_eq!(said, message("broken", why));
    let status = server.get("/v1/policies/broken").await.ok();
    assert_eq!((&status["state"], &status["last_error"]["code"]), (&json!("failed"), &json!("malformed")));
    // A route takes the fallback, and that is what the status shows.
    assert_eq!(status["fallback"], "reject");
    let (status, code, _) = server.chat("gated", "hello").await.error();
    assert_eq!((status, code.as_str()), (503, "policy-failed"));
    let (_, _, said) = server.chat("unknown", "hello").await.error();
    assert!(said.starts_with(&message("unknown", "; there are ")), "{said}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_says_when_to_ask_again_where_its_contract_can() {
    let folder = tempfile::tempdir().unwrap();
    let trial = folder.path().join("trial.wasm");
    let core = std::fs::read(repository(TRIAL)).unwrap();
    std::fs::write(&trial, componentize(&core, false, Wit::of("0.2.0-trial").unwrap()).unwrap()).unwrap();
    let server = Subject::with_policies(&[SCRIPTED, trial.to_str().unwrap()], |_| {}).await;
    for stream in [false, true] {
        let mut body = chat_body("trial", "r");
        body["stream"] = json!(stream);
        let refusal = server.ask(CHAT, body).await;
        assert_eq!(refusal.error(), (429, "spent".into(), "Spent.".into()));
        assert_eq!((refusal.header("retry-after"), refusal.header("retry-after-ms")), ("17", "17000"));
        assert_eq!(told(&refusal), ("trial", "reject", "trial"));

        let silent = script(&server, "reject:429:spent:Spent.", stream).await;
        assert_eq!(silent.error(), (429, "spent".into(), "Spent.".into()));
        assert_eq!((silent.header("retry-after"), silent.header("retry-after-ms")), ("", ""));
    }
    for (policy, contract) in [("trial", "0.2.0-trial"), ("scripted", "0.1.0")] {
        let status = server.get(&format!("/v1/policies/{policy}")).await.ok();
        assert_eq!(status["contract"], contract);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reply_continues_from_what_the_policy_asked() {
    let server = start("http://127.0.0.1:9/v1").await;
    let plain = script(&server, "generate", false).await.ok()["usage"].clone();
    let asked = script(&server, "ask:boolean:Is it?\ndecide\ngenerate", false).await.ok()["usage"].clone();
    let ours = &asked["x_forkpoint"];
    assert_eq!(ours["decisions"], 1);
    assert!(ours["decided_tokens"].as_u64().unwrap() > 0);
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(number(&ours["reused"]) + number(&ours["computed"]), number(&asked["prompt_tokens"]));

    // What a policy adds to a plan is in the prompt: turns, tools, and what stands on its fork.
    let prompt = |usage: &Value| number(&usage["prompt_tokens"]);
    let more = [
        "append:system Answer in one word, and do not explain it.\ngenerate",
        "mount:clock\ngenerate",
        "fork\nextend:user And another thing, which is long enough.\ncontinue\ngenerate",
    ];
    for lines in more {
        let usage = script(&server, lines, false).await.ok()["usage"].clone();
        assert!(prompt(&usage) > prompt(&plain) + 20, "{lines}: {usage} after {plain}");
    }
    let short = script(&server, "max-tokens:2\ngenerate", false).await.ok();
    assert_eq!(short["usage"]["completion_tokens"], 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_mounted_by_name_after_the_conversation() {
    let server = start("http://127.0.0.1:9/v1").await;
    let ask = async |lines: &str, tools: Value| {
        let mut body = chat_body("scripted", lines);
        body["tools"] = tools;
        server.ask(CHAT, body).await.ok()["usage"].clone()
    };
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "does something useful"}});
    let tools = json!([tool("bash"), tool("search")]);
    let prompt = |usage: &Value| usage["prompt_tokens"].as_u64().unwrap();
    let all = ask("generate", tools.clone()).await;
    let one = ask("mount:bash\ngenerate", tools.clone()).await;
    let none = ask("no-tools\ngenerate", tools).await;
    assert!(prompt(&all) > prompt(&one), "{all} {one}");
    assert!(prompt(&one) > prompt(&none), "{one} {none}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_asks_its_policies_in_order() {
    let server = start("http://127.0.0.1:9/v1").await;
    let answer = server.chat("chain", "because:second\nreply:x").await;
    assert_eq!(told(&answer), ("scripted", "reply", "second"));
    let exhausted = server.chat("chain", "next").await;
    assert_eq!(exhausted.header("x-forkpoint-reason"), "chain-exhausted");
    assert_eq!(exhausted.status, 200);

    let names: Vec<Value> = server.get("/v1/models").await.ok()["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].clone())
        .collect();
    assert_eq!(names, [MODEL, "chain", "scripted"]);
    let status = server.get("/v1/policies/scripted").await.ok();
    assert_eq!((&status["name"], &status["state"]), (&json!("scripted"), &json!("serving")));
    assert_eq!(status["version"], answer.header("x-forkpoint-version"));

    // Typed questions and texts go to a model, not through policies.
    let body =
        json!({"model": "scripted", "state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}});
    let refused = server.ask("/v1/systemone", body).await;
    assert_eq!(refused.error().0, 400);
    assert!(refused.error().2.contains("policies answer /v1/chat/completions"), "{}", refused.text);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_is_the_policy_of_that_name_once_it_is_there() {
    let server = Subject::start().await;
    let body = |model: Value| {
        let mut body = chat_body("", "reply:from the policy");
        body["model"] = model;
        body
    };
    assert_eq!(server.ask(CHAT, body(json!("auto"))).await.error().1, "model_not_found");
    assert_eq!(server.ask(CHAT, body(Value::Null)).await.header("x-forkpoint-policy"), "");

    std::fs::copy(repository(SCRIPTED), server.plugins.path().join("auto.wasm")).unwrap();
    for _ in 0..600 {
        if server.get("/v1/policies/auto").await.json()["state"] == "serving" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for model in [json!("auto"), json!(""), Value::Null] {
        let answer = server.ask(CHAT, body(model)).await;
        assert_eq!(told(&answer), ("auto", "reply", "reply"), "{}", answer.text);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_answer_comes_back_as_it_is() {
    let elsewhere = Elsewhere::default();
    let server = start(&elsewhere.start().await).await;

    let whole = script(&server, "forward:up", false).await;
    assert_eq!((whole.status.as_u16(), whole.text.as_str()), (200, "{ \"odd\":   \"spacing\" }"));
    assert_eq!((told(&whole).1, whole.header("x-up"), whole.header("x-hop")), ("up", "kept", ""));
    let (headers, body) = elsewhere.seen.lock().unwrap().pop().unwrap();
    assert_eq!(body["model"], "whole", "the upstream's model, not the policy's name");
    assert_eq!(body["messages"][0]["content"], "forward:up");
    assert_eq!((&headers["x-team"], headers.get("authorization")), (&"us".parse().unwrap(), None));
    assert_eq!(headers["x-request-id"], whole.header("x-request-id"));

    let stream = script(&server, "model:stream\nforward:up", true).await;
    assert_eq!((stream.text.as_str(), told(&stream).1), (STREAM, "up"));

    let busy = script(&server, "model:busy\nforward:up", false).await;
    assert_eq!(
        (busy.status.as_u16(), busy.header("retry-after"), busy.text.as_str()),
        (429, "7", "{\"error\": {}}")
    );
    assert_eq!(server.metric("forkpoint_upstream_requests_total", "outcome=\"ok\"").await, 3.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_fails_is_told_with_its_name() {
    let elsewhere = Elsewhere::default();
    let server = start(&elsewhere.start().await).await;
    for (model, status, code) in [
        ("unauthorized", 502, "upstream_unauthorized"),
        ("redirect", 502, "upstream_redirect"),
        ("slow", 504, "upstream_timeout"),
    ] {
        let answer = script(&server, &format!("model:{model}\nforward:up"), false).await;
        assert_eq!((answer.error().0, answer.error().1.as_str()), (status, code), "{}", answer.text);
        assert!(answer.error().2.contains("upstream up"), "{}", answer.text);
        assert_eq!(told(&answer).1, "up");
    }
    // A stream that breaks off says so as its last event.
    let cut = script(&server, "model:cut\nforward:up", true).await;
    assert_eq!(cut.events().last().unwrap()["error"]["code"], "upstream_broken_off", "{}", cut.text);
    server.stop().await;
}
