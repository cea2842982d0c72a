//! Shares of sessions and calls, as manifests and configurations write them.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A share from 0 to 1. In TOML `true` is 1 and `false` 0.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
pub struct Share(f64);

impl Share {
    /// Nothing.
    pub const NONE: Self = Self(0.0);
    /// Everything.
    pub const ALL: Self = Self(1.0);

    /// The share, from 0 to 1.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }

    /// Whether a hash, even over all 64 bits, falls into the share.
    #[must_use]
    pub fn holds(self, hash: u64) -> bool {
        // 53 bits are what a double can tell apart.
        ((hash >> 11) as f64) < self.0 * (1u64 << 53) as f64
    }
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a share from 0 to 1, true or false")]
        enum Written {
            All(bool),
            Number(f64),
        }
        match Written::deserialize(deserializer)? {
            Written::All(all) => Ok(Self(f64::from(u8::from(all)))),
            Written::Number(share) if (0.0..=1.0).contains(&share) => Ok(Self(share)),
            Written::Number(share) => Err(D::Error::custom(format!("a share is from 0 to 1, got {share}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manifest;
    use super::*;

    #[test]
    fn a_share_holds_its_share_of_hashes() {
        let tenth: Manifest = Manifest::parse("shadow = 0.1").unwrap();
        let share = tenth.shadow.unwrap();
        let hashes = (0..10_000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let held = hashes.filter(|hash| share.holds(*hash)).count();
        assert!((900..1100).contains(&held), "{held}");
        assert!(!Share::NONE.holds(0));
        assert!(Manifest::parse("shadow = true").unwrap().shadow.unwrap().holds(u64::MAX));
    }
}
