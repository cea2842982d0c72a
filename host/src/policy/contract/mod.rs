//! The versions of the contract that are served side by side.
//!
//! The host speaks the newest: its types are what the imports take and a guest's plan arrives in. An older version is
//! an adapter, one file that turns its types into the newest and back. A further version costs its WIT, a file like
//! `v0_2.rs` and an adapter in place of the one that was newest.

mod translate;
mod v0_1;
mod v0_2;

use wasmtime::Store;
use wasmtime::component::{HasSelf, InstancePre, Linker, Resource};

use self::translate::Translate;
pub(super) use self::v0_2::{dispatch, engine, host, types};
use super::guest::{Place, State};

/// Versions of the contract that are served, the newest first. The newest is a trial, which may still change.
pub const CONTRACT_VERSIONS: [&str; 2] = [Version::V0_2.name(), Version::V0_1.name()];

/// One of [`CONTRACT_VERSIONS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V0_1,
    V0_2,
}

impl Version {
    const ALL: [Self; 2] = [Self::V0_2, Self::V0_1];

    /// As packages have it after the `@`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::V0_1 => "0.1.0",
            Self::V0_2 => "0.2.0-trial",
        }
    }

    /// The one that serves a component built against `wanted`: below 1.0 the minor version must agree, and one before
    /// its release, such as a trial, serves itself alone.
    pub(super) fn serving(wanted: &str) -> Option<Self> {
        let track = |version: &str| match version.contains('-') {
            true => Some(version.to_owned()),
            false => version.rsplit_once('.').map(|(track, _)| track.to_owned()),
        };
        Self::ALL.into_iter().find(|version| track(version.name()) == track(wanted))
    }
}

/// Gives a linker the imports of every version.
pub(super) fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    v0_1::Policy::add_to_linker::<State, HasSelf<State>>(linker, |state| state)?;
    v0_2::Policy::add_to_linker::<State, HasSelf<State>>(linker, |state| state)
}

/// A linked component whose exports are those of its version.
#[derive(Clone)]
pub(super) enum Pre {
    V0_1(v0_1::PolicyPre<State>),
    V0_2(v0_2::PolicyPre<State>),
}

impl Pre {
    /// # Errors
    /// When the component does not export the version's `route`.
    pub(super) fn new(pre: InstancePre<State>, version: Version) -> wasmtime::Result<Self> {
        Ok(match version {
            Version::V0_1 => Self::V0_1(v0_1::PolicyPre::new(pre)?),
            Version::V0_2 => Self::V0_2(v0_2::PolicyPre::new(pre)?),
        })
    }

    /// A fresh instance.
    ///
    /// # Errors
    /// What ended the component's own start, or the limit that it met.
    pub(super) async fn instantiate(&self, store: &mut Store<State>) -> wasmtime::Result<Guest> {
        Ok(match self {
            Self::V0_1(pre) => Guest::V0_1(pre.instantiate_async(store).await?),
            Self::V0_2(pre) => Guest::V0_2(pre.instantiate_async(store).await?),
        })
    }
}

/// An instance, ready for one call.
pub(super) enum Guest {
    V0_1(v0_1::Policy),
    V0_2(v0_2::Policy),
}

impl Guest {
    /// Calls `route`. The inner error is the policy's own.
    ///
    /// # Errors
    /// What ended the call.
    pub(super) async fn route(
        &self,
        store: &mut Store<State>,
        request: types::Request,
        session: Resource<Place>,
    ) -> wasmtime::Result<Result<dispatch::Routing, String>> {
        match self {
            Self::V0_1(guest) => {
                let routed = guest.call_route(store, &request.translate(), session).await?;
                Ok(routed.map(Translate::translate))
            }
            Self::V0_2(guest) => guest.call_route(store, &request, session).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_tools::CONTRACTS;

    #[test]
    fn a_component_is_served_by_its_minor_version_and_a_trial_by_itself() {
        assert_eq!(Version::serving("0.1.0"), Some(Version::V0_1));
        assert_eq!(Version::serving("0.1.7"), Some(Version::V0_1));
        assert_eq!(Version::serving("0.2.0-trial"), Some(Version::V0_2));
        for other in [
            "0.2.0",
            "0.2.1",
            "0.2.0-trial.2",
            "0.2.1-trial",
            "0.1.0-trial",
            "0.3.0",
            "1.1.0",
            "0.10.0",
            "0",
            "",
            "x",
        ] {
            assert_eq!(Version::serving(other), None, "{other}");
        }
    }

    #[test]
    fn every_version_has_the_package_that_it_says() {
        assert_eq!(CONTRACTS.map(|(version, _)| version), CONTRACT_VERSIONS);
        for (version, wit) in CONTRACTS {
            assert_eq!(Version::serving(version).map(Version::name), Some(version));
            let package = format!("\npackage forkpoint:policy@{version};\n");
            assert!(wit.contains(&package), "{package}");
        }
    }
}
