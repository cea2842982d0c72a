//! What operators do over HTTP: change policies and read the journal, with a key of theirs and not without.

use crate::server::{Answer, Subject, chat_body, repository};
use forkpoint::config::Config;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};

const SCRIPTED: &str = "tests/fixtures/scripted.wasm";
const CHAT: &str = "/v1/chat/completions";

/// A server with a key for operators, and one for clients if there is to be one.
async fn start(clients: bool) -> (Subject, tempfile::TempDir) {
    let keys = tempfile::tempdir().unwrap();
    std::fs::write(keys.path().join("admin"), "root\n").unwrap();
    std::fs::write(keys.path().join("clients"), "guest\n").unwrap();
    let (admin, guests) = (keys.path().join("admin"), keys.path().join("clients"));
    let change = |config: &mut Config| {
        config.server.admin_keys_file = Some(admin);
        config.server.api_keys_file = clients.then_some(guests);
        config.journal.prompts = true;
    };
    (Subject::with_policies(&[SCRIPTED], change).await, keys)
}

fn request(subject: &Subject, method: Method, path: &str, key: &str) -> RequestBuilder {
    let request = subject.client.request(method, subject.url(path));
    if key.is_empty() { request } else { request.bearer_auth(key) }
}

async fn send(request: RequestBuilder) -> Answer {
    Answer::of(request.send().await.unwrap()).await
}

/// The records of the journal's stream.
async fn journal(subject: &Subject, query: &str) -> Vec<Value> {
    let answer =
        send(request(subject, Method::GET, &format!("/v1/journal?follow=false&{query}"), "root")).await;
    assert_eq!((answer.status, answer.header("content-type")), (StatusCode::OK, "text/event-stream"));
    let events = answer.text.split("\n\n").filter_map(|event| event.trim().strip_prefix("data: "));
    events.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_routes_are_closed_to_everyone_else() {
    let open = Subject::with_policies(&[SCRIPTED], |_| {}).await;
    let (keyed, _keys) = start(true).await;
    let routes = [
        (Method::PUT, "/v1/policies/new"),
        (Method::DELETE, "/v1/policies/scripted"),
        (Method::PUT, "/v1/policies/scripted/manifest"),
        (Method::POST, "/v1/policies/scripted/disable"),
        (Method::GET, "/v1/journal"),
    ];
    for (method, path) in routes {
        // Without a key of theirs in the configuration nobody is an operator.
        let (status, code, message) = send(request(&open, method.clone(), path, "")).await.error();
        assert_eq!((status, code.as_str()), (403, "operators_only"), "{method} {path}");
        assert!(message.contains("admin_keys_env"), "{message}");
        let (status, code, _) = send(request(&keyed, method.clone(), path, "guest")).await.error();
        assert_eq!((status, code.as_str()), (403, "operators_only"), "{method} {path}");
        let (status, ..) = send(request(&keyed, method.clone(), path, "other")).await.error();
        assert_eq!(status, 401, "{method} {path}");
    }
    assert_eq!(open.get("/v1/policies/scripted").await.ok()["state"], "serving", "nothing was done");
    open.stop().await;
    keyed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_uploaded_described_switched_and_removed() {
    let (subject, _keys) = start(false).await;
    let put = |path: &str, body: Vec<u8>| send(request(&subject, Method::PUT, path, "root").body(body));
    let act =
        |action: &str| send(request(&subject, Method::POST, &format!("/v1/policies/new/{action}"), "root"));
    let reply = async || subject.chat("new", "hello").await.ok()["choices"][0]["message"]["content"].clone();

    let v1 = std::fs::read(repository("tests/fixtures/reply-v1.wasm")).unwrap();
    let status = put("/v1/policies/new", v1.clone()).await.ok();
    assert_eq!((&status["state"], &status["loads"]), (&json!("serving"), &json!(1)));
    assert_eq!(reply().await, "v1");
    assert_eq!(std::fs::read(subject.plugins.path().join("new.wasm")).unwrap(), v1);

    let (status, code, message) = put("/v1/policies/new", b"not wasm".to_vec()).await.error();
    assert_eq!((status, code.as_str()), (422, "malformed"), "{message}");
    let (status, code, _) = put("/v1/policies/new/manifest", b"limits = 3".to_vec()).await.error();
    assert_eq!((status, code.as_str()), (422, "manifest"));
    assert_eq!(put("/v1/policies/No%20Name", v1).await.error().0, 400);
    let status =
        put("/v1/policies/new/manifest", b"description = \"It replies.\"\nroutes = [\"short\"]".to_vec())
            .await;
    assert_eq!(status.ok()["description"], "It replies.");
    assert_eq!(subject.chat("short", "hello").await.header("x-forkpoint-policy"), "new");

    assert_eq!(act("disable").await.ok()["state"], "disabled");
    assert_eq!(subject.chat("new", "hello").await.error().1, "model_not_found");
    assert_eq!(act("enable").await.ok()["state"], "serving");
    assert_eq!(act("promote").await.error().0, 409);
    assert_eq!(act("explode").await.error().0, 404);
    let missing = send(request(&subject, Method::POST, "/v1/policies/missing/disable", "root")).await;
    assert_eq!(missing.error().0, 404);

    let gone = send(request(&subject, Method::DELETE, "/v1/policies/new", "root")).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    assert_eq!(subject.get("/v1/policies/new").await.status, StatusCode::NOT_FOUND);
    subject.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_in_the_journal() {
    let (subject, _keys) = start(false).await;
    let say = async |id: &str, text: &str| {
        let body = chat_body("scripted", text);
        send(subject.post(CHAT, &body).header("x-request-id", id)).await.status
    };
    assert_eq!(say("a", "decide:boolean:Is it?\nlabel:x=1\nbecause:mine\nreply:hi").await, 200);
    assert_eq!(say("b", "trap").await, 200);
    assert_eq!(say("c", "reject:403:no:Not that.").await, 403);
    let mut body = chat_body("scripted", "generate");
    body["stream"] = true.into();
    let stream = send(subject.post(CHAT, &body).header("x-request-id", "d")).await;
    assert!(!stream.events().is_empty());

    let records = journal(&subject, "").await;
    let ids: Vec<&str> = records.iter().map(|record| record["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b", "c", "d"]);
    let [first, second, third, fourth] = &records[..] else { panic!("{records:?}") };
    assert_eq!(first["plan"], json!({"kind": "reply", "text": "hi"}));
    assert_eq!((&first["reason"], &first["outcome"]["status"]), (&json!("mine"), &json!(200)));
    assert_eq!(first["steps"][0]["labels"], json!([["x", "1"]]));
    let decision = &first["steps"][0]["decisions"][0];
    assert_eq!(decision["questions"][0]["instructions"], "Is it?");
    assert!(decision["answers"][0]["probabilities"][0].as_f64().unwrap() > 0.0);
    assert_eq!(first["messages"][0]["content"], "decide:boolean:Is it?\nlabel:x=1\nbecause:mine\nreply:hi");
    assert!(first["session"]["tokens"].as_u64().unwrap() > 0);
    assert_eq!(
        (&second["reason"], &second["steps"][0]["fault"]["kind"]),
        (&json!("policy-trap"), &json!("trap"))
    );
    assert_eq!((&third["outcome"]["status"], &third["outcome"]["error"]), (&json!(403), &json!("no")));
    assert_eq!((&fourth["plan"]["kind"], &fourth["outcome"]["left"]), (&json!("generate"), &json!(false)));
    assert!(fourth["outcome"]["completion"].as_u64().unwrap() > 0);

    for (query, ids) in [
        ("plan=reject", vec!["c"]),
        ("fault=trap", vec!["b"]),
        ("reason=mine", vec!["a"]),
        ("policy=scripted&last=2", vec!["c", "d"]),
        ("policy=other", vec![]),
        ("kind=shadow", vec![]),
    ] {
        let found = journal(&subject, query).await;
        let found: Vec<&str> = found.iter().map(|record| record["id"].as_str().unwrap()).collect();
        assert_eq!(found, ids, "{query}");
    }
    let wrong = send(request(&subject, Method::GET, "/v1/journal?polcy=x", "root")).await;
    assert_eq!(wrong.error().0, 400);

    // A reader that follows gets what comes, and is let go when the server stops.
    let live = request(&subject, Method::GET, "/v1/journal?last=0", "root").send().await.unwrap();
    assert_eq!(say("e", "reply:late").await, 200);
    subject.stop().await;
    let text = live.text().await.unwrap();
    assert!(text.contains("\"id\":\"e\"") && !text.contains("\"id\":\"a\""), "{text}");
}
