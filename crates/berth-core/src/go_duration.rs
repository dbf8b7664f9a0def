//! Durations as Go programs write them: in flags, and in the schedules of CronJobs.

use std::time::Duration;

/// Parses Go's durations, such as `1m30s`, `1.5h` or `300ms`; a negative one makes no sense where they are used here.
pub fn go_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; write one like 15s, 1m30s or 300ms");
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest.starts_with('-') {
        return Err(format!("{text:?} is negative; the least is 0s"));
    }
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let unit = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(wrong()),
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let part = Duration::try_from_secs_f64(number * unit).map_err(|_| wrong())?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        if tail.is_empty() {
            return Ok(total);
        }
        rest = tail;
    }
}
