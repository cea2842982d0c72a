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
        assert_eq!(records[0]["steps"][0]["decisions"][0]["failure"]["kind"], "full");
        assert_eq!(records[2]["outcome"]["error"], Value::Null);
        assert_eq!(records[2]["plan"]["kind"], "forward");
        server.stop().await;
    }
}
