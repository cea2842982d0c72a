//! What an operator sets: for all policies, and for each by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use forkpoint_engine::Engine;
use serde::{Deserialize, Serialize};

/// How the policies of a server are run.
#[derive(Debug, Clone)]
pub struct PolicyOptions {
    /// Where `name.wasm` is dropped, replaced and removed. Need not exist yet.
    pub dir: PathBuf,
    /// Where compiled code is kept over restarts; none compiles anew each time.
    pub cache: Option<PathBuf>,
    /// Settings of policies that the operator named.
    pub settings: BTreeMap<String, PolicySettings>,
    /// Settings of every other policy.
    pub defaults: PolicySettings,
    /// Requests that may be inside policies at once: the size of the instance pool.
    pub concurrency: u32,
    /// How long a request waits for a place among them before it is [`FaultKind::Busy`](super::FaultKind::Busy).
    pub queue_wait: Duration,
    /// Largest component file, in bytes.
    pub max_file: u64,
    /// Upstreams that a plan may forward to.
    pub upstreams: BTreeSet<String>,
    /// Models that a plan may name.
    pub models: BTreeSet<String>,
    /// Tools that a plan may mount besides those of the request.
    pub tools: BTreeSet<String>,
    /// The engine that probes are fitted on; none leaves policies without probes.
    pub engine: Option<Engine>,
    /// Where fitted probes are kept over restarts; none fits them anew each time.
    pub probe_cache: Option<PathBuf>,
}

impl PolicyOptions {
    /// The defaults, over a directory.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            cache: None,
            settings: BTreeMap::new(),
            defaults: PolicySettings::default(),
            concurrency: 64,
            queue_wait: Duration::from_secs(2),
            max_file: 64 << 20,
            upstreams: BTreeSet::new(),
            models: BTreeSet::new(),
            tools: BTreeSet::new(),
            engine: None,
            probe_cache: None,
        }
    }

    /// The settings of the policy of that name.
    #[must_use]
    pub fn settings_of(&self, name: &str) -> &PolicySettings {
        self.settings.get(name).unwrap_or(&self.defaults)
    }
}

/// `[policies.<name>]` of the configuration: what one policy may use and what happens when it fails.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicySettings {
    /// Bounds of one call.
    pub limits: Limits,
    /// What a fault leads to.
    pub fallback: Fallback,
    /// Names of the client's headers that the policy sees, in any case.
    pub headers: Vec<String>,
    /// Values that the policy reads with `config(key)`.
    pub config: BTreeMap<String, String>,
}

/// Bounds of one call of a policy. Those on questions, tokens and forks answer the guest with
/// `failure.budget`; the others end the call with the fault of their name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Milliseconds of processor time in the guest's own code. Waiting for the engine is free.
    pub cpu_ms: u64,
    /// Milliseconds from the call's start to its end, waiting for the engine included.
    pub wall_ms: u64,
    /// MiB of linear memory, all memories of the component together.
    pub memory_mb: u64,
    /// Calls of imported functions.
    pub calls: u64,
    /// Questions asked.
    pub decisions: u64,
    /// Tokens computed for questions and for turns that the policy appends.
    pub decided_tokens: u64,
    /// Tokens of drafts.
    pub generated_tokens: u64,
    /// Forks made.
    pub forks: u64,
    /// Lines that reach the log; more are counted and dropped.
    pub log_lines: u64,
    /// Bytes of keys and values kept in the policy's store, all its calls together.
    pub store_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu_ms: 100,
            wall_ms: 10_000,
            memory_mb: 64,
            calls: 10_000,
            decisions: 64,
            decided_tokens: 16_384,
            generated_tokens: 1_024,
            forks: 64,
            log_lines: 100,
            store_bytes: 1 << 20,
        }
    }
}

impl Limits {
    /// The memory bound in bytes.
    pub(super) fn memory(&self) -> usize {
        usize::try_from(self.memory_mb.saturating_mul(1 << 20)).unwrap_or(usize::MAX)
    }

    pub(super) fn cpu(&self) -> Duration {
        Duration::from_millis(self.cpu_ms)
    }

    pub(super) fn wall(&self) -> Duration {
        Duration::from_millis(self.wall_ms)
    }
}

/// What happens to a request whose policy failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    /// The request's model answers, as if no policy had been asked.
    #[default]
    Generate,
    /// The next policy of the chain is asked.
    Next,
    /// The client gets 503 with the code `policy-failed`.
    Reject,
}

/// Whether a file's stem is a policy's name: 1 to 64 of `a-z`, `0-9`, `-` and `_`, the first of them a letter
/// or digit. Names stand in URLs, headers and metrics.
#[must_use]
pub fn is_policy_name(name: &str) -> bool {
    let word = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=64).contains(&name.len())
        && name.bytes().next().is_some_and(word)
        && name.bytes().all(|c| word(c) || c == b'-' || c == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_misspelt_ones_refused() {
        let toml = r#"
            fallback = "reject"
            headers = ["X-Tenant"]
            [limits]
            cpu_ms = 5
            [config]
            threshold = "0.8"
        "#;
        let settings: PolicySettings = toml::from_str(toml).unwrap();
        assert_eq!(settings.fallback, Fallback::Reject);
        assert_eq!((settings.limits.cpu_ms, settings.limits.wall_ms), (5, 10_000));
        assert_eq!(settings.config["threshold"], "0.8");
        for wrong in ["fallbak = 'next'", "fallback = 'none'", "[limits]\ncpu = 5", "[limits]\ncpu_ms = -1"] {
            assert!(toml::from_str::<PolicySettings>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_are_those_that_fit_a_url_and_a_metric() {
        for good in ["auto", "shell-gate", "v2_b", "0", &"a".repeat(64)] {
            assert!(is_policy_name(good), "{good}");
        }
        for bad in ["", "-a", "_a", "Auto", "a b", "a/b", "../a", "é", ".hidden", &"a".repeat(65)] {
            assert!(!is_policy_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_policy_without_settings_of_its_own_has_the_defaults() {
        let mut options = PolicyOptions::new("plugins");
        options
            .settings
            .insert("auto".into(), PolicySettings { fallback: Fallback::Next, ..Default::default() });
        assert_eq!(options.settings_of("auto").fallback, Fallback::Next);
        assert_eq!(options.settings_of("other"), &PolicySettings::default());
    }
}
