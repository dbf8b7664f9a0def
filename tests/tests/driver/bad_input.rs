//! Requests that must be refused, or that must not reach beyond what they are about.
//!
//! Each is answered with the code the specification gives it and a sentence, and leaves the data directory and
//! everything around it as it was.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use berth_e2e::{Access, DiskType, Kind, Shape, Testbed, machine};
use tonic::{Code, Status};

mod damage;
mod full;
mod links;
mod paths;
mod values;

const BTRFS: Shape = Shape::new(Kind::Btrfs, Access::Mount(""), 64);
const DIR: Shape = Shape::new(Kind::Dir, Access::Mount(""), 64);
const IMAGE: Shape = Shape::new(Kind::Image, Access::Mount("ext4"), 64);

/// Each kind of volume on a disk that has it.
const KINDS: &[(DiskType, Shape)] =
    &[(DiskType::Btrfs, BTRFS), (DiskType::Xfs, IMAGE), (DiskType::Ext4, DIR), (DiskType::Ext4, IMAGE)];

/// What is there before a request, to be compared with what is there after it.
struct Before {
    everything: Vec<String>,
    mounts: Vec<std::path::PathBuf>,
}

impl Before {
    fn of(bed: &Testbed) -> Result<Self> {
        Ok(Self { everything: around(bed.dir())?, mounts: machine::mounts_below(bed.dir())? })
    }

    /// Checks that a request was refused with one of these codes, in words, and changed nothing.
    fn refused<T: std::fmt::Debug>(
        &self,
        bed: &Testbed,
        answer: Result<T, Status>,
        codes: &[Code],
    ) -> Result<Status> {
        let status = match answer {
            Ok(answer) => anyhow::bail!("not refused: {answer:?}"),
            Err(status) => status,
        };
        ensure!(codes.contains(&status.code()), "refused with {status}, not with {codes:?}");
        ensure!(status.message().len() > 10, "refused without a word: {status}");
        self.unchanged(bed).with_context(|| format!("after {status}"))?;
        Ok(status)
    }

    fn unchanged(&self, bed: &Testbed) -> Result<()> {
        let now = around(bed.dir())?;
        let gone: Vec<&String> = self.everything.iter().filter(|line| !now.contains(line)).collect();
        let new: Vec<&String> = now.iter().filter(|line| !self.everything.contains(line)).collect();
        ensure!(gone.is_empty() && new.is_empty(), "gone: {gone:?}, new: {new:?}");
        ensure!(self.mounts == machine::mounts_below(bed.dir())?, "something was mounted or unmounted");
        Ok(())
    }
}

/// Everything in the test's directory, but not how far the logs have grown.
fn around(dir: &Path) -> Result<Vec<String>> {
    let lines = machine::listing(dir)?.into_iter().map(|line| match line.rsplit_once(' ') {
        Some((name, _)) if name == "driver.log" || name.ends_with(".journal") => name.to_owned(),
        _ => line,
    });
    Ok(lines.collect())
}
