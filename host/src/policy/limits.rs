//! Bounds of one call of a policy: those in force, and those that a manifest or an operator names.

use std::time::Duration;

use serde::{Deserialize, Serialize};

macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $name:ident = $default:literal, at most $ceiling:literal;)+) => {
        /// Bounds of one call of a policy. Those on questions, tokens and forks answer the guest with
        /// `failure.budget`; the others end the call with the fault of their name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        pub struct Limits {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        /// The bounds that someone names; the others are someone else's to name.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct SomeLimits {
            $($(#[doc = $doc])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<u64>,)+
        }

        impl Limits {
            /// What holds where nobody says anything.
            pub const DEFAULT: Self = Self { $($name: $default,)+ };

            /// What a manifest may ask for where the operator says nothing.
            pub const CEILING: Self = Self { $($name: $ceiling,)+ };

            /// These, with what `over` names in their place.
            #[must_use]
            pub fn with(self, over: &SomeLimits) -> Self {
                Self { $($name: over.$name.unwrap_or(self.$name),)+ }
            }

            /// These, but none above that of `ceiling`.
            #[must_use]
            pub fn at_most(self, ceiling: &Self) -> Self {
                Self { $($name: self.$name.min(ceiling.$name),)+ }
            }

            /// The larger of each.
            #[must_use]
            pub fn or_more(self, other: &Self) -> Self {
                Self { $($name: self.$name.max(other.$name),)+ }
            }
        }

        impl SomeLimits {
            /// Those that ask for more than `granted`, as sentences.
            #[must_use]
            pub fn above(&self, granted: &Limits) -> Vec<String> {
                let mut above = Vec::new();
                $(if let Some(asked) = self.$name.filter(|asked| *asked > granted.$name) {
                    above.push(format!("{} = {asked}, granted {}", stringify!($name), granted.$name));
                })+
                above
            }

            /// The first that is 0, where that would leave a policy nothing to run with.
            pub(crate) fn useless(&self) -> Option<&'static str> {
                let needed = ["cpu_ms", "wall_ms", "memory_mb", "calls"];
                let zero = [$((stringify!($name), self.$name == Some(0)),)+];
                zero.into_iter().find(|(name, zero)| *zero && needed.contains(name)).map(|(name, _)| name)
            }
        }
    };
}

limits! {
    /// Milliseconds of processor time in the guest's own code. Waiting for the engine is free.
    cpu_ms = 100, at most 1_000;
    /// Milliseconds from the call's start to its end, waiting for the engine included, but for the opening of the
    /// request's session.
    wall_ms = 10_000, at most 60_000;
    /// MiB of linear memory, all memories of the component together.
    memory_mb = 64, at most 256;
    /// Calls of imported functions.
    calls = 10_000, at most 100_000;
    /// Questions asked.
    decisions = 64, at most 1_024;
    /// Tokens computed for questions and for turns that the policy appends.
    decided_tokens = 16_384, at most 131_072;
    /// Tokens of drafts.
    generated_tokens = 1_024, at most 16_384;
    /// Forks made.
    forks = 64, at most 1_024;
    /// Lines that reach the log; more are counted and dropped.
    log_lines = 100, at most 1_000;
    /// Bytes of keys and values kept in the policy's store, all its calls together.
    store_bytes = 1_048_576, at most 16_777_216;
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_holds_and_never_above_the_ceiling() {
        let asked: SomeLimits = toml::from_str("cpu_ms = 5\nmemory_mb = 9000").unwrap();
        let limits = Limits::DEFAULT.with(&asked).at_most(&Limits::CEILING);
        assert_eq!((limits.cpu_ms, limits.wall_ms, limits.memory_mb), (5, 10_000, 256));
        assert_eq!(asked.above(&limits), ["memory_mb = 9000, granted 256"]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for wrong in ["cpu = 5", "cpu_ms = -1", "cpu_ms = '5'"] {
            assert!(toml::from_str::<SomeLimits>(wrong).is_err(), "{wrong}");
        }
        let none = SomeLimits { wall_ms: Some(0), ..SomeLimits::default() };
        assert_eq!(none.useless(), Some("wall_ms"));
        assert_eq!(SomeLimits { decisions: Some(0), ..SomeLimits::default() }.useless(), None);
    }
}
