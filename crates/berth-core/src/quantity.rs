//! Quantities such as `10Gi`: reading them and writing them the way Kubernetes does.

use std::cmp::Ordering;

const NANO: i128 = 1_000_000_000;
/// Kubernetes caps binary quantities at this many whole units.
const BINARY_MAX: i128 = (i64::MAX as i128) * NANO;
/// As much as a decimal quantity counts for here, far more than anything that is measured; its text stays exact.
const DECIMAL_MAX: i128 = 10_i128.pow(36);
/// As many digits as a number can have below these.
const DIGITS: usize = 37;
/// The largest power of ten that has a letter.
const EXA: i64 = 18;

/// Why a text is not a quantity, in Kubernetes' words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text has another form altogether.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Form,
    /// The unit is not one.
    #[error("unable to parse quantity's suffix")]
    Suffix,
    /// The number is not one.
    #[error("unable to parse numeric part of quantity")]
    Numeric,
}

/// How a quantity is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    DecimalSi,
    BinarySi,
    DecimalExponent,
}

/// A quantity, exact to a billionth.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

/// The text Kubernetes makes of a quantity: `1024Mi` is `1Gi`, `0.5` is `500m`.
pub fn canonical(text: &str) -> Result<String, Error> {
    let text = text.trim();
    let parts = Parts::split(text)?;
    if parts.is_kept() {
        return Ok(text.to_owned());
    }
    if parts.base == 2 {
        return Ok(text.parse::<Quantity>()?.to_string());
    }
    let places = i64::try_from(parts.fraction.len()).map_err(|_| Error::Numeric)?;
    let digits = format!("{}{}", parts.whole, parts.fraction);
    decimal_text(parts.negative, &digits, i64::from(parts.exponent) - places, parts.format)
}

/// Writes `digits * 10^exponent`, rounded up to billionths, in the largest unit that leaves a whole number.
fn decimal_text(negative: bool, digits: &str, exponent: i64, format: Format) -> Result<String, Error> {
    let (mut digits, mut exponent) = round_up(digits, exponent);
    let zeros = digits.len() - digits.trim_end_matches('0').len();
    digits.truncate(digits.len() - zeros);
    exponent += i64::try_from(zeros).map_err(|_| Error::Numeric)?;
    if digits.is_empty() {
        return Ok("0".to_owned());
    }
    while exponent % 3 != 0 || (format != Format::DecimalExponent && exponent > EXA) {
        digits.push('0');
        exponent -= 1;
    }
    let sign = if negative { "-" } else { "" };
    let unit = match (format, exponent) {
        (_, 0) => String::new(),
        // What is written must be readable again.
        (Format::DecimalExponent, _) => format!("e{}", i32::try_from(exponent).map_err(|_| Error::Suffix)?),
        _ => usize::try_from((exponent + 9) / 3)
            .ok()
            .and_then(|index| ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"].get(index))
            .map_or_else(String::new, ToString::to_string),
    };
    Ok(format!("{sign}{digits}{unit}"))
}

/// The number without anything finer than billionths, of which there is one more for what was cut off.
fn round_up(digits: &str, exponent: i64) -> (String, i64) {
    let digits = digits.trim_start_matches('0');
    let cut = usize::try_from(-9 - exponent).unwrap_or(0);
    if cut == 0 || digits.is_empty() {
        return (digits.to_owned(), exponent);
    }
    let (kept, rest) = digits.split_at(digits.len().saturating_sub(cut));
    let mut kept = kept.as_bytes().to_vec();
    if rest.bytes().any(|digit| digit != b'0') {
        let nines = kept.iter().rev().take_while(|digit| **digit == b'9').count();
        let end = kept.len();
        kept[end - nines..].fill(b'0');
        match kept[..end - nines].last_mut() {
            Some(digit) => *digit += 1,
            None => kept.insert(0, b'1'),
        }
    }
    (kept.into_iter().map(char::from).collect(), -9)
}

/// The parts of a text that may be a quantity.
struct Parts<'a> {
    negative: bool,
    whole: &'a str,
    fraction: &'a str,
    base: u32,
    exponent: i32,
    format: Format,
}

impl<'a> Parts<'a> {
    fn split(text: &'a str) -> Result<Self, Error> {
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
            None => return Err(Error::Form),
        };
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        // A unit alone is nothing of it.
        let tail = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
        let digits = tail.strip_prefix(['-', '+']).unwrap_or(tail);
        if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(Error::Form);
        }
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') {
            return Err(Error::Form);
        }
        let (base, exponent, format) = parse_suffix(suffix)?;
        Ok(Self { negative, whole: whole.trim_start_matches('0'), fraction, base, exponent, format })
    }

    /// Whether Kubernetes keeps the text as it is instead of writing the number anew: it takes short numbers that
    /// look canonical for canonical.
    fn is_kept(&self) -> bool {
        let places = |text: &str| i32::try_from(text.len()).unwrap_or(i32::MAX / 4);
        if self.base == 2 {
            let short = places(self.whole) + self.exponent * 3 / 10 <= 14;
            let last: u32 = self
                .whole
                .bytes()
                .rev()
                .take(3)
                .zip([1, 10, 100])
                .map(|(d, w)| u32::from(d - b'0') * w)
                .sum();
            return short && self.fraction.is_empty() && !last.is_multiple_of(8);
        }
        let scale = self.exponent.saturating_sub(places(self.fraction));
        let thousands =
            self.whole.bytes().chain(self.fraction.bytes()).rev().take_while(|digit| *digit == b'0').count();
        places(self.whole) + places(self.fraction) <= 18
            && (-9..).contains(&scale)
            && scale % 3 == 0
            && thousands < 3
            && !self.whole.is_empty()
    }
}

impl Quantity {
    /// Nothing, as absent amounts count.
    pub const ZERO: Self = Self { nanos: 0, format: Format::DecimalSi };

    /// The quantity rounded up, away from zero, to thousandths; `None` where it is no finer already.
    pub fn rounded_to_thousandths(&self) -> Option<Self> {
        let rest = self.nanos % (NANO / 1000);
        let up = (NANO / 1000) * rest.signum();
        (rest != 0).then(|| Self { nanos: (self.nanos - rest).saturating_add(up), format: self.format })
    }

    /// The value in whole units, rounded up.
    pub fn value(&self) -> i64 {
        let units = self.nanos.div_euclid(NANO) + i128::from(self.nanos.rem_euclid(NANO) != 0);
        i64::try_from(units).unwrap_or(if units < 0 { i64::MIN } else { i64::MAX })
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

impl std::str::FromStr for Quantity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let Parts { negative, whole, fraction, base, exponent, format } = Parts::split(text)?;
        let magnitude = scale(whole, fraction, base, exponent);
        Ok(Self { nanos: if negative { -magnitude } else { magnitude }, format })
    }
}

fn parse_suffix(suffix: &str) -> Result<(u32, i32, Format), Error> {
    let decimal = |exponent| Ok((10, exponent, Format::DecimalSi));
    let binary = |exponent| Ok((2, exponent, Format::BinarySi));
    match suffix {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(10),
        "Mi" => binary(20),
        "Gi" => binary(30),
        "Ti" => binary(40),
        "Pi" => binary(50),
        "Ei" => binary(60),
        other => {
            let digits = other.strip_prefix(['e', 'E']).ok_or(Error::Suffix)?;
            let exponent = digits.parse().map_err(|_| Error::Suffix)?;
            Ok((10, exponent, Format::DecimalExponent))
        }
    }
}

/// `whole.fraction * base^exponent` in billionths: rounded up, and capped.
fn scale(whole: &str, fraction: &str, base: u32, exponent: i32) -> i128 {
    let max = if base == 2 { BINARY_MAX } else { DECIMAL_MAX };
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return 0;
    }
    // Only as many digits as can matter: the rest moves into the exponent and, unless zero, rounds up.
    let kept = digits.len().min(DIGITS);
    let rest = i64::try_from(digits.len() - kept).unwrap_or(i64::MAX);
    let mut inexact = digits[kept..].bytes().any(|digit| digit != b'0');
    let mut value: i128 = digits[..kept].parse().unwrap_or(i128::MAX);
    let mut tens = 9 + rest - i64::try_from(fraction.len()).unwrap_or(i64::MAX);
    if base == 10 {
        tens += i64::from(exponent);
    }
    if base == 2 {
        match value.checked_mul(1 << exponent) {
            Some(product) => value = product,
            // Beyond the cap unless the number has a long fraction, whose end cannot matter then.
            None if tens < 0 => {
                let drop = u32::try_from(-tens).unwrap_or(38).min(18);
                value = (value / 10_i128.pow(drop)).saturating_mul(1 << exponent);
                tens += i64::from(drop);
                inexact = true;
            }
            None => return max,
        }
    }
    while tens > 0 && value <= max {
        value = value.saturating_mul(10);
        tens -= 1;
    }
    while tens < 0 && value > 0 {
        inexact |= value % 10 != 0;
        value /= 10;
        tens += 1;
    }
    (value.min(max) + i128::from(inexact)).min(max)
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.nanos % NANO == 0;
        if self.format == Format::BinarySi && whole && self.nanos.abs() >= 1024 * NANO {
            let mut value = self.nanos / NANO;
            let mut unit = 0;
            while value % 1024 == 0 && unit < 6 {
                value /= 1024;
                unit += 1;
            }
            return write!(formatter, "{value}{}", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][unit]);
        }
        let digits = self.nanos.unsigned_abs().to_string();
        let text = decimal_text(self.nanos < 0, &digits, -9, self.format);
        formatter.write_str(&text.map_err(|_| std::fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_as_kubernetes_writes_them() {
        let cases = [
            ("10Gi", "10Gi"),
            ("1024Mi", "1Gi"),
            ("1500Mi", "1500Mi"),
            ("0.5", "500m"),
            ("0.5Gi", "512Mi"),
            ("1.5Ki", "1536"),
            ("1000", "1k"),
            ("1000000k", "1G"),
            ("100m", "100m"),
            ("1e3", "1e3"),
            ("1E", "1E"),
            ("1E6", "1E6"),
            ("1000E6", "1e9"),
            ("0", "0"),
            ("0Gi", "0"),
            ("-5Gi", "-5Gi"),
            ("+7", "+7"),
            ("512Ki", "512Ki"),
            ("0.1Ki", "102400m"),
            ("1Ei", "1Ei"),
            ("1n", "1n"),
            ("0.1n", "1n"),
            (".5", "500m"),
            ("5.", "5."),
            ("1.500", "1.500"),
            ("12345678901234567890", "12345678901234567890"),
            ("16Ei", "9223372036854775807"),
            ("000123", "000123"),
            ("1000e21", "1e24"),
            ("1000E", "1000E"),
            ("1234567890123456789012345678901234567890000", "1234567890123456789012345678901234567890k"),
            ("0.99999999999999999999", "1"),
            ("-1.0000000001", "-1000000001n"),
            ("1e-999", "1e-9"),
            ("99999999999999999999e9", "99999999999999999999e9"),
        ];
        for (given, expected) in cases {
            assert_eq!(canonical(given).as_deref(), Ok(expected), "{given}");
        }
    }

    #[test]
    fn other_texts_are_refused_in_kubernetes_words() {
        for (given, expected) in [
            ("", Error::Form),
            ("ten", Error::Form),
            ("1 Gi", Error::Form),
            ("1Gb", Error::Form),
            ("1GiB", Error::Form),
            ("1gi", Error::Form),
            ("1KM", Error::Suffix),
            ("1.2.3", Error::Form),
            ("1e", Error::Suffix),
            ("1000e2147483646", Error::Suffix),
        ] {
            assert_eq!(canonical(given), Err(expected), "{given}");
        }
    }

    #[test]
    fn quantities_compare_by_value() {
        let parse = |text: &str| text.parse::<Quantity>().unwrap();
        assert_eq!(parse("1Gi"), parse("1024Mi"));
        assert!(parse("1G") < parse("1Gi"));
        assert_eq!(parse("1.5").value(), 2);
        assert_eq!(parse("-1.5").value(), -1);
        assert!(parse("-1").is_negative());
    }
}
