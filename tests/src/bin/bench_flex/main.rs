//! Measures call-outs of `berth flex` beside a driver in bash and jq that does the same mount: calls per second, and the CPU time
//! of each.
//!
//! The mount is a bind of a directory, so that nothing but the driver is measured. Nothing here fails because of a figure: it is
//! for reading. `CALLS` (200) chooses how much is done.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use berth_e2e::{driver::binary, machine, table::Table};

/// As `testbed/flex/nfs.sh`, with another mount.
const SCRIPT: &str = r#"#!/usr/bin/env bash
case $1 in
    init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
    mount)
        path=$(echo "$3" | jq -r .path)
        mkdir -p "$2" &>/dev/null
        mount --bind "$path" "$2" &>/dev/null || { echo '{"status": "Failure"}'; exit 1; }
        echo '{"status": "Success"}' ;;
    unmount)
        umount "$2" &>/dev/null || { echo '{"status": "Failure"}'; exit 1; }
        echo '{"status": "Success"}' ;;
    *) echo '{"status": "Not supported"}' ;;
esac
"#;

/// The price of a call.
struct Cost {
    per_second: f64,
    /// CPU time in milliseconds, of user and kernel, of the driver and what it starts.
    cpu: f64,
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-flex: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<()> {
    let calls: u32 = env::var("CALLS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    let dir = tempfile::tempdir()?;
    let text = |name: &str| dir.path().join(name).display().to_string();
    fs::create_dir_all(dir.path().join("volumes/v"))?;
    fs::create_dir_all(dir.path().join("script"))?;
    let words = [
        "flex",
        "install",
        "--driver=local",
        "--plugin-dir",
        &text("plugins"),
        "--state-dir",
        &text("state"),
    ];
    let berth = binary()?;
    let installed =
        machine::command(&berth).args(words).args(["--allowed-path", &text("volumes")]).output()?;
    ensure!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    let (own, script) = (dir.path().join("plugins/k8s~local/local"), dir.path().join("script/local"));
    fs::write(&script, SCRIPT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let document = format!("{{\"path\":\"{}\"}}", text("volumes/v"));
    let target = text("pod");
    let rows: [(&str, &[&[&str]]); 2] = [
        ("init", &[&["init"]]),
        ("mount and unmount", &[&["mount", &target, &document], &["unmount", &target]]),
    ];
    let mut table = Table::new(
        format!("Call-outs, {calls} of each, one after the other"),
        &["", "berth, calls/s", "bash and jq", "berth, CPU ms each", "bash and jq", "CPU, times less"],
    );
    for (name, words) in rows {
        let (own, script) = (cost(&own, words, calls)?, cost(&script, words, calls)?);
        table.add(vec![
            name.to_owned(),
            format!("{:.0}", own.per_second),
            format!("{:.0}", script.per_second),
            format!("{:.2}", own.cpu),
            format!("{:.2}", script.cpu),
            format!("{:.1}", script.cpu / own.cpu),
        ]);
    }
    println!("{table}");
    Ok(())
}

fn cost(program: &Path, words: &[&[&str]], calls: u32) -> Result<Cost> {
    let (begun, before) = (Instant::now(), children_cpu()?);
    for number in 0..calls {
        let words = words[usize::try_from(number)? % words.len()];
        let status =
            machine::command(program).args(words).stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        ensure!(status.success(), "{} {words:?} ended with {status}", program.display());
    }
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), children_cpu()? - before);
    Ok(Cost { per_second: f64::from(calls) / seconds, cpu: cpu / f64::from(calls) })
}

/// The CPU time of all children that have ended, in milliseconds.
fn children_cpu() -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit_once(") ").context("a name in parentheses")?.1.split(' ').collect();
    // cutime and cstime of proc(5), in hundredths of a second.
    let ticks =
        [13, 14].map(|at| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or_default());
    Ok(ticks.iter().sum::<f64>() * 10.0)
}
