//! What is counted, and its text for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkpoint_engine::Counters;

use crate::journal::Journal;
use crate::policy::{PolicyStatus, Trace};
use crate::probe::ProbeState;
use crate::traces::Traces;

/// Upper bounds of the latency buckets, in seconds.
const BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Reasons of a policy that have a series of their own.
const MAX_REASONS: usize = 64;

/// What stands for the reasons beyond them.
const OTHER_REASON: &str = "(other)";

#[derive(Debug, Default, Clone)]
struct Histogram {
    /// One a bucket, and the last for what is slower.
    counts: [u64; BUCKETS.len() + 1],
    seconds: f64,
}

/// Counts of one policy.
#[derive(Debug, Default)]
struct PolicyCounts {
    plans: BTreeMap<&'static str, u64>,
    faults: BTreeMap<&'static str, u64>,
    reasons: BTreeMap<String, u64>,
    decisions: u64,
    decided_tokens: u64,
    reused_tokens: u64,
    warm: u64,
    ready: u64,
    cpu_us: u64,
    host_us: u64,
}

#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<(&'static str, u16), u64>,
    latency: BTreeMap<&'static str, Histogram>,
    policies: BTreeMap<String, PolicyCounts>,
    upstreams: BTreeMap<(String, &'static str), u64>,
}

/// Counters of the HTTP side. A request adds to them once, at its end.
#[derive(Debug, Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
    disconnected: AtomicU64,
}

impl Metrics {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Counters stay true even if a thread panicked between two of them.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request is over.
    pub fn request(&self, route: &'static str, status: u16, took: Duration) {
        let seconds = took.as_secs_f64();
        let mut counts = self.counts();
        *counts.requests.entry((route, status)).or_default() += 1;
        let latency = counts.latency.entry(route).or_default();
        let bucket = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        latency.counts[bucket] += 1;
        latency.seconds += seconds;
    }

    /// A client left before its answer was whole.
    pub fn disconnected(&self) {
        self.disconnected.fetch_add(1, Ordering::Relaxed);
    }

    /// A request went through policies.
    pub fn policies(&self, trace: &Trace) {
        let mut counts = self.counts();
        for step in &trace.steps {
            let policy = counts.policies.entry(step.policy.clone()).or_default();
            match (&step.fault, &step.plan) {
                (Some(fault), _) => *policy.faults.entry(fault.kind.code()).or_default() += 1,
                (None, Some(plan)) => *policy.plans.entry(plan.kind()).or_default() += 1,
                (None, None) => {}
            }
            // A policy's words are its own: their number must be bounded here.
            let known = policy.reasons.len() < MAX_REASONS || policy.reasons.contains_key(&step.reason);
            let reason = if known { step.reason.as_str() } else { OTHER_REASON };
            *policy.reasons.entry(reason.to_owned()).or_default() += 1;
            policy.decisions += step.used.decisions;
            policy.decided_tokens += step.used.decided_tokens;
            policy.reused_tokens += step.used.reused_tokens;
            policy.warm += step.used.warm;
            policy.ready += step.used.ready;
            policy.cpu_us += step.used.cpu_us;
            policy.host_us += step.used.host_us;
        }
    }

    /// A request was sent on; `outcome` is `ok` or an error's code.
    pub fn forwarded(&self, upstream: &str, outcome: &'static str) {
        *self.counts().upstreams.entry((upstream.to_owned(), outcome)).or_default() += 1;
    }

    /// Everything, in Prometheus' text format (version 0.0.4).
    #[must_use]
    pub fn render(
        &self,
        engine: &Counters,
        policies: &[PolicyStatus],
        journal: Option<&Journal>,
        traces: Option<&Traces>,
        in_flight: usize,
    ) -> String {
        let mut text = Text::default();
        let counts = self.counts();

        text.head("forkpoint_http_requests_total", "counter", "Requests answered, by route and status.");
        for ((route, status), count) in &counts.requests {
            text.line(
                "forkpoint_http_requests_total",
                &[("route", route), ("status", &status.to_string())],
                *count,
            );
        }
        text.head(
            "forkpoint_http_request_seconds",
            "histogram",
            "From a request's arrival to its answer's end.",
        );
        for (route, latency) in &counts.latency {
            latency.render(&mut text, route);
        }
        text.single("forkpoint_http_in_flight", "gauge", "Requests being answered.", in_flight as u64);
        text.single(
            "forkpoint_http_disconnected_total",
            "counter",
            "Requests whose client left before the answer was whole.",
            self.disconnected.load(Ordering::Relaxed),
        );

        text.head("forkpoint_policy_plans_total", "counter", "Plans that policies returned, by kind.");
        for (name, policy) in &counts.policies {
            for (plan, count) in &policy.plans {
                text.line("forkpoint_policy_plans_total", &[("policy", name), ("plan", plan)], *count);
            }
        }
        text.head(
            "forkpoint_policy_faults_total",
            "counter",
            "Calls of policies that failed, by kind of fault.",
        );
        for (name, policy) in &counts.policies {
            for (fault, count) in &policy.faults {
                text.line("forkpoint_policy_faults_total", &[("policy", name), ("fault", fault)], *count);
            }
        }
        text.head("forkpoint_policy_reasons_total", "counter", "Calls of policies, by the reason given.");
        for (name, policy) in &counts.policies {
            for (reason, count) in &policy.reasons {
                text.line("forkpoint_policy_reasons_total", &[("policy", name), ("reason", reason)], *count);
            }
        }
        let help = "Tokens computed for policies' questions and appended turns.";
        text.head("forkpoint_policy_decided_tokens_total", "counter", help);
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_decided_tokens_total", &[("policy", name)], policy.decided_tokens);
        }
        let help = "Tokens that the sessions held already on which policies asked.";
        text.head("forkpoint_policy_reused_tokens_total", "counter", help);
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_reused_tokens_total", &[("policy", name)], policy.reused_tokens);
        }
        let help = "Calls of policies that found a warm instance.";
        text.head("forkpoint_policy_warm_calls_total", "counter", help);
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_warm_calls_total", &[("policy", name)], policy.warm);
        }
        let help = "Calls of policies whose fresh instance was made before they came.";
        text.head("forkpoint_policy_ready_calls_total", "counter", help);
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_ready_calls_total", &[("policy", name)], policy.ready);
        }
        text.head("forkpoint_policy_decisions_total", "counter", "Questions that policies asked.");
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_decisions_total", &[("policy", name)], policy.decisions);
        }
        text.head("forkpoint_policy_cpu_seconds_total", "counter", "Processor time in policies' own code.");
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_cpu_seconds_total", &[("policy", name)], seconds(policy.cpu_us));
        }
        text.head(
            "forkpoint_policy_host_seconds_total",
            "counter",
            "Time that policies waited for the engine.",
        );
        for (name, policy) in &counts.policies {
            text.line("forkpoint_policy_host_seconds_total", &[("policy", name)], seconds(policy.host_us));
        }
        text.head("forkpoint_policy_serving", "gauge", "1 where a version of the policy is served.");
        for policy in policies {
            let labels = [("policy", policy.name.as_str()), ("version", super::catalog::version(policy))];
            text.line("forkpoint_policy_serving", &labels, u64::from(super::catalog::is_served(policy)));
        }
        let help = "Instances of policies that live: in a call, kept warm for the next, or made ahead of it.";
        text.head("forkpoint_policy_instances", "gauge", help);
        for policy in policies {
            let name = ("policy", policy.name.as_str());
            text.line("forkpoint_policy_instances", &[name, ("state", "running")], policy.running);
            text.line("forkpoint_policy_instances", &[name, ("state", "warm")], policy.warm);
            text.line("forkpoint_policy_instances", &[name, ("state", "ready")], policy.ready);
        }
        text.head("forkpoint_policy_loads_total", "counter", "Versions of a policy that were published.");
        for policy in policies {
            text.line("forkpoint_policy_loads_total", &[("policy", &policy.name)], policy.loads);
        }
        text.head("forkpoint_policy_store_bytes", "gauge", "Bytes of keys and values that a policy keeps.");
        for policy in policies {
            text.line("forkpoint_policy_store_bytes", &[("policy", &policy.name)], policy.store_bytes);
        }
        text.probes(policies);
        text.head(
            "forkpoint_upstream_requests_total",
            "counter",
            "Requests sent on, by upstream and outcome.",
        );
        for ((name, outcome), count) in &counts.upstreams {
            text.line(
                "forkpoint_upstream_requests_total",
                &[("upstream", name), ("outcome", outcome)],
                *count,
            );
        }
        drop(counts);
        if let Some(journal) = journal {
            let (written, lost) = (journal.written(), journal.lost());
            let help = "Records of the journal that are on the disk.";
            text.single("forkpoint_journal_written_total", "counter", help, written);
            let help = "Records of the journal that the disk did not take.";
            text.single("forkpoint_journal_lost_total", "counter", help, lost);
        }
        if let Some(traces) = traces {
            let (sent, lost) = (traces.sent(), traces.lost());
            text.single("forkpoint_traces_sent_total", "counter", "Spans that the collector took.", sent);
            text.single("forkpoint_traces_lost_total", "counter", "Spans that no collector took.", lost);
        }

        for (name, help, value) in [
            ("steps_total", "Steps run.", engine.steps),
            ("prefill_tokens_total", "Tokens of sessions computed.", engine.prefill_tokens),
            ("reused_tokens_total", "Tokens of sessions found in the KV cache.", engine.reused_tokens),
            ("decisions_total", "Questions answered.", engine.decisions),
            ("decided_tokens_total", "Suffix tokens computed for questions.", engine.decided_tokens),
            ("generated_tokens_total", "Tokens generated.", engine.generated_tokens),
            ("studied_tokens_total", "Tokens computed to fit probes.", engine.studied_tokens),
            ("evictions_total", "Pages evicted.", engine.evictions),
        ] {
            text.single(&format!("forkpoint_engine_{name}"), "counter", help, value);
        }
        for (name, help, value) in [
            ("sessions", "Sessions and replies alive.", engine.sessions),
            ("waiting", "Calls that wait or run.", engine.waiting),
            ("pages_held", "Pages held by live sessions.", engine.pages_held),
            ("pages_cached", "Pages kept for reuse.", engine.pages_cached),
            ("pages", "Pages in the arena.", engine.pages_total),
            ("page_bytes", "Bytes of a page, over all layers.", engine.page_bytes),
            (
                "hidden_state_bytes",
                "Bytes of hidden states that probes read, beside the pages.",
                engine.hidden_page_bytes * engine.pages_total,
            ),
        ] {
            text.single(&format!("forkpoint_engine_{name}"), "gauge", help, value);
        }
        text.0
    }
}

impl Histogram {
    fn render(&self, text: &mut Text, route: &str) {
        let mut sum = 0;
        for (bound, count) in BUCKETS.iter().map(f64::to_string).chain(["+Inf".into()]).zip(&self.counts) {
            sum += count;
            text.line("forkpoint_http_request_seconds_bucket", &[("route", route), ("le", &bound)], sum);
        }
        text.line("forkpoint_http_request_seconds_sum", &[("route", route)], self.seconds);
        text.line("forkpoint_http_request_seconds_count", &[("route", route)], sum);
    }
}

fn seconds(microseconds: u64) -> f64 {
    Duration::from_micros(microseconds).as_secs_f64()
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
        self.push(format_args!("{name}{{{}}} {value}\n", labels.join(",")));
    }

    fn probes(&mut self, policies: &[PolicyStatus]) {
        let probes = || {
            policies.iter().flat_map(|policy| {
                policy.probes.iter().map(|(name, probe)| (policy.name.as_str(), name.as_str(), probe))
            })
        };
        self.head(
            "forkpoint_probe_answers_total",
            "counter",
            "Questions that name a probe, by what answered.",
        );
        for (policy, name, probe) in probes() {
            for (rung, count) in &probe.answers {
                let labels = [("policy", policy), ("probe", name), ("rung", *rung)];
                self.line("forkpoint_probe_answers_total", &labels, *count);
            }
        }
        self.head(
            "forkpoint_probe_ready",
            "gauge",
            "1 where the probe is fitted to the examples that are there.",
        );
        for (policy, name, probe) in probes() {
            let ready = u64::from(probe.state == ProbeState::Ready);
            self.line("forkpoint_probe_ready", &[("policy", policy), ("probe", name)], ready);
        }
        self.head(
            "forkpoint_probe_accuracy",
            "gauge",
            "Share of its examples that a probe gets right, cross-validated.",
        );
        for (policy, name, probe) in probes() {
            if let Some(quality) = &probe.quality {
                let labels = [("policy", policy), ("probe", name)];
                self.line("forkpoint_probe_accuracy", &labels, quality.accuracy);
            }
        }
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.push(format_args!("{name} {value}\n"));
    }

    fn push(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.0.write_fmt(line);
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.request("/health", 200, Duration::from_millis(2));
        metrics.request("/health", 200, Duration::from_secs(60));
        metrics.forwarded("a\"b", "ok");
        let text = metrics.render(&Counters { steps: 7, ..Counters::default() }, &[], None, None, 3);
        for line in [
            "forkpoint_http_requests_total{route=\"/health\",status=\"200\"} 2",
            "forkpoint_http_request_seconds_bucket{route=\"/health\",le=\"0.001\"} 0",
            "forkpoint_http_request_seconds_bucket{route=\"/health\",le=\"0.0025\"} 1",
            "forkpoint_http_request_seconds_bucket{route=\"/health\",le=\"+Inf\"} 2",
            "forkpoint_http_request_seconds_count{route=\"/health\"} 2",
            "forkpoint_upstream_requests_total{upstream=\"a\\\"b\",outcome=\"ok\"} 1",
            "forkpoint_engine_steps_total 7",
            "forkpoint_http_in_flight 3",
        ] {
            assert!(text.lines().any(|there| there == line), "{line}\nis not in\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
