//! `strftime_now`: the date, for templates that tell it to the model.

use std::time::SystemTime;

/// What `strftime` was asked for and does not know here.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("strftime_now does not know %{0}")]
pub(super) struct UnknownDirective(char);

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats a time in UTC by C's directives, in English.
///
/// # Errors
/// On a directive that is not known.
pub(super) fn format(time: SystemTime, format: &str) -> Result<String, UnknownDirective> {
    let seconds = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => after.as_secs() as i64,
        Err(before) => -(before.duration().as_secs() as i64),
    };
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let (year, month, day) = date(days);
    let of_year = days - days_before(year);
    let weekday = WEEKDAYS[(days + 4).rem_euclid(7) as usize];
    let name = MONTHS[month as usize - 1];
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next().unwrap_or('%');
        // glibc's "-": no padding.
        let bare = directive == '-';
        if bare {
            directive = characters.next().unwrap_or('-');
        }
        let padded = |number: i64, width: usize| match bare {
            true => number.to_string(),
            false => format!("{number:0width$}"),
        };
        let text = match directive {
            'Y' => year.to_string(),
            'y' => padded(year.rem_euclid(100), 2),
            'm' => padded(month, 2),
            'B' => name.into(),
            'b' | 'h' => name[..3].into(),
            'd' => padded(day, 2),
            'e' => format!("{day:2}"),
            'j' => padded(of_year + 1, 3),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'u' => ((days + 3).rem_euclid(7) + 1).to_string(),
            'w' => (days + 4).rem_euclid(7).to_string(),
            'H' => padded(hour, 2),
            'I' => padded(hour12, 2),
            'M' => padded(minute, 2),
            'S' => padded(second, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            's' => seconds.to_string(),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            other => return Err(UnknownDirective(other)),
        };
        out.push_str(&text);
    }
    Ok(out)
}

/// Year, month and day of a day since 1970, by Howard Hinnant's `civil_from_days`: the year is counted
/// from March, so that the leap day is its last.
fn date(days: i64) -> (i64, i64, i64) {
    const ERA: i64 = 146_097; // days of 400 years
    let from_march = days + 719_468; // 1970-01-01 is so many days after 0000-03-01
    let (era, of_era) = (from_march.div_euclid(ERA), from_march.rem_euclid(ERA));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// Days from 1970 to the first of January of a year.
fn days_before(year: i64) -> i64 {
    let past = year - 1;
    let leaps = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    (year - 1970) * 365 + leaps(past) - leaps(1969)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, directives: &str) -> String {
        format(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), directives).unwrap()
    }

    #[test]
    fn dates_are_the_calendars() {
        assert_eq!(at(0, "%A %F %T %j"), "Thursday 1970-01-01 00:00:00 001");
        assert_eq!(at(951_782_400, "%d %B %Y, %a, %j"), "29 February 2000, Tue, 060");
        assert_eq!(at(1_798_675_199, "%d %b %y %I:%M:%S %p"), "30 Dec 26 11:59:59 PM");
        assert_eq!(at(1_735_603_200, "%-d %-m %e %j %u %w"), "31 12 31 366 2 2");
        assert_eq!(at(4_102_444_800, "%%%Y%n%t%Z%z"), "%2100\n\tUTC+0000");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert_eq!(format(SystemTime::UNIX_EPOCH, "%Q"), Err(UnknownDirective('Q')));
    }
}
