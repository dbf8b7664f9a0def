//! Plain aligned tables, and figures with their targets.

use std::fmt;

/// Rows under a title; the first column is text, the others are aligned to the right.
#[derive(Debug)]
pub struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

/// Figures of Berth, each with its target and what somebody else does.
#[derive(Debug)]
pub struct Figures(Table);

/// A measured value with its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantity {
    /// A number of calls per second.
    Rate(f64),
    /// A duration in seconds.
    Seconds(f64),
    /// A size in millions of bytes.
    Megabytes(f64),
}

/// What a figure should be.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// The value must be at least this.
    AtLeast(Quantity),
    /// The value must be at most this.
    AtMost(Quantity),
    /// The value must be less than this.
    Below(Quantity),
}

impl Table {
    /// A table with only its header yet.
    pub fn new(title: impl Into<String>, header: &[&str]) -> Self {
        Self { title: title.into(), rows: vec![header.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row below the others.
    pub fn add(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("  {cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            });
            let line: String = cells.collect();
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl Figures {
    /// A table beside csi-driver-host-path.
    pub fn new(title: impl Into<String>) -> Self {
        Self::beside("host-path", title)
    }

    /// A table whose last column is somebody else's.
    pub fn beside(other: &str, title: impl Into<String>) -> Self {
        Self(Table::new(title, &["", "Berth", "target", "", other]))
    }

    /// Adds a figure; the last cell is what the other does, if that is known.
    pub fn add(
        &mut self,
        what: impl Into<String>,
        found: Quantity,
        target: Option<Target>,
        baseline: Option<String>,
    ) {
        let (aim, mark) = match target {
            Some(target) => (target.to_string(), if target.holds(found) { "ok" } else { "MISSED" }),
            None => (String::new(), ""),
        };
        self.0.add(vec![what.into(), found.to_string(), aim, mark.into(), baseline.unwrap_or_default()]);
    }

    /// Adds a row that is not to be judged.
    pub fn note(&mut self, what: impl Into<String>, text: impl Into<String>) {
        self.0.add(vec![what.into(), text.into()]);
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Quantity {
    fn number(self) -> f64 {
        let (Self::Rate(number) | Self::Seconds(number) | Self::Megabytes(number)) = self;
        number
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Rate(rate) => write!(f, "{}/s", thousands(&format!("{rate:.0}"))),
            Self::Seconds(time) if time >= 1.0 => write!(f, "{time:.2} s"),
            Self::Seconds(time) if time >= 0.001 => write!(f, "{:.1} ms", time * 1e3),
            Self::Seconds(time) => write!(f, "{:.0} µs", time * 1e6),
            Self::Megabytes(size) => write!(f, "{size:.1} MB"),
        }
    }
}

impl Target {
    fn holds(self, found: Quantity) -> bool {
        match self {
            Self::AtLeast(aim) => found.number() >= aim.number(),
            Self::AtMost(aim) => found.number() <= aim.number(),
            Self::Below(aim) => found.number() < aim.number(),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(aim) => write!(f, "≥ {aim}"),
            Self::AtMost(aim) => write!(f, "≤ {aim}"),
            Self::Below(aim) => write!(f, "< {aim}"),
        }
    }
}

/// A count with a comma after every third digit from the right.
pub fn count(number: usize) -> String {
    thousands(&number.to_string())
}

fn thousands(digits: &str) -> String {
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Figures, Quantity, Table, Target, count};

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new("title", &["", "p50"]);
        table.add(vec!["µ".into(), "1".into()]);
        table.add(vec!["long".into(), "1000".into()]);
        assert_eq!(table.to_string(), "title\n         p50\n  µ        1\n  long  1000\n");
    }

    #[test]
    fn a_figure_is_marked_by_its_target() {
        let mut figures = Figures::new("t");
        figures.add("a", Quantity::Rate(1999.0), Some(Target::AtLeast(Quantity::Rate(2000.0))), None);
        figures.add(
            "b",
            Quantity::Seconds(0.5),
            Some(Target::Below(Quantity::Seconds(2.0))),
            Some("3 s".into()),
        );
        let text = figures.to_string();
        assert!(text.contains("1,999/s  ≥ 2,000/s  MISSED\n"), "{text}");
        assert!(text.contains("500.0 ms   < 2.00 s      ok        3 s\n"), "{text}");
    }

    #[test]
    fn counts_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
    }
}
