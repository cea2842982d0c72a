//! `forkpoint bench` as its users run it: quick, on a random model of a few thousand weights.

mod server;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::LazyLock;

use axum::Router;
use axum::routing::{get, post};
use serde_json::{Value, json};
use server::repository;

/// The two policies that are measured, and none that would have to be compiled besides.
static PLUGINS: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let plugins = tempfile::tempdir().unwrap();
    for file in ["auto.wasm", "auto.toml", "triage.wasm", "triage.toml"] {
        std::fs::copy(repository("plugins").join(file), plugins.path().join(file)).unwrap();
    }
    plugins
});

fn bench(arguments: &[&str]) -> Output {
    bench_with(PLUGINS.path(), arguments)
}

fn bench_with(plugins: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkpoint"));
    command.args(["bench", "--quick", "--threads", "1", "--model"]).arg(repository("tests/data/qwen3-tiny"));
    command.arg("--plugins").arg(plugins).args(arguments);
    // Whatever is set up for the machine's own server has no say here.
    for name in ["FORKPOINT_CONFIG", "FORKPOINT_KV_MEMORY", "FORKPOINT_CONTEXT", "FORKPOINT_LOG"] {
        command.env_remove(name);
    }
    command.env("FORKPOINT_CACHE", repository("target/test-cache")).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The JSON that a bench which went well printed.
fn results(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Every number under these keys must say something.
fn check_numbers(value: &Value, path: &str) {
    match value {
        Value::Number(number) => {
            let idle = path.ends_with("load_average") || path.ends_with("threads");
            let number = number.as_f64().unwrap();
            assert!(number.is_finite() && (number > 0.0 || idle), "{path} is {number}");
        }
        Value::Array(items) => items.iter().for_each(|item| check_numbers(item, path)),
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| check_numbers(field, &format!("{path}.{name}")));
        }
        _ => {}
    }
}

fn names<'a>(results: &'a Value, list: &str, field: &str) -> Vec<&'a str> {
    results[list].as_array().unwrap().iter().map(|item| item[field].as_str().unwrap()).collect()
}

#[test]
fn every_measure_has_its_figures() {
    let results = results(&bench(&["--json", "-", "--clients", "1,3"]));
    check_numbers(&results, "");
    assert_eq!((&results["schema"], &results["version"]), (&json!(1), &json!(env!("CARGO_PKG_VERSION"))));
    assert!(results["date"].as_str().unwrap().ends_with('Z'));
    assert_eq!(results["model"]["name"], "qwen3-tiny");
    assert!(results["model"]["device"].as_str().unwrap().ends_with("1 thread"), "{}", results["model"]);
    assert!(results["machine"]["cores"].is_u64() && results["machine"]["quiet"].is_boolean());
    assert!(results["memory"]["kv_bytes"].as_u64().unwrap() > 0);
    assert_eq!(results["sides"][0]["name"], "forkpoint");
    assert_eq!(results["skipped"], json!([]));
    assert_eq!(
        names(&results, "measures", "name"),
        [
            "prefill 64",
            "prefill 256",
            "decode at 32",
            "decide, 1 question",
            "decide, 4 questions",
            "triage loop",
            "sessions, 1 client",
            "sessions, 3 clients",
            "policy without a question",
        ]
    );
    let measure = |name: &str| {
        let mut all = results["measures"].as_array().unwrap().iter();
        all.find(|measure| measure["name"] == name).unwrap()
    };
    for measure in results["measures"].as_array().unwrap() {
        for metric in measure["metrics"].as_array().unwrap() {
            let side = &metric["sides"][0];
            assert_eq!(side["side"], "forkpoint");
            let samples = side["samples"].as_array().unwrap();
            assert_eq!(samples.len(), 1, "{measure}");
            for field in ["median", "min", "max", "q1", "q3"] {
                assert_eq!(side[field], samples[0]);
            }
        }
    }
    let four = &measure("decide, 4 questions")["facts"];
    let suffixes = four["suffix_tokens"][0].as_array().unwrap();
    assert_eq!((four["questions"].as_u64(), suffixes.len()), (Some(4), 4));
    assert!(suffixes.iter().all(|tokens| tokens.as_u64().unwrap() > 20), "{suffixes:?}");
    assert_eq!(measure("triage loop")["facts"]["suffix_tokens"][0].as_array().unwrap().len(), 3);
    let metrics = measure("sessions, 3 clients")["metrics"].as_array().unwrap();
    assert_eq!(
        metrics.iter().map(|metric| &metric["name"]).collect::<Vec<_>>(),
        ["throughput", "p50", "p95"]
    );
    let policy = &measure("policy without a question")["metrics"][0]["sides"];
    assert_eq!((&policy[0]["side"], &policy[1]["side"]), (&json!("forkpoint"), &json!("wasmtime")));
    assert!(policy[1]["ratio"]["median"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_table_names_what_was_left_out() {
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkpoint"));
    command.args([
        "bench",
        "--quick",
        "--only",
        "triage,prefill,sessions",
        "--plugins",
        empty,
        "--kv-memory",
        "2MiB",
    ]);
    let output = command.arg("--model").arg(repository("tests/data/qwen3-tiny")).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("not measured: triage: there is no triage.wasm in"), "{table}");
    assert!(table.contains("not measured: sessions, 8 clients: the states of 8 clients need"), "{table}");
    let lines: Vec<&str> = table.lines().collect();
    let header = lines.iter().position(|line| line.starts_with("measure ")).unwrap();
    assert!(lines[header + 1].starts_with("prefill 64, tokens/s"), "{table}");
}

#[test]
fn what_was_measured_before_a_failure_is_written() {
    let plugins = tempfile::tempdir().unwrap();
    std::fs::copy(PLUGINS.path().join("triage.wasm"), plugins.path().join("triage.wasm")).unwrap();
    std::fs::write(plugins.path().join("triage.toml"), "[limits]\ndecisions = 1\n").unwrap();
    let output = bench_with(plugins.path(), &["--json", "-", "--only", "prefill,triage"]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("error: the policy triage failed: error: budget: 1 of 1 questions"),
        "{}",
        stderr(&output)
    );
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(names(&results, "measures", "name"), ["prefill 64", "prefill 256"]);
    assert_eq!(names(&results, "skipped", "measure"), ["what was to follow"]);
    let reason = results["skipped"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("the policy triage failed"), "{reason}");
}

#[test]
fn bad_input_is_told_at_once() {
    for (arguments, message) in [
        (&["--only", "prefil"][..], "invalid value 'prefil' for '--only <MEASURE>'"),
        (&["--only", "prefil"], "[possible values: prefill, decode, decide, triage, sessions, policy]"),
        (&["--against", "llama=nowhere"], "\"nowhere\" is no URL"),
        (&["--against", "ollama=http://127.0.0.1:1"], "\"ollama\" is no peer; there are llama and vllm"),
        (&["--against", "vllm"], "names no URL"),
        (&["--repeat", "0"], "0 is not in 1..=65535"),
        (&["--clients", "0"], "0 is not in 1..=256"),
        (&["--model", "no/such/model"], "no model \"no/such/model\""),
        (&["--context", "64"], "a context of 64 tokens, as forkpoint has it, is too short"),
        // Nobody listens on the discard port.
        (
            &["--against", "llama:q4=http://127.0.0.1:9"],
            "the peer llama:q4 at http://127.0.0.1:9 does not answer",
        ),
    ] {
        let output = if arguments[0] == "--model" {
            Command::new(env!("CARGO_BIN_EXE_forkpoint")).arg("bench").args(arguments).output().unwrap()
        } else {
            bench(arguments)
        };
        assert!(!output.status.success(), "{arguments:?}");
        assert!(stderr(&output).contains(message), "{arguments:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

/// A peer that speaks llama-server's wire and knows nothing: it counts what it is sent.
async fn llama() -> String {
    let completion = |body: String| async move {
        let body: Value = serde_json::from_str(&body).unwrap();
        let (prompt, predict) =
            (body["prompt"].as_array().unwrap().len(), body["n_predict"].as_u64().unwrap());
        let cached = if body["cache_prompt"] == true { prompt - 1 } else { 0 };
        let end = json!({
            "content": "A", "stop": true, "tokens_predicted": predict, "tokens_evaluated": prompt,
            "timings": { "cache_n": cached, "prompt_n": prompt - cached },
        });
        if body["stream"] != true {
            return end.to_string();
        }
        assert_eq!(body["ignore_eos"], true);
        let first = json!({ "content": "A", "stop": false, "tokens_predicted": 1 });
        format!("data: {first}\n\ndata: {end}\n\n")
    };
    let props = json!({
        "total_slots": 1, "default_generation_settings": { "n_ctx": 2048 }, "build_info": "b1-test",
    });
    let router = Router::new()
        .route("/completion", post(completion))
        .route("/props", get(move || async move { props.to_string() }))
        .route("/v1/models", get(|| async { "{}" }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_is_measured_in_turn_and_what_it_lacks_is_said() {
    let url = llama().await;
    let run = move || {
        let (one, other) = (format!("llama:a={url}"), format!("llama:b={url}"));
        bench(&[
            "--against",
            &one,
            "--against",
            &other,
            "--json",
            "-",
            "--clients",
            "1,2",
            "--only",
            "prefill,decide,triage,sessions",
        ])
    };
    let results = results(&tokio::task::spawn_blocking(run).await.unwrap());
    assert_eq!(results["sides"][1]["server"], "b1-test");
    assert_eq!((&results["sides"][2]["slots"], &results["sides"][2]["context"]), (&json!(1), &json!(2048)));
    for measure in results["measures"].as_array().unwrap() {
        let sides = measure["metrics"][0]["sides"].as_array().unwrap();
        assert_eq!(
            sides.iter().map(|side| &side["side"]).collect::<Vec<_>>(),
            ["forkpoint", "llama:a", "llama:b"]
        );
        if measure["name"] == "sessions, 2 clients" {
            assert!(sides[1]["lacks"].as_str().unwrap().starts_with("has 1 slots; -np 2"), "{}", sides[1]);
            assert!(sides[1]["median"].is_null());
            continue;
        }
        let best: Vec<_> = sides.iter().map(|side| side["ratio"]["best_of_its_kind"] == true).collect();
        assert_eq!(best.iter().filter(|&&best| best).count(), 1, "{measure}");
        if measure["measure"] == "decide" {
            let ways: Vec<_> = sides[1]["ways"].as_array().unwrap().iter().map(|way| &way["way"]).collect();
            assert_eq!(ways, ["grammar", "n_probs"]);
            assert!(ways.contains(&&sides[1]["way"]));
        }
        // What the ratio says is what the two medians say.
        let metric = &measure["metrics"][0];
        let median = |side: usize| sides[side]["median"].as_f64().unwrap();
        let expected =
            if metric["higher_is_better"] == true { median(0) / median(1) } else { median(1) / median(0) };
        assert!((sides[1]["ratio"]["median"].as_f64().unwrap() / expected - 1.0).abs() < 1e-9, "{measure}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_the_same_wire_gets_the_same_bodies() {
    // Forkpoint speaks what the bench asks of vLLM, but for prompts of token ids.
    let peer = server::Subject::start().await;
    let against = format!("vllm={}", peer.url(""));
    let run = move || {
        bench(&["--against", &against, "--json", "-", "--clients", "2", "--only", "prefill,decide,sessions"])
    };
    let results = results(&tokio::task::spawn_blocking(run).await.unwrap());
    for measure in results["measures"].as_array().unwrap() {
        let theirs = &measure["metrics"][0]["sides"][1];
        if measure["measure"] == "prefill" {
            assert!(theirs["lacks"].as_str().unwrap().contains("token ids are not supported"), "{theirs}");
        } else {
            assert!(theirs["ratio"]["median"].as_f64().unwrap() > 0.0, "{theirs}");
        }
    }
    assert!(peer.metric("forkpoint_engine_decisions_total", "").await > 0.0);
    peer.stop().await;
}
