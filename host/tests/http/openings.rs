//! Requests whose session is opened late, never, or cannot be: what clients, upstreams, the journal and metrics see.

use std::path::Path;

use serde_json::{Value, json};

use crate::policies::{Elsewhere, SCRIPTED, upstream};
use crate::server::{Answer, MODEL, Subject, chat_body};
use forkpoint::config::{Bytes, Config};

const CHAT: &str = "/v1/chat/completions";

async fn start(url: &str, change: impl FnOnce(&mut Config)) -> Subject {
    Subject::with_policies(&[SCRIPTED], |config| {
        config.upstreams.insert("up".into(), upstream(url));
        config.policies.insert("scripted".into(), toml::from_str("fallback = 'reject'").unwrap());
        change(config);
    })
    .await
}

/// A request after whose first turn, of so many bytes, the script follows; `salt` keeps its pages apart.
async fn ask(server: &Subject, model: &str, bytes: usize, script: &str, salt: &str) -> Answer {
    let mut body = chat_body(model, script);
    body["messages"] = json!([
        {"role": "system", "content": "long ".repeat(bytes / 5)},
        {"role": "user", "content": script},
    ]);
    body["cache_salt"] = json!(salt);
    server.ask(CHAT, body).await
}

async fn computed(server: &Subject) -> f64 {
    server.metric("forkpoint_engine_prefill_tokens_total", "").await
}

/// The journal's records, oldest first, once there are so many.
async fn records(folder: &Path, count: usize) -> Vec<Value> {
    for _ in 0..500 {
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let text: String = files
            .filter(|path| path.extension().is_some_and(|end| end == "jsonl"))
            .map(|path| std::fs::read_to_string(path).unwrap())
            .collect();
        let lines: Vec<&str> = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
        if lines.len() >= count {
            return lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("fewer than {count} records");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_a_refusal_and_a_forward_by_rule_compute_no_token() {
    let (elsewhere, journal) = (Elsewhere::default(), tempfile::tempdir().unwrap());
    let folder = journal.path().to_owned();
    let server = start(&elsewhere.start().await, |config| config.journal.dir = Some(folder)).await;
    let scripts = ["reply:by rule", "reject:403:no:No.", "forward:up", "max-tokens:2\ngenerate"];
    // Also where no session could hold the prompt.
    for bytes in [2_000, 40_000] {
        let reply = ask(&server, "scripted", bytes, scripts[0], "").await.ok();
        assert_eq!(reply["choices"][0]["message"]["content"], "by rule");
        let usage = &reply["usage"];
        assert_eq!(usage["prompt_tokens"], 0);
        assert!(usage["completion_tokens"].as_u64().unwrap() > 0);
        assert_eq!(
            (&usage["x_forkpoint"]["reused"], &usage["x_forkpoint"]["computed"]),
            (&json!(0), &json!(0))
        );
        assert_eq!(ask(&server, "scripted", bytes, scripts[1], "").await.error().1, "no");
        assert_eq!(ask(&server, "scripted", bytes, scripts[2], "").await.text, "{ \"odd\":   \"spacing\" }");
        assert_eq!(elsewhere.seen.lock().unwrap().len(), if bytes == 2_000 { 1 } else { 2 });
        assert_eq!(computed(&server).await, 0.0);
    }
    for record in records(journal.path(), 6).await {
        assert_eq!(record["session"], json!({"tokens": 0, "reused": 0, "computed": 0}), "{record}");
    }
    // What generates by rule opens its session then, and the journal has it.
    let usage = ask(&server, "scripted", 2_000, scripts[3], "").await.ok()["usage"].clone();
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    assert!(prompt > 300 && usage["x_forkpoint"]["computed"] == json!(prompt), "{usage}");
    let record = records(journal.path(), 7).await.pop().unwrap();
    let session = record["session"]["computed"].as_u64().unwrap();
    assert!(session > 300 && session < prompt, "{record}: the reply's opening comes on top");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_asks_and_generates_computes_its_prompt_once() {
    let server = start("http://127.0.0.1:9/v1", |_| {}).await;
    let script = "decide:boolean:Is it?\nfork\ndrop\ngenerate";
    let mut costs = Vec::new();
    for (model, salt) in [(MODEL, "a"), ("scripted", "b")] {
        let before = computed(&server).await;
        let usage = ask(&server, model, 2_000, script, salt).await.ok()["usage"].clone();
        assert_eq!(usage["x_forkpoint"]["reused"], 0, "{usage}");
        costs.push((computed(&server).await - before, usage["prompt_tokens"].clone()));
    }
    assert_eq!(costs[0], costs[1], "as without a policy");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_does_not_fit_ends_as_without_a_policy_unless_the_policy_says_otherwise() {
    // More pages than there are, within the context; and beyond it.
    for (bytes, kv_memory, status, code) in
        [(40_000, 16 << 20, 400, "context_length_exceeded"), (2_500, 300_000, 503, "kv_cache_full")]
    {
        let (elsewhere, journal) = (Elsewhere::default(), tempfile::tempdir().unwrap());
        let folder = journal.path().to_owned();
        let server = start(&elsewhere.start().await, |config| {
            config.model.kv_memory = Bytes(kv_memory);
            config.journal.dir = Some(folder);
        })
        .await;
        let decide = "decide:boolean:Is it?\n";
        let uncaught = format!("{decide}error:not caught");
        let plain = ask(&server, MODEL, bytes, &uncaught, "").await;
        let wanted = plain.error();
        assert_eq!((wanted.0, wanted.1.as_str()), (status, code), "{}", plain.text);

        // The policy's own fallback is a refusal of another kind.
        let through = ask(&server, "scripted", bytes, &uncaught, "").await;
        assert_eq!(
            (through.error(), through.header("retry-after")),
            (wanted.clone(), plain.header("retry-after"))
        );
        assert_eq!(through.header("x-forkpoint-reason"), "policy-error");
        let planned = ask(&server, "scripted", bytes, &format!("{decide}generate"), "").await;
        assert_eq!(
            (planned.error().0, planned.error().1.as_str()),
            (status, code),
            "a plan that cannot be carried out"
        );

        let forwarded =
            ask(&server, "scripted", bytes, &format!("{decide}because:large\nforward:up"), "").await;
        assert_eq!((forwarded.status.as_u16(), forwarded.header("x-forkpoint-reason")), (200, "large"));
        assert_eq!(elsewhere.seen.lock().unwrap().len(), 1);

        let records = records(journal.path(), 3).await;
        assert_eq!(records[0]["outcome"]["error"], code);
        assert_eq!(
            (&records[0]["session"]["error"], &records[2]["session"]["error"]),
            (&json!(code), &json!(code))
        );
        assert_eq!(records[0]["steps"][0]["decisions"][0]["failure"]["kind"], "full");
        assert_eq!(records[2]["outcome"]["error"], Value::Null);
        assert_eq!(records[2]["plan"]["kind"], "forward");
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_as_if_the_server_were_at_fault_gives_way_to_a_prompt_that_is_too_long() {
    let server = start("http://127.0.0.1:9/v1", |_| {}).await;
    let too_long = ask(&server, MODEL, 40_000, "x", "").await.error();
    assert_eq!((too_long.0, too_long.1.as_str()), (400, "context_length_exceeded"));
    let decide = "decide:boolean:Is it?\nbecause:guarded\n";
    for (bytes, plan, status, code) in [
        (40_000, "reject:503:later:Later.", 400, "context_length_exceeded"),
        (40_000, "reject:403:no:No.", 403, "no"),
        (500, "reject:503:later:Later.", 503, "later"),
    ] {
        let refused = ask(&server, "scripted", bytes, &format!("{decide}{plan}"), "").await;
        let (got, what, _) = refused.error();
        assert_eq!((got, what.as_str()), (status, code), "{bytes} {plan}: {}", refused.text);
        assert_eq!(refused.header("x-forkpoint-reason"), "guarded", "{bytes} {plan}");
    }
    // By rule, with no word of the session.
    let by_rule = ask(&server, "scripted", 40_000, "reject:503:later:Later.", "").await.error();
    assert_eq!((by_rule.0, by_rule.1.as_str()), (503, "later"));
    server.stop().await;

    // A cache that is full is the server's affair, and the policy's word on it stands.
    let server = start("http://127.0.0.1:9/v1", |config| config.model.kv_memory = Bytes(300_000)).await;
    let full = ask(&server, "scripted", 2_500, &format!("{decide}reject:503:later:Later."), "").await.error();
    assert_eq!((full.0, full.1.as_str()), (503, "later"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundled_guard_tells_a_client_that_its_prompt_is_too_long() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().to_owned();
    let server = Subject::with_policies(&["plugins/injection-guard.wasm"], |config| {
        config.journal.dir = Some(journal);
        // Its examples stay behind: labels are read.
        config.plugins.probes = false;
    })
    .await;
    let guarded = ask(&server, "injection-guard", 40_000, "What is the capital of France?", "").await;
    let (status, code, _) = guarded.error();
    assert_eq!((status, code.as_str()), (400, "context_length_exceeded"), "{}", guarded.text);
    assert_eq!(guarded.header("x-forkpoint-reason"), "engine-failed");
    let record = records(folder.path(), 1).await.remove(0);
    assert_eq!((&record["plan"]["status"], &record["reason"]), (&json!(503), &json!("engine-failed")));
    assert_eq!(record["outcome"]["error"], "context_length_exceeded");
    assert_eq!(record["session"]["error"], "context_length_exceeded");
    assert!(
        record["session"]["tokens"].as_u64().unwrap() > 4096 && record["session"]["computed"] == 0,
        "{record}"
    );
    server.stop().await;
}

/// The bundled `budget`, with this in its configuration, forwards what is within.
async fn budget(url: &str, kv_memory: u64, config: &str) -> Subject {
    Subject::with_policies(&["plugins/budget.wasm"], |server| {
        server.upstreams.insert("up".into(), upstream(url));
        server.model.kv_memory = Bytes(kv_memory);
        let rules = format!("fallback = 'reject'\n[config]\nwithin = 'forward up'\n{config}");
        server.policies.insert("budget".into(), toml::from_str(&rules).unwrap());
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_counts_prompts_that_no_session_holds() {
    let elsewhere = Elsewhere::default();
    let url = elsewhere.start().await;
    let seen = || elsewhere.seen.lock().unwrap().len();
    let server = budget(&url, 16 << 20, "tokens = 2000").await;
    assert_eq!(ask(&server, "budget", 500, "Hello", "").await.status.as_u16(), 200);
    assert_eq!(seen(), 1);
    let refused = ask(&server, "budget", 40_000, "Hello", "").await.error();
    assert_eq!((refused.0, refused.1.as_str()), (429, "quota-tokens"));
    server.stop().await;

    let server = budget(&url, 300_000, "tokens = 1000000").await;
    let uncounted = ask(&server, "budget", 2_500, "Hello", "").await;
    let (status, code, _) = uncounted.error();
    assert_eq!((status, code.as_str()), (503, "engine-failed"), "{}", uncounted.text);
    assert_eq!(seen(), 1, "neither is forwarded");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_is_used_up_computes_no_prompt() {
    let elsewhere = Elsewhere::default();
    let url = elsewhere.start().await;
    let server = budget(&url, 16 << 20, "requests = 1").await;
    // The last request of a window is degraded: answered here.
    assert_eq!(ask(&server, "budget", 100, "Hello", "a").await.status.as_u16(), 200);
    let before = computed(&server).await;
    assert!(before > 0.0, "its tokens are counted");
    let refused = ask(&server, "budget", 2_000, "Hello", "b").await.error();
    assert_eq!((refused.0, refused.1.as_str()), (429, "quota-requests"));
    assert_eq!(computed(&server).await, before);
    server.stop().await;

    // Its reply of 8 tokens alone leaves the quota no room for a prompt.
    let server = budget(&url, 16 << 20, "tokens = 8").await;
    let refused = ask(&server, "budget", 2_000, "Hello", "").await.error();
    assert_eq!((refused.0, refused.1.as_str()), (429, "quota-tokens"));
    assert_eq!(computed(&server).await, 0.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_shadow_computes_is_not_the_requests() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().to_owned();
    let components = [SCRIPTED, "tests/fixtures/reply-v1.wasm"];
    let server = Subject::with_policies(&components, |config| {
        config.journal.dir = Some(journal);
        config.policies.insert("reply-v1".into(), toml::from_str("shadow = true").unwrap());
        config.routes.insert("watched".into(), ["reply-v1", "scripted"].map(str::to_owned).to_vec());
    })
    .await;
    let reply = ask(&server, "watched", 2_000, "reply:by rule", "").await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], "by rule");
    assert_eq!(
        (&reply["usage"]["prompt_tokens"], &reply["usage"]["x_forkpoint"]["computed"]),
        (&json!(0), &json!(0))
    );
    let both = records(folder.path(), 2).await;
    let of = |kind: &str| both.iter().find(|record| record["kind"] == kind).unwrap();
    assert_eq!(of("request")["session"], json!({"tokens": 0, "reused": 0, "computed": 0}));
    let shadow = of("shadow");
    assert!(shadow["session"]["computed"].as_u64().unwrap() > 300, "{shadow}");
    assert_eq!((&shadow["plan"]["kind"], &shadow["id"]), (&json!("reply"), &of("request")["id"]));
    server.stop().await;
}
