//! What an operator sets: for all policies, and for each by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkpoint_engine::Engine;
use serde::{Deserialize, Serialize};

use super::capabilities::{Capabilities, Grant, Names};
use super::limits::{Limits, SomeLimits};
use super::manifest::{Canary, Manifest, values};
use super::share::Share;
use super::signature::Signers;
use crate::journal::Journal;
use crate::traces::Traces;

/// Of so many places, calls in shadow may have one.
const SHADOWS: usize = 4;

/// How the policies of a server are run.
#[derive(Debug, Clone)]
pub struct PolicyOptions {
    /// Where `name.wasm` is dropped, replaced and removed. Need not exist yet.
    pub dir: PathBuf,
    /// The only policy of the directory that is loaded; none loads all.
    pub only: Option<String>,
    /// Where compiled code is kept over restarts; none compiles anew each time.
    pub cache: Option<PathBuf>,
    /// What the operator says of policies by name.
    pub rules: BTreeMap<String, PolicyRules>,
    /// What the operator says of all policies; a rule by name wins.
    pub defaults: PolicyRules,
    /// What manifests may ask for where no rule says otherwise.
    pub ceiling: Limits,
    /// Calls of policies that there may be at once, a quarter of them in shadow. A call keeps its place while the
    /// request's session is opened for it, and until its instance has ended. At most [`Self::MOST_PLACES`].
    pub concurrency: u32,
    /// Instances of stateless policies that may be kept between calls; 0 keeps none. At most [`Self::MOST_WAITING`].
    pub warm_instances: u32,
    /// Instances that may be made ahead of their calls; 0 makes none. At most [`Self::MOST_WAITING`].
    pub ready_instances: u32,
    /// How long a request waits for a place among them before it is [`FaultKind::Busy`](super::FaultKind::Busy).
    pub queue_wait: Duration,
    /// Largest component file, in bytes.
    pub max_file: u64,
    /// Whose signatures of policies count, and whether there must be one.
    pub signers: Signers,
    /// Upstreams that a plan may forward to.
    pub upstreams: BTreeSet<String>,
    /// Models that a plan may name.
    pub models: BTreeSet<String>,
    /// Tools that a plan may mount besides those of the request.
    pub tools: BTreeSet<String>,
    /// The engine that probes are fitted on; none leaves policies without probes.
    pub engine: Option<Engine>,
    /// Where what policies store and which versions have proven themselves is kept over restarts; none keeps it in
    /// memory.
    pub state: Option<PathBuf>,
    /// Where calls in shadow are written down.
    pub journal: Option<Arc<Journal>>,
    /// Where their spans are sent.
    pub traces: Option<Arc<Traces>>,
    /// Where fitted probes are kept over restarts; none fits them anew each time.
    pub probe_cache: Option<PathBuf>,
}

impl PolicyOptions {
    /// Most calls at once.
    pub const MOST_PLACES: u32 = 1_000;

    /// Most instances that wait for calls: each holds memory.
    pub const MOST_WAITING: u32 = 1_000;

    /// Instances made ahead where nobody says otherwise.
    pub(crate) const READY: u32 = 16;

    /// Requests in flight for which there are places where nobody says otherwise.
    pub(crate) const REQUESTS: usize = 256;

    /// Places for so many requests at once, and for the calls in shadow that may run beside them.
    #[must_use]
    pub fn places_for(requests: usize) -> u32 {
        let places = requests.saturating_add(requests.div_ceil(SHADOWS - 1));
        u32::try_from(places).map_or(Self::MOST_PLACES, |places| places.min(Self::MOST_PLACES))
    }

    /// The places that calls in shadow may have.
    pub(super) fn shadow_places(&self) -> usize {
        (self.concurrency as usize).div_ceil(SHADOWS)
    }

    /// The defaults, over a directory.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            only: None,
            cache: None,
            rules: BTreeMap::new(),
            defaults: PolicyRules::default(),
            ceiling: Limits::CEILING,
            concurrency: Self::places_for(Self::REQUESTS),
            warm_instances: 0,
            ready_instances: Self::READY,
            queue_wait: Duration::from_secs(2),
            max_file: 64 << 20,
            signers: Signers::default(),
            upstreams: BTreeSet::new(),
            models: BTreeSet::new(),
            tools: BTreeSet::new(),
            engine: None,
            state: None,
            journal: None,
            traces: None,
            probe_cache: None,
        }
    }

    /// The settings of the policy of that name, with this manifest.
    #[must_use]
    pub fn settings_of(&self, name: &str, manifest: Option<&Manifest>) -> PolicySettings {
        let own = self.rules.get(name).cloned().unwrap_or_default();
        PolicySettings::resolve(manifest, &own, &self.defaults, &self.ceiling)
    }

    /// The most memory that any policy may have.
    pub(super) fn most_memory_mb(&self) -> (&str, u64) {
        let named = self.rules.iter().map(|(name, rules)| (name.as_str(), rules.limits.memory_mb));
        let usual =
            [("the ceiling", Some(self.ceiling.memory_mb)), ("the defaults", self.defaults.limits.memory_mb)];
        let all = named.chain(usual).filter_map(|(name, limit)| Some((name, limit?)));
        all.max_by_key(|(_, limit)| *limit).expect("the ceiling is there")
    }
}

/// What one policy may use and what happens when it fails: its manifest, within what the operator says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicySettings {
    /// What it does, as it says itself.
    pub description: Option<String>,
    /// Bounds of one call.
    pub limits: Limits,
    /// What a fault leads to.
    pub fallback: Fallback,
    /// Capabilities as its manifest asks for them.
    pub asked: Capabilities,
    /// Capabilities as the operator grants them.
    pub granted: Capabilities,
    /// Those that are in both.
    pub capabilities: Capabilities,
    /// Values that the policy reads with `config(key)`.
    pub config: BTreeMap<String, String>,
    /// More model names that it answers, as its manifest asks.
    pub routes: BTreeSet<String>,
    /// The share of sessions that it is asked for without its plan being carried out.
    pub shadow: Option<Share>,
    /// How a new version takes over.
    pub canary: Option<Canary>,
    /// An instance may be called again, where the operator keeps any.
    pub stateless: bool,
    /// Which of the operator's signers signed it; none where it is not signed, or there are no signers.
    pub signed_by: Option<String>,
    /// What its manifest asks for and does not get, for people.
    pub refused: Vec<String>,
}

impl PolicySettings {
    /// What holds for a policy with this manifest, if it has one. The operator's word on the policy itself holds
    /// as it is; where there is none, the manifest's does, up to the ceiling; else the operator's for all policies.
    #[must_use]
    pub fn resolve(
        manifest: Option<&Manifest>,
        own: &PolicyRules,
        usual: &PolicyRules,
        ceiling: &Limits,
    ) -> Self {
        let nothing = Manifest::default();
        let manifest = manifest.unwrap_or(&nothing);
        let defaults = Limits::DEFAULT.with(&usual.limits);
        let most = ceiling.or_more(&defaults);
        let limits = defaults.with(&manifest.limits).at_most(&most).with(&own.limits);
        let asked = match &manifest.capabilities {
            Some(asked) => Capabilities { routes: Names::Only(manifest.routes.clone()), ..asked.clone() },
            None => Capabilities::all(),
        };
        let granted = own.grant.over(&usual.grant.over(&Capabilities::usual_grant()));
        let capabilities = asked.and(&granted);
        let mut refused = [asked.beyond(&granted), manifest.limits.above(&limits)].concat();
        if asked.routes == Names::All {
            let missing = manifest.routes.iter().filter(|route| !granted.routes.has(route));
            refused.extend(missing.map(|route| format!("routes.{route}")));
        }
        let mut config = usual.config.clone();
        config.extend(manifest.config.clone());
        config.extend(own.config.clone());
        let routes = manifest.routes.iter().filter(|route| capabilities.routes.has(route)).cloned().collect();
        Self {
            description: manifest.description.clone(),
            limits,
            fallback: own.fallback.or(manifest.fallback).or(usual.fallback).unwrap_or_default(),
            asked,
            granted,
            capabilities,
            config,
            routes,
            // No share at all is no shadow: the policy decides.
            shadow: own.shadow.or(manifest.shadow).or(usual.shadow).filter(|share| *share > Share::NONE),
            canary: own.canary.or(manifest.canary).or(usual.canary),
            stateless: manifest.stateless,
            signed_by: None,
            refused,
        }
    }

    /// Of the client's headers, those that the policy sees, with names in lower case.
    pub(super) fn visible(&self, headers: &[(String, String)]) -> Vec<(String, String)> {
        let lower = headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone()));
        lower.filter(|(name, _)| self.capabilities.headers.has(name)).collect()
    }
}

/// `[policies.<name>]` of the configuration, and `[plugins.defaults]`: what the operator says of a policy, or of all
/// that have no table of their own.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRules {
    /// Bounds, whatever the manifest says.
    pub limits: SomeLimits,
    /// What a fault leads to, whatever the manifest says.
    pub fallback: Option<Fallback>,
    /// Capabilities that are granted or not.
    pub grant: Grant,
    /// Values over those of the manifest.
    #[serde(deserialize_with = "values")]
    pub config: BTreeMap<String, String>,
    /// As in the manifest.
    pub shadow: Option<Share>,
    /// As in the manifest.
    pub canary: Option<Canary>,
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

    fn rules(text: &str) -> PolicyRules {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn there_is_a_place_for_each_request_beside_those_in_shadow() {
        for (requests, places) in [(1, 2), (8, 11), (256, 342), (750, 1_000), (100_000, 1_000)] {
            let options =
                PolicyOptions { concurrency: PolicyOptions::places_for(requests), ..PolicyOptions::new("x") };
            assert_eq!(options.concurrency, places, "{requests}");
            let left = places as usize - options.shadow_places();
            assert!(left >= requests.min(750), "{requests}: {left}");
        }
        assert_eq!(PolicyOptions::new("x").concurrency, 342);
    }

    #[test]
    fn the_operator_has_the_last_word_and_the_manifest_the_one_before() {
        let manifest = Manifest::parse(
            "fallback = 'next'\n[limits]\ncpu_ms = 500\nmemory_mb = 9000\n[config]\na = 1\nb = 2",
        )
        .unwrap();
        let usual = rules("fallback = 'reject'\n[limits]\ncpu_ms = 50\nforks = 3");
        let own = rules("[limits]\nmemory_mb = 512\n[config]\nb = 'operator'");
        let none = PolicyRules::default();
        let ceiling = Limits::CEILING;
        let settings = PolicySettings::resolve(Some(&manifest), &own, &usual, &ceiling);
        assert_eq!((settings.limits.cpu_ms, settings.limits.forks, settings.limits.memory_mb), (500, 3, 512));
        assert_eq!(settings.fallback, Fallback::Next);
        assert_eq!((settings.config["a"].as_str(), settings.config["b"].as_str()), ("1", "operator"));
        assert_eq!(settings.refused, ["memory_mb = 9000, granted 512"]);
        // Without a word on the policy itself the manifest is held to the ceiling.
        let settings = PolicySettings::resolve(Some(&manifest), &none, &usual, &ceiling);
        assert_eq!(settings.limits.memory_mb, 256);
        // A bare component has what the operator says of all.
        let settings = PolicySettings::resolve(None, &none, &usual, &ceiling);
        assert_eq!((settings.limits.cpu_ms, settings.fallback), (50, Fallback::Reject));
        assert_eq!(settings.capabilities, Capabilities::usual_grant());
    }

    #[test]
    fn a_manifest_with_capabilities_has_no_others() {
        let manifest =
            Manifest::parse("routes = ['a', 'b']\n[capabilities]\nstore = true\nheaders = ['X-A']").unwrap();
        let own = rules("[grant]\nheaders = ['x-a', 'x-b']\nstore = false\nroutes = ['b']");
        let settings =
            PolicySettings::resolve(Some(&manifest), &own, &PolicyRules::default(), &Limits::CEILING);
        let may = &settings.capabilities;
        assert!(may.headers.has("x-a") && !may.headers.has("x-b"));
        assert!(!may.store && !may.generate && !may.upstreams.has("strong"));
        assert_eq!(settings.routes, BTreeSet::from(["b".to_owned()]));
        assert_eq!(settings.refused, ["store", "routes.a"]);
    }

    #[test]
    fn a_guest_sees_only_the_headers_that_it_is_granted() {
        let header = |name: &str| (name.to_owned(), "v".to_owned());
        let headers = [header("X-Tenant"), header("Authorization")];
        let one = rules("[grant]\nheaders = ['x-tenant']");
        let settings = |own| PolicySettings::resolve(None, own, &PolicyRules::default(), &Limits::CEILING);
        assert_eq!(settings(&one).visible(&headers), [header("x-tenant")]);
        assert!(settings(&PolicyRules::default()).visible(&headers).is_empty());
    }

    #[test]
    fn no_share_is_no_shadow() {
        let shadow = |manifest: &str, own: &str| {
            let manifest = Manifest::parse(manifest).unwrap();
            let usual = PolicyRules::default();
            PolicySettings::resolve(Some(&manifest), &rules(own), &usual, &Limits::CEILING).shadow
        };
        assert_eq!(shadow("", ""), None);
        assert!(shadow("shadow = true", "").is_some());
        for off in ["shadow = false", "shadow = 0", "shadow = 0.0"] {
            assert_eq!((shadow(off, ""), shadow("shadow = true", off)), (None, None), "{off}");
        }
    }

    #[test]
    fn a_misspelt_rule_is_refused() {
        for wrong in ["fallbak = 'next'", "fallback = 'none'", "[limits]\ncpu = 5", "[grant]\nstores = true"]
        {
            assert!(toml::from_str::<PolicyRules>(wrong).is_err(), "{wrong}");
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
}
