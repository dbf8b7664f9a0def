//! Measures call-outs of `berth flex` beside a driver in bash and jq that does the same mount: calls per second, the CPU time of
//! each, and the memory of its process.
//!
//! The mount is a bind of a directory, so that nothing but the driver is measured. Nothing here fails because of a figure: it is
//! for reading. `CALLS` (200) chooses how much is done.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use berth_e2e::{driver::binary, machine, table::Table};
use serde_json::json;

/// The driver in bash and jq that the tests run as somebody else's.
const SCRIPT: &str = include_str!("../../../../testbed/flex/nfs.sh");
/// What its mount of a share becomes here.
const NFS_MOUNT: &str = r#"mount -t nfs ${options:+-o "$options"} "$server:/${share#/}" "$mnt""#;
const BIND_MOUNT: &str = r#"mount --bind "/${share#/}" "$mnt""#;

/// The price of a call.
struct Cost {
    per_second: f64,
    /// CPU time in milliseconds, of user and kernel, of the driver and what it starts.
    cpu: f64,
    /// The most resident memory in MB that the driver's own process had; not that of programs that it started, such as jq.
    memory: f64,
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
    ensure!(SCRIPT.contains(NFS_MOUNT), "testbed/flex/nfs.sh mounts in another way than it did");
    fs::write(&script, SCRIPT.replace(NFS_MOUNT, BIND_MOUNT))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let volume = text("volumes/v");
    let own_options = json!({"path": volume}).to_string();
    let script_options = json!({"server": "localhost", "share": volume}).to_string();
    let target = text("pod");
    let mut table = Table::new(
        format!("Call-outs, {calls} of each, one after the other"),
        &[
            "",
            "berth, calls/s",
            "bash and jq",
            "berth, CPU ms each",
            "bash and jq",
            "CPU, times less",
            "berth, MB",
            "bash",
        ],
    );
    for name in ["init", "mount and unmount"] {
        let words = |options: &str| -> Vec<Vec<String>> {
            let call = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
            match name {
                "init" => vec![call(&["init"])],
                _ => vec![call(&["mount", &target, options]), call(&["unmount", &target])],
            }
        };
        let (own, script) =
            (cost(&own, &words(&own_options), calls)?, cost(&script, &words(&script_options), calls)?);
        table.add(vec![
            name.to_owned(),
            format!("{:.0}", own.per_second),
            format!("{:.0}", script.per_second),
            format!("{:.2}", own.cpu),
            format!("{:.2}", script.cpu),
            format!("{:.1}", script.cpu / own.cpu),
            format!("{:.1}", own.memory),
            format!("{:.1}", script.memory),
        ]);
    }
    println!("{table}");
    Ok(())
}

fn cost(program: &Path, words: &[Vec<String>], calls: u32) -> Result<Cost> {
    let (begun, before) = (Instant::now(), children_cpu()?);
    for number in 0..calls {
        let words = &words[usize::try_from(number)? % words.len()];
        let status =
            machine::command(program).args(words).stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        ensure!(status.success(), "{} {words:?} ended with {status}", program.display());
    }
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), children_cpu()? - before);
    let mut memory = 0.0_f64;
    for words in words {
        memory = memory.max(peak_memory(program, words)?);
    }
    Ok(Cost { per_second: f64::from(calls) / seconds, cpu: cpu / f64::from(calls), memory })
}

/// The most resident memory of a call, in MB. The call is kept from ending until it was read: the pipe for its reply is full.
fn peak_memory(program: &Path, words: &[String]) -> Result<f64> {
    let (mut read, mut write) = std::io::pipe()?;
    let size = rustix::pipe::fcntl_setpipe_size(&write, 4096)?;
    write.write_all(&vec![b' '; size])?;
    let mut call = machine::command(program).args(words).stdin(Stdio::null()).stdout(write).spawn()?;
    let process = Path::new("/proc").join(call.id().to_string());
    // The system call with the number 1 is write(2), and its first argument the descriptor.
    while !fs::read_to_string(process.join("syscall"))?.starts_with("1 0x1 ") {
        ensure!(call.try_wait()?.is_none(), "{} {words:?} ended without a reply", program.display());
        std::thread::sleep(Duration::from_millis(1));
    }
    let status = fs::read_to_string(process.join("status"))?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let kilobytes: f64 = kilobytes.context("VmHWM in the status of a process")?.parse()?;
    std::io::copy(&mut read, &mut std::io::sink())?;
    ensure!(call.wait()?.success(), "{} {words:?} failed", program.display());
    Ok(kilobytes / 1024.0)
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
