//! Ages in tables: `45s`, `5m3s`, `3h`, `2d4h`, as kubectl has always printed them.

use jiff::Timestamp;
use serde_json::Value;

/// A length of time in two or three significant figures.
pub(crate) fn human(seconds: i64) -> String {
    let minutes = seconds / 60;
    let hours = seconds / 3600;
    let pair = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match seconds {
        // Clocks may differ by a little.
        ..=-2 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        120..600 => pair(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => pair(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => pair(hours / 24, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{}d", hours / 24),
        63_072_000..252_288_000 => pair(hours / 24 / 365, "y", hours / 24 % 365, "d"),
        _ => format!("{}y", hours / 24 / 365),
    }
}

/// How long ago a JSON time was, or `<unknown>`.
pub(crate) fn since(time: &Value, now: Timestamp) -> String {
    match time.as_str().and_then(|text| text.parse::<Timestamp>().ok()) {
        Some(time) => human(now.duration_since(time).as_secs()),
        None => "<unknown>".to_owned(),
    }
}

/// The age of an object.
pub(crate) fn of(object: &Value, now: Timestamp) -> String {
    since(super::read::at(object, &["metadata", "creationTimestamp"]), now)
}

/// This moment as objects write it, to the second.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ages_are_printed_as_kubectl_prints_them() {
        for (seconds, text) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (303, "5m3s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (11_000, "3h3m"),
            (28_800, "8h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (180_000, "2d2h"),
            (691_200, "8d"),
            (63_072_000, "2y"),
            (63_172_000, "2y1d"),
            (252_288_000, "8y"),
        ] {
            assert_eq!(human(seconds), text, "{seconds}");
        }
    }

    #[test]
    fn times_that_are_not_there_are_unknown() {
        let now: Timestamp = "2026-01-01T00:05:03Z".parse().unwrap();
        assert_eq!(since(&json!("2026-01-01T00:00:00Z"), now), "5m3s");
        assert_eq!(since(&json!("2026-01-01T00:05:01.000000Z"), now), "2s");
        assert_eq!(since(&json!(null), now), "<unknown>");
        assert_eq!(since(&json!("soon"), now), "<unknown>");
    }
}
