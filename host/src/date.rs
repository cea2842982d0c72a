//! Dates of the calendar, in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A time's date in UTC, `YYYY-MM-DD` (days to civil date: H. Hinnant, "chrono-compatible low-level date
/// algorithms").
pub(crate) fn date(time: SystemTime) -> String {
    let days = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / 86_400;
    // Counted from 1 March of year 0, so that the leap day ends the year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, wrapped) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year_of_era + wrapped)
}

/// A time in UTC to the millisecond, `YYYY-MM-DDThh:mm:ss.sssZ` (RFC 3339).
pub(crate) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (seconds, ms) = (since.as_secs() % 86_400, since.subsec_millis());
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    format!("{}T{hours:02}:{minutes:02}:{:02}.{ms:03}Z", date(time), seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (1_735_689_599, "2024-12-31"),
            (1_735_689_600, "2025-01-01"),
            (4_107_542_399, "2100-02-28"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), day);
        }
    }

    #[test]
    fn times_are_those_of_the_clock() {
        let time = |ms| timestamp(UNIX_EPOCH + Duration::from_millis(ms));
        assert_eq!(time(951_782_399_007), "2000-02-28T23:59:59.007Z");
        assert_eq!(time(0), "1970-01-01T00:00:00.000Z");
    }
}
