//! A temporary directory that takes everything mounted or attached below it along when it goes.

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth_e2e::machine;
use tempfile::TempDir;

use crate::load::Latencies;

/// How long background removal may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What [`ScratchDir::sync_times`] is called in a table.
pub(crate) const SYNC: &str = "for comparison: write and fdatasync, p50 / p99";
/// How many writes are synced, of how many bytes, to see what that costs.
const SYNCS: usize = 200;
const SYNCED: usize = 256;

/// A directory that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct ScratchDir(TempDir);

impl ScratchDir {
    pub(crate) fn new() -> Result<Self> {
        // The path stays short: a socket's may have 107 bytes.
        tempfile::Builder::new()
            .prefix("berth-")
            .rand_bytes(6)
            .tempdir()
            .map(Self)
            .context("make a directory")
    }

    /// What durability costs here at this moment: how long a small write and its fdatasync take.
    pub(crate) fn sync_times(&self) -> Result<Latencies> {
        let file = fs::File::create(self.path().join("sync")).context("make a file to sync")?;
        // As a journal does: where room is allocated already, a sync writes the data and no more.
        file.write_all_at(&vec![0; SYNCS * SYNCED], 0)?;
        file.sync_all()?;
        let mut times = Latencies::default();
        for index in 0..SYNCS {
            let began = Instant::now();
            file.write_all_at(&[1; SYNCED], (index * SYNCED) as u64)?;
            file.sync_data()?;
            times.add(began.elapsed());
        }
        Ok(times)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = machine::clear_below(self.0.path()) {
            eprintln!("bench: could not clean up: {error:#}");
            // Removing the tree now would reach into whatever is still mounted.
            self.0.disable_cleanup(true);
        }
    }
}

/// Waits until the driver has removed what was deleted; a driver that removes at once has no trash.
pub(crate) async fn wait_for_empty_trash(data: &Path) -> Result<()> {
    let start = Instant::now();
    let trash = data.join("trash");
    while fs::read_dir(&trash).is_ok_and(|mut entries| entries.next().is_some()) {
        ensure!(start.elapsed() < PATIENCE, "{} is not emptied", trash.display());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}
