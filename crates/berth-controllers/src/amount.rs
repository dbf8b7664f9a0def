//! Amounts as Kubernetes writes them (`100m`, `2Gi`, `1e3`), read exactly enough to compare and add.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Thousandths of a unit; 0 for what is no quantity, which the API server does not let in.
pub(crate) fn thousandths(quantity: &Quantity) -> i128 {
    parse(&quantity.0).unwrap_or(0)
}

/// Whole units, rounded up.
pub(crate) fn units(quantity: &Quantity) -> i128 {
    let thousandths = thousandths(quantity);
    thousandths.div_euclid(1000) + i128::from(thousandths.rem_euclid(1000) != 0)
}

/// The bytes of `storage` in a list of resources; `None` if it is not listed.
pub(crate) fn storage(resources: Option<&BTreeMap<String, Quantity>>) -> Option<i128> {
    resources?.get("storage").map(units)
}

/// Whether a text is a quantity at all.
pub(crate) fn is_quantity(text: &str) -> bool {
    parse(text).is_some()
}

fn parse(text: &str) -> Option<i128> {
    let (negative, text) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || whole.len() + fraction.len() > 24 {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let places = u32::try_from(fraction.len()).ok()?;
    let (factor, exponent) = scale(suffix)?;
    // In thousandths: digits * factor * 10^(exponent + 3 - places), rounded up.
    let value = digits.checked_mul(factor)?;
    let power = exponent + 3 - i32::try_from(places).ok()?;
    let ten = 10_i128.checked_pow(power.unsigned_abs())?;
    let value = if power >= 0 { value.checked_mul(ten)? } else { (value + ten - 1) / ten };
    Some(if negative { -value } else { value })
}

/// What a suffix multiplies by: a factor, and a power of ten.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => (1, suffix.strip_prefix(['e', 'E'])?.parse().ok().filter(|e: &i32| e.abs() <= 18)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_in_every_spelling() {
        for (text, thousandths) in [
            ("0", 0),
            ("1", 1000),
            ("100m", 100),
            ("1.5", 1500),
            (".5", 500),
            ("2Ki", 2_048_000),
            ("1.5Gi", 1_610_612_736_000),
            ("1e3", 1_000_000),
            ("12E6", 12_000_000_000),
            ("1n", 1),
            ("-1", -1000),
            ("rubbish", 0),
            ("", 0),
        ] {
            assert_eq!(super::thousandths(&Quantity(text.to_owned())), thousandths, "{text}");
        }
        assert_eq!(units(&Quantity("1001m".to_owned())), 2);
    }
}
