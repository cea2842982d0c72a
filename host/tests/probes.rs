//! Probes as their users see them: found beside a policy, fitted while the server runs, asked by policies and over
//! HTTP, replaced and broken; and the commands that fit and judge them.

mod server;

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use forkpoint::author::sign::SigningKey;
use serde_json::{Value, json};
use server::{Subject, repository};

const SCRIPTED: &str = "tests/fixtures/scripted.wasm";

/// Examples that a random model tells apart; `seed` makes them new to every cache.
fn examples(seed: &str, labels: [&str; 2]) -> String {
    let rows = (0..24).map(|i| {
        let (words, label) = [("drop the table ", labels[0]), ("sing me a song ", labels[1])][i % 2];
        json!({ "text": format!("{}{seed} {i}", words.repeat(2)), "label": label }).to_string() + "\n"
    });
    rows.collect()
}

fn seed() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    format!("{}", now.as_nanos())
}

fn write(plugins: &Path, probe: &str, text: &str) {
    let folder = plugins.join("scripted.probes");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(probe), text).unwrap();
}

/// The same examples as a table of the policy's manifest.
fn table(text: &str) -> String {
    let rows = text.lines().map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        // What these strings hold is written alike in JSON and in TOML.
        format!("    {{ text = {}, label = {} }},\n", row["text"], row["label"])
    });
    format!("[probes.drops]\nexamples = [\n{}]\n", rows.collect::<String>())
}

fn describe(plugins: &Path, manifest: &str) {
    std::fs::write(plugins.join("scripted.toml"), manifest).unwrap();
}

/// A server with the scripted policy and a file of examples beside it.
async fn with_examples(text: &str) -> Subject {
    let text = text.to_owned();
    Subject::with_policies(&[SCRIPTED], |config| write(&config.plugins.dir, "drops.jsonl", &text)).await
}

/// The state of a probe, once it is as `wanted` says.
async fn until(server: &Subject, probe: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..600 {
        let status = server.get("/v1/policies/scripted").await.ok()["probes"][probe].clone();
        if wanted(&status) {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not reached: {}", server.get("/v1/policies/scripted").await.text);
}

/// What the scripted policy is answered.
async fn asked(server: &Subject, probe: &str) -> String {
    let text = format!("ask:probe:Does it drop?|{probe}\ndecide\necho");
    let answer = server.chat("scripted", &text).await.ok();
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_is_fitted_beside_requests_and_then_answers() {
    let server = with_examples(&examples(&seed(), ["yes", "no"])).await;
    // Labels or the probe, whichever is there: never nothing.
    assert!(asked(&server, "drops").await.starts_with("boolean "));
    let status = until(&server, "drops", |status| status["state"] == "ready").await;
    assert_eq!((&status["kind"], &status["labels"]), (&json!("boolean"), &json!({ "no": 12, "yes": 12 })));
    assert!(status["quality"]["accuracy"].as_f64().unwrap() > 0.9, "{status}");
    assert!(status["quality"]["label_reads"].is_null(), "the file does not say the question");

    let before = server.metric("forkpoint_engine_decided_tokens_total", "").await;
    let told = asked(&server, "drops").await;
    assert!(told.ends_with("by probe"), "{told}");
    assert_eq!(server.metric("forkpoint_engine_decided_tokens_total", "").await, before, "it costs no token");
    assert!(server.metric("forkpoint_probe_answers_total", "rung=\"probe\"").await >= 1.0);
    assert!(server.metric("forkpoint_probe_accuracy", "probe=\"drops\"").await > 0.9);
    assert!(server.metric("forkpoint_engine_hidden_state_bytes", "").await > 0.0);
    assert_eq!(
        asked(&server, "nope").await,
        "failure invalid: question 0: there is no probe \"nope\"; the policy ships drops"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http_a_question_names_a_probe() {
    let server = with_examples(&examples(&seed(), ["yes", "no"])).await;
    until(&server, "drops", |status| status["state"] == "ready").await;
    let ask = |state: &str, question: Value| {
        let body = json!({ "state": state, "questions": { "q": question } });
        server.ask("/v1/systemone", body)
    };
    let probed = json!({ "type": "noul", "x_probe": "scripted/drops" });
    let yes = ask("drop the table drop the table 99", probed.clone()).await.ok();
    let no = ask("sing me a song sing me a song 99", probed).await.ok();
    assert_eq!(yes["answers"]["q"]["x_rung"], "probe");
    let noul = |answer: &Value| answer["answers"]["q"]["noul"].as_f64().unwrap();
    assert!(noul(&yes) > 0.5 && noul(&no) < 0.5, "{yes} {no}");
    // The state's tokens and no question's.
    let usage = |answer: &Value| answer["usage"]["input_tokens"].as_u64().unwrap();
    let labels = ask("drop the table drop the table 99", json!({ "type": "noul", "instructions": "Is it?" }));
    let labels = labels.await.ok();
    assert!(usage(&labels) > usage(&yes));
    assert!(labels["answers"]["q"].get("x_rung").is_none());

    for (question, expected) in [
        (json!({ "type": "noul", "x_probe": "scripted/nope" }), "the policy ships drops"),
        (json!({ "type": "noul", "x_probe": "drops" }), "must be \\\"policy/probe\\\""),
        (json!({ "type": "noul", "x_probe": 3 }), "must be a string"),
        (
            json!({ "type": "choice", "x_probe": "scripted/drops", "criteria": { "a": null, "b": null } }),
            "the probe answers a boolean of yes, no, it was asked a choice of a, b",
        ),
    ] {
        let answer = ask("Hello.", question).await;
        assert!(answer.status.is_client_error(), "{} {}", answer.status, answer.text);
        assert!(answer.text.contains(expected), "{}", answer.text);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn examples_that_change_are_fitted_again_and_broken_ones_leave_what_there_is() {
    let server = with_examples(&examples(&seed(), ["yes", "no"])).await;
    let plugins = server.plugins.path().to_owned();
    until(&server, "drops", |status| status["state"] == "ready").await;
    write(&plugins, "drops.jsonl", &(examples(&seed(), ["yes", "no"]) + &examples(&seed(), ["yes", "no"])));
    until(&server, "drops", |status| status["state"] == "ready" && status["examples"] == 48).await;

    let one_class = "{\"text\": \"a\", \"label\": \"yes\"}\n{\"text\": \"b\", \"label\": \"yes\"}\n";
    write(&plugins, "drops.jsonl", one_class);
    let status = until(&server, "drops", |status| status["state"] == "failed").await;
    assert!(status["error"].as_str().unwrap().contains("at least two labels"), "{status}");
    assert!(asked(&server, "drops").await.ends_with("by probe"), "the last good one answers");

    // One that never was good: label reads answer.
    write(&plugins, "other.jsonl", "not json\n");
    let status = until(&server, "other", |status| status["state"] == "failed").await;
    assert!(status["error"].as_str().unwrap().starts_with("line 1: "), "{status}");
    let told = asked(&server, "other").await;
    assert!(told.starts_with("boolean ") && !told.contains("probe"), "{told}");
    std::fs::remove_dir_all(plugins.join("scripted.probes")).unwrap();
    until(&server, "drops", Value::is_null).await;
    assert!(asked(&server, "drops").await.contains("the policy ships none"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_the_manifest_stands_for_a_file() {
    let text = examples(&seed(), ["yes", "no"]);
    let server =
        Subject::with_policies(&[SCRIPTED], |config| describe(&config.plugins.dir, &table(&text))).await;
    let plugins = server.plugins.path().to_owned();
    let status = until(&server, "drops", |status| status["state"] == "ready").await;
    assert_eq!((&status["kind"], &status["labels"]), (&json!("boolean"), &json!({ "no": 12, "yes": 12 })));
    assert!(asked(&server, "drops").await.ends_with("by probe"));

    // Under one name, not even the same examples stand in both.
    write(&plugins, "drops.jsonl", &text);
    let status = until(&server, "drops", |status| status["state"] == "failed").await;
    let error = status["error"].as_str().unwrap();
    assert!(error.contains("table [probes.drops] and in scripted.probes/drops.jsonl"), "{error}");
    assert!(asked(&server, "drops").await.ends_with("by probe"), "the last good one answers");
    std::fs::remove_dir_all(plugins.join("scripted.probes")).unwrap();
    until(&server, "drops", |status| status["state"] == "ready").await;

    let more = table(&(text.clone() + &examples(&seed(), ["yes", "no"])));
    describe(&plugins, &more);
    until(&server, "drops", |status| status["state"] == "ready" && status["examples"] == 48).await;
    describe(&plugins, &more.replacen("label", "lable", 1));
    let refused = async || server.get("/v1/policies/scripted").await.ok()["last_error"].clone();
    for _ in 0..600 {
        if !refused().await.is_null() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let error = refused().await;
    assert_eq!(error["code"], "manifest");
    let said = error["message"].as_str().unwrap();
    assert!(said.contains("scripted.toml: line 3, ") && said.contains("unknown field `lable`"), "{said}");
    assert!(asked(&server, "drops").await.ends_with("by probe"), "the last good one answers");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contradictions_are_warned_of_and_an_artifact_of_other_examples_is_left_out() {
    let text = examples(&seed(), ["yes", "no"]);
    let first = text.lines().next().unwrap().replace("\"yes\"", "\"no\"");
    let text = format!("{text}{first}\n");
    // A good artifact, but of examples of the opposite meaning; and a bad one.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.jsonl");
    std::fs::write(&other, examples("other", ["no", "yes"])).unwrap();
    let tiny = repository("tests/data/qwen3-tiny");
    let fitted = probe(&["fit", other.to_str().unwrap(), "--out", "-", "--model", tiny.to_str().unwrap()]);
    let artifact = String::from_utf8(fitted.stdout).unwrap();
    assert!(artifact.contains("\"format\": 1"), "{artifact}");
    let server = Subject::with_policies(&[SCRIPTED], |config| {
        write(&config.plugins.dir, "drops.jsonl", &text);
        write(&config.plugins.dir, "drops.probe.json", &artifact);
        write(&config.plugins.dir, "also.jsonl", &text);
        write(&config.plugins.dir, "also.probe.json", "{\"format\": 1, \"mean\": \"AAAA\"}");
    })
    .await;
    let status = until(&server, "drops", |status| status["state"] == "ready").await;
    let warnings = status["warnings"].to_string();
    assert!(warnings.contains("stand under two labels; the first are examples 1 and 25"), "{warnings}");
    let judged = |status: &Value| -> u64 {
        let rows = status["quality"]["confusion"].as_array().unwrap();
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|count| count.as_u64().unwrap()).sum()
    };
    assert_eq!(judged(&status), 25, "fitted to what is there, not to the artifact's 24");
    assert_eq!(judged(&until(&server, "also", |status| status["state"] == "ready").await), 25);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_can_be_switched_off() {
    let text = examples(&seed(), ["yes", "no"]);
    let server = Subject::with_policies(&[SCRIPTED], |config| {
        write(&config.plugins.dir, "drops.jsonl", &text);
        config.plugins.probes = false;
    })
    .await;
    assert_eq!(server.get("/v1/policies/scripted").await.ok()["probes"], json!({}));
    let told = asked(&server, "drops").await;
    assert!(told.starts_with("boolean ") && !told.contains("probe"), "label reads answer: {told}");
    let question = json!({ "type": "noul", "x_probe": "scripted/drops" });
    let body = json!({ "state": "Hello.", "questions": { "q": question } });
    assert!(server.ask("/v1/systemone", body).await.text.contains("probes are switched off"));
    assert_eq!(server.metric("forkpoint_engine_hidden_state_bytes", "").await, 0.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_table_is_answered_by_what_the_server_fitted_alone() {
    let key = SigningKey::read(SigningKey::generate().unwrap().as_bytes()).unwrap();
    let manifest = table(&examples(&seed(), ["yes", "no"]));
    let signed = key.sign("scripted", &std::fs::read(repository(SCRIPTED)).unwrap(), &manifest).unwrap();
    let server = Subject::with_policies(&[SCRIPTED], |config| {
        config.plugins.signers.insert("author".to_owned(), key.public());
        let dir = &config.plugins.dir;
        describe(dir, &manifest);
        let tiny = repository("tests/data/qwen3-tiny");
        let fit = ["fit", dir.join("scripted.toml").to_str().unwrap(), "--model", tiny.to_str().unwrap()]
            .map(str::to_owned);
        assert!(probe(&fit.each_ref().map(String::as_str)).status.success());
        // Whoever can write into the folder can make it say anything.
        let artifact = dir.join("scripted.probes/drops.probe.json");
        let mut forged: Value = serde_json::from_slice(&std::fs::read(&artifact).unwrap()).unwrap();
        forged["quality"]["accuracy"] = json!(0.125);
        std::fs::write(artifact, forged.to_string()).unwrap();
    })
    .await;
    let forged = until(&server, "drops", |status| status["state"] == "ready").await;
    assert_eq!(forged["quality"]["accuracy"], 0.125, "an unsigned manifest takes it");
    describe(server.plugins.path(), &signed);
    until(&server, "drops", |status| status["quality"]["accuracy"].as_f64() > Some(0.9)).await;
    server.stop().await;
}

fn probe(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkpoint"));
    command.arg("probe").args(arguments).env("FORKPOINT_CACHE", repository("target/test-cache"));
    for name in ["FORKPOINT_CONFIG", "FORKPOINT_MODEL", "FORKPOINT_LOG"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

#[test]
fn the_commands_fit_show_and_judge() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("drops.jsonl");
    std::fs::write(&file, examples("one", ["yes", "no"])).unwrap();
    let tiny = repository("tests/data/qwen3-tiny");
    let (file, tiny) = (file.to_str().unwrap(), tiny.to_str().unwrap());
    let text = |output: &Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let fitted = text(&probe(&["fit", file, "--model", tiny]));
    assert!(fitted.contains("examples    yes 12, no 12"), "{fitted}");
    let artifact = folder.path().join("drops.probe.json");
    let artifact = artifact.to_str().unwrap();
    assert_eq!(text(&probe(&["show", artifact])), fitted);

    let fresh = folder.path().join("fresh.jsonl");
    std::fs::write(&fresh, examples("two", ["yes", "no"])).unwrap();
    let fresh = fresh.to_str().unwrap();
    let judged = text(&probe(&["eval", fresh, "--probe", artifact, "--model", tiny]));
    assert!(judged.contains(": accuracy 1.000 (majority 0.500)"), "{judged}");
    let halves =
        probe(&["eval", file, fresh, "--per-label", "4", "--curve", "2,4", "--json", "-", "--model", tiny]);
    let table: Value = serde_json::from_str(&text(&halves)).unwrap();
    assert_eq!(table["questions"].as_array().unwrap().len(), 2);
    assert_eq!(table["questions"][0]["curve"].as_array().unwrap().len(), 2);
    assert!(table["accuracy"].as_f64().unwrap() > 0.8, "{table}");

    let refused = |arguments: &[&str], expected: &str| {
        let output = probe(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{said}");
    };
    refused(&["show", file], "not a probe of this version");
    refused(&["fit", artifact, "--model", tiny], "line 1: ");
    refused(&["eval", "no/such.jsonl", "--model", tiny], "no/such.jsonl");
    let llama = repository("tests/data/llama-tiny");
    refused(
        &["eval", fresh, "--probe", artifact, "--model", llama.to_str().unwrap()],
        "fitted on another model",
    );
}

#[test]
fn a_table_is_fitted_to_the_probe_that_a_file_is_fitted_to() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (examples("one", ["yes", "no"]), examples("two", ["yes", "no"]));
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (file, gate, both) = (path("drops.jsonl"), path("gate.toml"), path("both.toml"));
    std::fs::write(&file, &one).unwrap();
    std::fs::write(&gate, table(&one)).unwrap();
    std::fs::write(&both, table(&one) + &table(&two).replace("probes.drops", "probes.also")).unwrap();
    let tiny = repository("tests/data/qwen3-tiny");
    let tiny = tiny.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let output = probe(&[arguments, &["--model", tiny]].concat());
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    };
    let good = |arguments: &[&str]| {
        let (success, said) = run(arguments);
        assert!(success, "{said}");
        said
    };
    good(&["fit", &file]);
    let fitted = std::fs::read(path("drops.probe.json")).unwrap();
    // To where a server looks for it.
    good(&["fit", &gate]);
    assert_eq!(std::fs::read(path("gate.probes/drops.probe.json")).unwrap(), fitted);
    good(&["fit", &both, "--name", "drops"]);
    assert_eq!(std::fs::read(path("both.probes/drops.probe.json")).unwrap(), fitted);
    let judged = good(&["eval", &both, "--name", "also", "--probe", &path("drops.probe.json")]);
    assert!(judged.contains("both.toml, [probes.also]: accuracy 1.000"), "{judged}");
    let table = good(&["eval", &both, "--per-label", "4", "--json", "-"]);
    let table: Value = serde_json::from_str(&table).unwrap();
    assert_eq!(table["questions"].as_array().unwrap().len(), 2, "each of its probes");

    std::fs::write(path("none.toml"), "fallback = 'next'").unwrap();
    std::fs::write(path("bad.toml"), "[probes.drops]\nexamples = [{}]").unwrap();
    for (arguments, says) in [
        (vec!["fit", &both], "has the probes also, drops: name one with --name"),
        (vec!["fit", &both, "--name", "nope"], "no table [probes.nope]; its probes: also, drops"),
        (vec!["fit", &file, "--name", "drops"], "--name names a probe of a manifest"),
        (vec!["fit", &path("none.toml")], "no table [probes.NAME]; its probes: none"),
        (vec!["eval", &path("bad.toml")], "line 2, column 13: missing field `label`"),
    ] {
        let (success, said) = run(&arguments);
        assert!(!success && said.contains(says), "{said}");
    }
}
