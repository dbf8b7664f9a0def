//! What is read as a schedule and when it is due; after `parser_test.go` and `spec_test.go` of robfig/cron, which Kubernetes uses.

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::Schedule;

fn next(schedule: &str, zone: &str, after: &str) -> Option<String> {
    let schedule = Schedule::parse(schedule).unwrap();
    let zone = TimeZone::get(zone).unwrap();
    let next = schedule.next(after.parse::<Timestamp>().unwrap(), &zone)?;
    Some(next.to_zoned(zone).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string())
}

#[test]
fn the_next_time_is_after_the_last_one() {
    let rows = [
        // Within the hour, on to the next hour, day, month and year.
        ("0/15 * * * *", "2012-07-09T14:45:00Z", "2012-07-09T15:00:00+00:00"),
        ("0/15 * * * *", "2012-07-09T14:59:59Z", "2012-07-09T15:00:00+00:00"),
        ("20-35/15 * * * *", "2012-07-09T15:45:00Z", "2012-07-09T16:20:00+00:00"),
        ("* * * * *", "2012-07-09T14:59:01Z", "2012-07-09T15:00:00+00:00"),
        ("30 0 9 * *", "2012-07-09T00:30:00Z", "2012-08-09T00:30:00+00:00"),
        ("0 0 1 1 *", "2012-07-09T14:45:00Z", "2013-01-01T00:00:00+00:00"),
        ("@yearly", "2012-07-09T14:45:00Z", "2013-01-01T00:00:00+00:00"),
        ("@monthly", "2012-12-09T14:45:00Z", "2013-01-01T00:00:00+00:00"),
        ("@weekly", "2012-07-09T14:45:00Z", "2012-07-15T00:00:00+00:00"),
        ("@midnight", "2012-07-09T14:45:00Z", "2012-07-10T00:00:00+00:00"),
        ("@hourly", "2012-07-09T14:45:00Z", "2012-07-09T15:00:00+00:00"),
        // Names, in either case.
        ("0 0 * Feb Mon", "2012-07-09T23:35:00Z", "2013-02-04T00:00:00+00:00"),
        ("0 0 * feb,MAR mon-wed", "2012-07-09T23:35:00Z", "2013-02-04T00:00:00+00:00"),
        // A day of the month or of the week, if both are restricted.
        ("0 0 1,15 * Sun", "2012-07-15T00:00:00Z", "2012-07-22T00:00:00+00:00"),
        ("0 0 1,15 * *", "2012-07-14T00:00:00Z", "2012-07-15T00:00:00+00:00"),
        ("0 0 ? * Sun", "2012-07-14T00:00:00Z", "2012-07-15T00:00:00+00:00"),
        // 29 February.
        ("0 0 29 2 *", "2012-07-09T23:35:00Z", "2016-02-29T00:00:00+00:00"),
        ("@every 90m", "2012-07-09T14:45:00Z", "2012-07-09T16:15:00+00:00"),
        ("@every 1h30m0.5s", "2012-07-09T14:45:00.7Z", "2012-07-09T16:15:00+00:00"),
        ("@every 10ms", "2012-07-09T14:45:00Z", "2012-07-09T14:45:01+00:00"),
    ];
    for (schedule, after, expected) in rows {
        assert_eq!(next(schedule, "UTC", after).as_deref(), Some(expected), "{schedule} after {after}");
    }
}

#[test]
fn a_time_that_the_clock_skips_is_not_due_and_one_it_repeats_is_due_twice() {
    let zone = "America/New_York";
    let rows = [
        // 2:30 does not exist on 11 March.
        ("30 2 * * *", "2012-03-11T05:00:00Z", "2012-03-12T02:30:00-04:00"),
        ("0 * * * *", "2012-03-11T06:00:00Z", "2012-03-11T03:00:00-04:00"),
        // 1:30 is there twice on 4 November.
        ("30 1 * * *", "2012-11-04T04:00:00Z", "2012-11-04T01:30:00-04:00"),
        ("30 1 * * *", "2012-11-04T05:30:00Z", "2012-11-04T01:30:00-05:00"),
        ("30 1 * * *", "2012-11-04T06:30:00Z", "2012-11-05T01:30:00-05:00"),
        ("0 9 * * *", "2012-11-04T04:00:00Z", "2012-11-04T09:00:00-05:00"),
    ];
    for (schedule, after, expected) in rows {
        assert_eq!(next(schedule, zone, after).as_deref(), Some(expected), "{schedule} after {after}");
    }
    // Midnight does not exist in São Paulo on 15 October 2017.
    let day = next("0 0 15 10 *", "America/Sao_Paulo", "2017-10-14T12:00:00Z").unwrap();
    assert!(day.starts_with("2018-10-15T00:00:00"), "{day}");
    let noon = next("0 12 15 10 *", "America/Sao_Paulo", "2017-10-14T12:00:00Z").unwrap();
    assert_eq!(noon, "2017-10-15T12:00:00-02:00");
}

#[test]
fn a_day_that_never_comes_has_no_next_time() {
    assert_eq!(next("0 0 30 2 *", "UTC", "2012-07-09T23:35:00Z"), None);
    assert_eq!(next("59 23 31 4 *", "UTC", "2012-07-09T23:35:00Z"), None);
    assert_eq!(next(", * * * *", "UTC", "2012-07-09T23:35:00Z"), None);
}

#[test]
fn what_is_no_schedule_is_refused_with_the_reason() {
    let rows = [
        ("", "empty spec string"),
        ("* * * *", "expected exactly 5 fields, found 4: [* * * *]"),
        ("1 2 3 4 5 6", "expected exactly 5 fields, found 6: [1 2 3 4 5 6]"),
        ("60 * * * *", "end of range (60) above maximum (59): 60"),
        ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
        ("* * * * 7", "end of range (7) above maximum (6): 7"),
        ("5-1 * * * *", "beginning of range (5) beyond end of range (1): 5-1"),
        ("1-2-3 * * * *", "too many hyphens: 1-2-3"),
        ("*/1/2 * * * *", "too many slashes: */1/2"),
        ("*/0 * * * *", "step of range should be a positive number: */0"),
        ("x * * * *", "failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax"),
        ("* * * * */-2", "negative number (-2) not allowed: -2"),
        ("@often", "unrecognized descriptor: @often"),
        ("@every x", "failed to parse duration @every x: time: invalid duration \"x\""),
    ];
    for (schedule, why) in rows {
        let error = Schedule::parse(schedule).expect_err(schedule);
        assert_eq!(error.to_string(), why, "{schedule}");
    }
}
