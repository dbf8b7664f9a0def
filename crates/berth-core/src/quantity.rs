//! Kubernetes quantities such as `10Gi`, `500m` or `1e3`.

use std::cmp::Ordering;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

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
pub enum InvalidQuantity {
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

/// An amount of a resource as Kubernetes writes it, exact to a billionth.
///
/// Parsing accepts and refuses the same texts as kube-apiserver. Two quantities are equal if their amounts are, however
/// they are written. A quantity remembers the family of units it was written in (`Ki`, `k` or `e3`), and
/// [`Display`](fmt::Display) writes it in that family, in the largest unit that leaves a whole number. Amounts beyond
/// what Kubernetes can hold are capped and sums do not overflow.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

/// The implementation of [`Quantity::canonical`].
fn canonical(text: &str) -> Result<String, InvalidQuantity> {
    let text = text.trim();
    let parts = Parts::split(text)?;
    if parts.is_kept() {
        return Ok(text.to_owned());
    }
    if parts.base == 2 {
        return Ok(text.parse::<Quantity>()?.to_string());
    }
    let places = i64::try_from(parts.fraction.len()).map_err(|_| InvalidQuantity::Numeric)?;
    let digits = format!("{}{}", parts.whole, parts.fraction);
    decimal_text(parts.negative, &digits, i64::from(parts.exponent) - places, parts.format)
}

/// Writes `digits * 10^exponent`, rounded up to billionths, in the largest unit that leaves a whole number.
fn decimal_text(
    negative: bool,
    digits: &str,
    exponent: i64,
    format: Format,
) -> Result<String, InvalidQuantity> {
    let (mut digits, mut exponent) = round_up(digits, exponent);
    let zeros = digits.len() - digits.trim_end_matches('0').len();
    digits.truncate(digits.len() - zeros);
    exponent += i64::try_from(zeros).map_err(|_| InvalidQuantity::Numeric)?;
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
        (Format::DecimalExponent, _) => {
            format!("e{}", i32::try_from(exponent).map_err(|_| InvalidQuantity::Suffix)?)
        }
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
    fn split(text: &'a str) -> Result<Self, InvalidQuantity> {
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
            None => return Err(InvalidQuantity::Form),
        };
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let tail = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
        let digits = tail.strip_prefix(['-', '+']).unwrap_or(tail);
        if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(InvalidQuantity::Form);
        }
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') {
            return Err(InvalidQuantity::Form);
        }
        let (base, exponent, format) = parse_suffix(suffix)?;
        // Kubernetes takes a unit without a number for zero, except where its fast path does not fit.
        if number.bytes().all(|byte| byte == b'.') && format == Format::BinarySi && exponent >= 50 {
            return Err(InvalidQuantity::Numeric);
        }
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
    /// The amount of what is not listed.
    pub const ZERO: Self = Self { nanos: 0, format: Format::DecimalSi };

    /// A number of bytes, written in binary units: 2^30 is `1Gi`.
    pub const fn from_bytes(bytes: i64) -> Self {
        Self { nanos: bytes as i128 * NANO, format: Format::BinarySi }
    }

    /// The text that kube-apiserver stores for `text`: `1024Mi` becomes `1Gi`, `0.5` becomes `500m`.
    ///
    /// This is not always the text that [`Display`](fmt::Display) writes: like Kubernetes it keeps short numbers that
    /// look canonical as they are (`1.500`, `+7`), and it is exact for numbers that a `Quantity` caps.
    pub fn canonical(text: &str) -> Result<String, InvalidQuantity> {
        canonical(text)
    }

    /// The amount as the size of a volume, rounded up to whole bytes; `None` if it is negative or does not fit the
    /// `int64` of a CSI message.
    pub fn bytes(&self) -> Option<i64> {
        // Kubernetes caps what is larger at `i64::MAX`, so that value may stand for any larger one.
        (self.nanos >= 0).then(|| self.value()).filter(|bytes| *bytes < i64::MAX)
    }

    /// The amount in thousandths, rounded away from zero: Kubernetes' `MilliValue` without its cap.
    pub fn thousandths(&self) -> i128 {
        divide(self.nanos, NANO / 1000)
    }

    /// The quantity rounded away from zero to thousandths; `None` if it is not finer than that.
    pub fn rounded_to_thousandths(&self) -> Option<Self> {
        let rest = self.nanos % (NANO / 1000);
        let up = (NANO / 1000) * rest.signum();
        (rest != 0).then(|| Self { nanos: (self.nanos - rest).saturating_add(up), format: self.format })
    }

    /// The amount in whole units, rounded away from zero and capped at the limits of `i64`.
    pub fn value(&self) -> i64 {
        let units = divide(self.nanos, NANO);
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

impl Add for Quantity {
    type Output = Self;

    /// The sum, written like `self` unless that is zero.
    fn add(self, other: Self) -> Self {
        let format = if self.nanos == 0 { other.format } else { self.format };
        Self { nanos: self.nanos.saturating_add(other.nanos), format }
    }
}

impl Sub for Quantity {
    type Output = Self;

    /// The difference, which may be negative, written like `self` unless that is zero.
    fn sub(self, other: Self) -> Self {
        self + Self { nanos: -other.nanos, format: other.format }
    }
}

impl AddAssign for Quantity {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Quantity {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sum for Quantity {
    fn sum<I: Iterator<Item = Self>>(quantities: I) -> Self {
        quantities.fold(Self::ZERO, Add::add)
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

impl FromStr for Quantity {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let Parts { negative, whole, fraction, base, exponent, format } = Parts::split(text)?;
        let magnitude = scale(whole, fraction, base, exponent);
        Ok(Self { nanos: if negative { -magnitude } else { magnitude }, format })
    }
}

/// Divides, rounding away from zero as Kubernetes does.
fn divide(value: i128, by: i128) -> i128 {
    value / by + (value % by).signum()
}

fn parse_suffix(suffix: &str) -> Result<(u32, i32, Format), InvalidQuantity> {
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
            let digits = other.strip_prefix(['e', 'E']).ok_or(InvalidQuantity::Suffix)?;
            let exponent = digits.parse().map_err(|_| InvalidQuantity::Suffix)?;
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

impl fmt::Display for Quantity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        formatter.write_str(&text.map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Quantity {
        text.parse().unwrap_or_else(|error| panic!("{text:?}: {error}"))
    }

    /// What Kubernetes v1.36's `resource.ParseQuantity` answered: a text, then its `String`, `Value` and `MilliValue`, or
    /// the error after an exclamation mark.
    const RECORDED: &str = include_str!("quantity.recorded");

    #[test]
    fn quantities_are_read_and_written_as_kubernetes_was_recorded_to_do() {
        let mut checked = 0;
        for line in RECORDED.lines() {
            let (text, answer) = line.split_once('\t').unwrap();
            if let Some(error) = answer.strip_prefix('!') {
                assert_eq!(Quantity::canonical(text).unwrap_err().to_string(), error, "{text:?}");
                assert!(text.parse::<Quantity>().is_err(), "{text:?}");
            } else {
                let fields: Vec<&str> = answer.split('\t').collect();
                assert_eq!(Quantity::canonical(text).as_deref(), Ok(fields[0]), "{text:?}");
                let quantity = parse(text);
                assert_eq!(quantity.value().to_string(), fields[1], "the value of {text:?}");
                let thousandths = quantity.thousandths();
                // Go's answer for what overflows its int64 is not one to repeat.
                if i64::try_from(thousandths).is_ok() {
                    assert_eq!(thousandths.to_string(), fields[2], "the thousandths of {text:?}");
                }
                assert_eq!(parse(fields[0]), quantity, "{text:?} and its canonical text");
            }
            checked += 1;
        }
        assert!(checked > 300, "only {checked} recorded answers");
    }

    #[test]
    fn the_text_of_huge_and_tiny_numbers_is_exact() {
        for (given, expected) in [
            ("1000E", "1000E"),
            ("1234567890123456789012345678901234567890000", "1234567890123456789012345678901234567890k"),
            ("99999999999999999999e9", "99999999999999999999e9"),
            ("1e-999", "1e-9"),
            ("0.99999999999999999999", "1"),
            ("-1.0000000001", "-1000000001n"),
        ] {
            assert_eq!(Quantity::canonical(given).as_deref(), Ok(expected), "{given}");
        }
        assert_eq!(Quantity::canonical("1000e2147483646"), Err(InvalidQuantity::Suffix));
        for text in ["1e400", "99999999999999999999999999999999999999999999", "1e-400", "9e2147483647"] {
            let quantity = parse(text);
            assert!(quantity.is_positive() && (quantity + quantity).is_positive(), "{text}");
            let _ = (quantity.to_string(), quantity.value(), quantity.rounded_to_thousandths());
        }
    }

    #[test]
    fn quantities_compare_by_amount() {
        assert_eq!(parse("1Gi"), parse("1024Mi"));
        assert!(parse("1G") < parse("1Gi"));
        assert!(parse("-1") < Quantity::ZERO && parse("-1").is_negative());
        assert_eq!(parse("1.2").rounded_to_thousandths(), None);
        assert_eq!(parse("100u").rounded_to_thousandths(), Some(parse("1m")));
    }

    #[test]
    fn sums_are_written_like_their_first_part() {
        assert_eq!((parse("1Gi") + parse("1073741824")).to_string(), "2Gi");
        assert_eq!((parse("500m") + parse("1Ki")).to_string(), "1024500m");
        assert_eq!((parse("1Gi") - parse("512Mi")).to_string(), "512Mi");
        assert_eq!((parse("1") - parse("2")).to_string(), "-1");
        assert_eq!(["1Gi", "1Gi", "512Mi"].map(parse).into_iter().sum::<Quantity>().to_string(), "2560Mi");
        let mut sum = parse("2");
        sum += parse("1");
        sum -= parse("500m");
        assert_eq!(sum.to_string(), "2500m");
    }

    #[test]
    fn sizes_are_rounded_up_to_bytes_and_written_in_binary_units() {
        for (text, bytes) in [
            ("1.5Ki", Some(1536)),
            ("1500m", Some(2)),
            ("0", Some(0)),
            ("5E2", Some(500)),
            ("8Ei", None),
            ("1e40", None),
            ("-1Gi", None),
        ] {
            assert_eq!(parse(text).bytes(), bytes, "{text}");
        }
        for (bytes, text) in
            [(0, "0"), (1023, "1023"), (1024, "1Ki"), (3 << 29, "1536Mi"), ((1 << 30) + 1, "1073741825")]
        {
            assert_eq!(Quantity::from_bytes(bytes).to_string(), text);
        }
    }
}
