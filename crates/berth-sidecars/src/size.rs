//! Sizes: Kubernetes' quantities as the bytes CSI speaks of, and back.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A quantity in bytes, rounded up; `None` if it is none, or more than CSI can say.
pub(crate) fn bytes(quantity: &Quantity) -> Option<i64> {
    let text = quantity.0.trim();
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (numerator, denominator) = scale(suffix)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty())
        || fraction.len() > 18
        || !all_digits(whole)
        || !all_digits(fraction)
    {
        return None;
    }
    let places = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let bytes = digits.checked_mul(numerator)?.div_ceil(denominator.checked_mul(places)?);
    i64::try_from(bytes).ok()
}

/// Bytes as Kubernetes writes them: the largest binary unit without a rest.
pub(crate) fn quantity(bytes: i64) -> Quantity {
    const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut value, mut unit) = (bytes, 0);
    while value != 0 && value % 1024 == 0 && unit + 1 < SUFFIXES.len() {
        value /= 1024;
        unit += 1;
    }
    Quantity(format!("{value}{}", SUFFIXES[unit]))
}

fn all_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// What a suffix multiplies with, as a fraction.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    Some(match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "k" => (1_000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let factor = 10_u128.checked_pow(power.unsigned_abs())?;
            if power < 0 { (1, factor) } else { (factor, 1) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_in_all_their_spellings() {
        for (text, expected) in [
            ("1Gi", Some(1 << 30)),
            ("1.5Ki", Some(1536)),
            ("100M", Some(100_000_000)),
            ("1e3", Some(1000)),
            ("5E2", Some(500)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1500m", Some(2)),
            ("0", Some(0)),
            (".5Ki", Some(512)),
            ("8Ei", None),
            ("", None),
            ("-1Gi", None),
            ("1Qi", None),
        ] {
            assert_eq!(bytes(&Quantity(text.to_owned())), expected, "{text:?}");
        }
    }

    #[test]
    fn bytes_are_written_in_the_largest_unit_without_a_rest() {
        for (bytes, expected) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1 << 30, "1Gi"),
            (3 << 29, "1536Mi"),
            ((1 << 30) + 1, "1073741825"),
        ] {
            assert_eq!(quantity(bytes).0, expected);
        }
    }
}
