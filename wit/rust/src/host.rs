//! Log, configuration and state: what the host gives besides the engine.

use crate::bindings::forkpoint::policy::host::{self, Level};
use crate::{Error, Result};
use std::fmt::{Debug, Display};
use std::ops::RangeBounds;
use std::str::FromStr;

/// Logs at debug level, under this policy's name.
pub fn debug(message: &str) {
    host::log(Level::Debug, message);
}

/// Logs at info level, under this policy's name.
pub fn info(message: &str) {
    host::log(Level::Info, message);
}

/// Logs a warning under this policy's name.
pub fn warn(message: &str) {
    host::log(Level::Warn, message);
}

/// Logs an error under this policy's name.
pub fn error(message: &str) {
    host::log(Level::Error, message);
}

/// A value of the policy's configuration.
#[must_use]
pub fn config(key: &str) -> Option<String> {
    host::config(key)
}

/// A value of the policy's configuration, or `default` where the key is not set.
///
/// # Errors
/// When the key is set to what is not a `T`: a mistyped threshold is never taken for the default.
pub fn config_or<T: FromStr<Err: Display>>(key: &str, default: T) -> Result<T> {
    parse_or(key, config(key), default)
}

/// A number of the policy's configuration within a range, or `default` where the key is not set:
/// `config_within("deny-at", 0.8, 0.0..=1.0)?`.
///
/// # Errors
/// When the key is set to what is not a `T` of the range. A threshold that is not a number would hold for nothing.
pub fn config_within<T>(key: &str, default: T, range: impl RangeBounds<T> + Debug) -> Result<T>
where
    T: FromStr<Err: Display> + PartialOrd + Display,
{
    within(key, config_or(key, default)?, range)
}

/// The names that a key of the policy's configuration lists with commas between, or those of `default` where the key is
/// not set. Blanks around names and empty names do not count.
#[must_use]
pub fn config_list(key: &str, default: &str) -> Vec<String> {
    list(&config(key).unwrap_or_else(|| default.to_owned()))
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn within<T: PartialOrd + Display>(key: &str, value: T, range: impl RangeBounds<T> + Debug) -> Result<T> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Error::Policy(format!("config {key} = {value}: must lie within {range:?}")))
}

fn parse_or<T: FromStr<Err: Display>>(key: &str, value: Option<String>, default: T) -> Result<T> {
    let Some(value) = value else { return Ok(default) };
    value.trim().parse().map_err(|cause| Error::Policy(format!("config {key} = {value:?}: {cause}")))
}

/// State that all instances of this policy share; it survives reloads of the policy.
pub mod store {
    use crate::bindings::forkpoint::policy::host;
    use crate::{Error, Result};
    use std::time::Duration;

    /// The value under `key`.
    #[must_use]
    pub fn get(key: &str) -> Option<Vec<u8>> {
        host::get(key)
    }

    /// Puts a value under `key`, for `ttl` (in whole seconds, at least one) or until it is replaced.
    ///
    /// # Errors
    /// When the state is full, or the key or value too long.
    pub fn set(key: &str, value: &[u8], ttl: Option<Duration>) -> Result<()> {
        host::set(key, value, ttl.map(seconds)).map_err(Error::Policy)
    }

    /// Adds to the counter under `key`, atomically, and returns its new value. It starts at 0.
    ///
    /// # Errors
    /// When what lies under `key` is no counter, or the state is full.
    pub fn add(key: &str, delta: i64, ttl: Option<Duration>) -> Result<i64> {
        host::add(key, delta, ttl.map(seconds)).map_err(Error::Policy)
    }

    /// What the counter under `key` stands at; 0 where there is none, and where what lies there is no number.
    #[must_use]
    pub fn count(key: &str) -> i64 {
        get(key).map_or(0, |value| number(&value))
    }

    pub(super) fn number(value: &[u8]) -> i64 {
        std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    pub(super) fn seconds(ttl: Duration) -> u32 {
        u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_config_value_is_parsed_or_refused_but_never_ignored() {
        assert_eq!(parse_or("t", None, 0.8).unwrap(), 0.8);
        assert_eq!(parse_or("t", Some(" 0.9 ".into()), 0.8).unwrap(), 0.9);
        let error = parse_or("t", Some("high".into()), 0.8).unwrap_err().to_string();
        assert!(error.contains("config t") && error.contains("high"), "{error}");
    }

    #[test]
    fn a_number_lies_within_its_range() {
        assert_eq!(within("t", 1.0, 0.0..=1.0).unwrap(), 1.0);
        for bad in [1.5, -0.1, f64::NAN, f64::INFINITY] {
            let error = within("t", bad, 0.0..=1.0).unwrap_err().to_string();
            assert_eq!(error, format!("config t = {bad}: must lie within 0.0..=1.0"));
        }
        assert!(within("n", 0, 1..).is_err());
    }

    #[test]
    fn a_list_holds_names_and_no_blanks() {
        assert_eq!(list(" bash, sh ,,exec"), ["bash", "sh", "exec"]);
        assert!(list(" , ").is_empty(), "an empty name is none");
    }

    #[test]
    fn a_counter_is_a_number_or_nothing() {
        assert_eq!((store::number(b"-3"), store::number(b"many"), store::number(b"\xff")), (-3, 0, 0));
    }

    #[test]
    fn a_time_to_live_is_at_least_a_second() {
        assert_eq!(store::seconds(Duration::from_millis(10)), 1);
        assert_eq!(store::seconds(Duration::from_secs(90)), 90);
        assert_eq!(store::seconds(Duration::MAX), u32::MAX);
    }
}
