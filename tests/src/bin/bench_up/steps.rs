//! Where the time goes: the steps that `berth up` itself tells of, by who took them.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use berth_e2e::{
    table::{Table, count},
    times::Times,
};
use serde_json::Value;

/// The steps in the timeline so far.
pub(crate) fn table(data: &Path) -> Result<Table> {
    let text = fs::read_to_string(data.join("timeline.jsonl")).context("read the timeline")?;
    let mut steps: BTreeMap<(String, String), (Times, usize)> = BTreeMap::new();
    for step in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let word = |name: &str| step[name].as_str().unwrap_or_default().to_owned();
        let (times, failures) = steps.entry((word("component"), word("call"))).or_default();
        times.add(Duration::from_micros(step["duration_us"].as_u64().unwrap_or_default()));
        *failures += usize::from(!word("error").is_empty());
    }
    let mut table = Table::new(
        "Where it goes: the steps of those runs, as they were told",
        &["", "times", "failed", "median", "90 %", "longest"],
    );
    for ((component, call), (times, failures)) in steps {
        table.add(vec![
            format!("{component}: {call}"),
            count(times.len()),
            count(failures),
            times.percentile(50).to_string(),
            times.percentile(90).to_string(),
            times.percentile(100).to_string(),
        ]);
    }
    Ok(table)
}
