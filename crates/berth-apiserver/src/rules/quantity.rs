//! Quantities: `10Gi`, `0.5`, `100m`, `1e3`, read and written as Kubernetes does.
//!
//! The server rewrites what clients send: `1024Mi` is stored as `1Gi`, `0.5` as `500m`. A value is kept in billionths,
//! which is the smallest amount Kubernetes knows.

use std::cmp::Ordering;
use std::fmt;

use serde_json::Value;

const NANO: i128 = 1_000_000_000;
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
// More digits than this cannot be told apart from the largest amount.
const DIGITS: usize = 38;

/// Why a text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text has another shape.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    /// The suffix is not known.
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Binary,
    Decimal,
    Exponent,
}

/// An amount with the notation it was written in.
#[derive(Clone, Debug)]
pub struct Quantity {
    nanos: i128,
    format: Format,
    // Some spellings count as canonical and are kept (`1.500`, `+1`).
    written: Option<String>,
}

impl Quantity {
    /// Reads a quantity.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        let parts = Parts::split(text)?;
        let (format, base10, base2) = interpret(parts.suffix).ok_or(QuantityError::Suffix)?;
        let digits = format!("{}{}", parts.whole, parts.fraction);
        let scale = base10 - i32::try_from(parts.fraction.len()).unwrap_or(i32::MAX);
        let mut nanos = scaled(&digits, scale, base2);
        let mut kept_format = format;
        if format == Format::Binary {
            nanos = nanos.min(i128::from(i64::MAX) * NANO);
            if nanos > 0 && nanos < NANO {
                kept_format = Format::Decimal;
            }
        }
        if parts.negative {
            nanos = -nanos;
        }
        let written = keeps_spelling(text, &parts, &digits, format, scale, base2).then(|| text.to_owned());
        Ok(Self { nanos, format: kept_format, written })
    }

    /// Reads a quantity from a JSON string or number.
    pub fn from_value(value: &Value) -> Result<Self, QuantityError> {
        match value {
            Value::String(text) => Self::parse(text),
            Value::Number(number) => Self::parse(&number.to_string()),
            _ => Err(QuantityError::Format),
        }
    }

    /// Zero, as absent amounts count.
    pub fn zero() -> Self {
        Self { nanos: 0, format: Format::Decimal, written: None }
    }

    /// The amount in whole units, rounded away from zero, as sizes are.
    pub fn value(&self) -> i64 {
        clamp(divide(self.nanos, NANO))
    }

    /// The amount in thousandths, rounded away from zero.
    pub fn milli_value(&self) -> i64 {
        clamp(divide(self.nanos, NANO / 1000))
    }

    /// Whether it is less than zero.
    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }

    /// Whether it is more than zero.
    pub fn is_positive(&self) -> bool {
        self.nanos > 0
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(written) = &self.written {
            return f.write_str(written);
        }
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let whole = self.nanos / NANO;
        let exact = self.nanos % NANO == 0;
        if self.format == Format::Binary && exact && whole.abs() >= 1024 {
            let mut amount = whole;
            let mut step = 0;
            while amount % 1024 == 0 && step + 1 < BINARY.len() {
                amount /= 1024;
                step += 1;
            }
            return write!(f, "{amount}{}", BINARY[step]);
        }
        let mut amount = self.nanos;
        let mut exponent = -9;
        while amount % 1000 == 0 && (exponent < 18 || self.format == Format::Exponent) {
            amount /= 1000;
            exponent += 3;
        }
        if self.format == Format::Exponent {
            return if exponent == 0 { write!(f, "{amount}") } else { write!(f, "{amount}e{exponent}") };
        }
        let suffix = DECIMAL.iter().find(|(_, e)| *e == exponent).map_or("", |(s, _)| s);
        write!(f, "{amount}{suffix}")
    }
}

/// Rewrites a JSON quantity in its canonical spelling; leaves alone what is no quantity.
pub fn canonicalise(value: &mut Value) {
    if let Ok(quantity) = Quantity::from_value(value) {
        *value = Value::String(quantity.to_string());
    }
}

/// Rewrites every quantity of a resource list (`{"storage": "1024Mi"}`).
///
/// What is finer than a thousandth is rounded up, as the server does for lists but not for single quantities.
pub fn canonicalise_list(owner: &mut serde_json::Map<String, Value>, list: &str) {
    const MILLI: i128 = NANO / 1000;
    let Some(Value::Object(map)) = owner.get_mut(list) else { return };
    for value in map.values_mut() {
        let Ok(mut quantity) = Quantity::from_value(value) else { continue };
        if quantity.nanos % MILLI != 0 {
            quantity.nanos = divide(quantity.nanos, MILLI).saturating_mul(MILLI);
            quantity.written = None;
        }
        *value = Value::String(quantity.to_string());
    }
}

struct Parts<'a> {
    negative: bool,
    whole: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

impl<'a> Parts<'a> {
    fn split(text: &'a str) -> Result<Self, QuantityError> {
        if text.is_empty() {
            return Err(QuantityError::Format);
        }
        let (negative, rest) = match text.as_bytes()[0] {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
        let rest = rest.trim_start_matches('0');
        let end = digits(rest);
        let (whole, rest) = rest.split_at(end);
        let (fraction, rest) = match rest.strip_prefix('.') {
            Some(rest) => rest.split_at(digits(rest)),
            None => ("", rest),
        };
        let whole = if whole.is_empty() { "0" } else { whole };
        let letters = rest.bytes().take_while(|b| b"eEinumkKMGTP".contains(b)).count();
        let tail = &rest[letters..];
        let number = tail.strip_prefix(['-', '+']).unwrap_or(tail);
        if !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(QuantityError::Format);
        }
        Ok(Self { negative, whole, fraction, suffix: rest })
    }
}

/// The notation of a suffix with its power of ten and its power of two.
fn interpret(suffix: &str) -> Option<(Format, i32, u32)> {
    if let Some((_, exponent)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
        return Some((Format::Decimal, *exponent, 0));
    }
    if let Some(step) = BINARY.iter().position(|s| *s == suffix) {
        return Some((Format::Binary, 0, u32::try_from(step).ok()? * 10));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    Some((Format::Exponent, exponent.strip_prefix('+').unwrap_or(exponent).parse().ok()?, 0))
}

/// `digits` times ten to the `scale` times two to the `shift`, in billionths, rounded away from zero.
fn scaled(digits: &str, scale: i32, shift: u32) -> i128 {
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return 0;
    }
    let Ok(mut amount) = digits[..digits.len().min(DIGITS)].parse::<i128>() else {
        return i128::MAX;
    };
    let dropped = i32::try_from(digits.len().saturating_sub(DIGITS)).unwrap_or(i32::MAX);
    let mut power = scale.saturating_add(9).saturating_add(dropped);
    amount = amount.checked_mul(1_i128 << shift).unwrap_or(i128::MAX);
    while power > 0 && amount < i128::MAX {
        amount = amount.checked_mul(10).unwrap_or(i128::MAX);
        power -= 1;
    }
    while power < 0 && amount > 1 {
        amount = amount / 10 + i128::from(amount % 10 != 0);
        power += 1;
    }
    amount
}

/// Whether the server stores the client's own spelling rather than the canonical one.
fn keeps_spelling(
    text: &str,
    parts: &Parts<'_>,
    digits: &str,
    format: Format,
    scale: i32,
    shift: u32,
) -> bool {
    if text == "0" {
        return true;
    }
    let length = i64::try_from(digits.len()).unwrap_or(i64::MAX);
    match format {
        Format::Binary => {
            let room =
                15 - i64::try_from(parts.whole.len()).unwrap_or(i64::MAX) - i64::from(shift) * 3 / 10 - 1;
            let low = digits.parse::<i64>().unwrap_or(0);
            let fits = low.checked_mul(1_i64.checked_shl(shift).unwrap_or(i64::MAX)).is_some();
            parts.fraction.is_empty() && room >= 0 && low & 7 != 0 && fits
        }
        Format::Decimal | Format::Exponent => {
            length <= 18
                && scale >= -9
                && scale % 3 == 0
                && !digits.ends_with("000")
                && !digits.starts_with('0')
        }
    }
}

fn divide(amount: i128, unit: i128) -> i128 {
    amount / unit + (amount % unit).signum()
}

fn clamp(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        Quantity::parse(text).map_or_else(|e| e.to_string(), |q| q.to_string())
    }

    #[test]
    fn quantities_are_rewritten_as_the_server_rewrites_them() {
        for (written, stored) in [
            ("0", "0"),
            ("10Gi", "10Gi"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("0.5", "500m"),
            ("1.5", "1500m"),
            ("100m", "100m"),
            ("1000m", "1"),
            ("1e3", "1e3"),
            ("1000e0", "1e3"),
            ("1000", "1k"),
            ("1024", "1024"),
            ("1024Ki", "1Mi"),
            ("512Ki", "512Ki"),
            ("8Gi", "8Gi"),
            ("0.5Gi", "512Mi"),
            ("1G", "1G"),
            ("5000M", "5G"),
            ("0Gi", "0"),
            ("0.00000000001", "1n"),
            ("1.500", "1.500"),
            ("-1", "-1"),
            ("100Ei", "9223372036854775807"),
        ] {
            assert_eq!(canonical(written), stored, "{written}");
        }
    }

    #[test]
    fn texts_that_are_no_quantities_are_refused() {
        for text in ["", "abc", "1 Gi", "Gi?", "1.2.3", "1Gi "] {
            assert_eq!(Quantity::parse(text).err(), Some(QuantityError::Format), "{text}");
        }
        for text in ["1gi", "1Kb", "1mm", "1KiKi"] {
            assert!(Quantity::parse(text).is_err(), "{text}");
        }
        assert_eq!(Quantity::parse("1KiKi").err(), Some(QuantityError::Suffix));
    }

    #[test]
    fn quantities_compare_by_amount() {
        let q = |text: &str| Quantity::parse(text).unwrap();
        assert_eq!(q("1Gi"), q("1073741824"));
        assert!(q("1Gi") > q("1G"));
        assert!(q("-1").is_negative());
        assert_eq!(q("1.2").value(), 2);
        assert_eq!(q("1.2").milli_value(), 1200);
    }

    #[test]
    fn lists_know_nothing_finer_than_thousandths() {
        let mut owner = serde_json::Map::new();
        owner
            .insert("limits".to_owned(), serde_json::json!({"cpu": "100u", "memory": 1024, "x": "nonsense"}));
        canonicalise_list(&mut owner, "limits");
        assert_eq!(owner["limits"], serde_json::json!({"cpu": "1m", "memory": "1024", "x": "nonsense"}));
    }

    #[test]
    fn huge_quantities_do_not_overflow() {
        for text in ["1e400", "99999999999999999999999999999999999999999999", "1e-400", "9e2147483647"] {
            let quantity = Quantity::parse(text).unwrap();
            assert!(quantity.is_positive(), "{text}");
            let _ = (quantity.to_string(), quantity.value(), quantity.milli_value());
        }
    }
}
