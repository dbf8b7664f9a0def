//! What `berth up` and its containers' shims cost: memory and CPU time.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use berth_e2e::{table::Quantity, up::Machine};

/// The unit of CPU time in `/proc`: Linux promises 100 to user space, whatever its own clock does.
const TICK: Duration = Duration::from_millis(10);

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

/// The CPU time that it and the programs that it ran have used so far.
pub(crate) fn cpu(machine: &Machine) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", machine.pid()?)).context("read its times")?;
    // The name in parentheses may hold anything; the times, own and children's, are the 12th to 15th words after it.
    let (_, rest) = stat.rsplit_once(')').context("its times have an unknown form")?;
    let words = rest.split_whitespace().skip(11).take(4);
    let ticks: u32 = words.map(|word| word.parse::<u32>().unwrap_or_default()).sum();
    Ok(TICK * ticks)
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
