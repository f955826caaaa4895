//! `strftime` for chat templates that print today's date.
//!
//! The time is UTC: engines run in containers without a time zone. An engine in another zone differs for the hours in
//! which the date does.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// The time in a `strftime` format; none when the format has a directive that is not known here.
pub(super) fn format(now: SystemTime, format: &str) -> Option<String> {
    let seconds = now.duration_since(UNIX_EPOCH).ok()?.as_secs();
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
    let day_name = DAYS.get(usize::try_from((days + 4) % 7).ok()?)?;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next()?;
        let padded = directive != '-';
        if !padded {
            directive = chars.next()?;
        }
        let number = match directive {
            'd' => day,
            'm' => month,
            'H' => hour,
            'I' => (hour + 11) % 12 + 1,
            'M' => minute,
            'S' => second,
            'y' => year % 100,
            _ => {
                match directive {
                    'Y' => write!(out, "{year}").ok()?,
                    'B' => out.push_str(month_name),
                    'b' | 'h' => out.push_str(&month_name[..3]),
                    'A' => out.push_str(day_name),
                    'a' => out.push_str(&day_name[..3]),
                    'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                    'F' => write!(out, "{year}-{month:02}-{day:02}").ok()?,
                    'T' => write!(out, "{hour:02}:{minute:02}:{second:02}").ok()?,
                    '%' => out.push('%'),
                    _ => return None,
                }
                continue;
            }
        };
        if padded { write!(out, "{number:02}").ok()? } else { write!(out, "{number}").ok()? }
    }
    Some(out)
}

/// Year, month and day of a day counted from 1970-01-01, by counting eras of 400 years that begin in March.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_printed() {
        for (seconds, pattern, expected) in [
            (1_748_768_703, "%d %b %Y", Some("01 Jun 2025")),
            (1_748_768_703, "%A, %B %-d, %Y %H:%M:%S", Some("Sunday, June 1, 2025 09:05:03")),
            (951_782_400, "%Y-%m-%d", Some("2000-02-29")),
            (4_107_542_399, "%F %T %I%p", Some("2100-02-28 23:59:59 11PM")),
            (0, "%a %y 100%%", Some("Thu 70 100%")),
            (0, "%q", None),
            (0, "%", None),
        ] {
            assert_eq!(format(UNIX_EPOCH + Duration::from_secs(seconds), pattern).as_deref(), expected);
        }
    }
}
