//! Compares answers and tells the differences so that they can be acted on.

use std::fmt::Write as _;

use serde_json::Value;

use crate::differential::answer::Answer;
use crate::differential::corpus::Step;

/// Fails with all differences that no step allows, and with all permissions that nothing needs.
pub(crate) fn assert_equal(pairs: &[(&Step, Option<&Answer>, &Answer)]) {
    let mut report = String::new();
    let mut differing = 0;
    for (step, wanted, got) in pairs {
        let found = wanted.map_or_else(
            || vec!["  nothing is recorded: make test-kube RECORD=1".to_owned()],
            |wanted| judge(step, wanted, got),
        );
        if !found.is_empty() {
            differing += 1;
            writeln!(report, "{}\n{}", step.id, found.join("\n")).expect("a string takes all");
        }
    }
    if let Some(path) = std::env::var_os("BERTH_DIFFERENCES") {
        std::fs::write(path, &report).expect("the report can be written");
    }
    assert!(report.is_empty(), "{differing} of {} answers differ:\n{report}", pairs.len());
}

fn judge(step: &Step, wanted: &Answer, got: &Answer) -> Vec<String> {
    let value = |answer: &Answer| serde_json::to_value(answer).expect("an answer is JSON");
    let mut found = Vec::new();
    walk("", &value(wanted), &value(got), &mut found);
    let below = |pointer: &str, path: &str| pointer == "/" || path.starts_with(pointer);
    let mut lines: Vec<String> = step
        .differs
        .iter()
        .filter(|pointer| !found.iter().any(|(path, _)| below(pointer, path)))
        .map(|pointer| format!("  {pointer} is the same again: take `> differs` away"))
        .collect();
    let rest = found.iter().filter(|(path, _)| !step.differs.iter().any(|pointer| below(pointer, path)));
    lines.extend(rest.map(|(path, text)| format!("  {path}: {text}")));
    lines
}

/// Collects the paths at which two values differ, with both values.
fn walk(path: &str, wanted: &Value, got: &Value, found: &mut Vec<(String, String)>) {
    match (wanted, got) {
        (Value::Object(wanted), Value::Object(got)) => {
            let mut keys: Vec<&String> = wanted.keys().chain(got.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let below = format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
                match (wanted.get(key), got.get(key)) {
                    (Some(wanted), Some(got)) => walk(&below, wanted, got, found),
                    (wanted, got) => found.push((below, difference(wanted, got))),
                }
            }
        }
        (Value::Array(wanted), Value::Array(got)) if wanted.len() == got.len() => {
            for (index, (wanted, got)) in wanted.iter().zip(got).enumerate() {
                walk(&format!("{path}/{index}"), wanted, got, found);
            }
        }
        (wanted, got) if wanted != got => found.push((path.to_owned(), difference(Some(wanted), Some(got)))),
        _ => {}
    }
}

fn difference(wanted: Option<&Value>, got: Option<&Value>) -> String {
    let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
    let (wanted, got) = (text(wanted), text(got));
    let separator = if wanted.len() + got.len() < 80 { ", " } else { "\n    " };
    format!("wanted {wanted}{separator}got {got}")
}
