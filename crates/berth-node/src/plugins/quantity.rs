//! Quantities of resources, such as `500m` or `1Gi`, as exact numbers.

/// Billionths in one.
const NANO: i128 = 1_000_000_000;
/// More than any resource has; larger numbers count as this.
const LARGEST: i128 = i64::MAX as i128 * NANO;

/// A quantity in billionths, rounded up; none if the text is no quantity.
fn nanos(text: &str) -> Option<i128> {
    let (sign, text) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let (base, exponent): (i128, i32) = match unit {
        "Ki" => (2, 10),
        "Mi" => (2, 20),
        "Gi" => (2, 30),
        "Ti" => (2, 40),
        "Pi" => (2, 50),
        "Ei" => (2, 60),
        "n" => (10, -9),
        "u" => (10, -6),
        "m" => (10, -3),
        "" => (10, 0),
        "k" => (10, 3),
        "M" => (10, 6),
        "G" => (10, 9),
        "T" => (10, 12),
        "P" => (10, 15),
        "E" => (10, 18),
        _ => (10, unit.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let digits: String = whole.chars().chain(fraction.chars()).collect();
    let digits = digits.trim_start_matches('0');
    let value: i128 = if digits.is_empty() { 0 } else { digits.get(..digits.len().min(30))?.parse().ok()? };
    let cut = i32::try_from(digits.len().saturating_sub(30)).ok()?;
    let places = i32::try_from(fraction.len()).ok()?;
    let scaled = if base == 2 {
        scale(value.saturating_mul(1_i128 << exponent), 9 + cut - places)
    } else {
        scale(value, exponent.saturating_add(9 + cut - places))
    };
    Some(sign * scaled.min(LARGEST))
}

/// `value * 10^exponent`, rounded up.
fn scale(value: i128, exponent: i32) -> i128 {
    let power = 10_i128.checked_pow(exponent.unsigned_abs());
    match (power, exponent >= 0) {
        (Some(power), true) => value.saturating_mul(power),
        (Some(power), false) => div_ceil(value, power),
        (None, true) if value != 0 => LARGEST,
        (None, true) => 0,
        (None, false) => i128::from(value != 0),
    }
}

/// Divides, rounding up.
pub(super) fn div_ceil(value: i128, by: i128) -> i128 {
    value.div_euclid(by) + i128::from(value.rem_euclid(by) != 0)
}

/// A quantity in whole units, rounded up.
pub(super) fn units(text: &str) -> Option<i128> {
    nanos(text).map(|nanos| div_ceil(nanos, NANO))
}

/// A quantity in thousandths, rounded up.
pub(super) fn thousandths(text: &str) -> Option<i128> {
    nanos(text).map(|nanos| div_ceil(nanos, NANO / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected_units, expected_thousandths) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("500m", 1, 500),
            ("1.5", 2, 1500),
            (".5", 1, 500),
            ("1.", 1, 1000),
            ("100u", 1, 1),
            ("1n", 1, 1),
            ("1Ki", 1024, 1_024_000),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("128974848", 128_974_848, 128_974_848_000),
            ("129e6", 129_000_000, 129_000_000_000),
            ("129M", 129_000_000, 129_000_000_000),
            ("1E", 1_000_000_000_000_000_000, 1_000_000_000_000_000_000_000),
            ("12E-1", 2, 1200),
            ("-2", -2, -2000),
            ("99999999999999999999999999999999999999999", i64::MAX.into(), i128::from(i64::MAX) * 1000),
            ("1e99", i64::MAX.into(), i128::from(i64::MAX) * 1000),
            ("1e-99", 1, 1),
        ] {
            assert_eq!(units(text), Some(expected_units), "{text}");
            assert_eq!(thousandths(text), Some(expected_thousandths), "{text}");
        }
        for text in ["", "x", "1x", "1 Gi", "Gi", "1.2.3", "1e", "--1", "1KiB", "."] {
            assert_eq!(units(text), None, "{text:?}");
        }
    }
}
