//! Policies from outside: files in a directory, a real engine on a tiny random model, and what comes of requests.
//!
//! `tests/fixtures/scripted.wasm` does what the request's last turn says; its README lists the commands.
//! `trial.core.wat` there does so against the trial of the next contract.

mod contracts;
mod faults;
mod fuzz;
mod loading;
mod opening;
mod plans;
mod platform;
mod ready;
mod reload;
mod signatures;
mod warm;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint::guest_tools::{Wit, componentize};
use forkpoint::policy::{
    Fault, GeneratePlan, Opening, Plan, Policies, PolicyOptions, PolicyRules, PolicyStatus, RouteRequest,
    Routed,
};
use forkpoint_engine::{Conversation, Engine, Message, Options, Role};
use tempfile::TempDir;

/// A server's policies and its engine.
struct Bench {
    dir: TempDir,
    engine: Engine,
    policies: Arc<Policies>,
}

impl Bench {
    /// Starts with copies of these fixtures in the directory, `name=file` each.
    async fn start(files: &[&str], change: impl FnOnce(&mut PolicyOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let (name, source) = file.split_once('=').unwrap_or((file, file));
            fs::copy(fixture(source), dir.path().join(format!("{name}.wasm"))).unwrap();
        }
        Self::over(dir, change).await
    }

    /// Starts over a directory that is filled already.
    async fn over(dir: TempDir, change: impl FnOnce(&mut PolicyOptions)) -> Self {
        let engine = Engine::start(&root().join("tests/data/qwen3-tiny"), &Options::default()).unwrap();
        let mut options = PolicyOptions::new(dir.path());
        change(&mut options);
        let policies = Policies::start(options).await.unwrap();
        Self { dir, engine, policies }
    }

    /// Sends a request through a chain.
    async fn route(&self, chain: &[&str], request: RouteRequest) -> Routed {
        let conversation = Conversation { messages: request.messages.clone(), tools: Vec::new() };
        let engine = self.engine.clone();
        let session = Opening::new(async move { engine.open(conversation, "").await });
        let chain: Vec<String> = chain.iter().map(|&name| name.to_owned()).collect();
        self.policies.route(&chain, request, session).await
    }

    /// Runs a script in a policy.
    async fn run(&self, policy: &str, script: &str) -> Routed {
        self.route(&[policy], say(script)).await
    }

    /// Runs a script that ends with `echo`, and gives the notes.
    async fn notes(&self, policy: &str, script: &str) -> String {
        text(&self.run(policy, &format!("{script}\necho")).await)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.wasm"))
    }

    fn status(&self, name: &str) -> PolicyStatus {
        self.policies.get(name).unwrap_or_else(|| panic!("no policy {name}"))
    }

    /// Puts bytes in place of a policy in one step, as a careful tool does.
    fn replace(&self, name: &str, bytes: &[u8]) {
        let new = self.dir.path().join(".new");
        fs::write(&new, bytes).unwrap();
        fs::rename(new, self.path(name)).unwrap();
    }

    /// Ends the policies and checks that every page and session came back to the engine.
    async fn end(self) {
        self.policies.stop().await;
        eventually("every session and page is given back", || {
            let counters = self.engine.counters();
            counters.sessions == 0 && counters.pages_held == 0 && counters.waiting == 0
        })
        .await;
        self.engine.stop();
    }
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(format!("{name}.wasm"))
}

/// The policy for the trial of contract 0.2.
fn trial() -> Vec<u8> {
    let core = fs::read(root().join("tests/fixtures/trial.core.wat")).unwrap();
    componentize(&core, false, Wit::of("0.2.0-trial").unwrap()).unwrap()
}

/// A request whose last turn says this.
fn say(text: &str) -> RouteRequest {
    RouteRequest {
        id: "test".into(),
        model: "auto".into(),
        messages: vec![Message::new(Role::User, text)],
        ..RouteRequest::default()
    }
}

/// Rules for the one policy that a test is about.
fn with(rules: PolicyRules) -> impl FnOnce(&mut PolicyOptions) {
    move |options| options.defaults = rules
}

/// The reply of a plan that is one.
fn text(routed: &Routed) -> String {
    match &routed.plan {
        Plan::Reply(text) => text.clone(),
        plan => panic!("{} ({}), {:?}", plan.kind(), routed.reason, routed.trace.fault()),
    }
}

fn generated(routed: &Routed) -> &GeneratePlan {
    match &routed.plan {
        Plan::Generate(plan) => plan,
        plan => panic!("{} ({}), {:?}", plan.kind(), routed.reason, routed.trace.fault()),
    }
}

fn fault(routed: &Routed) -> &Fault {
    routed.trace.fault().unwrap_or_else(|| panic!("no fault, but {} ({})", routed.plan.kind(), routed.reason))
}

/// Whether the request's session holds its one turn and no more; it may never have been needed.
fn untouched(routed: &Routed) -> bool {
    routed.session.session().is_none_or(|session| session.conversation().messages.len() == 1)
}

/// Waits for what happens soon.
async fn eventually(what: &str, mut happens: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !happens() {
        assert!(start.elapsed() < Duration::from_secs(30), "not in 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    start.elapsed()
}
