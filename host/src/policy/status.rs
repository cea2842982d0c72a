//! A policy as operators see it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::capabilities::Capabilities;
use super::limits::Limits;
use super::loader::LoadCode;
use super::manifest::Canary;
use super::settings::Fallback;
use super::share::Share;
use crate::probe::ProbeStatus;

/// Whether a policy is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyState {
    /// Some version is. The last error, if there is one, is of a newer file.
    Serving,
    /// None is: the file could not be loaded.
    Failed,
    /// None is yet: the file is being loaded.
    Compiling,
    /// None is: the operator switched the policy off.
    Disabled,
}

/// Why the last file of a policy was not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LastError {
    /// The kind, for programs.
    pub code: LoadCode,
    /// One sentence for people.
    pub message: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// A policy as operators see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyStatus {
    /// Its name: the file's, without `.wasm`.
    pub name: String,
    /// Whether it is served.
    pub state: PolicyState,
    /// SHA-256 of the component that is served.
    pub hash: Option<String>,
    /// The first 12 digits of the hash.
    pub version: Option<String>,
    /// The version of the contract (the WIT package) that the component was built against.
    pub contract: Option<String>,
    /// Bytes of the component.
    pub bytes: Option<u64>,
    /// When it was published, in seconds since 1970.
    pub loaded_at: Option<u64>,
    /// Versions published since the server's start.
    pub loads: u64,
    /// Why a later file is not served; none when the last file is.
    pub last_error: Option<LastError>,
    /// Calls since the server's start, over all versions.
    pub calls: u64,
    /// Of those, plans by their kind.
    pub plans: BTreeMap<&'static str, u64>,
    /// Of those, faults by their kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Calls under way, each on an instance of its own.
    pub running: u64,
    /// Instances that are kept for calls to come.
    pub warm: u64,
    /// Instances that were made ahead of their call.
    pub ready: u64,
    /// Bytes of keys and values in its store.
    pub store_bytes: u64,
    /// Which of the operator's signers signed the version that is served; none where it is not signed, or there are no
    /// signers to judge it by.
    pub signed_by: Option<String>,
    /// What it does, as its manifest says.
    pub description: Option<String>,
    /// Capabilities: asked for by the manifest, granted by the operator, and made use of since the server's start.
    pub capabilities: CapabilityStatus,
    /// More model names that it answers.
    pub routes: Vec<String>,
    /// The share of sessions that it is asked for without its plan being carried out.
    pub shadow: Option<Share>,
    /// A new version that is on its trial.
    pub canary: Option<CanaryStatus>,
    /// Bounds of a call.
    pub limits: Limits,
    /// What a fault leads to, and a request while no version serves.
    pub fallback: Fallback,
    /// What its questions may be answered by, by name.
    pub probes: BTreeMap<String, ProbeStatus>,
}

/// What a policy may do, from either side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CapabilityStatus {
    /// By its manifest; everything where it has none.
    pub asked: Capabilities,
    /// By the operator.
    pub granted: Capabilities,
    /// How many calls made use of each, such as `store` or `upstreams.strong`.
    pub used: BTreeMap<String, u64>,
    /// What is asked for by name and not granted, as sentences.
    pub refused: Vec<String>,
}

/// A new version on its trial.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CanaryStatus {
    /// SHA-256 of its component.
    pub hash: String,
    /// The first 12 digits of the hash.
    pub version: String,
    /// Who signed it, as above.
    pub signed_by: Option<String>,
    /// What it is tried on, and what ends the trial.
    #[serde(flatten)]
    pub rule: Canary,
    /// Calls so far.
    pub calls: u64,
    /// Of those, faults.
    pub faults: u64,
}
