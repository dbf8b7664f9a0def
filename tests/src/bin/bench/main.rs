//! Measures the release binary on this machine, beside csi-driver-host-path, and says which targets hold.
//!
//! Nothing here fails because of a figure: it is for reading. `BENCH_DIR` chooses the disk (default: the machine's
//! directory for temporary files), `HOSTPATH_BIN` names a `hostpathplugin` to put under the same load.

use std::{env, fs, path::Path, process::ExitCode};

use anyhow::{Context, Result};
use berth_e2e::{
    driver::binary,
    machine::{command, run},
    table,
};
use tokio::signal::unix::{SignalKind, signal};

mod baseline;
mod few;
mod load;
mod many;
mod scratch;
mod server;
mod volume_types;

use baseline::Baseline;
use server::Subject;
use table::{Figures, Quantity, Target};

// One thread makes all the calls: on two cores, the driver has the other one to itself.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match interruptible().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs everything; a signal drops it where it stands, and with it processes, mounts, devices and directories.
async fn interruptible() -> Result<bool> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let signalled = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        eprintln!("bench: stopping, and removing what was made");
    };
    tokio::select! {
        done = measure_all() => done,
        () = signalled => Ok(false),
    }
}

/// Prints table after table and returns whether all of them could be measured.
async fn measure_all() -> Result<bool> {
    if let Some(dir) = env::var_os("BENCH_DIR") {
        // Whatever is temporary from here on, disks included, is made there.
        let dir = fs::canonicalize(&dir).with_context(|| format!("BENCH_DIR {}", dir.display()))?;
        tempfile::env::override_temp_dir(&dir).map_err(|_| anyhow::anyhow!("BENCH_DIR comes too late"))?;
    }
    let mut complete = true;
    println!("{}", machine(&tempfile::env::temp_dir())?);
    let (baseline, measured) = match Baseline::measure().await {
        Ok(baseline) => (baseline, true),
        Err(error) => {
            eprintln!("bench: csi-driver-host-path could not be measured: {error:#}");
            (Baseline::quoted(), false)
        }
    };
    println!("host-path: {}\n", baseline.origin);
    complete &= measured;

    complete &= print("the binary", size());
    complete &= print("few volumes", few::measure(&Subject::Berth).await.map(|few| few.figures(&baseline)));
    complete &= print(
        "many volumes",
        many::measure(&Subject::Berth, many::STEPS, many::PATIENCE).await.map(|many| many.figures(&baseline)),
    );
    for table in volume_types::measure().await {
        complete &= print("the kinds of volumes", table);
    }
    Ok(complete)
}

fn print(what: &str, table: Result<impl std::fmt::Display>) -> bool {
    match table {
        Ok(table) => println!("{table}"),
        Err(error) => {
            println!("{what}: could not be measured\n");
            eprintln!("bench: {what}: {error:#}");
            return false;
        }
    }
    true
}

fn size() -> Result<Figures> {
    let binary = binary()?;
    let bytes = u32::try_from(fs::metadata(&binary)?.len()).context("the binary is beyond measure")?;
    let mut figures = Figures::new("The binary");
    let size = Quantity::Megabytes(f64::from(bytes) / 1e6);
    figures.add("size", size, Some(Target::Below(Quantity::Megabytes(15.0))), None);
    Ok(figures)
}

/// What the figures depend on besides the code.
fn machine(dir: &Path) -> Result<String> {
    let cores = std::thread::available_parallelism()?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let filesystem = filesystem(dir)?;
    let load = fs::read_to_string("/proc/loadavg")?;
    let load = load.split(' ').next().unwrap_or_default();
    let version = command(binary()?).arg("--version").output().context("ask the binary for its version")?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let build =
        if cfg!(debug_assertions) { ", A DEBUG BUILD: `make bench` measures the release" } else { "" };
    Ok(format!(
        "{version}{build}; {cores} cores, Linux {}, {} ({}); load average {load} before the first call\n",
        kernel.trim(),
        dir.display(),
        filesystem,
    ))
}

fn filesystem(dir: &Path) -> Result<String> {
    let found = run("findmnt", &["-no", "FSTYPE,SOURCE", "-T", &dir.display().to_string()])?;
    let (kind, source) = found.trim().split_once(' ').context("findmnt says neither type nor source")?;
    let device = Path::new(source.trim()).file_name().unwrap_or_default();
    let journal = fs::read_to_string(Path::new("/sys/fs/ext4").join(device).join("journal_task"));
    // There ext4 passes over every inode that was freed in the last seconds: creates after many deletes are slow.
    let bare = journal.is_ok_and(|task| task.trim() == "<none>");
    Ok(format!("{kind}{}", if bare { " without a journal: slow to create after many deletes" } else { "" }))
}
