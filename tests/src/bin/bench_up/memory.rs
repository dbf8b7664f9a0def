//! What `berth up` and its containers' shims hold in memory.

use std::fs;

use anyhow::{Context, Result};
use berth_e2e::{table::Quantity, up::Machine};

/// What the process of `berth up` has resident.
pub(crate) fn resident(machine: &Machine) -> Result<Quantity> {
    let status = fs::read_to_string(format!("/proc/{}/status", machine.pid()?)).context("read its status")?;
    Ok(megabytes(sum(&status, &["VmRSS:"])))
}

/// How many shims there are, and what they hold together that they share with nobody.
pub(crate) fn shims(machine: &Machine) -> Result<(usize, Quantity)> {
    let (program, main) = (machine.dir().join("berth"), machine.pid()?.to_string());
    let (mut count, mut kibibytes) = (0, 0);
    for process in fs::read_dir("/proc")? {
        let process = process?.path();
        let is_main = process.file_name().is_some_and(|name| name.to_string_lossy() == main);
        if is_main || fs::read_link(process.join("exe")).ok().as_ref() != Some(&program) {
            continue;
        }
        // It may have ended meanwhile.
        let Ok(maps) = fs::read_to_string(process.join("smaps_rollup")) else { continue };
        count += 1;
        kibibytes += sum(&maps, &["Private_Clean:", "Private_Dirty:"]);
    }
    Ok((count, megabytes(kibibytes)))
}

/// The sum of the lines with these names, which are in kB.
fn sum(text: &str, names: &[&str]) -> u32 {
    let values = text.lines().filter_map(|line| {
        let value = names.iter().find_map(|name| line.strip_prefix(name))?;
        value.trim().trim_end_matches("kB").trim_end().parse::<u32>().ok()
    });
    values.sum()
}

fn megabytes(kibibytes: u32) -> Quantity {
    Quantity::Megabytes(f64::from(kibibytes) * 1024.0 / 1e6)
}
