//! Schedules of CronJobs: the crontab syntax that Kubernetes takes, and when a schedule is due next.
//!
//! The API server refuses what cannot be read and the controller computes times, so both use this one. Syntax, messages and
//! the rules for changes of the clock are those of the library that Kubernetes uses: a time that a change of the clock skips is
//! not due that day, and one that it repeats is due twice.

#[cfg(test)]
mod tests;

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, Zoned};

use crate::go_duration;

/// A schedule with nothing due for so many years is never due.
const YEARS: i16 = 5;

/// Why a text is no schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadSchedule(String);

/// When something is to be done again and again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule(Rule);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    /// At the minutes whose parts are all in these sets.
    Calendar(Calendar),
    /// Again so long after the last time, in whole seconds.
    Every(Duration),
}

/// The minutes of a crontab line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Calendar {
    minutes: Values,
    hours: Values,
    days: Values,
    months: Values,
    weekdays: Values,
}

/// Which values of one field are meant, a bit for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Values {
    bits: u64,
    /// The field was `*` or `?`: it asks for nothing.
    is_any: bool,
}

/// The values that a field may have, and their names.
struct Bounds {
    min: u32,
    max: u32,
    names: &'static [&'static str],
}

const MINUTES: Bounds = Bounds { min: 0, max: 59, names: &[] };
const HOURS: Bounds = Bounds { min: 0, max: 23, names: &[] };
const DAYS: Bounds = Bounds { min: 1, max: 31, names: &[] };
const MONTHS: Bounds = Bounds {
    min: 1,
    max: 12,
    names: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
};
const WEEKDAYS: Bounds = Bounds { min: 0, max: 6, names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] };

impl Schedule {
    /// Reads five fields of crontab, or a descriptor such as `@hourly` or `@every 90m`.
    pub fn parse(text: &str) -> Result<Self, BadSchedule> {
        if text.is_empty() {
            return Err(BadSchedule("empty spec string".to_owned()));
        }
        let line = match text {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            text if text.starts_with('@') => {
                let Some(every) = text.strip_prefix("@every ") else {
                    return Err(BadSchedule(format!("unrecognized descriptor: {text}")));
                };
                let period = go_duration(every).map_err(|_| {
                    BadSchedule(format!("failed to parse duration {text}: time: invalid duration {every:?}"))
                })?;
                return Ok(Self(Rule::Every(Duration::from_secs(period.as_secs().max(1)))));
            }
            text => text,
        };
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[minutes, hours, days, months, weekdays] = fields.as_slice() else {
            let found = format!("found {}: [{}]", fields.len(), fields.join(" "));
            return Err(BadSchedule(format!("expected exactly 5 fields, {found}")));
        };
        Ok(Self(Rule::Calendar(Calendar {
            minutes: Values::parse(minutes, &MINUTES)?,
            hours: Values::parse(hours, &HOURS)?,
            days: Values::parse(days, &DAYS)?,
            months: Values::parse(months, &MONTHS)?,
            weekdays: Values::parse(weekdays, &WEEKDAYS)?,
        })))
    }

    /// The first time after another at which something is due; `None` if it never is.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match &self.0 {
            Rule::Every(period) => {
                let whole = Timestamp::from_second(after.as_second()).ok()?;
                whole.checked_add(*period).ok()
            }
            Rule::Calendar(calendar) => calendar.next(after, zone),
        }
    }
}

impl Calendar {
    fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let minute = after.as_second().div_euclid(60) + 1;
        let mut time = Timestamp::from_second(minute * 60).ok()?.to_zoned(zone.clone());
        let last_year = time.year() + YEARS;
        while time.year() <= last_year {
            let date = time.date();
            let next = if !self.months.has(date.month()) {
                start_of(date.last_of_month().tomorrow().ok()?, zone)?
            } else if !self.is_day(&time) {
                start_of(date.tomorrow().ok()?, zone)?
            } else if !self.hours.has(time.hour()) {
                later(&time, 60 - i64::from(time.minute()))?
            } else if !self.minutes.has(time.minute()) {
                later(&time, 1)?
            } else {
                return Some(time.timestamp());
            };
            // A day that a change of the clock begins late must not lead back.
            time = if next > time { next } else { later(&time, 1)? };
        }
        None
    }

    /// Both the day of the month and that of the week must match, unless both are restricted: then one is enough.
    fn is_day(&self, time: &Zoned) -> bool {
        let day = self.days.has(time.day());
        let weekday = self.weekdays.has(time.weekday().to_sunday_zero_offset());
        if self.days.is_any || self.weekdays.is_any { day && weekday } else { day || weekday }
    }
}

fn start_of(date: jiff::civil::Date, zone: &TimeZone) -> Option<Zoned> {
    date.to_zoned(zone.clone()).ok()
}

fn later(time: &Zoned, minutes: i64) -> Option<Zoned> {
    time.checked_add(SignedDuration::from_mins(minutes)).ok()
}

impl Values {
    fn has(self, value: i8) -> bool {
        u32::try_from(value).is_ok_and(|value| value < 64 && self.bits & (1 << value) != 0)
    }

    /// Reads a list of ranges.
    fn parse(field: &str, bounds: &Bounds) -> Result<Self, BadSchedule> {
        let mut values = Self { bits: 0, is_any: false };
        for range in field.split(',').filter(|range| !range.is_empty()) {
            let part = Self::parse_range(range, bounds)?;
            values.bits |= part.bits;
            values.is_any |= part.is_any;
        }
        Ok(values)
    }

    /// Reads `*`, `N`, `N-M`, each also with `/STEP`.
    fn parse_range(range: &str, bounds: &Bounds) -> Result<Self, BadSchedule> {
        let mut steps = range.split('/');
        let limits: Vec<&str> = steps.next().unwrap_or_default().split('-').collect();
        let mut is_any = matches!(limits[0], "*" | "?");
        let (start, mut end) = if is_any {
            (bounds.min, bounds.max)
        } else {
            let start = value(limits[0], bounds)?;
            match limits.as_slice() {
                [_] => (start, start),
                [_, end] => (start, value(end, bounds)?),
                _ => return Err(BadSchedule(format!("too many hyphens: {range}"))),
            }
        };
        let mut step = 1;
        if let Some(text) = steps.next() {
            step = integer(text)?;
            // "N/STEP" means "N-MAX/STEP".
            if limits.len() == 1 {
                end = bounds.max;
            }
            is_any &= step <= 1;
        }
        if steps.next().is_some() {
            return Err(BadSchedule(format!("too many slashes: {range}")));
        }
        let (min, max) = (bounds.min, bounds.max);
        if start < min {
            return Err(BadSchedule(format!("beginning of range ({start}) below minimum ({min}): {range}")));
        }
        if end > max {
            return Err(BadSchedule(format!("end of range ({end}) above maximum ({max}): {range}")));
        }
        if start > end {
            let why = format!("beginning of range ({start}) beyond end of range ({end}): {range}");
            return Err(BadSchedule(why));
        }
        if step == 0 {
            return Err(BadSchedule(format!("step of range should be a positive number: {range}")));
        }
        let steps = usize::try_from(step).unwrap_or(usize::MAX);
        let bits = (start..=end).step_by(steps).fold(0, |bits, value| bits | (1_u64 << value));
        Ok(Self { bits, is_any })
    }
}

/// The value that a number or a name means.
fn value(text: &str, bounds: &Bounds) -> Result<u32, BadSchedule> {
    let named = bounds.names.iter().position(|name| name.eq_ignore_ascii_case(text));
    match named.and_then(|position| u32::try_from(position).ok()) {
        Some(position) => Ok(bounds.min + position),
        None => integer(text),
    }
}

fn integer(text: &str) -> Result<u32, BadSchedule> {
    let number: i64 = text.parse().map_err(|_| {
        let why = format!("strconv.Atoi: parsing {text:?}: invalid syntax");
        BadSchedule(format!("failed to parse int from {text}: {why}"))
    })?;
    u32::try_from(number).map_err(|_| BadSchedule(format!("negative number ({number}) not allowed: {text}")))
}
