//! The forms of a report.

use super::{CallRecord, CheckResult, Report, Status};
use crate::rules::RULES;

fn report() -> Report {
    let result = |index: usize, status, detail: &str| CheckResult {
        rule: RULES[index].clone(),
        status,
        detail: detail.to_owned(),
        calls: vec![CallRecord { method: "Probe", request: "<&\">".to_owned(), answer: "\u{1}".to_owned() }],
        milliseconds: 1500,
    };
    Report {
        driver: "a<b".to_owned(),
        version: "1".to_owned(),
        results: vec![
            result(0, Status::Passed, ""),
            result(1, Status::Failed, "found \"x\""),
            result(2, Status::NotRun, "why"),
        ],
    }
}

#[test]
fn what_was_not_run_is_in_every_form_and_never_counted_as_passed() {
    let report = report();
    assert!(report.summary().ends_with("1 passed, 1 failed (1 MUST), 1 not run"), "{}", report.summary());
    assert!(report.badge().contains("1 passed · 1 failed · 1 not run"));
    assert!(report.junit().contains("failures=\"1\" skipped=\"1\""));
    assert!(report.html().contains("Not run (1)"));
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!((&json["counts"]["not_run"], &json["results"][2]["status"]), (&1.into(), &"not-run".into()));
}

#[test]
fn what_a_driver_says_is_escaped() {
    let report = report();
    assert!(report.junit().contains("a&lt;b") && report.junit().contains("message=\"found &quot;x&quot;\""));
    assert!(!report.junit().contains('\u{1}') && !report.html().contains("<&\">"));
}
