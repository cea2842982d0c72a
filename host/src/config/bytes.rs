//! Sizes, as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// A number of bytes, written `1073741824`, `"1GiB"`, `"512 MB"` or `"1.5G"` (G and GiB are 2^30, GB is 10^9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a size; write it like 1073741824, 512MiB or 1GiB");
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(wrong()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Self).ok_or_else(wrong);
        }
        let part: f64 = number.parse().map_err(|_| wrong())?;
        let bytes = part * factor as f64;
        // Beyond 2^53 the fraction is noise, and no machine has it.
        if bytes < 9e15 { Ok(Self(bytes as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 >= 1 << shift {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                let decimals = usize::from(!self.0.is_multiple_of(1 << shift));
                return write!(formatter, "{value:.decimals$} {unit}");
            }
        }
        write!(formatter, "{} B", self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;

        impl serde::de::Visitor<'_> for BytesVisitor {
            type Value = Bytes;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number of bytes or a size such as \"1GiB\"")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Bytes, E> {
                u64::try_from(value).map(Bytes).map_err(|_| E::custom("a size must not be negative"))
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Bytes, E> {
                Ok(Bytes(value))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(BytesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        let cases = [
            ("1073741824", 1 << 30, "1 GiB"),
            ("1GiB", 1 << 30, "1 GiB"),
            ("1.5g", 3 << 29, "1.5 GiB"),
            (" 512 MB ", 512_000_000, "488.3 MiB"),
            ("10k", 10 << 10, "10 KiB"),
            ("7", 7, "7 B"),
        ];
        for (text, bytes, shown) in cases {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
            assert_eq!(Bytes(bytes).to_string(), shown);
        }
        for bad in ["", "GiB", "1 parsec", "-1", "1.2.3", "99999999T"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }
}
