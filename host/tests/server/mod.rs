//! A server in this process, on a free port and a random model of a few thousand weights, and a client for it.
#![allow(dead_code, reason = "every test binary compiles all of it and uses some")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forkpoint::config::{Bytes, Config, StateConfig};
use forkpoint::serve::{Server, bind};
use reqwest::header::HeaderMap;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

/// The name that the tiny model is served by.
pub(crate) const MODEL: &str = "qwen3-tiny";

/// A file of the repository's tests.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A server under test.
pub(crate) struct Subject {
    server: Server,
    pub(crate) client: Client,
    pub(crate) plugins: tempfile::TempDir,
}

/// A whole answer.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Subject {
    /// With the defaults.
    pub(crate) async fn start() -> Self {
        Self::configured(|_| {}).await
    }

    /// With the configuration changed, and none of the policies.
    pub(crate) async fn configured(change: impl FnOnce(&mut Config)) -> Self {
        Self::with_policies(&[], change).await
    }

    /// With these components as policies, each under its file's name.
    pub(crate) async fn with_policies(components: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        let plugins = tempfile::tempdir().unwrap();
        for component in components {
            let path = repository(component);
            std::fs::copy(&path, plugins.path().join(path.file_name().unwrap())).unwrap();
        }
        let mut config = Config::default();
        config.server.addr = SocketAddr::from(([127, 0, 0, 1], 0));
        config.model.source = repository("tests/data/qwen3-tiny").to_str().unwrap().to_owned();
        config.model.threads = 1;
        config.model.kv_memory = Bytes(16 << 20);
        config.plugins.dir = plugins.path().to_owned();
        config.plugins.cache = Some(repository("target/test-cache"));
        config.plugins.concurrency = Some(8);
        config.state.dir = Some(StateConfig::MEMORY.into());
        change(&mut config);
        let listener = bind(config.server.addr).await.unwrap();
        let server = Server::start(&config, listener).await.unwrap();
        // The client is built without one of its own; the other tests of this process may have been first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A proxy set up for the machine must not stand between the test and its server.
        let client = Client::builder().no_proxy().build().unwrap();
        Self { server, client, plugins }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.addr())
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.raw(path, body.to_string())
    }

    /// A body that is perhaps no JSON.
    pub(crate) fn raw(&self, path: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
        self.client.post(self.url(path)).header("content-type", "application/json").body(body)
    }

    pub(crate) async fn ask(&self, path: &str, body: Value) -> Answer {
        Answer::of(self.post(path, &body).send().await.unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::of(self.client.get(self.url(path)).send().await.unwrap()).await
    }

    /// One user turn, greedy, short.
    pub(crate) async fn chat(&self, model: &str, text: &str) -> Answer {
        self.ask("/v1/chat/completions", chat_body(model, text)).await
    }

    /// The sum of a metric's series whose labels hold `label`.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.get("/metrics").await.text;
        let lines = text.lines().filter(|line| {
            line.split(['{', ' ']).next() == Some(name) && (label.is_empty() || line.contains(label))
        });
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }

    /// Waits until no session lives and no page is held.
    pub(crate) async fn until_nothing_is_held(&self) {
        for _ in 0..500 {
            let counters = self.server.app().engine.counters();
            if (counters.sessions, counters.pages_held) == (0, 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("still held: {:?}", self.server.app().engine.counters());
    }

    /// Stops it, which must come to an end and leave nothing held.
    pub(crate) async fn stop(self) {
        self.until_nothing_is_held().await;
        tokio::time::timeout(Duration::from_secs(30), self.server.stop()).await.expect("the server hangs");
    }

    /// Stops it with requests still in flight.
    pub(crate) async fn drain(self) {
        tokio::time::timeout(Duration::from_secs(30), self.server.stop()).await.expect("the server hangs");
    }
}

/// One user turn, greedy, short.
pub(crate) fn chat_body(model: &str, text: &str) -> Value {
    json!({
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    })
}

impl Answer {
    pub(crate) async fn of(response: Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await.unwrap();
        Self { status, headers, text }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub(crate) fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// OpenAI's error: status, code, message.
    pub(crate) fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (self.status.as_u16(), text("code"), text("message"))
    }

    /// The events of a stream, the end mark checked and left out.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), "text/event-stream", "{}", self.text);
        let mut data: Vec<&str> = self
            .text
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").expect(event))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.text);
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// The text of a chat stream.
    pub(crate) fn streamed_text(&self) -> String {
        let content =
            |event: &Value| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned();
        self.events().iter().map(content).collect()
    }
}
