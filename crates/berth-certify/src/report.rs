//! What a run found: one result for each check, and the ways to print them.

mod html;

use std::fmt::Write as _;

use serde::Serialize;

use crate::rules::{Level, Rule};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The rule was tested and kept.
    Passed,
    /// The rule was tested and broken.
    Failed,
    /// The rule was not tested; the detail says why.
    NotRun,
}

impl Status {
    fn mark(self) -> &'static str {
        match self {
            Self::Passed => "✓",
            Self::Failed => "✗",
            Self::NotRun => "-",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::NotRun => "not run",
        }
    }
}

/// One call, without its secrets.
#[derive(Debug, Clone, Serialize)]
pub struct CallRecord {
    /// The name of the method.
    pub method: &'static str,
    /// The request; secrets are stripped.
    pub request: String,
    /// The answer, or code and message.
    pub answer: String,
}

/// How one check ended.
#[derive(Debug, Clone, Serialize)]
pub struct CheckResult {
    /// The rule that was checked.
    #[serde(flatten)]
    pub rule: Rule,
    /// Whether the check passed, failed or could not run.
    pub status: Status,
    /// What was found instead, or why it was not run; empty if it passed.
    pub detail: String,
    /// The calls that led there; empty if it passed.
    pub calls: Vec<CallRecord>,
    /// How long it took.
    pub milliseconds: u64,
}

/// What a run found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The name of the driver.
    pub driver: String,
    /// The version of the driver.
    pub version: String,
    /// All checks, in the order of the table.
    pub results: Vec<CheckResult>,
}

/// How many checks ended in each way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Rules that were kept.
    pub passed: usize,
    /// Rules of level MUST that were broken.
    pub failed_must: usize,
    /// Rules of level SHOULD or INFO that were broken.
    pub failed_other: usize,
    /// Rules that were not tested.
    pub not_run: usize,
}

impl Report {
    /// How many checks ended in each way.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for result in &self.results {
            match (result.status, result.rule.level) {
                (Status::Passed, _) => counts.passed += 1,
                (Status::Failed, Level::Must) => counts.failed_must += 1,
                (Status::Failed, _) => counts.failed_other += 1,
                (Status::NotRun, _) => counts.not_run += 1,
            }
        }
        counts
    }

    /// The ids of the checks that ended like this.
    pub fn ids(&self, status: Status) -> Vec<&'static str> {
        self.results.iter().filter(|result| result.status == status).map(|result| result.rule.id).collect()
    }

    /// The last line of the report.
    pub fn summary(&self) -> String {
        let counts = self.counts();
        let failed = counts.failed_must + counts.failed_other;
        format!(
            "{} {}: {} passed, {failed} failed ({} MUST), {} not run",
            self.driver, self.version, counts.passed, counts.failed_must, counts.not_run
        )
    }

    /// The whole report as JSON.
    pub fn json(&self) -> String {
        let document = serde_json::json!({
            "driver": self.driver, "version": self.version, "counts": self.counts(), "results": self.results,
        });
        format!("{document:#}\n")
    }

    /// The report in the form of JUnit, which build servers read.
    pub fn junit(&self) -> String {
        let counts = self.counts();
        let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let _ = writeln!(
            text,
            "<testsuite name=\"berth certify {}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\">",
            escape(&self.driver),
            self.results.len(),
            counts.failed_must + counts.failed_other,
            counts.not_run
        );
        for result in &self.results {
            let area = result.rule.id.split('.').next().unwrap_or_default();
            #[expect(clippy::cast_precision_loss, reason = "milliseconds of one check")]
            let seconds = result.milliseconds as f64 / 1000.0;
            let _ = write!(
                text,
                "  <testcase classname=\"{area}\" name=\"{}\" time=\"{seconds:.3}\"",
                result.rule.id
            );
            let detail = escape(&result.detail);
            let _ = match result.status {
                Status::Passed => writeln!(text, "/>"),
                Status::NotRun => writeln!(text, "><skipped message=\"{detail}\"/></testcase>"),
                Status::Failed => writeln!(
                    text,
                    "><failure type=\"{}\" message=\"{detail}\">{}</failure></testcase>",
                    result.rule.level,
                    escape(&result.explanation())
                ),
            };
        }
        text + "</testsuite>\n"
    }

    /// The report as one HTML file.
    pub fn html(&self) -> String {
        html::page(self)
    }

    /// A badge for a README, as SVG; the number of checks that were not run is part of it.
    pub fn badge(&self) -> String {
        let counts = self.counts();
        let failed = counts.failed_must + counts.failed_other;
        let text = format!("{} passed · {failed} failed · {} not run", counts.passed, counts.not_run);
        let color = match (counts.failed_must, counts.failed_other, counts.not_run) {
            (1.., _, _) => "#c62828",
            (0, 1.., _) => "#b26a00",
            (0, 0, 1..) => "#5a6b00",
            (0, 0, 0) => "#2e7d32",
        };
        // About 6.5 pixels for a letter of this font.
        let width = text.chars().count() * 13 / 2 + 12;
        let (label, whole) = (34, width + 34);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{whole}\" height=\"20\" role=\"img\" \
             aria-label=\"CSI: {text}\"><title>CSI: {text}</title><rect width=\"{label}\" height=\"20\" fill=\"#444\"/>\
             <rect x=\"{label}\" width=\"{width}\" height=\"20\" fill=\"{color}\"/><g fill=\"#fff\" \
             font-family=\"Verdana,DejaVu Sans,sans-serif\" font-size=\"11\"><text x=\"6\" y=\"14\">CSI</text>\
             <text x=\"{}\" y=\"14\">{text}</text></g></svg>\n",
            label + 6
        )
    }
}

impl CheckResult {
    /// One line for the terminal, and what was found below it.
    pub fn line(&self) -> String {
        let mut line = format!("{} {:<6} {}", self.status.mark(), self.rule.level, self.rule.id);
        if !self.detail.is_empty() {
            let _ = write!(
                line,
                "  {}{}",
                if self.status == Status::NotRun { "not run: " } else { "" },
                self.detail
            );
        }
        if self.status == Status::Failed {
            let _ = write!(line, "\n           rule: {} ({})", self.rule.rule, self.rule.section);
            let _ = write!(line, "\n           to do: {}", self.rule.advice);
            for call in self.calls.iter().rev().take(3).rev() {
                let _ = write!(
                    line,
                    "\n           {} {} -> {}",
                    call.method,
                    short(&call.request),
                    short(&call.answer)
                );
            }
        }
        line
    }

    fn explanation(&self) -> String {
        let mut text = format!(
            "{}\n{} ({})\nTo do: {}\n",
            self.detail, self.rule.rule, self.rule.section, self.rule.advice
        );
        for call in &self.calls {
            let _ = writeln!(text, "{}\n  request: {}\n  answer: {}", call.method, call.request, call.answer);
        }
        text
    }
}

/// The beginning of a long text.
fn short(text: &str) -> String {
    const LONGEST: usize = 400;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Text for XML and HTML; characters that XML does not allow become spaces.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(character),
            _ if character.is_control() => escaped.push(' '),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests;
